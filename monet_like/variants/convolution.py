"""Convolution by other algorithms, and its two gradients, each by itself.

The input's gradient is a transposed convolution (and that of a transposed one a plain one): the same kernels and the
same bits as PyTorch's own, without the convolution's input, which PyTorch reads for its shape alone.

``conv`` admits forwards that add in another order and agree to rounding, not to the bit: a 1x1 convolution as a
matrix product over each image's pixels, and im2col.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..program import Call, Ref, Task
from .editor import Editor

_CONVOLUTION = "aten.convolution.default"
_BACKWARD = "aten.convolution_backward.default"


def offer(editor: Editor) -> None:
    """Ways for the input's gradient; conv: algorithms for 2-d convolutions in the default layout."""
    for slot, way, call in list(editor.find_slots(_BACKWARD)):
        if call.args[-1] == [True, False, False]:
            (out,) = way.writes
            turned = input_gradient(editor, way.calls[:-1], call, out)
            if turned is not None:
                editor.add_way(slot, (*way.calls[:-1], turned), "conv.transposed")
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
