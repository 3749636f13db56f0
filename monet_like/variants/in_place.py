"""Elementwise operators in place: the result overwrites an input that nothing reads afterwards, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..capture.captured import TensorMeta
from ..ir.program import Call, Ref, Task, refs
from .editor import Editor

_ACTIVATIONS = ("relu", "hardtanh", "leaky_relu", "elu", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh", "gelu")
#: Of which the gradient can be written into a given tensor.
_GRADS = ("threshold", "hardtanh", "leaky_relu", "elu", "silu", "hardsigmoid", "sigmoid", "tanh", "gelu", "softplus")
_ARITHMETIC = [(name, overload) for name in ("add", "mul", "sub", "div") for overload in ("Tensor", "Scalar")]
#: Operators of the forward, their form that writes into a given tensor, and its name there ("": the first argument).
FORWARD = {f"aten.{name}.default": (f"aten.{name}_.default", "") for name in _ACTIVATIONS} | {
    f"aten.{name}.{overload}": (f"aten.{name}_.{overload}", "") for name, overload in _ARITHMETIC
}
#: Operators of the backward, likewise.
BACKWARD = {
    "monet_like.keep_where.default": ("monet_like.keep_where_.default", ""),
    "aten.hardswish_backward.default": ("aten.hardswish_backward.out", "out"),
    "aten.neg.default": ("aten.neg_.default", ""),
} | {f"aten.{name}_backward.default": (f"aten.{name}_backward.grad_input", "grad_input") for name in _GRADS}
BACKWARD |= {op: form for op, form in FORWARD.items() if op.startswith(("aten.mul.", "aten.div."))}
#: Operators that may overwrite their second operand, and one whose form in place swaps its operands.
_COMMUTATIVE = frozenset({"aten.add.Tensor", "aten.mul.Tensor"})
_SWAPPED = "aten.mul.Scalar"
_ROUNDED = (torch.bfloat16, torch.float16)

#: Shape, dtype and layout of an argument that is a value's own tensor; None for literals and for views.
MetaOf = Callable[[Any], TensorMeta | None]


def overwriting(call: Call, form: tuple[str, str], meta_of: MetaOf) -> Iterator[tuple[Any, Call]]:
    """The arguments that a call can overwrite, if they are laid out as its result, each with the call that does so.

    The results are equal to the bit, whatever the dtypes of the arguments: so none is complex. Products of complex
    numbers that do not fill a vector are rounded in another way where the compiler could not rule out that operands and
    result overlap.

    Args:
        form: of the call's operator in `FORWARD` or `BACKWARD`.
    """
    op, keyword = form
    for position in (0, 1) if call.op in _COMMUTATIVE and not call.kwargs else (0,):
        taken = call.args[position]
        own = meta_of(taken)
        if own is None or own.dtype.is_complex:
            continue
        others = (*call.args[:position], *call.args[position + 1 :])
        swaps = position == 1 or call.op == _SWAPPED
        if keyword:
            yield taken, Call(op, call.args, (*call.kwargs, (keyword, taken)), call.outs)
        elif not swaps or _may_swap(own.dtype, meta_of(others[0])):
            yield taken, Call(op, (taken, *others), call.kwargs, call.outs)
        else:
            yield taken, Call(f"{call.op.rsplit('.', 1)[0]}.out", call.args, (("out", taken),), call.outs)


def _may_swap(own: torch.dtype, other: TensorMeta | None) -> bool:
    """Whether two operands may change places: in 16 bits, a wider number is rounded first only where it is the first
    operand.
    """
    return own not in _ROUNDED or (other is not None and other.dtype == own)


def offer(editor: Editor) -> None:
    """Offer, for ``inplace``, to overwrite forward inputs that nothing else reads and gradients at their last use."""
    needed = editor.unavoidable()
    for task, call in editor.find(*FORWARD):
        for taken, write in overwriting(call, FORWARD[call.op], editor.meta_of):
            if taken.name not in needed and _is_free(editor, task, call, taken):
                suffix = "" if taken is call.args[0] else "_other"
                options: dict[str, Any] = {"word": "inplace", "overwrites": taken.name, "runs": task.runs}
                editor.add(task, (write,), task.writes, f"in_place{suffix}", **options)
    _as_called(editor)
    _backward(editor)


def _as_called(editor: Editor) -> None:
    """Offer what the model's own calls overwrite: buffers that it fills part by part, sums that a custom backward adds
    up.
    """
    own = {task.name: task for task in editor.captured.plain.every_task() if task.overwrites is not None}
    offered = {(task.writes, task.overwrites) for task in editor.every_task()}
    for task in editor.tasks:
        called = own.get(task.name)
        if called is not None and (called.writes, called.overwrites) not in offered:
            options: dict[str, Any] = {"word": "inplace", "overwrites": called.overwrites, "runs": called.runs}
            editor.add(task, called.calls, called.writes, "in_place", **options)
    for slot, (first, *_) in enumerate(editor.slots):
        called = own.get(first.name)
        if called is None or (called.writes, called.overwrites) in offered or {*called.reads} != {*first.reads}:
            continue
        assert called.overwrites is not None
        if editor.values[called.overwrites].kind == "forward" or editor.dies_in(called.overwrites, slot):
            editor.add_way(slot, called.calls, "in_place", word="inplace", overwrites=called.overwrites)


def _is_free(editor: Editor, task: Task, call: Call, taken: Ref) -> bool:
    """Whether a forward task may overwrite an argument: a value of the result's layout that no other forward task
    reads.
    """
    out = call.outs[0]
    assert out is not None and isinstance(out.name, int)
    return (
        editor.is_own(taken)
        and isinstance(taken.name, int)
        and sum(taken == other for other in call.args) == 1
        and editor.metas[taken.name] == editor.metas[out.name]
        and editor.dense(taken.name)
        and editor.forward_readers(taken.name) == [task]
        and taken.name not in editor.captured.program.outputs
        and out.name not in editor.captured.program.outputs
    )


def _backward(editor: Editor) -> None:
    """Add ways that overwrite the incoming gradient, if no later slot reads it, for each way of the slot that can."""
    for slot, ways in enumerate(editor.slots):
        first = ways[0]
        if first.overwrites is not None or len(first.writes) != 1:
            continue
        (out,) = first.writes
        for way in list(ways):
            *views, call = way.calls
            if call.op not in BACKWARD:
                continue
            for grad, write in overwriting(call, BACKWARD[call.op], editor.meta_of):
                once = sum(grad == ref for call in way.calls for ref in refs(call)) == 1
                if once and editor.replaceable(grad, slot, Ref(out)):
                    # A way that needs a word of its own is offered in place only beside it.
                    variant = "in_place" if way is first else f"{way.variant}_in_place"
                    word = way.word or "inplace"
                    editor.add_way(slot, (*views, write), variant, word=word, overwrites=grad.name)
                    break
