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

    def runs(self) -> list[tuple[int, int]]:
        """(stage, task) of every run in order, as `simulate` reports its steps; -1: the slot itself.

        Stage 0 is the forward, stage ``t >= 1`` backward slot ``t - 1``.
        """
        found = [(0, p) for p in self.forward]
        for slot, tasks in enumerate(self.again):
            found += [(slot + 1, p) for p in (*tasks, -1)]
        return found
