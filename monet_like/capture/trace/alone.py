"""One capture at a time: while a model is traced, some of PyTorch's functions and classes are changed, which all
threads see.

Other threads go on: what a trace puts in the place of PyTorch's own acts in the thread that traces alone, and what
they draw from random generators meanwhile is no draw of the trace's.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode

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


class TrueInThisThread:
    """In the place of a flag that is to be set for the thread that makes this alone."""

    def __init__(self, elsewhere: bool) -> None:
        self._mine, self._elsewhere = threading.get_ident(), elsewhere

    def __bool__(self) -> bool:
        return threading.get_ident() == self._mine or self._elsewhere


class _OfThisThread:
    """Matches every warning of one thread, as the pattern of a warnings filter."""

    def __init__(self) -> None:
        self.thread: int | None = threading.get_ident()

    def match(self, _: str) -> bool:
        return threading.get_ident() == self.thread


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of this thread; those of others are given. ``catch_warnings`` changes them for all."""
    pattern = _OfThisThread()
    ours, filters = ("ignore", pattern, Warning, None, 0), cast("list[Any]", warnings.filters)
    filters.insert(0, ours)
    try:
        yield
    finally:
        pattern.thread = None  # where another thread has copied it
        if ours in filters:
            filters.remove(ours)


def is_only_thread() -> bool:
    """Whether no other thread runs Python code."""
    return len(sys._current_frames()) == 1


class _Observed(threading.local):
    depth = 0


_observed = _Observed()


@contextlib.contextmanager
def observed() -> Iterator[None]:
    """While a forward is traced, or run to learn of it: parts of it that have schedules run as they are."""
    _observed.depth += 1
    try:
        yield
    finally:
        _observed.depth -= 1


def is_observed() -> bool:
    """Whether this thread is in `observed`, or PyTorch records: ``torch.export``, ``make_fx``, ``torch.jit.trace``."""
    return _observed.depth > 0 or torch.jit.is_tracing() or get_innermost_proxy_mode() is not None


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
