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

from ..ir.program import Call, Ref, Task
from .calls import HALF, Calls, Total
from .convolution import BACKWARD, CONVOLUTION, input_gradient, is_depthwise
from .editor import Editor, cuts

#: Into how many parts the batch is cut; each is a variant of its own.
PARTS = (4, 16)
#: Of the largest convolution's input and result: what a convolution must read and write, for its workspace to matter.
LEAST = 0.25


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, the largest convolutions and their gradients in parts."""
    if editor.device.type != "cuda" or "conv" not in editor.words:
        return
    forwards = [task for task, _ in editor.find_last(CONVOLUTION)]
    moved = [_elements(editor, task.calls, task.calls[-1].args[0], Ref(task.writes[0])) for task in forwards]
    least = LEAST * max(moved, default=0)
    for task, elements in zip(forwards, moved, strict=True):
        *before, call = task.calls
        if elements >= least and not is_depthwise(editor, task):
            for parts in PARTS:
                calls = _images(editor, before, call, task.writes[0], parts)
                editor.add(task, calls, task.writes, f"conv.batch{parts}", word="conv", runs=task.runs)
    for slot, way, call in list(editor.find_slots(BACKWARD)):
        if _elements(editor, way.calls, *call.args[:2]) >= least and not is_depthwise(editor, way):
            for parts in PARTS:
                for calls, taken in _gradients(editor, slot, way, parts):
                    name = f"conv.batch{parts}{'' if taken is None else '_in_place'}"
                    editor.add_way(slot, calls, name, word="conv", overwrites=taken)


def _gradients(editor: Editor, slot: int, way: Task, parts: int) -> Iterator[tuple[Calls, int | None]]:
    """The gradient that a slot makes, in parts, and the value that it overwrites or None."""
    *before, call = way.calls
    of_input, of_weight, _ = call.args[-1]
    if of_weight and not of_input:
        yield _sums(editor, before, call, editor.seen(before, call.args[0]).shape[0], parts), None
    turned = input_gradient(editor, before, call, way.writes[0]) if of_input and not of_weight else None
    if turned is not None:
        yield _images(editor, before, turned, way.writes[0], parts), None
        if editor.replaceable(call.args[0], slot, Ref(way.writes[0])):
            yield _in_place(editor, before, turned, way.writes[0], parts), call.args[0].name


def _elements(editor: Editor, calls: Sequence[Call], *of: Ref) -> int:
    return sum(math.prod(editor.seen(calls[:-1], ref).shape) for ref in of)


def _images(editor: Editor, before: Sequence[Call], call: Call, out: int, parts: int) -> Calls:
    """The convolution ``call`` in parts, with its result in a tensor of its own."""
    meta, calls = editor.metas[out], Calls(before)
    calls.add("aten.new_empty_strided.default", call.args[0], meta.shape, meta.stride, out=Ref(out))
    for _, begin, end in cuts(meta.shape[0], parts):
        x, target = calls.slice(call.args[0], 0, begin, end), calls.slice(Ref(out), 0, begin, end)
        calls.put(calls.again(call, x, *call.args[1:]), target)
    return calls


def _in_place(editor: Editor, before: Sequence[Call], call: Call, out: int, parts: int) -> Calls:
    """The convolution ``call`` in parts, with its result in the place of its input."""
    calls = Calls(before)
    for _, begin, end in cuts(editor.metas[out].shape[0], parts):
        x = calls.slice(call.args[0], 0, begin, end)
        calls.put(calls.again(call, x, *call.args[1:]), x)
    calls.add("aten.alias.default", call.args[0], out=Ref(out))
    return calls


def _sums(editor: Editor, before: Sequence[Call], call: Call, count: int, parts: int) -> Calls:
    """The gradients of weight and bias that ``call`` makes of ``count`` images, added up over parts."""
    calls = Calls(before)
    dtypes = {out: editor.metas[int(out.name)].dtype for out in call.outs if out is not None}
    apart = not set(HALF).isdisjoint(dtypes.values())
    totals = {out: Total(calls, out, dtype, apart=apart) for out, dtype in dtypes.items()}
    for _, begin, end in cuts(count, parts):
        grad, x = (calls.slice(whole, 0, begin, end) for whole in call.args[:2])
        made = {out: total.place() for out, total in totals.items()}
        outs = tuple(out and made[out] for out in call.outs)
        calls.append(replace(call, args=(grad, x, *call.args[2:]), outs=outs))
        for out, total in totals.items():
            total.add(made[out])
    for total in totals.values():
        total.finish()
    return calls
