"""Plans in the cache folder, as JSON: the next start with the same pieces and budget plans nothing.

A whole model is a step of one piece. The file's name is a digest of everything that a plan depends on (`StepKey`),
except the memory of the rest of the model: that is measured again at every start, and may differ a little between two
of them. So two sums of it are in the file, and compared.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..capture.captured import Captured
from ..compiler.sources import keep
from ..errors import InfeasibleError, ScheduleFileError, warn_caller
from ..files import cache_folder, read_bytes
from ..ir.json_fields import digest_of_fields, headed, read_as, write_with_digest
from ..ir.schedule import Schedule
from ..ir.schedule_file import InputSpec, ScheduleRecord
from ..ir.step import Point, Step
from ..ir.units import Budget, format_seconds
from ..profile.devices import device_name
from ..profile.settings import settings_digest
from .agreement import Sharing, planned_by
from .planning import Settings
from .promise import BlockPlan

FORMAT = "monet_like plan"
VERSION = 10
#: Said of a quick plan.
REFINED = " (quickly; all is measured and refined at the next start, or now with effort='full')"
#: Quick plans that this process has made: to call again is no new start.
_planned_here: set[Path] = set()
#: A plan is made anew if the peak differs by more than this share from when it was made. Gloo's threads release buffers
#: late, so that two starts of the same script may differ by less.
OTHER_SHARE = 0.01

#: Of a block that has no gradient: plain PyTorch runs it, and the rest of the model counts it.
NOTHING = Point(Schedule((), (), ()), 0.0, 0, 0, 0, 0)


def digest_of(captured: Captured, autocast: str, layout: str, inputs: tuple[InputSpec, ...]) -> str:
    """A digest of a piece: its program with all sizes.

    Args:
        layout: of its weights.
        inputs: of its call.
    """
    program = captured.program
    of = (
        program.fingerprint, [(value.bytes, value.spec) for value in program.values],
        [task.cost for task in captured.every_task()], captured.made_last, autocast, layout, inputs,
    )  # fmt: skip
    return hashlib.sha256(repr(of).encode()).hexdigest()


@dataclass(frozen=True)
class StepKey:
    """Everything that a plan depends on, but for the memory of the rest of the model.

    Attributes:
        pieces: for every piece its digest (`digest_of`), and the values that the rest holds; None: it has no gradient.
        calls: how often every piece runs in a step.
        step: for every moment of the step which pieces carry and run; none for a whole model.
        resident_bytes: of all parameters, buffers, inputs and the optimizer's state; 0 for a whole model, whose program
            has them.
        settings: of the planner.
        device: its name and a digest of its settings and of all versions.
        processes: that plan together.
    """

    pieces: tuple[Any, ...]
    calls: tuple[int, ...]
    step: tuple[Any, ...]
    resident_bytes: int
    settings: tuple[Any, ...]
    device: tuple[str, str]
    processes: int = 1

    def path(self, *, quick: bool) -> Path:
        """The file of the cache for a plan that was made in seconds, or by the integer program."""
        digest = hashlib.sha256(repr((VERSION, self)).encode()).hexdigest()[:24]
        return cache_folder() / f"plan_{digest}{'_quick' if quick else ''}.json"

    def refines(self, settings: Settings) -> bool:
        """Whether a full plan is made now because an earlier start has left a quick one."""
        quick = self.path(quick=True)
        return settings.refines and quick not in _planned_here and quick.exists()

    def find(self, settings: Settings, fits: Callable[[KeptPlan], bool], whose: str) -> tuple[KeptPlan, str] | None:
        """The plan in the cache that fits, and its file; None if there is none, or a quick one that is to be refined.

        A full plan serves where a quick one is wanted.

        Args:
            fits: raises `ScheduleFileError` where the plan is for other programs.
            whose: the plan is, for a warning.
        """
        for quick in (False, True) if settings.quick and not self.refines(settings) else (False,):
            path = self.path(quick=quick)
            if not path.exists():
                continue
            try:
                kept = KeptPlan.load(path)
                if fits(kept):
                    return kept, str(path)
            except ScheduleFileError as error:
                warn_caller(f"{whose} planned anew: {error}")
        return None

    def keep(self, plan: KeptPlan, *, quick: bool, sharing: Sharing) -> str:
        """Write a plan into the cache, in one of the processes that plan together, unless the solver may do better at
        the next start.

        Returns:
            Where it is kept, in words.
        """
        path = self.path(quick=quick)
        if plan.promise.status == "searched" or not any(plan.records):
            return ""
        planned_by(lambda: keep(plan, path), sharing)
        if quick:
            _planned_here.add(path)
        return f", kept in {path}"


@dataclass(frozen=True)
class KeptPlan:
    """The content of a file: the schedules of a step's pieces, and what they were planned with.

    Attributes:
        promise: for the whole step.
        planned: the day, such as 2026-11-26.
        cublas_bytes: cuBLAS's workspaces.
        rest_bytes: the most that the rest of the model takes at a moment of the first rehearsal.
        records: by piece; None where it has no gradient.
    """

    promise: BlockPlan
    planned: str
    cublas_bytes: int
    rest_bytes: int
    records: tuple[ScheduleRecord | None, ...]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Equal schedules and points are in it once."""
        schedules: list[Any] = []
        points: list[Any] = []
        pieces: list[int | None] = []
        for record, point in zip(self.records, self.promise.points, strict=True):
            if record is None:
                pieces.append(None)
                continue
            text = record.content()
            if text not in schedules:
                schedules.append(text)
            found = [schedules.index(text), *point.costs]
            if found not in points:
                points.append(found)
            pieces.append(points.index(found))
        content = headed(self, FORMAT, VERSION, without="records")
        content["promise"] = {name: value for name, value in vars(self.promise).items() if name != "points"}
        content |= {"schedules": schedules, "points": points, "pieces": pieces}
        write_with_digest(path, content)

    @staticmethod
    def load(path: Path) -> KeptPlan:
        """Read a file, every field of it checked; nothing in it can run.

        Raises:
            ScheduleFileError: missing, damaged, of another format or version.
        """
        try:
            content = json.loads(read_bytes(path, "plan"))
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise ValueError(f"it is a {content['format']!r} of version {content['version']!r}")
            if content["sha256"] != digest_of_fields({name: content[name] for name in content if name != "sha256"}):
                raise ValueError("its content has another digest than it says")
            lists = read_as(content, _Lists)
            schedules = [ScheduleRecord.of_content(record, str(path)) for record in lists.schedules]
            records = [None if number is None else schedules[lists.points[number][0]] for number in lists.pieces]
            points = [
                Point(record.schedule, *lists.points[number][1:]) if record and number is not None else NOTHING
                for record, number in zip(records, lists.pieces, strict=True)
            ]
            promise = {**content["promise"], "points": points}
            return read_as({**content, "promise": promise, "records": records}, KeptPlan)
        except json.JSONDecodeError as error:
            raise ScheduleFileError(f"{path} is no whole plan: no JSON: {error}") from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ScheduleFileError(f"{path} is no whole plan: {error}") from None


