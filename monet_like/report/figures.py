"""The data of a report: a training step run by run, and its memory by kind and by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..capture.captured import Captured
from ..capture.layers import OUTSIDE, layers_of, operator_of
from ..ir.frames import frame
from ..ir.program import RESIDENT_KINDS, Cost, Program
from ..ir.schedule import Schedule, kept_values
from ..ir.simulate import Launches, cost_of, running
from ..ir.units import format_bytes, format_seconds
from ..plan.baseline import plain_step

if TYPE_CHECKING:
    import pandas

#: Kinds of memory, from the bottom of a stack to its top, and what they are called.
KINDS: Mapping[str, str] = {
    "parameters": "parameters and buffers",
    "optimizer": "optimizer state",
    "cublas": "cuBLAS's workspaces",
    "inputs": "inputs",
    "gradients": "gradients of parameters",
    "kept": "kept for the backward",
    "passing": "activations passing by",
    "recomputed": "recomputed",
    "backward": "gradients of activations",
    "workspace": "workspace",
}
_PLACE = {kind: place for place, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Run:
    """One run of a task.

    Attributes:
        task, operator, variant, layer: names, for people.
        slot: None in the forward, else the backward slot.
        again: a forward task run again.
        begins, seconds: when it starts within the step, and how long it takes.
        bytes: memory while it runs, by kind, in the order of `KINDS`.
        made_bytes: size of its results.
    """

    task: str
    operator: str
    variant: str
    layer: str
    slot: int | None
    again: bool
    begins: float
    seconds: float
    bytes: tuple[int, ...]
    made_bytes: int

    @property
    def total_bytes(self) -> int:
        """Memory while it runs: everything the step has allocated."""
        return sum(self.bytes)


@dataclass(frozen=True, repr=False)
class Course:
    """A training step from its first run to its last.

    Attributes:
        runs: in order.
        at_peak: memory of the run that needs the most: by layer, then by kind in the order of `KINDS`.
    """

    runs: tuple[Run, ...]
    at_peak: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"Course({len(self.runs)} runs, peak {format_bytes(self.peak.total_bytes)}, step "
            f"{format_seconds(self.seconds)})"
        )

    def to_frame(self) -> pandas.DataFrame:
        """The memory timeline: one row per run, in order; ``bytes`` is all that the step holds, then by kind (`KINDS`).

        ``slot`` is missing in the forward; ``begins_seconds`` counts from the step's start.
        """
        rows = (
            (
                run.task, run.operator, run.variant, run.layer, run.slot, run.again, run.begins, run.seconds,
                run.made_bytes, run.total_bytes, *run.bytes,
            )
            for run in self.runs
        )  # fmt: skip
        columns = {"task": "object", "operator": "object", "variant": "object", "layer": "object", "slot": "Int64"}
        columns |= {"again": "bool", "begins_seconds": "float64", "seconds": "float64", "written_bytes": "int64"}
        return frame(columns | {"bytes": "int64"} | {f"{kind}_bytes": "int64" for kind in KINDS}, rows)

    @property
    def peak(self) -> Run:
        """The run that needs the most memory, the first of them."""
        return max(self.runs, key=lambda run: run.total_bytes)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(run.seconds for run in self.runs)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the forward has kept when the backward starts."""
        first = next((run for run in self.runs if run.slot is not None), None)
        return first.bytes[_PLACE["kept"]] if first else 0


def plain_course(
    captured: Captured,
    costs: Mapping[str, Cost],
    extra_bytes: int,
    cublas_bytes: int = 0,
    launches: Launches | None = None,
) -> Course:
    """Plain PyTorch's step, run by run."""
    program, schedule, eager = plain_step(captured.plain, costs, autograd_nodes=captured.autograd_nodes)
    return course(captured, program, schedule, eager, extra_bytes, cublas_bytes, launches)


def course(
    captured: Captured,
    program: Program,
    schedule: Schedule,
    costs: Mapping[str, Cost],
    extra_bytes: int,
    cublas_bytes: int = 0,
    launches: Launches | None = None,
) -> Course:
    """A schedule's step, run by run, as the simulator counts it.

    Args:
        program: of ``captured``: with its variants, or as it was before them.
        extra_bytes: resident memory beyond the program's; of it ``cublas_bytes`` are cuBLAS's workspaces, the rest is
            the optimizer's state.
        launches: the CPU's clock; see `monet_like.ir.simulate.simulate`.
    """
    layers = layers_of(captured, program)
    values, places = program.values, _places(program, schedule)
    always = [(layers[v], places[v], value.bytes) for v, value in enumerate(values) if value.kind in RESIDENT_KINDS]
    always += [(OUTSIDE, _PLACE["optimizer"], extra_bytes - cublas_bytes), (OUTSIDE, _PLACE["cublas"], cublas_bytes)]
    runs: list[Run] = []
    most, at_peak, begins = -1, always, 0.0
    for step, task, alive, _ in running(program, schedule, costs, extra_bytes=extra_bytes, launches=launches):
        layer = layers[task.writes[0]] if task.writes else OUTSIDE
        parts = [*always, *((layers[v], places[v], count) for v, count in alive.items() if v != task.overwrites)]
        if step.again:  # its results are no longer those that the forward kept
            places.update((v, _PLACE["recomputed"]) for v in task.writes)
        parts += [(layers[v], places[v], values[v].bytes) for v in task.writes]
        parts.append((layer, _PLACE["workspace"], cost_of(task, costs).workspace_bytes))
        by_kind = [0] * len(KINDS)
        for _, place, count in parts:
            by_kind[place] += count
        made = sum(values[v].bytes for v in task.writes)
        runs.append(
            Run(
                step.task, operator_of(task), task.variant, layer, step.slot, step.again, begins, step.seconds,
                tuple(by_kind), made,
            )
        )  # fmt: skip
        begins += step.seconds
        if step.bytes > most:
            most, at_peak = step.bytes, parts
    return Course(tuple(runs), _by_layer(at_peak))


def _places(program: Program, schedule: Schedule) -> dict[int, int]:
    """The place among `KINDS` of every value, as the forward makes it."""
    kept = {*kept_values(program, schedule), *program.outputs}
    of_kind = {"parameter": "parameters", "buffer": "parameters", "input": "inputs", "backward": "backward"}
    found = {}
    for v, value in enumerate(program.values):
        kind = of_kind.get(value.kind, "kept" if v in kept else "passing")
        found[v] = _PLACE["gradients" if v in program.gradients else kind]
    return found


def _by_layer(parts: Iterable[tuple[str, int, int]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for layer, place, count in parts:
        if count:
            found.setdefault(layer, [0] * len(KINDS))[place] += count
    return {layer: tuple(counts) for layer, counts in found.items()}


def groups(layers: Sequence[str], most: int = 44) -> dict[str, str]:
    """The group in which each layer is shown: names are cut so that at most ``most`` groups remain.

    Args:
        layers: in the order to be kept.
    """
    depth = max((layer.count(".") + 1 for layer in layers), default=1)
    while depth > 1 and len({_cut(layer, depth) for layer in layers}) > most:
        depth -= 1
    return {layer: _cut(layer, depth) for layer in layers}


def _cut(layer: str, depth: int) -> str:
    return ".".join(layer.split(".")[:depth])
