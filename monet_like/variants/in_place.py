"""Elementwise operators that write into a dead input. The values are the same bits; one tensor fewer is needed."""

from __future__ import annotations

from ..program import Call, Ref, Task
from .editor import Editor

_FORWARD = (
    "relu",
    "hardtanh",
    "leaky_relu",
    "elu",
    "silu",
    "hardswish",
    "hardsigmoid",
    "sigmoid",
    "tanh",
    "gelu",
    "add",
    "mul",
    "sub",
    "div",
)
_COMMUTATIVE = frozenset({"add", "mul"})


def offer(editor: Editor) -> None:
    """inplace: forward tasks whose only reader is the operator itself; gradients that end in their slot."""
    ops = {f"aten.{name}.{overload}" for name in _FORWARD for overload in ("default", "Tensor", "Scalar")}
    for task, call in editor.find(*ops):
        for position in _candidates(editor, task, call):
            _add_forward(editor, task, call, position)
    _backward(editor)


def _candidates(editor: Editor, task: Task, call: Call) -> list[int]:
    """Argument positions whose value may be overwritten: read by nothing else, of the result's layout."""
    out = call.outs[0]
    assert out is not None and isinstance(out.name, int)
    name = call.op.split(".")[1]
    found = []
    for position, arg in enumerate(call.args[: 2 if name in _COMMUTATIVE else 1]):
        if (
            editor.is_own(arg)
            and not (position == 1 and (call.kwargs or not isinstance(call.args[0], Ref)))
            and sum(arg == other for other in call.args) == 1
            and editor.metas[arg.name] == editor.metas[out.name]
            and editor.dense(arg.name)
            and editor.forward_readers(arg.name) == [task]
            and all(_avoidable(editor, slot, arg.name) for slot in editor.slot_readers(arg.name))
            and arg.name not in editor.captured.program.outputs
            and out.name not in editor.captured.program.outputs
        ):
            found.append(position)
    return found


def _avoidable(editor: Editor, slot: int, value: int) -> bool:
    """Whether a slot can be done without reading ``value``."""
    return any(value not in way.reads for way in editor.slots[slot])


def _add_forward(editor: Editor, task: Task, call: Call, position: int) -> None:
    _, name, overload = call.op.split(".")
    args = call.args if position == 0 else (call.args[1], call.args[0], *call.args[2:])
    write = Call(f"aten.{name}_.{overload}", args, call.kwargs, call.outs)
    suffix = "" if position == 0 else "_other"
    editor.add(
        task, (write,), task.writes, f"in_place{suffix}", word="inplace", overwrites=args[0].name, runs=task.runs
    )


def _backward(editor: Editor) -> None:
    """ReLU's gradient written into the incoming one, as every way of the slot allows it."""
    program = editor.captured.program
    last = {value: index for index, ways in enumerate(editor.slots) for value in ways[0].reads}
    for slot, first, call in list(editor.find_slots("aten.threshold_backward.default")):
        grad, out = call.args[0], call.outs[0]
        if not (isinstance(grad, Ref) and isinstance(grad.name, int)) or out is None or not isinstance(out.name, int):
            continue
        if editor.values[grad.name].kind != "backward" or grad.name in (*program.gradients, *program.tangents):
            continue
        if last[grad.name] != slot or editor.metas[grad.name] != editor.metas[out.name]:
            continue
        for way in list(editor.slots[slot]):
            inner = way.calls[-1]
            if inner.op == "aten.threshold_backward.default":
                write = Call("aten.threshold_backward.grad_input", inner.args, (("grad_input", grad),), inner.outs)
            elif inner.op == "monet_like.unpack_threshold_backward.default":
                write = Call("monet_like.unpack_threshold_backward_.default", inner.args, (), inner.outs)
            else:
                continue
            words = way.word  # a way that needs a word of its own is offered in place only beside it
            variant = "in_place" if way is first else f"{way.variant}_in_place"
            editor.add_way(slot, (*way.calls[:-1], write), variant, word=words or "inplace", overwrites=grad.name)