def found_or_planned(
    key_of: Callable[[Settings], StepKey],
    settings: Settings,
    kept: Callable[[StepKey, Settings], tuple[KeptPlan, str] | None],
    planned: Callable[[Settings], KeptPlan],
    sharing: Sharing = "alone",
) -> tuple[KeptPlan, str]:
    """A step's plan: from the cache, or made now and kept; and which of both, in words.

    Args:
        key_of: the step's key by settings.
        kept: looks for the plan of a key in the cache, as `StepKey.find`.
        planned: makes one. The plan for the budget that its error names is kept as well: another search may find none.

    Raises:
        InfeasibleError: nothing fits, nor does what an earlier start has found.
    """
    started, key = time.monotonic(), key_of(settings)
    found = kept(key, settings)
    if found is None:
        if key.refines(settings):
            settings = replace(settings, effort="full")
        try:
            plan = planned(settings)
        except InfeasibleError as error:
            if isinstance(error.smallest, KeptPlan):
                named = key_of(replace(settings, budget=Budget(error.smallest.promise.budget_bytes)))
                named.keep(error.smallest, quick=True, sharing=sharing)
            found = kept(key, replace(settings, effort="quick"))
            if found is None:
                raise
        else:
            later = REFINED if settings.quick and settings.refines else ""
            place = key.keep(plan, quick=settings.quick, sharing=sharing)
            return plan, f"planned in {format_seconds(time.monotonic() - started)}{later}{place}"
    return found[0], f"reused, planned on {found[0].planned}, from {found[1]}"


def here(device: torch.device) -> tuple[str, str]:
    """`StepKey.device` of a device."""
    return device_name(device), settings_digest(device)


def is_near(found_bytes: int, planned_bytes: int) -> bool:
    """Whether a step takes as much memory as when it was planned; where it takes less, faster schedules may fit."""
    return abs(found_bytes - planned_bytes) <= OTHER_SHARE * planned_bytes


def most_of_rest(step: Step) -> int:
    """The most memory that the rest of the model takes at a moment of the step, in bytes."""
    return max(moment.base_bytes for moment in step.moments)


#: The number of a schedule, and `Point.costs`.
_Point = tuple[int, float, int, int, int, int, tuple[int, ...], float, float, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Lists:
    """What a file has once, and the number of a point for each piece."""

    schedules: tuple[Any, ...]
    points: tuple[_Point, ...]
    pieces: tuple[int | None, ...]
