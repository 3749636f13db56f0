"""Gradients of concatenated inputs of convolutions, computed part by part.

PyTorch computes the gradient of a concatenation as one tensor, which lives until its last part is used. In a U-Net,
whose skip connections join far ends of the network, that is nearly the whole backward. Here every part is a gradient of
its own and is freed after its own use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..capture.captured import make_task
from ..ir.program import Call, Ref, Task, refs
from .calls import Calls
from .convolution import input_gradient
from .editor import Editor, with_names

_BACKWARD = "aten.convolution_backward.default"
SLICE = "aten.slice.Tensor"
CHANNELS = 1
#: Position of that argument of `_BACKWARD`.
_TRANSPOSED = 7

#: The first channel, and the one after the last.
Range = tuple[int, int]


def offer(editor: Editor) -> None:
    """Offer, for the word ``conv``, parts of a convolution's input gradient that is read in slices of channels only.

    The slices must not overlap.
    """
    if "conv" not in editor.words:
        return
    for slot, way, call in list(editor.find_slots(_BACKWARD)):
        if call.args[-1] == [True, False, False] and call.args[-2] == 1:
            _split(editor, slot, way, call)


def _split(editor: Editor, slot: int, way: Task, call: Call) -> None:
    (whole,) = way.writes
    readers = {number: ways[0] for number, ways in enumerate(editor.slots) if whole in ways[0].reads}
    ranges = _ranges(editor, readers.values(), whole)
    if len(ranges) < 2 or whole in editor.captured.program.gradients:
        return
    copies = {part: Ref(f"copy_{part[0]}") for part in ranges}
    for reader in readers.values():
        made = editor.results((*_copy(Ref(whole), copies), *_on_parts(editor, reader, whole, copies)))
        as_before = editor.results(reader.calls)
        if any(made[Ref(value)] != as_before[Ref(value)] for value in reader.writes):
            return  # laid out differently where what it reads lies by itself
    metas = editor.results(_copy(Ref(whole), copies))
    name = editor.values[whole].name
    values = {
        part: editor.value(f"{name}.channels_{part[0]}_{part[1]}", "backward", metas[copy])
        for part, copy in copies.items()
    }
    _make_parts(editor, slot, way, call, values)
    for number, reader in readers.items():
        calls = _on_parts(editor, reader, whole, {part: Ref(value) for part, value in values.items()})
        editor.rewrite(number, [make_task(reader.name, calls, reader.writes, editor.metas)])


def _make_parts(editor: Editor, slot: int, way: Task, call: Call, values: Mapping[Range, int]) -> None:
    """Give a slot two ways: the whole gradient and copies of its parts, or each part from its channels' weights."""
    whole = Ref("whole")
    copies = _copy(whole, {part: Ref(value) for part, value in values.items()})
    own = (*way.calls[:-1], replace(call, outs=(whole, None, None)), *copies)
    editor.rewrite(slot, [make_task(way.name, own, tuple(values.values()), editor.metas)])
    grad, x, weight, *rest = call.args
    calls = Calls(way.calls[:-1])
    for part, value in values.items():
        mine = calls.slice(weight, 0 if call.args[_TRANSPOSED] else 1, *part)
        made = input_gradient(editor, calls, replace(call, args=(grad, x, mine, *rest)), value)
        if made is None:
            return
        calls.append(made)
    editor.add_way(slot, calls, "conv.in_parts", word="conv")


def _ranges(editor: Editor, readers: Iterable[Task], whole: int) -> list[Range]:
    """The slices of ``whole`` that are read, in order; none if they overlap or if it is read in another way."""
    calls = [call for reader in readers for call in reader.calls if Ref(whole) in refs(call)]
    found = {_range(editor, call, whole) for call in calls}
    ranges = sorted(part for part in found if part is not None)
    overlap = any(one[1] > other[0] for one, other in zip(ranges, ranges[1:], strict=False))
    return [] if overlap or None in found else ranges


def _range(editor: Editor, call: Call, whole: int) -> Range | None:
    part = part_of(editor, call)
    return part[1] if part is not None and part[0] == whole else None


def part_of(editor: Editor, call: Call) -> tuple[int, Range] | None:
    """The value of which a call takes a slice of channels, and the slice; None for other calls."""
    if call.op != SLICE or call.kwargs or len(call.args) != 4 or call.args[1] != CHANNELS:
        return None
    whole = all_of(editor, call.args[0])
    if whole is None:
        return None
    first, last = call.args[2:]
    return whole[0], (first or 0, min(whole[1][1], sys.maxsize if last is None else last))


def all_of(editor: Editor, arg: Ref) -> tuple[int, Range] | None:
    """The value that an argument is, with the slice of all its channels; None if it has no channels."""
    meta = editor.meta_of(arg)
    if meta is None or len(meta.shape) <= CHANNELS:
        return None
    assert isinstance(arg.name, int)
    return arg.name, (0, meta.shape[CHANNELS])


def _copy(whole: Ref, parts: Mapping[Range, Ref]) -> Calls:
    """The calls that copy the slices of a tensor into tensors of their own."""
    calls = Calls()
    for part, to in parts.items():
        calls.add("aten.clone.default", calls.slice(whole, CHANNELS, *part), out=to)
    return calls


def _on_parts(editor: Editor, reader: Task, whole: int, parts: Mapping[Range, Ref]) -> list[Call]:
    """The calls of a task that reads parts in place of slices."""
    slices = {call.outs[0]: part for call in reader.calls if (part := _range(editor, call, whole)) is not None}
    names = {piece: parts[part] for piece, part in slices.items() if piece is not None}
    return [with_names(call, names) for call in reader.calls if _range(editor, call, whole) is None]
