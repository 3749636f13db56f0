"""Gradients of ReLU, leaky ReLU, ReLU6 and hardsigmoid from one bit per element.

The bit can be read from the input, from the output (except hardsigmoid's), or from a packed mask. All ways give the
same bits: ``relu(x) > 0`` exactly where ``x > 0``. The gradients of hardswish, ELU and smooth activations need the
numbers themselves.
"""

from __future__ import annotations

from typing import Any

from ..ir.program import Call, Ref, Task
from .editor import Editor

#: ATen's 1 / 6, a float32 whatever the dtype.
_SIXTH = 0.1666666716337204


def offer(editor: Editor) -> None:
    """Offer the ways for these gradients, and the tasks that pack the bits."""
    _relu(editor)
    _hardtanh(editor)
    _leaky_relu(editor)
    _hardsigmoid(editor)


def _relu(editor: Editor) -> None:
    makers = {call.outs[0].name: (task, call) for task, call in editor.find("aten.relu.default") if call.outs[0]}
    for slot, way, call in list(editor.find_slots("aten.threshold_backward.default")):
        grad, out, threshold = call.args
        if threshold != 0 or not editor.is_own(out) or out.name not in makers or way.calls[-1].outs[0] is None:
            continue
        task, forward = makers[out.name]
        source = forward.args[0]
        if editor.is_own(source):
            from_input = Call(call.op, (grad, source, 0), (), call.outs)
            editor.add_way(slot, (*way.calls[:-1], from_input), "relu.from_input", word="multiway")
        _packed(editor, slot, task, out, "relu", "pack_sign")


def _hardtanh(editor: Editor) -> None:
    made = {call.args[0]: (task, call) for task, call in editor.find("aten.hardtanh.default") if call.outs[0]}
    for slot, way, call in list(editor.find_slots("aten.hardtanh_backward.default")):
        grad, source, low, high = call.args
        if source not in made or not editor.is_own(source):
            continue
        task, (out, *_) = made[source][0], made[source][1].outs
        # The gradient passes where low < x < high, which is exactly where low < clamp(x) < high.
        from_output = Call(call.op, (grad, out, low, high), (), call.outs)
        editor.add_way(slot, (*way.calls[:-1], from_output), "hardtanh.from_output", word="multiway")
        _packed(editor, slot, task, out, "hardtanh", "pack_range", float(low), float(high))


def _leaky_relu(editor: Editor) -> None:
    """Add ways for leaky ReLU: with a positive slope, output and input have the same sign."""
    made = {call.args[0]: (task, call) for task, call in editor.find("aten.leaky_relu.default")}
    for slot, way, call in list(editor.find_slots("aten.leaky_relu_backward.default")):
        grad, source, slope, of_result = call.args
        if of_result or slope <= 0 or source not in made or not editor.is_own(source):
            continue
        task, (out, *_) = made[source][0], made[source][1].outs
        from_output = Call(call.op, (grad, out, slope, True), (), call.outs)
        editor.add_way(slot, (*way.calls[:-1], from_output), "leaky_relu.from_output", word="multiway")
        _packed(editor, slot, task, out, "leaky_relu", "pack_sign", slope=float(slope))


def _hardsigmoid(editor: Editor) -> None:
    """Add ways for hardsigmoid: the gradient is a sixth where -3 < x < 3."""
    made = {call.args[0]: task for task, call in editor.find("aten.hardsigmoid.default")}
    for slot, _, call in list(editor.find_slots("aten.hardsigmoid_backward.default")):
        source = call.args[1]
        if source in made and editor.is_own(source):
            scale = Call("aten.mul_.Tensor", (call.outs[0], _SIXTH), (), call.outs)
            _packed(editor, slot, made[source], source, "hardsigmoid", "pack_range", -3.0, 3.0, after=(scale,))


def _packed(
    editor: Editor, slot: int, task: Task, source: Any, name: str, pack: str, *bounds: float,
    slope: float = 0.0, after: tuple[Call, ...] = (),
) -> None:  # fmt: skip
    """Add, for ``newnode``, a task that packs a bit for each element of ``source``, and the gradient by these bits.

    Args:
        task: the activation.
        pack: the operator that packs; ``bounds``: its further arguments.
        slope: of the gradient where the bit is 0.
        after: further calls of the gradient.
    """
    if not editor.dense(source.name):
        return
    *views, call = editor.slots[slot][0].calls
    mask, stride = Ref(editor.bits(task.name, source.name)), editor.metas[source.name].stride
    packing = Call(f"monet_like.{pack}.default", (source, *bounds), (), (mask,))
    editor.add(task, (packing,), (int(mask.name),), f"{name}.pack", word="newnode")
    op, args = ("masked_scale", (1.0, stride, slope)) if slope else ("keep_where", (stride,))
    unpack = Call(f"monet_like.{op}.default", (call.args[0], mask, *args), (), call.outs)
    editor.add_way(slot, (*views, unpack, *after), f"{name}.packed", word="newnode")
