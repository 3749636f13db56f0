"""Shared by all tests of planning but those of fits: costs are measured and menus made in a second instead of ten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from block_models import plan_briefly


@pytest.fixture(scope="module", autouse=True)
def _briefly(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "fits":  # which promises bounds that take longer
            plan_briefly(patch.setattr)
        yield
