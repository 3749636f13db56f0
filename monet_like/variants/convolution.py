"""Convolution by other algorithms, and its two gradients, each by itself.

PyTorch reads a convolution's input for the shape of its gradient alone. On a CPU a number that is expanded to that shape
serves as well, where all lies in row-major order: the same operator, the same bits, and a copy of that size while it runs.
The gradient is also a transposed convolution (and that of a transposed one a plain one), in any layout and without the
copy: on CUDA by the same kernels; on a CPU oneDNN, or PyTorch in its place, may add in another order, so that there it
takes the word ``conv``. So does a depthwise one on CUDA: PyTorch has a kernel of its own for its gradient (``use_cudnn`` and
``is_depthwise`` in PyTorch's Convolution.cpp), and cuDNN's for the transposed convolution.

``conv`` also admits forwards that add in another order and agree to rounding, not to the bit: a 1x1 convolution as a
matrix product over each image's pixels, and im2col.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ir.program import Call, Ref, Task
from .editor import Editor

_CONVOLUTION = "aten.convolution.default"
_BACKWARD = "aten.convolution_backward.default"


def offer(editor: Editor) -> None:
    """Ways for the input's gradient; conv: algorithms for 2-d convolutions in the default layout."""
    for slot, way, call in list(editor.find_slots(_BACKWARD)):
        if call.args[-1] == [True, False, False]:
            (out,) = way.writes
            by_shape = _by_shape(editor, way.calls[:-1], call, out)
            if by_shape is not None:
                editor.add_way(slot, (*way.calls[:-1], *by_shape), "conv.shape_only")
            if (turned := input_gradient(editor, way.calls[:-1], call, out)) is not None:
                same = editor.device.type == "cuda" and not _is_depthwise(editor, way)
                word = "" if same else "conv"
                editor.add_way(slot, (*way.calls[:-1], turned), "conv.transposed", word=word)
    for task, call in list(editor.find(_CONVOLUTION)):
        _forward(editor, task, call)


def _forward(editor: Editor, task: Task, call: Call) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    (out,) = task.writes
    if len(editor.metas[out].shape) != 4 or not _plain(editor, x, weight, Ref(out)):
        return
    if transposed or groups != 1:
        return
    size = editor.metas[weight.name].shape
    if size[2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and bias is None:
        _matmul(editor, task, x, weight, out)
    elif set(dilation) == {1}:
        im2col = Call(
            "aten._slow_conv2d_forward.default", (x, weight, size[2:], bias, stride, padding), (), (Ref(out),)
        )
        editor.add(task, (im2col,), (out,), "conv.im2col", word="conv", runs=task.runs)


def _by_shape(editor: Editor, before: Sequence[Call], call: Call, out: int) -> tuple[Call, ...] | None:
    """The gradient for the input with an expanded number in the input's place; None if that might be another kernel.

    In other layouts PyTorch looks at the input's strides to choose one.
    """
    grad, x, weight, *rest = call.args
    x_meta, known = editor.meta_of(x), (editor.meta_of(weight), editor.metas[out])
    if editor.device.type != "cpu" or x_meta is None or not all(m and m.contiguous for m in (x_meta, *known)):
        return None
    number, shape = Ref("number"), Ref("shape")
    options = (("dtype", x_meta.dtype), ("device", x_meta.device))
    made = (
        Call("aten.empty.memory_format", ((1,),), options, (number,)),
        Call("aten.expand.default", (number, x_meta.shape), (), (shape,)),
        replace(call, args=(grad, shape, weight, *rest)),
    )
    return made if editor.results((*before, *made))[Ref(out)] == editor.metas[out] else None


def input_gradient(editor: Editor, before: Sequence[Call], call: Call, out: int) -> Call | None:
    """The gradient for the input of a convolution as a convolution that writes ``out``; None if there is none.

    Args:
        before: calls that make what ``call`` reads.
        call: to ``convolution_backward``.
    """
    grad, _, weight, _, stride, padding, dilation, transposed, _, groups, _ = call.args
    wanted = editor.metas[out]

    def turned(rest: list[int]) -> Call:
        options = (stride, padding, dilation, not transposed, rest, groups)
        return Call(_CONVOLUTION, (grad, weight, None, *options), (), (Ref(out),))

    made = editor.result((*before, turned([0] * len(stride))))
    # A transposed convolution is told how many cells at the far end the strides have skipped.
    skipped = [want - got for want, got in zip(wanted.shape[2:], made.shape[2:], strict=True)]
    return turned(skipped) if editor.result((*before, turned(skipped))) == wanted else None


def _is_depthwise(editor: Editor, way: Task) -> bool:
    """Whether a gradient is of a convolution with a group for every channel, or of the transpose of such a one."""
    *before, call = way.calls
    weight = Call("aten.detach.default", (call.args[2],), (), (Ref("filters"),))
    return call.args[-2] > 1 and editor.result((*before, weight)).shape[1] == 1


def _plain(editor: Editor, *found: Any) -> bool:
    """Whether these are whole contiguous tensors."""
    metas = [editor.meta_of(ref) for ref in found]
    return all(meta is not None and meta.contiguous for meta in metas)


def _matmul(editor: Editor, task: Task, x: Ref, weight: Ref, out: int) -> None:
    batch, channels, *pixels = editor.metas[x.name].shape  # type: ignore[index]
    wide = editor.metas[out].shape[1]
    count = math.prod(pixels)
    calls = (
        Call("aten.view.default", (x, (batch, channels, count)), (), (Ref("pixels"),)),
        Call("aten.view.default", (weight, (1, wide, channels)), (), (Ref("matrix"),)),
        Call("aten.expand.default", (Ref("matrix"), (batch, wide, channels)), (), (Ref("matrices"),)),
        Call("aten.bmm.default", (Ref("matrices"), Ref("pixels")), (), (Ref("product"),)),
        Call("aten.view.default", (Ref("product"), editor.metas[out].shape), (), (Ref(out),)),
    )
    editor.add(task, calls, (out,), "conv.matmul", word="conv", runs=task.runs)
