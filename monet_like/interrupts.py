"""Handles Ctrl-C: a command ends at any moment in one line, without a traceback or half-written files."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

MESSAGE = "interrupted; files are as they were, or whole"
#: Seconds after which an interrupt that was lost is sent again.
_AGAIN_SECONDS = 0.02


def die_silently() -> None:
    """Let Ctrl-C end the process silently before a command begins and after it has ended."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody's
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Context in which Ctrl-C raises KeyboardInterrupt, again if Python has lost the first one.

    Python prints exceptions that it cannot raise, as in a finaliser, and goes on.
    """
    before = signal.getsignal(signal.SIGINT)
    ours = (signal.SIG_DFL, signal.default_int_handler)
    if threading.current_thread() is not threading.main_thread() or before not in ours:
        yield
        return
    hook = sys.unraisablehook

    def again(lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            _thread.start_new_thread(_press_again, ())  # without a wait, in which the next one would be lost
        else:
            hook(lost)

    sys.unraisablehook = again
    try:
        signal.signal(signal.SIGINT, _end_or_raise if before is signal.SIG_DFL else signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


def _end_or_raise(number: int, frame: FrameType | None) -> None:
    """End at once during an import; else raise.

    PyTorch takes an interrupted import of NumPy for NumPy's absence, and goes on.
    """
    at = frame
    while at is not None:
        if at.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, f"{MESSAGE}\n".encode())
            os._exit(130)
        at = at.f_back
    signal.default_int_handler(number, frame)


def _press_again() -> None:
    time.sleep(_AGAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """Context, to be kept short, in which Ctrl-C is put off until its end."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[Any] = []
    signal.signal(signal.SIGINT, lambda *event: pressed.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])
