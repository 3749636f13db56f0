"""Convolutions for a part of the batch at a time, on CUDA.

cuDNN's workspace grows with the batch. Where it does not fit, PyTorch's own algorithm without one works image by image
and takes several times as long. A part of the batch needs a part of the workspace, and still fills the GPU. Results are
copied to their place part by part, and the weight's gradient is added up; so the input's gradient may take the place of
the incoming one.

``conv`` admits it: for fewer images cuDNN may choose another algorithm. 16-bit gradients of weights are summed in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..ir.program import Call, Ref, Task
from .convolution import BACKWARD, CONVOLUTION, input_gradient, is_depthwise
from .editor import Editor, cuts

#: Into how many parts the batch is cut; each is a variant of its own.
PARTS = (4, 16)
#: Of the largest convolution's input and result: what a convolution must read and write, for its workspace to matter.
LEAST = 0.25
_HALF = (torch.float16, torch.bfloat16)


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, the largest convolutions and their gradients in parts."""
    if editor.device.type != "cuda" or "conv" not in editor.words:
        return
    forwards = [task for task in editor.tasks if task.variant == "aten" and _last(task) == CONVOLUTION]
    moved = [_elements(editor, task.calls, task.calls[-1].args[0], Ref(task.writes[0])) for task in forwards]
    least = LEAST * max(moved, default=0)
    for task, elements in zip(forwards, moved, strict=True):
        *before, call = task.calls
        if elements >= least and not is_depthwise(editor, task):
            for parts in PARTS:
                calls = (*before, *_images(editor, call, task.writes[0], parts))
                editor.add(task, calls, task.writes, f"conv.batch{parts}", word="conv", runs=task.runs)
    for slot, way, call in list(editor.find_slots(BACKWARD)):
        if _elements(editor, way.calls, *call.args[:2]) >= least and not is_depthwise(editor, way):
            for parts in PARTS:
                for calls, taken in _gradients(editor, slot, way, parts):
                    name = f"conv.batch{parts}{'' if taken is None else '_in_place'}"
                    editor.add_way(slot, calls, name, word="conv", overwrites=taken)


def _last(task: Task) -> str:
    return task.calls[-1].op if task.calls else ""


def _gradients(editor: Editor, slot: int, way: Task, parts: int) -> Iterator[tuple[tuple[Call, ...], Any]]:
    """The gradient that a slot makes, in parts, and the value that it overwrites or None."""
    *before, call = way.calls
    of_input, of_weight, _ = call.args[-1]
    if of_weight and not of_input:
        yield (*before, *_sums(editor, call, _shape(editor, before, call.args[0])[0], parts)), None
    turned = input_gradient(editor, before, call, way.writes[0]) if of_input and not of_weight else None
    if turned is not None:
        yield (*before, *_images(editor, turned, way.writes[0], parts)), None
        if editor.replaceable(call.args[0], slot, Ref(way.writes[0])):
            yield (*before, *_in_place(editor, turned, way.writes[0], parts)), call.args[0].name


def _shape(editor: Editor, calls: Sequence[Call], ref: Ref) -> tuple[int, ...]:
    """The shape of a value or of a temporary of ``calls``."""
    meta = editor.meta_of(ref)
    return (meta or editor.results(calls)[ref]).shape


def _elements(editor: Editor, calls: Sequence[Call], *of: Ref) -> int:
    return sum(math.prod(_shape(editor, calls[:-1], ref)) for ref in of)


def _slices(x: Any, name: str, count: int, parts: int) -> Iterator[tuple[Ref, Call]]:
    """The parts of a tensor along the batch of ``count``, each with the call that takes it."""
    for part, begin, end in cuts(count, parts):
        taken = Ref(f"{name}_{part}")
        yield taken, Call("aten.slice.Tensor", (x, 0, begin, end), (), (taken,))


def _images(editor: Editor, call: Call, out: int, parts: int) -> Iterator[Call]:
    """The convolution ``call`` in parts, with its result in a tensor of its own."""
    meta = editor.metas[out]
    yield Call("aten.new_empty_strided.default", (call.args[0], meta.shape, meta.stride), (), (Ref(out),))
    given = _slices(call.args[0], "part", meta.shape[0], parts)
    for (x, take), (target, aim) in zip(given, _slices(Ref(out), "into", meta.shape[0], parts), strict=True):
        yield from (take, aim, *_copied(call, x, target))


def _in_place(editor: Editor, call: Call, out: int, parts: int) -> Iterator[Call]:
    """The convolution ``call`` in parts, with its result in the place of its input."""
    for x, take in _slices(call.args[0], "part", editor.metas[out].shape[0], parts):
        yield from (take, *_copied(call, x, x))
    yield Call("aten.alias.default", (call.args[0],), (), (Ref(out),))


def _copied(call: Call, x: Ref, target: Ref) -> tuple[Call, Call]:
    made = Ref(f"made_of_{x.name}")  # a name of its own, so that it is released before the next is made
    part = replace(call, args=(x, *call.args[1:]), outs=(made,))
    return part, Call("aten.copy_.default", (target, made), (), (target,))


def _sums(editor: Editor, call: Call, count: int, parts: int) -> Iterator[Call]:
    """The gradients of weight and bias that ``call`` makes of ``count`` images, added up over parts."""
    outs = [(place, out) for place, out in enumerate(call.outs) if out is not None]
    wide = any(editor.metas[out.name].dtype in _HALF for _, out in outs)  # type: ignore[index]
    grads = _slices(call.args[0], "grad", count, parts)
    both = zip(grads, _slices(call.args[1], "part", count, parts), strict=True)
    for part, ((grad, take), (x, take_too)) in enumerate(both):
        made = [out and (Ref(f"made_{place}_{part}") if part or wide else out) for place, out in enumerate(call.outs)]
        yield from (take, take_too, replace(call, args=(grad, x, *call.args[2:]), outs=tuple(made)))
        for place, out in outs:
            total = Ref(f"total_{place}") if wide else out
            if part:
                yield Call("aten.add_.Tensor", (total, made[place]), (), (total,))
            elif wide:
                yield Call("aten._to_copy.default", (made[place],), (("dtype", torch.float32),), (total,))
    for place, out in outs if wide else ():
        narrow = (("dtype", editor.metas[out.name].dtype),)  # type: ignore[index]
        yield Call("aten._to_copy.default", (Ref(f"total_{place}"),), narrow, (out,))
