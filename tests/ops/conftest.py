"""Threads for tests of the operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors on one thread: on a busy machine each parallel loop waits for a time slice of the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def three_threads() -> None:
    """For the tests that are about parallel loops; restored by _one_thread."""
    torch.set_num_threads(3)
