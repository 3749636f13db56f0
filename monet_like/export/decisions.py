"""The decisions of a schedule by module and operator: a table that a person can read and a program can use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..capture.layers import OUTSIDE, layers_of, operator_of
from ..compiler.prepared import Prepared, with_workspaces_of
from ..files import write_atomically
from ..ir.frames import frame
from ..ir.json_fields import headed
from ..ir.program import Cost, Program, Task
from ..ir.schedule import Schedule, kept_values
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import cost_of, simulate

if TYPE_CHECKING:
    import pandas

FORMAT = "monet_like decisions"
VERSION = 1

#: What becomes of an operator's results when the forward has ended.
Fate = Literal["output", "kept", "recomputed", "offloaded", "freed"]


@dataclass(frozen=True, slots=True)
class Rerun:
    """One more run of a forward operator, during the backward.

    Attributes:
        before: the backward task that it runs just before.
        variant: ``aten`` is PyTorch's own operator; another one may compute the same, such as ``batch_norm_again``.
        seconds: predicted.
    """

    before: str
    variant: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What a schedule does with one operator.

    Attributes:
        module: qualified name of the module in whose call the operator runs, or for which the backward runs it.
        stage: ``forward``, ``backward``, or ``again`` for a forward operator that only the backward runs.
        task, operator, variant: names; ``variant`` is ``aten`` for PyTorch's own operator.
        fate: of the results: ``output``: the caller holds them; ``kept`` until the backward has read them;
            ``recomputed``; ``offloaded``: copied to the host and back; ``freed``: the backward does not read them. A
            gradient is ``output`` or ``freed``.
        bytes: of the results, as the device's allocator counts them.
        kept_bytes: of them, those that exist when the forward has ended because the backward reads them.
        seconds: of one run, predicted.
        reruns: runs of a forward operator, or of another one that makes the same results, during the backward.
    """

    module: str
    stage: str
    task: str
    operator: str
    variant: str
    fate: Fate
    bytes: int
    kept_bytes: int
    seconds: float
    reruns: tuple[Rerun, ...] = ()


@dataclass(frozen=True)
class Decisions:
    """All decisions of a schedule, in the order in which the operators first run.

    Attributes:
        model, mode, device, budget_bytes, fingerprint: as those of the schedule file.
        peak_bytes, seconds: predicted for the schedule.
        plain_peak_bytes, plain_seconds: predicted for plain PyTorch.
        rerun_seconds: of ``seconds``, those of recomputed operators.
        decisions: one for each operator.
    """

    model: str
    mode: str
    device: str
    budget_bytes: int
    fingerprint: str
    peak_bytes: int
    seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    rerun_seconds: float
    decisions: tuple[Decision, ...]

    def content(self) -> dict[str, Any]:
        """The content of the JSON file, as builtins: under each module's name its decisions, in order of execution."""
        modules: dict[str, list[dict[str, Any]]] = {}
        for decision in self.decisions:
            modules.setdefault(decision.module, []).append(
                {name: value for name, value in asdict(decision).items() if name != "module"}
            )
        return {**headed(self, FORMAT, VERSION, without="decisions"), "modules": modules}

    def to_json(self, path: str | Path) -> None:
        """Write the content as JSON, one line for each operator.

        Raises:
            UsageError: it cannot be written.
        """
        content = self.content()
        modules = content.pop("modules")
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        entries = (
            f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in found) + "\n  ]"
            for name, found in modules.items()
        )
        lines.append('"modules": {\n' + ",\n".join(entries) + "\n}")
        write_atomically(Path(path), ("{\n" + ",\n".join(lines) + "\n}\n").encode())

    def to_frame(self) -> pandas.DataFrame:
        """One row per operator; ``reruns`` counts its further runs and ``rerun_seconds`` is their time."""
        columns = dict.fromkeys(("module", "stage", "task", "operator", "variant", "fate"), "object")
        columns |= {"bytes": "int64", "kept_bytes": "int64", "seconds": "float64"}
        columns |= {"reruns": "int64", "rerun_seconds": "float64"}
        rows = (
            (
                d.module, d.stage, d.task, d.operator, d.variant, d.fate, d.bytes, d.kept_bytes, d.seconds,
                len(d.reruns), sum(run.seconds for run in d.reruns),
            )
            for d in self.decisions
        )  # fmt: skip
        return frame(columns, rows)


def decisions_of(record: ScheduleRecord, ready: Prepared) -> Decisions:
    """The decisions of a schedule.

    Args:
        record: the schedule, and what it was made for.
        ready: the captured program of the same model and mode, and its costs. The peak and the seconds are those that
            the simulator finds with these costs.
    """
    ready = with_workspaces_of(record, ready)
    program, schedule = ready.captured.program, record.schedule
    report = simulate(program, schedule, ready.costs, extra_bytes=ready.extra_bytes)
    layers = layers_of(ready.captured, program)
    return Decisions(
        model=record.model,
        mode=record.mode,
        device=ready.profile.device,
        budget_bytes=record.budget_bytes,
        fingerprint=record.fingerprint,
        peak_bytes=report.peak_bytes,
        seconds=report.seconds,
        plain_peak_bytes=ready.plain.peak_bytes,
        plain_seconds=ready.plain.seconds,
        rerun_seconds=report.rerun_seconds,
        decisions=_decisions(program, schedule, ready.costs, layers),
    )


def _decisions(
    program: Program, schedule: Schedule, costs: Mapping[str, Cost], layers: Sequence[str]
) -> tuple[Decision, ...]:
    """A decision for each task of the forward, for each that only the backward runs, and for each slot."""
    kept = kept_values(program, schedule)
    sent = {v for p in schedule.forward if program.tasks[p].word == "offload" for v in program.tasks[p].reads}
    maker = {v: p for p in schedule.forward for v in program.tasks[p].writes}
    reruns: dict[int, list[Rerun]] = {}
    for slot, tasks in enumerate(schedule.again):
        before = program.slots[slot][schedule.ways[slot]].name
        for p in tasks:
            task = program.tasks[p]
            owner = next((maker[v] for v in task.writes if v in maker), p)
            maker.update(dict.fromkeys((v for v in task.writes if v not in maker), owner))
            reruns.setdefault(owner, []).append(Rerun(before, task.variant, cost_of(task, costs).seconds))

    def decision(task: Task, stage: str, fate: Fate, again: Sequence[Rerun] = ()) -> Decision:
        values = [program.values[v] for v in task.writes]
        return Decision(
            module=layers[task.writes[0]] if task.writes else OUTSIDE,
            stage=stage,
            task=task.name,
            operator=operator_of(task),
            variant=task.variant,
            fate=fate,
            bytes=sum(value.bytes for value in values),
            kept_bytes=sum(program.values[v].bytes for v in task.writes if v in kept and stage == "forward"),
            seconds=cost_of(task, costs).seconds,
            reruns=tuple(again),
        )

    def fate_of(p: int) -> Fate:
        writes = program.tasks[p].writes
        if not sent.isdisjoint(writes):
            return "offloaded"
        if p in reruns:
            return "recomputed"
        if not kept.isdisjoint(writes):
            return "kept"
        return "freed" if set(program.outputs).isdisjoint(writes) else "output"

    first = set(schedule.forward)
    found = [
        decision(program.tasks[p], "forward" if p in first else "again", fate_of(p), reruns.get(p, ()))
        for p in sorted(first.union(reruns))
    ]
    for slot, way in enumerate(schedule.ways):
        task = program.slots[slot][way]
        stays = not set(program.gradients).isdisjoint(task.writes)
        found.append(decision(task, "backward", "output" if stays else "freed"))
    return tuple(found)
