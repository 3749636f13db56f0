"""A schedule: which forward tasks run when, and which way each backward slot takes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to run. Everything else follows: a value is freed right after the last read of it.

    Attributes:
        forward: indices into ``Program.tasks``, ascending: what the forward runs.
        again: for every backward slot, the tasks run again just before it, ascending.
        ways: for every backward slot, the index of the way it takes.
    """

    forward: tuple[int, ...]
    again: tuple[tuple[int, ...], ...]
    ways: tuple[int, ...]

    @property
    def rerun_count(self) -> int:
        """How many forward tasks run again, each time counted."""
        return sum(map(len, self.again))
