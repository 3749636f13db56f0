"""Convolution by other algorithms. A 1x1 convolution is a matrix product over each image's pixels.

These change the order of additions: results agree with PyTorch's to rounding, not to the bit.
"""

from __future__ import annotations

import math
from typing import Any

from ..program import Call, Ref
from .editor import Editor


def offer(editor: Editor) -> None:
    """conv: algorithms for the forward of 2-d convolutions in the default layout."""
    for task, call in list(editor.find("aten.convolution.default")):
        x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
        (out,) = task.writes
        if transposed or groups != 1 or len(editor.metas[out].shape) != 4 or not _plain(editor, x, weight, out):
            continue
        size = editor.metas[weight.name].shape
        if size[2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and bias is None:
            _matmul(editor, task, x, weight, out)
        elif set(dilation) == {1}:
            im2col = Call(
                "aten._slow_conv2d_forward.default", (x, weight, size[2:], bias, stride, padding), (), (Ref(out),)
            )
            editor.add(task, (im2col,), (out,), "conv.im2col", word="conv", runs=task.runs)


def _plain(editor: Editor, x: Any, weight: Any, out: int) -> bool:
    """Whether input, weight and output are whole contiguous tensors."""
    for ref in (x, weight, Ref(out)):
        if not isinstance(ref, Ref) or not isinstance(ref.name, int):
            return False
        meta = editor.metas[ref.name]
        expected, stride = [], 1
        for extent in reversed(meta.shape):
            expected.append(stride)
            stride *= extent
        if meta.stride != tuple(reversed(expected)):
            return False
    return True


def _matmul(editor: Editor, task: Any, x: Ref, weight: Ref, out: int) -> None:
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
