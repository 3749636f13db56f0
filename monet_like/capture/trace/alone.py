"""One capture at a time: while a model is traced, some of PyTorch's functions and classes are changed, which all
threads see.

Other threads go on: what a trace puts in the place of PyTorch's own acts in the thread that traces alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

#: Held while a model is traced or planned.
CAPTURING = threading.RLock()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def one_at_a_time(function: _Function) -> _Function:
    """Decorator: the function runs in one thread at a time, as all that hold `CAPTURING`."""

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with CAPTURING:
            return function(*args, **kwargs)

    return cast(_Function, alone)


def in_this_thread(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is ``function`` in the thread that calls this, and ``elsewhere`` in all others."""
    mine = threading.get_ident()

    @functools.wraps(elsewhere)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == mine else elsewhere)(*args, **kwargs)

    return chosen


class CallLock:
    """A lock of one wrapper; a copy of the wrapper has one of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return CallLock, ()
