"""The exceptions and warnings of this package. Each message says what was given, what was needed and what to do."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

#: Characters of a message that are kept at its beginning and at its end; one that is longer echoes content.
_BEGINNING, _END = 1300, 500
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn_caller(message: str) -> None:
    """Warn at the line that called into this package: the nearest one that is neither in it nor in PyTorch."""
    frame, level = sys._getframe(1), 1
    torch = sys.modules.get("torch")
    inside = (_PACKAGE, os.path.dirname(torch.__file__) + os.sep) if torch and torch.__file__ else (_PACKAGE,)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)


class MonetError(Exception):
    """Base of every error this package raises on purpose. A message has a part of what it echoes where that is long.

    Attributes:
        plain_peak_bytes: that plain PyTorch's step needs as predicted, where a plan failed and this is known.
        smallest_bytes: a budget for which a schedule is known, where a plan failed.
        smallest: that schedule, or the `KeptPlan` of blocks; another search may not find it again.
        found_for: the prepared program of that schedule.
    """

    plain_peak_bytes: int | None = None
    smallest_bytes: int | None = None
    smallest: Any = None
    found_for: Any = None

    def __init__(self, message: str = "", *others: object) -> None:
        super().__init__(shortened(str(message)), *others)


def shortened(message: str) -> str:
    """A message without its middle where it is long: the beginning says what was given, the end what to do."""
    left_out = len(message) - _BEGINNING - _END
    if left_out < 100:
        return message
    return f"{message[:_BEGINNING]} [... {left_out} characters ...] {message[-_END:]}"


class UsageError(MonetError, ValueError):
    """An argument is wrong: a typo, a number out of range, a path that cannot be used."""


class CaptureError(MonetError):
    """The model cannot be turned into a program of operators.

    Attributes:
        of_values: because of what tensors contain, not of how the model is written elsewhere: parts of it may be
            captured.
    """

    of_values: bool = False


class ProfileError(MonetError):
    """An operator could not be measured, or a profile lacks an operator."""


class OutOfMemory(ProfileError):
    """The machine has not enough memory to measure an operator.

    Attributes:
        task: the operator's name in the program.
        told: what the allocator said.
    """

    def __init__(self, message: str, task: str, told: str) -> None:
        super().__init__(message)
        self.task, self.told = task, told


class InfeasibleError(MonetError):
    """No schedule fits the memory budget.

    Attributes:
        step: the step of the training iteration that needs the most, in words.
        proven: no schedule exists; else none was found by a restricted search.
        least_bytes: what ``step`` needs by itself, if that is more than the budget; else None.
    """

    def __init__(
        self,
        message: str,
        smallest_bytes: int | None = None,
        step: str = "",
        *,
        proven: bool = False,
        least_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        self.smallest_bytes = smallest_bytes
        self.step = step
        self.proven = proven


class SolverError(MonetError):
    """The solver is missing, failed, or stopped without a usable plan."""

    def __init__(self, message: str = "", smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class ScheduleError(MonetError):
    """A schedule breaks a rule of the program it claims to run (found by the simulator)."""


class ScheduleFileError(MonetError):
    """A schedule or profile file is unreadable, hostile, or made for something else."""
