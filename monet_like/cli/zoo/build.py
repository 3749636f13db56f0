"""Builds the zoo: captures each model once for each kind of device and plans every profile and budget.

A build goes on where the last one stopped: what is there, is what the registry says and is for the program that the
model still is, is left alone; what is for another program goes. Schedules are found by local search, counted and
seeded (`Search.run_counted`), and files hold neither clock times nor bounds, which depend on how long a solver had: so
with the same versions the same bytes come out again. The registry has both.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ...compiler.pipeline import make_record
from ...errors import InfeasibleError, ScheduleFileError, UsageError
from ...ir.profile_file import Profile
from ...ir.program import Cost
from ...ir.schedule_file import ScheduleRecord
from ...ir.simulate import simulate
from ...ir.units import GIB, parse_budget
from ...plan.ilp.search import Search
from ...profile.devices import DEVICES, DeviceLimits
from ...profile.launches import launches_of
from ...profile.roofline import ROOFLINE_VERSION
from ...zoo.catalogue import CATALOGUE, MODE, PROFILES, Entry
from ...zoo.model_file import SUFFIX
from ...zoo.registry import FILE_NAME, Registry
from ...zoo.rows import Listed, Refused
from .problems import captured_model, prepared_model

#: Policies that the local search judges for each plan, in each of its two annealings.
EVALUATIONS = 25_000
#: A quarter of these seconds is for the bound.
LIMIT_SECONDS = 40.0
COUNTED = "counted"

#: Called with words for people, files done, files in all.
Progress = Callable[[str, int, int], None]

#: What planning for one budget gives: a schedule and what is said of it, or why there is none.
_Planned = tuple[Listed | Refused, ScheduleRecord | None]
#: What is planned: arguments of `_plan`.
_Job = tuple[Entry, str, str, int]


@dataclass(frozen=True)
class Built:
    """Result of a build: names that were planned, unchanged or refused."""

    made: tuple[str, ...]
    kept: tuple[str, ...]
    refused: tuple[str, ...]


def build(
    folder: Path,
    *,
    entries: Sequence[Entry] = CATALOGUE,
    profiles: Sequence[str] = PROFILES,
    again: bool = False,
    evaluations: int = EVALUATIONS,
    processes: int = 1,
    progress: Progress | None = None,
) -> Built:
    """Plan what is missing in ``folder``. The model's file and the registry are written after every schedule.

    Args:
        entries: of the catalogue, or others.
        profiles: names in `roofline.DEVICES`.
        again: make what is there, too.
        evaluations: of the local search for each plan.
        processes: that plan at the same time; the files are the same for any number.
        progress: told what is being done.

    Raises:
        UsageError: an unknown profile.
    """
    for profile in profiles:
        if profile not in DEVICES:
            raise UsageError(f"there is no profile {profile!r}; choose some of {', '.join(DEVICES)}")
    registry = Registry.load(folder) if (folder / FILE_NAME).exists() else Registry(folder)
    total = len(profiles) * sum(len(entry.budgets) for entry in entries)
    made: list[str] = []
    kept: list[str] = []
    refused: list[str] = []

    def tell(what: str) -> None:
        if progress:
            progress(what, len(made) + len(kept) + len(refused), total)

    with _planning(processes) as planned:
        for entry in entries:
            model, missing = _Model(entry), list[_Job]()
            for profile in profiles:
                for budget in entry.budgets:
                    known = None if again else model.known(registry, budget, DEVICES[profile])
                    if known is None:
                        missing.append((entry, profile, budget, evaluations))
                    else:
                        (kept if isinstance(known, Listed) else refused).append(known.full_name)
            tell(f"{entry.name} {entry.batch}: {len(missing)} to plan")
            for found, record in planned(missing):
                if isinstance(found, Listed):
                    registry = registry.with_schedule(found, record)
                    made.append(found.full_name)
                else:
                    registry = registry.with_refused(found)
                    refused.append(found.full_name)
                registry.save()
                tell(found.full_name)
            for profile in profiles:
                registry = model.without_outdated(registry, DEVICES[profile])
    tell("done")
    return Built(tuple(made), tuple(kept), tuple(refused))


@contextlib.contextmanager
def _planning(processes: int) -> Iterator[Callable[[Sequence[_Job]], Iterator[_Planned]]]:
    """A function that runs `_plan` for each of some jobs; results come in the order in which jobs end.

    Args:
        processes: that plan at the same time; with one, this process plans.
    """
    if processes == 1:
        yield lambda jobs: (_plan(*job) for job in jobs)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"))
    try:
        yield lambda jobs: (done.result() for done in as_completed([pool.submit(_plan, *job) for job in jobs]))
    finally:
        pool.shutdown(cancel_futures=True)


def _plan(entry: Entry, profile: str, budget: str, evaluations: int) -> _Planned:
    return _Model(entry).plan(budget, DEVICES[profile], evaluations)


def _budget_bytes(budget: str, plain_peak_bytes: int) -> int:
    """A budget in bytes; a share of plain PyTorch's peak is rounded to hundredths of a GB, as names show it."""
    wanted = parse_budget(budget)
    return wanted.bytes or int(round(wanted.share * plain_peak_bytes / GIB, 2) * GIB)


