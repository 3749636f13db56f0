"""Gradients of ReLU, leaky ReLU, ReLU6 and hardsigmoid from one bit per element.

The bit can be read from the input, from the output (except hardsigmoid's), or from a packed mask. All ways give the
same bits: ``relu(x) > 0`` exactly where ``x > 0``. The gradients of hardswish, ELU and smooth activations need the
numbers themselves.
"""

from __future__ import annotations

from ..ir.program import Call, Ref
from .editor import Editor

#: ATen's 1 / 6, a float32 whatever the dtype.
_SIXTH = 0.1666666716337204


def offer(editor: Editor) -> None:
    """Offer the ways for these gradients, and the tasks that pack the bits."""
    makers = {call.outs[0].name: (task, call) for task, call in editor.find("aten.relu.default") if call.outs[0]}
    for slot, way, call in list(editor.find_slots("aten.threshold_backward.default")):
        grad, out, threshold = call.args
        if threshold != 0 or not editor.is_own(out) or out.name not in makers or way.calls[-1].outs[0] is None:
            continue
        task, forward = makers[out.name]
        source = forward.args[0]
        views = way.calls[:-1]
        if editor.is_own(source):
            from_input = Call(call.op, (grad, source, 0), (), call.outs)
            editor.add_way(slot, (*views, from_input), "relu.from_input", word="multiway")
        if editor.dense(out.name):
            mask = editor.bits(task.name, out.name)
            pack = Call("monet_like.pack_sign.default", (out,), (), (Ref(mask),))
            editor.add(task, (pack,), (mask,), "relu.pack", word="newnode")
            stride = editor.metas[out.name].stride
            unpack = Call("monet_like.keep_where.default", (grad, Ref(mask), stride), (), call.outs)
            editor.add_way(slot, (*views, unpack), "relu.packed", word="newnode")
    _hardtanh(editor)
    _leaky_relu(editor)
    _hardsigmoid(editor)


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
            mask = editor.bits(task.name, out.name)
            pack = Call("monet_like.pack_range.default", (out, float(low), float(high)), (), (Ref(mask),))
            editor.add(task, (pack,), (mask,), "hardtanh.pack", word="newnode")
            stride = editor.metas[out.name].stride
            unpack = Call("monet_like.keep_where.default", (grad, Ref(mask), stride), (), call.outs)
            editor.add_way(slot, (*views, unpack), "hardtanh.packed", word="newnode")


def _leaky_relu(editor: Editor) -> None:
    """Add ways for leaky ReLU: with a positive slope, output and input have the same sign."""
    made = {call.args[0]: (task, call) for task, call in editor.find("aten.leaky_relu.default")}
    for slot, way, call in list(editor.find_slots("aten.leaky_relu_backward.default")):
        grad, source, slope, of_result = call.args
        if of_result or slope <= 0 or source not in made or not editor.is_own(source):
            continue
        task, forward = made[source]
        out, views = forward.outs[0], way.calls[:-1]
        assert out is not None and isinstance(out.name, int)
        from_output = Call(call.op, (grad, out, slope, True), (), call.outs)
        editor.add_way(slot, (*views, from_output), "leaky_relu.from_output", word="multiway")
        if editor.dense(out.name):
            mask = editor.bits(task.name, out.name)
            pack = Call("monet_like.pack_sign.default", (out,), (), (Ref(mask),))
            editor.add(task, (pack,), (mask,), "leaky_relu.pack", word="newnode")
            scaled = (grad, Ref(mask), 1.0, editor.metas[out.name].stride, float(slope))
            unpack = Call("monet_like.masked_scale.default", scaled, (), call.outs)
            editor.add_way(slot, (*views, unpack), "leaky_relu.packed", word="newnode")


def _hardsigmoid(editor: Editor) -> None:
    """Add ways for hardsigmoid: the gradient is a sixth where -3 < x < 3."""
    made = {call.args[0]: task for task, call in editor.find("aten.hardsigmoid.default")}
    for slot, way, call in list(editor.find_slots("aten.hardsigmoid_backward.default")):
        grad, source = call.args
        if source not in made or not editor.is_own(source) or not editor.dense(source.name):
            continue
        mask = editor.bits(made[source].name, source.name)
        pack = Call("monet_like.pack_range.default", (source, -3.0, 3.0), (), (Ref(mask),))
        editor.add(made[source], (pack,), (mask,), "hardsigmoid.pack", word="newnode")
        kept = (grad, Ref(mask), editor.metas[source.name].stride)
        unpack = Call("monet_like.keep_where.default", kept, (), call.outs)
        scale = Call("aten.mul_.Tensor", (call.outs[0], _SIXTH), (), call.outs)
        editor.add_way(slot, (*way.calls[:-1], unpack, scale), "hardsigmoid.packed", word="newnode")
