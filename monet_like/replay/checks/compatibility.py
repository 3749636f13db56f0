"""Checks that a schedule fits the call, the program and the device at hand, and explains what does not.

Gradients are the same everywhere and so is what is kept; times, and the workspaces of convolutions, are the device's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...capture.captured import CUDA_GRANULARITY_BYTES, Captured
from ...capture.example_inputs import device_of, input_specs, specs_in_words
from ...capture.precision import autocast_name, weights_layout
from ...errors import ScheduleError, ScheduleFileError
from ...ir.program import Program, Task
from ...ir.schedule import Schedule
from ...ir.schedule_file import InputSpec, ScheduleRecord
from ...ir.simulate import Free, simulate
from ...ir.units import format_bytes, format_seconds
from ...nn.sync_batch_norm import among
from ...ops.liger import PACKAGE, is_ours
from ...profile.devices import Machine, machine_at, planned_for
from .twins import twins_taken, workspaces_of_twins

#: Memory and rates that differ by less are taken to be the same: datasheets round, cards reserve some for themselves.
MEMORY_FACTOR, RATE_FACTOR = 1.15, 1.25

_told: set[tuple[str, str]] = set()


def difference(planned: Machine, here: Machine, peak_bytes: int) -> str:
    """How the device differs from the one planned for in what matters for time or memory, in words; else "".

    Args:
        peak_bytes: that the schedule predicts.
    """
    if planned.kind == here.kind == "cpu":
        return ""
    found = []
    if here.memory_bytes and peak_bytes > here.memory_bytes:
        found.append(
            f"its peak of {format_bytes(peak_bytes)} does not fit into {format_bytes(here.memory_bytes)}; "
            "plan for a smaller budget"
        )
    elif _apart(planned.memory_bytes, here.memory_bytes, MEMORY_FACTOR):
        found.append(f"memory is {format_bytes(here.memory_bytes)} instead of {format_bytes(planned.memory_bytes)}")
    for what, mine, theirs, unit in (
        ("arithmetic", here.flops_per_second, planned.flops_per_second, "TFLOP/s"),
        ("float32 convolution", here.convolution_flops_per_second, planned.convolution_flops_per_second, "TFLOP/s"),
        ("memory traffic", here.bytes_per_second, planned.bytes_per_second, "TB/s"),
    ):
        if _apart(mine, theirs, RATE_FACTOR):
            found.append(f"{what} is {mine / 1e12:.3g} {unit} instead of {theirs / 1e12:.3g}")
    if planned.kind != here.kind:
        found.append("a GPU and a CPU differ in which operators are slow")
    elif not found and not (planned.bytes_per_second and here.bytes_per_second) and planned.name != here.name:
        unknown = [machine.name for machine in (planned, here) if not machine.bytes_per_second]
        found.append(f"rates of {' and '.join(unknown)} are not known, so that how far times differ is not, either")
    return "; ".join(found)


def _apart(one: float, other: float, factor: float) -> bool:
    return bool(one and other) and not 1 / factor <= one / other <= factor


def warn_elsewhere(record: ScheduleRecord, device: torch.device, stacklevel: int) -> None:
    """Warn, once for every pair of devices, that a schedule was planned for another one."""
    planned, here = planned_for(record.device), machine_at(device)
    differs = difference(planned, here, record.peak_bytes)
    if not differs or (record.device, here.name) in _told:
        return
    _told.add((record.device, here.name))
    warnings.warn(
        f"the schedule was planned for {planned.name} and runs on {here.name}: {differs}. Gradients are the same, but "
        "times and workspaces are not those predicted; to plan for this device, solve on it",
        stacklevel=stacklevel + 1,
    )


def check_shapes(record: ScheduleRecord, given: Sequence[Any]) -> None:
    shapes = [tuple(s) for s in given] if given and not isinstance(given[0], int) else [tuple(given)]
    solved = [spec.shape for spec in record.inputs]
    if len(shapes) != len(solved):
        raise ScheduleFileError(f"the schedule was solved for {len(solved)} inputs, input_shape names {len(shapes)}")
    for shape, other in zip(shapes, solved, strict=True):
        if shape not in (other, other[1:]):
            raise ScheduleFileError(
                f"the schedule was solved for an input of shape {list(other)} (batch {other[0] if other else 0}), "
                f"input_shape is {list(shape)}; solve for this shape, or give {list(other[1:])}"
            )


def mismatch(record: ScheduleRecord, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call does not match the inputs that a schedule was solved for, and what to do; "" if it does."""
    if (found := call_difference(record, model, args, kwargs)) is None:
        return ""
    return (
        f"the schedule was solved {found[0]}, the model was called {found[1]}; smaller inputs (a batch, a length) are "
        "fine, anything else needs a schedule of its own"
    )


