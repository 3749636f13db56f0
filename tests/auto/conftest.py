"""Shared by all tests of planning: costs are measured and menus are made in a second instead of ten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from block_models import plan_briefly


@pytest.fixture(scope="module", autouse=True)
def _briefly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plan_briefly(patch.setattr)
        yield
