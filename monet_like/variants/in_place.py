"""Elementwise operators in place: the result overwrites an input that nothing reads afterwards, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..ir.program import Call, Ref, Task, refs
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

#: Operators of the backward, their form that writes into a given tensor, and its name there ("": the first argument).
_GRADIENTS = {
    "monet_like.keep_where.default": ("monet_like.keep_where_.default", ""),
    "aten.hardswish_backward.default": ("aten.hardswish_backward.out", "out"),
    "aten.mul.Tensor": ("aten.mul_.Tensor", ""),
    "aten.mul.Scalar": ("aten.mul_.Scalar", ""),
    "aten.div.Tensor": ("aten.div_.Tensor", ""),
    "aten.div.Scalar": ("aten.div_.Scalar", ""),
    "aten.neg.default": ("aten.neg_.default", ""),
} | {
    f"aten.{name}_backward.default": (f"aten.{name}_backward.grad_input", "grad_input")
    for name in (
        "threshold",
        "hardtanh",
        "leaky_relu",
        "elu",
        "silu",
        "hardsigmoid",
        "sigmoid",
        "tanh",
        "gelu",
        "softplus",
    )
}


def offer(editor: Editor) -> None:
    """Offer, for ``inplace``, to overwrite forward inputs that nothing else reads and gradients at their last use."""
    ops = {f"aten.{name}.{overload}" for name in _FORWARD for overload in ("default", "Tensor", "Scalar")}
    for task, call in editor.find(*ops):
        for position in _candidates(editor, task, call):
            _add_forward(editor, task, call, position)
    _backward(editor)


def _candidates(editor: Editor, task: Task, call: Call) -> list[int]:
    """Positions of the arguments that may be overwritten: values of the result's layout that nothing else reads."""
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
            and editor.avoidable(arg.name)
            and arg.name not in editor.captured.program.outputs
            and out.name not in editor.captured.program.outputs
        ):
            found.append(position)
    return found


def _add_forward(editor: Editor, task: Task, call: Call, position: int) -> None:
    _, name, overload = call.op.split(".")
    args = call.args if position == 0 else (call.args[1], call.args[0], *call.args[2:])
    write = Call(f"aten.{name}_.{overload}", args, call.kwargs, call.outs)
    suffix = "" if position == 0 else "_other"
    editor.add(
        task, (write,), task.writes, f"in_place{suffix}", word="inplace", overwrites=args[0].name, runs=task.runs
    )


def _backward(editor: Editor) -> None:
    """Add ways that overwrite the incoming gradient, if no later slot reads it, for each way of the slot that can."""
    for slot, ways in enumerate(editor.slots):
        first = ways[0]
        if first.overwrites is not None or len(first.writes) != 1:
            continue
        (out,) = first.writes
        for way in list(ways):
            for grad, write in _overwriting(way.calls[-1]):
                once = sum(grad == ref for call in way.calls for ref in refs(call)) == 1
                if once and editor.replaceable(grad, slot, Ref(out)):
                    # A way that needs a word of its own is offered in place only beside it.
                    variant = "in_place" if way is first else f"{way.variant}_in_place"
                    calls = (*way.calls[:-1], write)
                    editor.add_way(slot, calls, variant, word=way.word or "inplace", overwrites=grad.name)
                    break


def _overwriting(call: Call) -> Iterator[tuple[Any, Call]]:
    """The arguments that an operator of the backward can overwrite, each with the call that does so."""
    form, keyword = _GRADIENTS.get(call.op, ("", ""))
    positions = (0, 1) if call.op == "aten.mul.Tensor" else (0,)
    for position in positions if form else ():
        grad = call.args[position]
        if keyword:
            yield grad, Call(form, call.args, (*call.kwargs, (keyword, grad)), call.outs)
        else:
            others = (*call.args[:position], *call.args[position + 1 :])
            yield grad, Call(form, (grad, *others), call.kwargs, call.outs)