def roofline_source(profile: str) -> str:
    """The source of costs from datasheet rates: enough to compute them again."""
    return f"roofline:{profile} version {ROOFLINE_VERSION}"


@dataclass(frozen=True)
class _Model:
    """One model of the catalogue, captured once for each kind of device and priced once for each profile."""

    entry: Entry

    def known(self, registry: Registry, budget: str, limits: DeviceLimits) -> Listed | Refused | None:
        """The registry's row for a budget, if its file exists and a new build would make the same."""
        entry = self.entry
        for row in self._rows(registry, limits):
            if row.budget_bytes != _budget_bytes(budget, row.plain_peak_bytes) or row.fingerprint != self.fingerprint(
                limits.device
            ):
                continue
            if isinstance(row, Refused):
                return row
            with contextlib.suppress(ScheduleFileError):
                made_so = row.profile_source == roofline_source(limits.name) and row.solver == COUNTED
                if made_so and (row.model, row.mode) == (entry.model, MODE) and registry.check(registry.file_of(row)):
                    return row
        return None

    def without_outdated(self, registry: Registry, limits: DeviceLimits) -> Registry:
        """Remove schedules whose program no longer matches the model from the registry and the files."""
        current = self.fingerprint(limits.device)
        outdated = [
            row
            for row in self._rows(registry, limits)
            if row.fingerprint != current
            and (isinstance(row, Refused) or (row.kind, row.model) == ("roofline", self.entry.model))
        ]
        if outdated:
            registry = registry.without(outdated)
            registry.save()
        return registry

    def _rows(self, registry: Registry, limits: DeviceLimits) -> list[Listed | Refused]:
        """The registry's rows of this entry for a profile."""
        start = f"{self.entry.name}_{self.entry.batch}_"
        return [row for row in registry.rows if row.name.startswith(start) and row.profile == limits.name]

    def fingerprint(self, device: str) -> str:
        return captured_model(self.entry.model, self.entry.batch, device)[1].program.fingerprint

    def plan(self, budget: str, limits: DeviceLimits, evaluations: int) -> _Planned:
        """Plan one budget."""
        problem, ready = prepared_model(self.entry.model, self.entry.batch, limits.name)
        limit = _budget_bytes(budget, ready.plain.peak_bytes)
        program = ready.captured.program
        name = f"{self.entry.name}_{self.entry.batch}_{limit / GIB:.2f}"
        search = Search(program, ready.costs, limit, solver="HIGHS", time_limit_seconds=LIMIT_SECONDS, gap=1e-3)
        try:
            found = search.run_counted(evaluations)
        except InfeasibleError as error:
            peak = ready.plain.peak_bytes
            refused = Refused(
                name, limits.name, limit, peak, error.proven, error.smallest_bytes, str(error), program.fingerprint
            )
            return refused, None
        record = make_record(problem.request, ready, found, limit)
        kept = {key: record.versions[key] for key in ("monet_like", "torch")}
        proven = {name: getattr(record, name) for name in ("bound_seconds", "gap", "bound_kind")}
        seconds = record.solve_seconds
        unclocked: dict[str, Any] = {"solve_seconds": 0.0, "bound_seconds": None, "gap": None, "bound_kind": "none"}
        record = replace(record, **unclocked, status="feasible", versions=kept)
        listed = Listed(
            name=name,
            profile=limits.name,
            kind="roofline",
            profile_source=roofline_source(limits.name),
            device=limits.device,
            captured_there=problem.request.target is None,
            path=f"{self.entry.name}_{self.entry.batch}{SUFFIX}",
            solver=COUNTED,
            solve_seconds=round(seconds, 1),
            **proven,
            **described(record, self.entry.batch),
        )
        return listed, record