#: Why a plan does not serve a call from which `call_difference` tells no difference.
OTHER_STEP = (
    "other parameters are frozen, other parts in eval mode, other inputs are one tensor or expanded, or results are "
    "larger"
)


def call_difference(
    record: ScheduleRecord, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str] | None:
    """What a schedule was planned for and how the model was called, in words; None if the schedule serves the call.

    Inputs that are no larger in any dimension, such as a last batch or shorter sequences, run with the same decisions.
    Anything else must be as solved for. Under another autocast and with weights in another layout other operators run,
    or others than were priced.
    """
    found = input_specs(args, kwargs)
    if not fits_within(found, record.inputs):
        return f"for {specs_in_words(record.inputs)}", f"with {specs_in_words(found)}"
    autocast = autocast_name(device_of(model, (args, kwargs)))
    if autocast != record.autocast:
        return _under(record.autocast), _under(autocast)
    layout = weights_layout(model)
    if layout != record.layout:
        wanted, given = (name or "the default layout" for name in (record.layout, layout))
        return f"for weights in {wanted}", f"with weights in {given}"
    return None


def fits_within(inputs: tuple[InputSpec, ...], largest: tuple[InputSpec, ...]) -> bool:
    """Whether inputs equal those of a plan but for extents that are smaller or the same."""
    return len(inputs) == len(largest) and all(
        replace(mine, shape=other.shape) == other
        and len(mine.shape) == len(other.shape)
        and all(extent <= most for extent, most in zip(mine.shape, other.shape, strict=True))
        for mine, other in zip(inputs, largest, strict=True)
    )


def replayed_in_words(record: ScheduleRecord, captured: Captured, inputs: tuple[InputSpec, ...], seconds: float) -> str:
    """For the log: that a schedule for larger inputs serves these, and what that takes."""
    needed = simulate(captured.program, record.schedule, Free()).peak_bytes + record.extra_bytes
    return (
        f"{record.model}: {specs_in_words(inputs)} by the schedule for {specs_in_words(record.inputs)}, captured in "
        f"{format_seconds(seconds)}; at least {format_bytes(needed)} of the {format_bytes(record.peak_bytes)} that it "
        "promises"
    )


def _under(autocast: str) -> str:
    return f"under autocast to {autocast}" if autocast else "without autocast"


def has_liger(record: ScheduleRecord) -> bool:
    """Whether the program that a schedule was made for has ways by Liger's kernels."""
    return PACKAGE in record.versions


def check_program(record: ScheduleRecord, captured: Captured, name: str, device: torch.device) -> None:
    """Check that a schedule was made for this program and keeps its promises, before any operator runs.

    Args:
        name: of the model, for people.
        device: that the model is on.

    Raises:
        ScheduleFileError: it is of another one, breaks its rules, or needs more memory than it promises.
    """
    program = captured.program
    planned = planned_for(record.device)
    if program.fingerprint != record.fingerprint and planned.kind != device.type:
        raise ScheduleFileError(
            f"this schedule was planned for {planned.name}, a {planned.kind} device, and {name} is on {device.type}, "
            f"where PyTorch runs other operators; move the model to {planned.kind}, name a schedule for {device.type} "
            f"(zoo:NAME@PROFILE as monet-like zoo list shows them), or plan for it with monet-like solve --device "
            f"{device.type}"
        )
    if program.fingerprint != record.fingerprint:
        made = ", ".join(f"{k} {v}" for k, v in sorted(record.versions.items()))
        raise ScheduleFileError(
            f"this schedule does not match the model: it was planned for {record.model}{_counted(record)}, {name} has "
            f"{_sized(*program.parameters, len(program.slots))}; use the model that it was planned for, with the same "
            "frozen parameters, train/eval flags, precision, inputs that are one tensor, and versions (planned with "
            f"{made} for {record.device}; this is torch {torch.__version__}), or plan again with monet-like solve"
            f"{_about_variants(record, program)}"
            f"{_about_dtypes(record, program)}{_about_processes(record.counts.get('processes', 1), among(program))}"
        )
    if reason := exceeds(record, captured, name, device):
        raise ScheduleFileError(reason)


