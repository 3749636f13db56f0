"""How much less a test does than a user's plan: it searches fewer schedules, and empties less of the caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monet_like.plan.local_search import searcher
from monet_like.profile import cache_state

#: A user's plan searches this many times more, which takes seconds.
FEWER = 40
FEW = searcher.EVALUATIONS // FEWER
#: Bytes that the profiler reads before each timed run to empty the caches. A user's reads as much as they hold, which
#: takes longer than the operators of small nets do; no test asserts a time.
FORGOTTEN_BYTES = 2**21


def be_brief(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let this process, which pytest has not started, search and measure as briefly as tests do.

    Args:
        replace: such as ``monkeypatch.setattr``, which undoes it when a test has ended.
    """
    replace(searcher, "EVALUATIONS", FEW)
    replace(cache_state, "_FORGOTTEN", FORGOTTEN_BYTES)
