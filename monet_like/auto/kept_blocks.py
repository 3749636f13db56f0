"""Plans of blocks in the cache folder, as JSON: the next start with the same blocks and budget plans nothing.

The file's name is a digest of everything that the plan depends on (`BlockKey`), except the memory of the rest of the
model: that is measured again at every start, and may differ a little between two of them. So two sums of it are in the
file, and compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ScheduleFileError
from ..files import cache_folder, read_bytes, write_atomically
from ..ir.json_fields import headed, read_as
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.step import Point, Step
from ..plan.step.choice import ChoiceStatus

FORMAT = "monet_like block plan"
VERSION = 5
#: A plan is made anew if the peak differs by more than this share from when it was made. Gloo's threads release buffers
#: late, so that two starts of the same script may differ by less.
OTHER_SHARE = 0.01

#: Of a block that has no gradient: plain PyTorch runs it, and the rest of the model counts it.
NOTHING = Point(Schedule((), (), ()), 0.0, 0, 0, 0, 0)


@dataclass(frozen=True)
class BlockKey:
    """Everything that a plan of blocks depends on, but for the memory of the rest of the model.

    Attributes:
        kinds: for every block a digest of its program with all sizes, and the values that the rest holds.
        calls: how often every block runs in a step.
        step: for every moment of the step which blocks carry and run.
        resident_bytes: parameters, buffers, inputs and the optimizer's state.
        settings: of the planner.
        device: its name and a digest of its settings and of all versions.
        processes: that plan together.
    """

    kinds: tuple[Any, ...]
    calls: tuple[int, ...]
    step: tuple[Any, ...]
    resident_bytes: int
    settings: tuple[Any, ...]
    device: tuple[str, str]
    processes: int

    def path(self, *, quick: bool) -> Path:
        """The file of the cache for a plan that was made in seconds, or by the integer program."""
        digest = hashlib.sha256(repr((VERSION, self)).encode()).hexdigest()[:24]
        return cache_folder() / f"blocks_{digest}{'_quick' if quick else ''}.json"


@dataclass(frozen=True)
class KeptBlocks:
    """The content of a file: the schedules of a model's blocks, and what they were planned with.

    Attributes:
        planned: the day, such as 2026-11-26.
        budget_bytes: of the whole step.
        peak_bytes: predicted.
        plain_peak_bytes, plain_seconds: predicted for the model without schedules.
        cublas_bytes: cuBLAS's workspaces.
        kinds: how many different programs the blocks have.
        rest_bytes: the most that the rest of the model takes at a moment of the first rehearsal.
        points: by block.
        records: by block; None where it has no gradient.
        status: of the choice among the blocks' menus, see `Choice`.
        bound_seconds: see `BlockPlan`.
    """

    planned: str
    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    cublas_bytes: int
    kinds: int
    rest_bytes: int
    points: tuple[Point, ...]
    records: tuple[ScheduleRecord | None, ...]
    status: ChoiceStatus
    bound_seconds: float

    def content(self) -> dict[str, Any]:
        """Everything that the file holds, as plain builtins. Equal schedules and points are in it once."""
        schedules: list[Any] = []
        points: list[Any] = []
        blocks: list[int | None] = []
        for record, point in zip(self.records, self.points, strict=True):
            if record is None:
                blocks.append(None)
                continue
            text = record.content()
            if text not in schedules:
                schedules.append(text)
            found = [schedules.index(text), *point.numbers, list(point.shared)]
            if found not in points:
                points.append(found)
            blocks.append(points.index(found))
        content = headed(self, FORMAT, VERSION, without="points")
        del content["records"]
        content |= {"schedules": schedules, "points": points, "blocks": blocks}
        return {**content, "sha256": _digest(content)}

    @staticmethod
    def of_content(content: Any, path: str) -> KeptBlocks:
        """A plan from what `content` returns, every field of it checked.

        Args:
            path: where it is from, for people.

        Raises:
            ScheduleFileError: it is damaged, or of another format or version.
        """
        try:
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise ValueError(f"it is a {content['format']!r} of version {content['version']!r}")
            if content["sha256"] != _digest({name: content[name] for name in content if name != "sha256"}):
                raise ValueError("its content has another digest than it says")
            lists = read_as(content, _Lists)
            schedules = [ScheduleRecord.of_content(record, path) for record in lists.schedules]
            records = [None if number is None else schedules[lists.points[number][0]] for number in lists.blocks]
            points = [
                Point(record.schedule, *lists.points[number][1:]) if record and number is not None else NOTHING
                for record, number in zip(records, lists.blocks, strict=True)
            ]
            return read_as({**content, "points": points, "records": records}, KeptBlocks)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ScheduleFileError(f"{path} is no whole plan of blocks: {error}") from None

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        members = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.content().items())
        write_atomically(path, f"{{\n{members}\n}}\n".encode())

    @staticmethod
    def load(path: Path) -> KeptBlocks:
        """Read a file; nothing in it can run.

        Raises:
            ScheduleFileError: missing, damaged, of another format or version.
        """
        try:
            content = json.loads(read_bytes(path, "plan of blocks"))
        except (ValueError, RecursionError) as error:  # the latter: nested too deeply
            raise ScheduleFileError(f"{path} is no whole plan of blocks: no JSON: {error}") from None
        return KeptBlocks.of_content(content, str(path))

    def same_rest(self, rest_bytes: int) -> bool:
        """Whether the rest of the model takes as much memory as when this was planned."""
        return abs(rest_bytes - self.rest_bytes) <= OTHER_SHARE * self.rest_bytes

    def same_peak(self, peak_bytes: int) -> bool:
        """Whether the step with these schedules has the peak that was planned.

        With a lower one, faster ones may fit.
        """
        return abs(peak_bytes - self.peak_bytes) <= OTHER_SHARE * self.peak_bytes


def most_of_rest(step: Step) -> int:
    """The most memory that the rest of the model takes at a moment of the step, in bytes."""
    return max(moment.base_bytes for moment in step.moments)


@dataclass(frozen=True)
class _Lists:
    """What a file has once, with the number of a schedule in each point, and that of a point for each block."""

    schedules: tuple[Any, ...]
    points: tuple[tuple[int, float, int, int, int, int, tuple[int, ...]], ...]
    blocks: tuple[int | None, ...]


def _digest(content: dict[str, Any]) -> str:
    """Of a file's content, so that a changed number is noticed."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