@contextmanager
def told_of_order(inputs: int) -> Iterator[None]:
    """Add to an error that the inputs which a schedule file describes were given to the model in their order.

    Args:
        inputs: how many; with a single one there is nothing to add.
    """
    try:
        yield
    except ScheduleFileError as error:
        if inputs < 2:
            raise
        raise ScheduleFileError(
            f"{error}; the file does not hold the names of arguments, so its {inputs} inputs were taken to be the "
            "first arguments: if the model is called by keyword, give ScheduleWrapper example=(args, kwargs)"
        ) from None


def _about_variants(record: ScheduleRecord, program: Program) -> str:
    """For a message: the variants that a schedule takes and nothing offers for this program; "" if there are none."""
    offered = {task.variant for task in program.every_task()}
    taken = (key.removeprefix("variant ") for key in record.counts if key.startswith("variant "))
    missing = [name for name in taken if name not in offered]
    if not missing:
        return ""
    return (
        f"; the schedule takes the variants {', '.join(missing)}, which nothing offers here: if they are from outside "
        "the package, import the module that registers them (monet_like.register_variant) first"
    )


def exceeds(record: ScheduleRecord, captured: Captured, name: str, device: torch.device) -> str:
    """Why a step by this schedule would need more memory than the schedule promises, in words; "" if it would not.

    Operators are the same at any size: a model may upsample four times instead of twice. Without workspace, which
    depends on the device, a step needs at most the peak that was predicted with it. Where plain-torch twins run in the
    place of compiled kernels, theirs is counted: then a step may need more than predicted, but not than the budget.

    Raises:
        ScheduleFileError: the schedule breaks the program's rules.
    """
    program = captured.program
    try:
        needed = simulate(program, record.schedule, Free()).peak_bytes
    except ScheduleError as error:
        raise ScheduleFileError(f"the schedule does not fit the program it names: {error}; solve again") from None
    promised = record.peak_bytes - record.extra_bytes
    # A GPU's allocator rounds sizes up.
    rounded = CUDA_GRANULARITY_BYTES * len(program.values) if device.type != planned_for(record.device).kind else 0
    if not record.peak_bytes:
        return ""
    if needed <= promised + rounded:
        return _exceeds_by_twins(record, captured, device, promised + rounded)
    return (
        f"this schedule does not match the model: it promises {record.model} a peak of {format_bytes(promised)} "
        f"({promised} bytes), and {name} needs {format_bytes(needed)} ({needed} bytes) with the same operators, whose "
        "results are larger; plan again with monet-like solve"
    )


def _exceeds_by_twins(record: ScheduleRecord, captured: Captured, device: torch.device, promised: int) -> str:
    """Why a schedule exceeds its budget with plain-torch twins instead of kernels, in words; "" if it does not."""
    needed = simulate(captured.program, record.schedule, workspaces_of_twins(captured, device.type)).peak_bytes
    budget = record.budget_bytes - record.extra_bytes
    if needed <= max(promised, budget):
        return ""
    missing = twins_taken(captured.program, record.schedule, device.type)
    of_liger = {op for op in missing if is_ours(op)}
    names, advice = [], []
    if missing - of_liger:
        names.append("the compiled kernels of monet_like")
        advice.append(
            "compile the kernels with python -m monet_like.build (for a GPU, that needs nvcc: monet-like doctor says "
            "where it is looked for)"
        )
    if of_liger:
        names.append(f"Liger's kernels (liger-kernel {record.versions.get(PACKAGE, '0.8')})")
        advice.append("install Liger with pip install 'monet_like[liger]' (for a GPU under Linux)")
    return (
        f"this schedule needs {' and '.join(names)}: with the plain-torch twins, which run here on {device.type}, a "
        f"step takes at least {format_bytes(needed)} ({needed} bytes), more than its budget of {format_bytes(budget)}; "
        f"{' and '.join(advice)}, or plan here with monet-like solve, which measures the twins"
    )


