"""ReLU and ReLU6: the gradient needs one bit per element, found in the output, in the input, or packed.

All ways are bit-equal: the bit is the same wherever it is read from (``relu(x) > 0`` exactly where ``x > 0``,
and NaN passes the gradient in every one of them).
"""

from __future__ import annotations

import torch

from ..program import Call, Ref
from .editor import Editor, like


def offer(editor: Editor) -> None:
    """Ways for ``threshold_backward`` (ReLU) and ``hardtanh_backward`` (ReLU6, hardtanh)."""
    makers = {call.outs[0].name: (task, call) for task, call in editor.find("aten.relu.default") if call.outs[0]}
    for slot, way, call in list(editor.find_slots("aten.threshold_backward.default")):
        grad, out, threshold = call.args
        if threshold != 0 or not editor.is_own(out) or out.name not in makers or way.calls[-1].outs[0] is None:
            continue
        task, forward = makers[out.name]
        source = forward.args[0]
        views = way.calls[:-1]
        if editor.is_own(source):
            editor.add_way(
                slot, (*views, Call(call.op, (grad, source, 0), (), call.outs)), "relu.from_input", word="multiway"
            )
        if editor.dense(out.name):
            mask = _mask(editor, task.name, out.name)
            editor.add(
                task,
                (Call("monet_like.pack_sign.default", (out,), (), (Ref(mask),)),),
                (mask,),
                "relu.pack",
                word="newnode",
            )
            stride = editor.metas[out.name].stride
            unpack = Call("monet_like.keep_where.default", (grad, Ref(mask), stride), (), call.outs)
            editor.add_way(slot, (*views, unpack), "relu.packed", word="newnode")
    _hardtanh(editor)


def _hardtanh(editor: Editor) -> None:
    makers = {call.outs[0].name: (task, call) for task, call in editor.find("aten.hardtanh.default") if call.outs[0]}
    by_input = {call.args[0]: (task, call) for task, call in makers.values()}
    for slot, way, call in list(editor.find_slots("aten.hardtanh_backward.default")):
        grad, source, low, high = call.args
        if source not in by_input or not editor.is_own(source):
            continue
        task, forward = by_input[source]
        out = forward.outs[0]
        assert out is not None and isinstance(out.name, int)
        views = way.calls[:-1]
        # The gradient passes where low < x < high, which is exactly where low < clamp(x) < high.
        from_output = Call(call.op, (grad, out, low, high), (), call.outs)
        editor.add_way(slot, (*views, from_output), "hardtanh.from_output", word="multiway")
        if editor.dense(out.name):
            mask = _mask(editor, task.name, out.name)
            pack = Call("monet_like.pack_range.default", (out, float(low), float(high)), (), (Ref(mask),))
            editor.add(task, (pack,), (mask,), "hardtanh.pack", word="newnode")
            stride = editor.metas[out.name].stride
            unpack = Call("monet_like.keep_where.default", (grad, Ref(mask), stride), (), call.outs)
            editor.add_way(slot, (*views, unpack), "hardtanh.packed", word="newnode")


def _mask(editor: Editor, name: str, value: int) -> int:
    meta = editor.metas[value]
    elements = meta.storage_bytes // meta.dtype.itemsize
    return editor.value(f"{name}.bits", "forward", like(meta, dtype=torch.uint8, shape=(-(-elements // 8),)))