def described(record: ScheduleRecord, batch: int) -> dict[str, Any]:
    """The fields of a registry entry that describe a schedule file's content."""
    return {
        "model": record.model,
        "batch": batch,
        "inputs": tuple(f"{spec.dtype}{list(spec.shape)}" for spec in record.inputs),
        "mode": record.mode,
        "budget_bytes": record.budget_bytes,
        "peak_bytes": record.peak_bytes,
        "seconds": record.seconds,
        "plain_peak_bytes": record.plain_peak_bytes,
        "plain_seconds": record.plain_seconds,
        "torch": record.versions["torch"],
        "fingerprint": record.fingerprint,
    }


def add_measured(folder: Path, path: Path, name: str, profile: str, profile_file: Path) -> Listed:
    """Add a schedule that was planned from a measured profile to the folder's registry.

    Args:
        path, profile_file: within ``folder``.
        name: short, such as ``resnet50``.
        profile: a name for the machine.

    Raises:
        UsageError: the files are elsewhere, not of one machine, or the name is that of a datasheet profile.
    """
    folder, path, profile_file = (Path(os.path.realpath(given)) for given in (folder, path, profile_file))
    if folder not in path.parents or folder not in profile_file.parents:
        raise UsageError(f"{path.name} and {profile_file.name} must be in the zoo's folder, {folder}")
    if profile in DEVICES or not re.fullmatch(r"[a-z0-9.\-]+", profile):
        raise UsageError(f"the machine's name {profile!r} must be of a-z, 0-9, . and -, and not {', '.join(DEVICES)}")
    record = ScheduleRecord.load(path)
    measured = Profile.load(profile_file)
    if measured.device != record.device:
        raise UsageError(f"{path} was made for {record.device}, {profile_file} is of {measured.device}")
    batch = record.inputs[0].shape[0]
    listed = Listed(
        name=f"{name}_{batch}_{record.budget_bytes / GIB:.2f}",
        profile=profile,
        kind="measured",
        profile_source=profile_file.relative_to(folder).as_posix(),
        device=record.device.partition(":")[0],
        captured_there=True,
        path=path.relative_to(folder).as_posix(),
        solver=record.solver,
        solve_seconds=round(record.solve_seconds, 1),
        bound_seconds=record.bound_seconds,
        gap=record.gap,
        bound_kind=record.bound_kind,
        **described(record, batch),
    )
    registry = Registry.load(folder) if (folder / FILE_NAME).exists() else Registry(folder)
    registry.with_schedule(listed).save()
    return listed


def verify(registry: Registry, listed: Listed, *, simulated: bool = True) -> None:
    """Check a schedule: its file's hash, that it loads, and, by capturing and simulating, that it keeps its promises.

    Raises:
        ScheduleFileError: what does not hold.
    """
    record = registry.record(listed)
    if any(getattr(listed, name) != value for name, value in described(record, listed.batch).items()):
        raise ScheduleFileError(f"{listed.path} and the registry differ in what they promise; build the zoo again")
    if not simulated:
        return
    _, captured = captured_model(listed.model, listed.batch, listed.device)
    if captured.program.fingerprint != record.fingerprint:
        raise ScheduleFileError(
            f"{listed.full_name} was made for another program than {listed.model} is with PyTorch {torch.__version__} "
            f"(made with {listed.torch}); build the zoo again"
        )
    costs = _costs(registry, listed)
    launches = launches_of(captured.program, record.device, planned=True)
    report = simulate(captured.program, record.schedule, costs, extra_bytes=record.extra_bytes, launches=launches)
    if report.peak_bytes > record.budget_bytes:
        raise ScheduleFileError(f"{listed.full_name} takes {report.peak_bytes} bytes, more than its budget")
    if report.peak_bytes != listed.peak_bytes or abs(report.seconds - listed.seconds) > 1e-9 * listed.seconds:
        raise ScheduleFileError(
            f"{listed.full_name} takes {report.peak_bytes} bytes and {report.seconds:.6f} s by "
            f"{listed.profile_source}, the registry says {listed.peak_bytes} bytes and {listed.seconds:.6f} s; build "
            "the zoo again"
        )


def _costs(registry: Registry, listed: Listed) -> Mapping[str, Cost]:
    if listed.kind == "measured":
        return Profile.load(registry.folder / listed.profile_source).costs
    return prepared_model(listed.model, listed.batch, listed.profile)[1].costs


def select(names: Sequence[str], entries: Sequence[Entry] = CATALOGUE) -> tuple[Entry, ...]:
    """The catalogue's entries with these names; all of them if no name is given.

    Raises:
        UsageError: an unknown name.
    """
    known = {entry.name: entry for entry in entries}
    for name in names:
        if name not in known:
            raise UsageError(f"the catalogue has no {name!r}; choose some of {', '.join(known)}")
    return tuple(known[name] for name in names) if names else tuple(entries)
