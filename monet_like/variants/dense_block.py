"""Gradients of concatenations that meet, added up by the batch norms that make them.

In a dense block every layer reads all results before it, joined, through a batch norm. PyTorch cuts the gradient of
what was joined into parts and adds each to what has come from later layers: for n bytes it writes n, then reads 2 n and
writes n again. Here what has come in stays in one piece, and each batch norm's gradient is added to its channels of it:
n are read and n written, by one slot where there was one for each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..capture.captured import make_task
from ..ir.program import Call, Ref, Task
from ..runtime.batch_norm import backward_of
from .batch_norm import NOTHING
from .concatenation import CHANNELS, SLICE, Range, all_of, part_of
from .editor import Editor, with_names

_ADD = ("aten.add.Tensor", "aten.add_.Tensor")


def offer(editor: Editor) -> None:
    """conv: for every batch norm all of whose input gradient is added, in parts, to channels of one other gradient."""
    if "conv" not in editor.words:
        return
    slot = 0
    while slot < len(editor.slots):
        call = editor.slots[slot][0].calls[-1]
        if backward_of(call) is not None and len(editor.slots[slot][0].calls) == 1:
            _gather(editor, slot, call)
        slot += 1


def _gather(editor: Editor, slot: int, call: Call) -> None:
    own = call.outs[0]
    if own is None or not isinstance(own.name, int) or own.name in editor.captured.program.gradients:
        return
    readers = [number for number, ways in enumerate(editor.slots) if own.name in ways[0].reads]
    count = len(readers)
    if not count or readers != list(range(slot + 1, slot + 1 + count)):
        return
    pairs = [_met(editor, editor.slots[number][0], own.name) for number in readers]
    met = [pair for pair in pairs if pair is not None]
    places = {(other, there[0] - here[0]) for here, other, there in met}
    ranges = sorted(here for here, _, _ in met)
    channels = editor.metas[own.name].shape[CHANNELS]
    joined = [0, *(last for _, last in ranges)] == [*(first for first, _ in ranges), channels]
    if len(met) != count or len(places) != 1 or not joined:
        return
    ((other, first),) = places
    total = editor.value(f"{editor.values[own.name].name}.met", "backward", editor.metas[own.name])
    parts = {editor.slots[number][0].writes[0]: here for number, (here, _, _) in zip(readers, met, strict=True)}
    rewritten = _reading_parts(editor, parts, total, slot + count)
    if rewritten is None:
        editor.withdraw(total)
        return
    _add_up(editor, slot, call, total, (other, (first, first + channels)), count)
    for number, task in rewritten.items():
        editor.rewrite(number - count, [task])


def _met(editor: Editor, task: Task, own: int) -> tuple[Range, int, Range] | None:
    """The channels of ``own`` that a task adds to which channels of what other gradient; None if it does
    anything else.
    """
    *views, add = task.calls
    if add.op not in _ADD or add.kwargs or len(add.args) != 2 or len(task.writes) != 1:
        return None
    slices = {view.outs[0]: part for view in views if (part := part_of(editor, view)) is not None}
    if len(slices) != len(views) or not all(isinstance(arg, Ref) for arg in add.args):
        return None
    operands = [slices.get(arg) or all_of(editor, arg) for arg in add.args]
    for mine, other in (operands, operands[::-1]):
        if mine is not None and other is not None and mine[0] == own != other[0]:
            kind = editor.values[other[0]].kind
            return (mine[1], other[0], other[1]) if kind == "backward" else None
    return None


def _taken(whole: Ref, meta_channels: int, channels: Range, name: str) -> tuple[list[Call], Ref]:
    """The call that takes these channels, if they are not all, and what it gives."""
    if channels == (0, meta_channels):
        return [], whole
    piece = Ref(name)
    return [Call(SLICE, (whole, CHANNELS, *channels), (), (piece,))], piece


def _reading_parts(editor: Editor, parts: Mapping[int, Range], total: int, after: int) -> dict[int, Task] | None:
    """The slots beyond ``after`` that read what is now channels of ``total``, so rewritten; None if that cannot be."""
    if not parts.keys().isdisjoint(editor.captured.program.gradients):
        return None
    rewritten: dict[int, Task] = {}
    for number in range(after + 1, len(editor.slots)):
        task = editor.slots[number][0]
        read = [value for value in task.reads if value in parts]
        if not read:
            continue
        in_place = task.overwrites in parts and task.calls[-1].op not in _ADD  # additions need not be in place
        if len(editor.slots[number]) > 1 or in_place:
            return None
        rewritten[number] = _on_parts(editor, task, {value: parts[value] for value in read}, total)
        made, before = editor.results(rewritten[number].calls), editor.results(task.calls)
        if any(made[Ref(value)] != before[Ref(value)] for value in task.writes):
            return None  # laid out differently where what it reads does not lie by itself
    return rewritten


def _on_parts(editor: Editor, task: Task, parts: Mapping[int, Range], total: int) -> Task:
    """A task that reads channels of ``total`` for each of ``parts``."""
    views: list[Call] = []
    names: dict[Ref, Ref] = {}
    for value, channels in parts.items():
        made, names[Ref(value)] = _taken(Ref(total), editor.metas[total].shape[CHANNELS], channels, f"met_{value}")
        views += made
    calls = [with_names(call, names) for call in task.calls]
    overwrites = task.overwrites
    if overwrites in parts:
        calls[-1], overwrites = replace(calls[-1], op=_ADD[0]), None
    return make_task(
        task.name, (*views, *calls), task.writes, editor.metas, overwrites=overwrites, variant=task.variant
    )


def _add_up(editor: Editor, slot: int, call: Call, total: int, other: tuple[int, Range], count: int) -> None:
    """One slot for a batch norm's gradient and the additions: by PyTorch's operators, or in one."""
    task = editor.slots[slot][0]
    value, channels = other
    views, there = _taken(Ref(value), editor.metas[value].shape[CHANNELS], channels, "there")
    own, rest = Ref("own"), call.outs[1:]
    writes = (total, *(v for v in task.writes if Ref(v) != call.outs[0]))
    apart = (replace(call, outs=(own, *rest)), *views, Call(_ADD[0], (there, own), (), (Ref(total),)))
    editor.merge(slot, [make_task(task.name, apart, writes, editor.metas)], 1 + count)
    taken = backward_of(call)
    assert taken is not None
    operands = (taken.grad, taken.x, taken.weight, None, taken.mean, taken.invstd, *NOTHING, taken.mask, there)
    fused = Call("monet_like.batch_norm_activation_backward.default", operands, (), (Ref(total), *rest), True)
    editor.add_way(slot, (*views, fused), "batch_norm.backward_met", word="conv")