def carried_over(schedule: Schedule, program: Program, other: Program) -> Schedule | None:
    """The same decisions for a program with equal forward and other copies in its backward; None: they do not fit.

    A slot that lacks the way that the schedule takes is done in PyTorch's own.
    """

    def outline(program: Program, task: Task) -> tuple[Any, ...]:
        named = [[program.values[v].name for v in values] for values in (task.reads, task.writes)]
        taken = None if task.overwrites is None else program.values[task.overwrites].name
        return task.variant, *named, taken, [call.op for call in task.calls]

    if [outline(program, task) for task in program.tasks] != [outline(other, task) for task in other.tasks]:
        return None
    places = {ways[0].name: place for place, ways in enumerate(program.slots)}
    ways: list[int] = []
    again: list[tuple[int, ...]] = []
    seen = 0
    for theirs in other.slots:
        place = places.get(theirs[0].name)
        if place is None:
            again.append(())
            ways.append(0)
            continue
        wanted = outline(program, program.slots[place][schedule.ways[place]])
        ways.append(next((way for way, task in enumerate(theirs) if outline(other, task) == wanted), 0))
        again.append(tuple(task for slot in schedule.again[seen : place + 1] for task in slot))
        seen = max(seen, place + 1)
    carried = replace(schedule, ways=tuple(ways), again=tuple(again))
    try:
        simulate(other, carried, Free())
    except ScheduleError:
        return None
    return carried


def _counted(record: ScheduleRecord) -> str:
    """The size of a schedule's model, as far as the file tells it."""
    try:
        counts = [record.counts[name] for name in ("parameters", "parameter_bytes", "slots")]
    except KeyError:
        return ""
    return f" with {_sized(*counts)}"


def _sized(parameters: int, parameter_bytes: int, slots: int) -> str:
    return f"{parameters} parameters in {format_bytes(parameter_bytes)} and {slots} operators in its backward"


#: Quotients of the sizes of dtypes: between 8 and 64 bits.
_SIZES = frozenset({1 / 8, 1 / 4, 1 / 2, 2, 4, 8})


def _about_dtypes(record: ScheduleRecord, program: Program) -> str:
    """Advice where the model seems to be the same in another dtype, or has buffers in another one."""
    count, size = program.parameters
    if not count or record.counts.get("parameters") != count:
        return ""
    if record.counts.get("parameter_bytes", 0) / size in _SIZES:
        return (
            "; its parameters seem to have another dtype: a schedule is for one dtype, so convert the model first "
            "(model.to(torch.bfloat16)) and plan it then"
        )
    before, now = record.counts.get("buffer_bytes", program.buffer_bytes), program.buffer_bytes
    if record.counts.get("parameter_bytes") == size and now and before / now in _SIZES:
        return (
            f"; its buffers take {format_bytes(now)} and took {format_bytes(before)}: model.to(dtype) converts buffers "
            "too, such as frequencies of rotary embeddings, which stay in float32 in a model that is made or loaded in "
            "that dtype; make the model in the same way as when it was planned"
        )
    return ""


def _about_processes(solved: int, here: int) -> str:
    """Advice where schedule and program differ in whether SyncBatchNorm shares its statistics among processes."""
    if (solved > 1) == (here > 1):
        return ""
    if here > 1:
        return f"; SyncBatchNorm is among {here} processes here: solve with --processes {here}"
    return f"; it is for SyncBatchNorm among {solved} processes: start their process group first"
