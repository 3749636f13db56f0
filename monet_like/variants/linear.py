"""Linear layers by oneDNN on a CPU, forward and input gradient, where PyTorch calls its BLAS.

Which library is faster depends on the machine and the shape. On an AMD EPYC with MKL, oneDNN was 10 to 40 % faster in
the forward and 10 to 20 % in the input gradient of ViT's layers, but slower in the weight gradient, which is not
offered. It adds in another order: ``conv`` admits it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..ir.program import Call, Ref, Task
from .editor import Editor

VARIANT = "linear.onednn"
_LINEAR = "mkldnn._linear_pointwise.default"


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, oneDNN for float32 products of two matrices, of which the forward transposes the second."""
    if not usable(editor):
        return
    for task, call in editor.find_last("aten.mm.default", "aten.addmm.default"):
        for calls in _forward(editor, task, call):
            editor.add(task, calls, task.writes, VARIANT, word="conv", runs=task.runs)
    for slot, ways in enumerate(editor.slots):
        for calls in _input_gradient(editor, ways[0]):
            editor.add_way(slot, calls, VARIANT, word="conv")


def _forward(editor: Editor, task: Task, call: Call) -> Iterator[Sequence[Call]]:
    *bias, x, turned = call.args
    views = task.calls[:-1]
    transposing = [view for view in views if view.outs == (turned,)]
    if call.kwargs or not transposing or transposing[0].op != "aten.t.default" or not _single(editor, task.writes):
        return
    weight = transposing[0].args[0]
    of_bias = editor.meta_of(bias[0]) if bias else None
    if bias and (of_bias is None or len(of_bias.shape) != 1):
        return
    if _contiguous(editor, weight):
        rest = [view for view in views if view is not transposing[0]]
        yield (*rest, product(x, weight, bias[0] if bias else None, call.outs))


def _input_gradient(editor: Editor, way: Task) -> Iterator[Sequence[Call]]:
    *views, call = way.calls
    if call.op != "aten.mm.default" or not _single(editor, way.writes):
        return
    grad, weight = call.args
    if _contiguous(editor, weight):
        turned = Ref("turned")
        yield (*views, Call("aten.t.default", (weight,), (), (turned,)), product(grad, turned, None, call.outs))


def usable(editor: Editor) -> bool:
    """Whether this PyTorch has oneDNN's linear layers on the program's device."""
    here = editor.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return here and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Any, weight: Any, bias: Any, outs: tuple[Ref | None, ...]) -> Call:
    """The call that multiplies x [N, D] by the transpose of weight [V, D] and adds the bias."""
    return Call(_LINEAR, (x, weight, bias, "none", [], ""), (), outs)


def _contiguous(editor: Editor, weight: Any) -> bool:
    meta = editor.meta_of(weight)
    return meta is not None and meta.contiguous


def _single(editor: Editor, writes: Sequence[int]) -> bool:
    """Whether the task has one result, a contiguous float32 matrix."""
    metas = [editor.metas[value] for value in writes]
    return len(metas) == 1 and metas[0].dtype == torch.float32 and metas[0].contiguous and len(metas[0].shape) == 2
