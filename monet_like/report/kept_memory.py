"""What a scheduled model keeps between its forward and its backward, module by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ..capture.layers import layers_of
from ..errors import UsageError
from ..ir.frames import frame_of
from ..ir.program import RESIDENT_KINDS
from ..ir.units import format_bytes
from ..replay.kept_steps import KeptStep
from ..replay.wrapper import ScheduleWrapper

if TYPE_CHECKING:
    import pandas

#: Rows that are printed; `MemoryReport.to_frame` has all.
_SHOWN = 20
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name


@dataclass(frozen=True)
class KeptModule:
    """What one module keeps, or each of several equal ones.

    Attributes:
        module: its name; numbers of equal ones as ``layers.0-31``.
        count: of equal modules.
        tensors: that each of them keeps, such as ``2 x float32[8, 64]``, the largest first.
        each_bytes: of one module, rounded as PyTorch's allocator rounds.
        bytes: of all of them.
    """

    module: str
    count: int
    tensors: tuple[str, ...]
    each_bytes: int
    bytes: int


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """What the forward of a training step keeps for its backward. ``print`` it, or take `to_frame`.

    Attributes:
        promise: of the schedules: budget, peak and plain PyTorch's peak, in words.
        modules: those that keep something, the largest first. Parameters, buffers and the model's inputs are not
            counted.
    """

    promise: str
    modules: tuple[KeptModule, ...]

    @property
    def bytes(self) -> int:
        """Of all modules."""
        return sum(module.bytes for module in self.modules)

    def to_frame(self) -> pandas.DataFrame:
        """One row for each of `modules`."""
        return frame_of(KeptModule, self.modules)

    def __repr__(self) -> str:
        rows = [("module", "", "each", "all", "tensors of each")]
        rows += [
            (m.module, f"x{m.count}" if m.count > 1 else "", format_bytes(m.each_bytes), format_bytes(m.bytes),
             ", ".join(m.tensors))
            for m in self.modules[:_SHOWN]
        ]  # fmt: skip
        if smaller := self.modules[_SHOWN:]:
            left = sum(m.bytes for m in smaller)
            rows.append((f"{sum(m.count for m in smaller)} smaller ones", "", "", format_bytes(left), ""))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = (
            f"{name:<{widths[0]}}  {count:>{widths[1]}}  {each:>{widths[2]}}  {total:>{widths[3]}}  {tensors}".rstrip()
            for name, count, each, total, tensors in rows
        )
        return "\n".join((self.promise, f"kept for the backward: {format_bytes(self.bytes)}", *lines))


def memory_report(model: nn.Module) -> MemoryReport:
    """What the latest kind of call of a scheduled model keeps for its backward, by module, equal modules once.

    Args:
        model: wrapped by `monet_like.auto_schedule` or `ScheduleWrapper`, or one whose blocks are; after its first
            training call.

    Raises:
        UsageError: nothing in ``model`` is scheduled, or no call was planned yet.
    """
    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, ScheduleWrapper)}
    if not wrappers:
        raise UsageError(
            f"nothing in {type(model).__name__} has a schedule: give memory_report the model that auto_schedule returns"
        )
    latest = {name: list(wrapper._kept)[-1] for name, wrapper in wrappers.items() if len(wrapper._kept)}
    if not latest:
        raise UsageError("no training call was planned yet: call the model once in training mode, then ask again")
    found = [row for name, step in latest.items() for row in _kept_by(step, name)]
    return MemoryReport(_promise(wrappers), tuple(sorted(_folded(found), key=lambda module: -module.bytes)))


def _kept_by(kept: KeptStep, prefix: str) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Of a captured step: (module, its tensors in words, bytes)."""
    captured = kept.captured
    values, layers = captured.program.values, layers_of(captured, captured.program)
    by_layer: dict[str, list[int]] = {}
    for value in kept.step.saved:
        if values[value].kind not in RESIDENT_KINDS:
            by_layer.setdefault(layers[value], []).append(value)
    for layer, members in by_layer.items():
        members.sort(key=lambda value: -values[value].bytes)
        told = Counter(_in_words(kept, value) for value in members)
        tensors = tuple(f"{count} x {words}" if count > 1 else words for words, count in told.items())
        yield ".".join(filter(None, (prefix, layer))), tensors, sum(values[value].bytes for value in members)


def _in_words(kept: KeptStep, value: int) -> str:
    """Such as ``float32[8, 64]``."""
    meta = kept.captured.metas[value]
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"


def _folded(found: Sequence[tuple[str, tuple[str, ...], int]]) -> Iterator[KeptModule]:
    """Modules whose names differ in one number, and which keep the same, as one."""
    alike: dict[tuple[str, str, bool, tuple[str, ...], int], list[tuple[str, int]]] = {}
    for name, tensors, size in found:
        match = _NUMBER.search(name)
        begin, end = match.span() if match else (len(name), len(name))
        number = int(match.group()) if match else 0
        alike.setdefault((name[:begin], name[end:], match is None, tensors, size), []).append((name, number))
    for (before, after, _, tensors, size), members in alike.items():
        names, numbers = zip(*members, strict=True)
        shown = names[0] if len(members) == 1 else f"{before}{_ranges(sorted(numbers))}{after}"
        yield KeptModule(shown, len(members), tensors, size, size * len(members))


def _ranges(numbers: list[int]) -> str:
    """Such as ``0-3,5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _promise(wrappers: dict[str, ScheduleWrapper]) -> str:
    """What the schedules promise, in words."""
    planned = [getattr(wrapper, "_block_plan", None) or wrapper.record for wrapper in wrappers.values()]
    plan = next((plan for plan in planned if plan is not None), None)
    if plan is None:
        return "nothing of this model has a gradient"
    return (
        f"budget {format_bytes(plan.budget_bytes)}, predicted peak {format_bytes(plan.peak_bytes)}, plain PyTorch "
        f"{format_bytes(plan.plain_peak_bytes)}"
    )
