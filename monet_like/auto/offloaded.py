"""Which values of a model's blocks may be on the host between their forward and their backward, and how many bytes."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..capture.captured import Captured, look_of
from ..capture.example_inputs import device_of
from ..compiler.offloading import Host
from ..errors import warn_caller
from ..ir.mode import OFFLOAD, parse_mode
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import Free, running
from ..ir.step import Step, with_offloads
from ..ir.units import format_bytes
from ..profile.rates import host_rate
from ..runtime.frozen_weights import available_bytes
from ..runtime.offload import can_pin
from ..runtime.offloaded_calls import LEAST_BYTES, OffloadedCalls
from .agreement import gathered, processes
from .kept_plans import KeptPlan
from .planning import Settings
from .rehearsal.memory import Blocks, StepMemory

#: By block, inputs that are gone when the block lets go of them, and the blocks of which they are results.
Lone = Mapping[int, Mapping[int, Collection[int]]]
#: Share of the host's available memory that they may take: data loaders need some, too.
ROOM = 0.5
#: Said where the host's memory cannot be pinned.
NOT_PINNED = "the host's memory for offloaded activations could not be pinned, so the plan offloads none"


def offloadable(captured: Captured, held: Collection[int], lone: Collection[int]) -> frozenset[int]:
    """Values of a block that are gone from the device when the block lets go of them: its own activations, some inputs,
    and results that nobody else holds.

    Args:
        held: see `held_values`.
        lone: the inputs.
    """
    values, metas = captured.program.values, captured.metas
    free = (v for v, value in enumerate(values) if v in lone or (value.kind == "forward" and v not in held))
    return frozenset(
        v
        for v in free
        if values[v].bytes >= LEAST_BYTES
        and not values[v].host_bytes
        and metas[v].covers_storage
        and not metas[v].lazily
        and metas[v].device == captured.device
    )


def looks_of(captured: Captured) -> dict[int, str]:
    """How each input of a block looks; Inductor's graph has those inputs under other names."""
    return {v: look_of(captured.metas[v]) for v in captured.inputs}


def lone_looks(captured: Captured, lone: Collection[int]) -> tuple[str, ...]:
    """How lone inputs look, each as often as there are such; without those that others look like."""
    looks = looks_of(captured)
    others = {look for v, look in looks.items() if v not in lone}
    return tuple(look for v, look in looks.items() if v in lone and look not in others)


def _admits(device: torch.device, settings: Settings) -> bool:
    """Whether values may be offloaded: on a GPU unless the user's mode says otherwise, on a CPU where it says
    ``offload``: there both memories are one.
    """
    return OFFLOAD in parse_mode(settings.mode) or (device.type == "cuda" and settings.offloads)


def _room_alone() -> int:
    """The share of one process, which does not ask how many of the others are on this host."""
    return int(ROOM * available_bytes() / processes())


def adds_copies(device: torch.device, settings: Settings) -> bool:
    """Whether a plan of a whole model may add copies on the host to what its mode has."""
    return OFFLOAD not in parse_mode(settings.mode) and _admits(device, settings)


def host_of(device: torch.device) -> Host | None:
    """The host for copies that a plan of a whole model adds; None: nothing can be pinned."""
    if not (room := _room_alone()):
        return None
    try:
        rate = host_rate(device)
    except RuntimeError:
        return None
    return Host(rate, room, lambda captured, schedule: _pinned(captured, schedule, device))


def has_room(record: ScheduleRecord, captured: Captured, device: torch.device, settings: Settings) -> bool:
    """Whether there is room for the copies on the host that a plan from the cache has added, if it has."""
    if not adds_copies(device, settings) or OFFLOAD not in parse_mode(record.mode):
        return True
    return record.counts.get("host_bytes", 0) <= _room_alone() and _pinned(captured, record.schedule, device)


def _pinned(captured: Captured, schedule: Schedule, device: torch.device) -> bool:
    """Whether what a schedule has on the host at once can be pinned; PyTorch keeps the memory. Else a warning."""
    values, most = captured.program.values, list[int]()
    for moment in running(captured.program, schedule, Free()):
        alive = {*moment.alive, *moment.task.writes} - {moment.task.overwrites}
        there = [values[v].host_bytes for v in alive if values[v].host_bytes]
        most = max(most, there, key=sum)
    if not can_pin(most, device):
        warn_caller(NOT_PINNED)
        return False
    return True


def room_on_host(of: Blocks, step: Step, settings: Settings) -> int:
    """Bytes of the host that offloaded values may take in each process; 0: nothing is offloaded."""
    if not _admits(device_of(of.model), settings) or with_offloads(step) is None:
        return 0
    if settings.sharing == "alone":
        return _room_alone()
    every = gathered([platform.node(), available_bytes()], settings.sharing)
    names = [name for name, _ in every]
    return min(int(ROOM * count / names.count(name)) for name, count in every)


def lone_in_all(memory: StepMemory, settings: Settings) -> Lone:
    """`lone_inputs` that are so in all processes."""
    blocks = range(len(memory.of.blocks))
    found = memory.least().lone
    mine = [[[value, sorted(makers)] for value, makers in sorted(found.get(n, {}).items())] for n in blocks]
    every: list[Any] = gathered(mine, settings.sharing)
    return {n: {v: makers for v, makers in every[0][n] if all([v, makers] in own[n] for own in every)} for n in blocks}


def link_rate(of: Blocks, room: int, settings: Settings) -> float:
    """Bytes a second to and from the host, each way; 0: nothing is offloaded."""
    return min(gathered(host_rate(device_of(of.model)) if room else 0.0, settings.sharing))


def can_offload(of: Blocks, step: Step, kept: KeptPlan) -> bool:
    """Whether the host's memory can be pinned that a plan needs: else a step would not find it."""
    both = zip(step.pieces, kept.promise.points, strict=True)
    return can_pin([size for piece, point in both for size in piece.calls * point.copies], device_of(of.model))


def offload(of: Blocks, kept: KeptPlan) -> None:
    """Have blocks offload what a plan says."""
    followed = any(record is not None and record.offloaded for record in kept.records)
    if followed or any(point.copies for point in kept.promise.points):
        calls = next((block._offloads for block in of.blocks if block._offloads), None) or OffloadedCalls()
        for block in of.blocks:
            block._offloads = calls


def on_host(count: int) -> str:
    """So many bytes of activations on the host, as the end of a line; "": none."""
    return f"; {format_bytes(count)} of activations on the host until the backward" if count else ""
