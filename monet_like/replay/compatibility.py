"""A schedule on another device than it was planned for: what differs, in words.

Gradients are the same everywhere and so is what is kept; times, and the workspaces of convolutions, are the device's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from ..ir.schedule_file import ScheduleRecord
from ..profile.profiler import device_name
from ..profile.roofline import DEVICES, DeviceLimits
from ..units import format_bytes

#: Memory and rates that differ by less are taken to be the same: datasheets round, cards reserve some for themselves.
MEMORY_FACTOR, RATE_FACTOR = 1.15, 1.25

_told: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Machine:
    """A device, as far as it is known.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        name: for people.
        memory_bytes, flops_per_second, bytes_per_second: 0: not known. Arithmetic in float32, without TF32.
        convolution_flops_per_second: of float32 by PyTorch's default, which is with TF32 where there is one; 0: not known.
    """

    kind: str
    name: str
    memory_bytes: int = 0
    flops_per_second: float = 0.0
    bytes_per_second: float = 0.0
    convolution_flops_per_second: float = 0.0


def known_limits(name: str) -> DeviceLimits | None:
    """The datasheet of the device that PyTorch calls so, if there is one.

    Names must be equal: an "NVIDIA GH200 480GB" is no H200, and a part of a card ("... MIG 1g.5gb") not the card.
    """
    product = name.removeprefix("NVIDIA ")
    return next((limits for limits in DEVICES.values() if product in limits.products), None)


def planned_for(device: str) -> Machine:
    """The machine that a schedule file names: ``roofline:h100``, ``cuda: NVIDIA H100 80GB HBM3`` or ``cpu: ...``."""
    kind, _, name = (part.strip() for part in device.partition(":"))
    limits = DEVICES.get(name) if kind == "roofline" else known_limits(name) if kind == "cuda" else None
    if limits is None:
        return Machine("cuda" if kind == "cuda" else "cpu", name)
    shown = f"{name} (datasheet rates)" if kind == "roofline" else name
    return Machine(limits.device, shown, limits.memory_bytes, *_rates(limits))


def machine_at(device: torch.device) -> Machine:
    """The machine that ``device`` is: its own memory, and the rates of its datasheet."""
    name = device_name(device).partition(": ")[2]
    if device.type != "cuda":
        return Machine("cpu", name)
    limits = known_limits(name)
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    return Machine("cuda", name, memory, *(_rates(limits) if limits else ()))


def _rates(limits: DeviceLimits) -> tuple[float, float, float]:
    return limits.flops_per_second, limits.bytes_per_second, limits.convolution_flops_per_second


def difference(planned: Machine, here: Machine, peak_bytes: int) -> str:
    """What differs so much that another schedule may be better here, or this one not fit; "" if nothing is known to.

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
