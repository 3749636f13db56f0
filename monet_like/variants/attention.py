"""Attention on CUDA by PyTorch's other kernels: flash, memory-efficient, cuDNN's; for float32 also as matrix products.

PyTorch chooses one of these kinds by rules (card, dtypes, shapes), not by measuring. The result of all kinds is one
value of the program. The tensors that a kind saves for its own gradient (logarithms of sums, in a layout of that kind)
are values of their own. So any forward can be paired with any gradient whose saved tensors exist; where they do not,
the gradient runs the forward of its kind again. The gradient of the matrix products reads query, key and value only.

Offered without dropout, whose random numbers are the operator's own, and without a mask. The word ``algorithms`` admits
them; they agree with PyTorch's choice up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.captured import TensorMeta
from ..ir.mode import ALGORITHMS
from ..ir.program import Call, Ref, Task
from ..runtime.operators import overload
from .editor import Editor

_HALF = (torch.float16, torch.bfloat16)
_Kwargs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Attention:
    """One attention of the program.

    Attributes:
        query, key, value: tensors [N, heads, length, width], and what they look like in `metas`.
        causal: whether a position sees only those before it.
        scale: the factor of the scores that was given; None: one over the root of the width.
        out: the value of the result.
    """

    query: Any
    key: Any
    value: Any
    metas: tuple[TensorMeta, TensorMeta, TensorMeta]
    causal: bool
    scale: float | None
    out: Ref

    @property
    def kwargs(self) -> _Kwargs:
        return () if self.scale is None else (("scale", self.scale),)

    @property
    def factor(self) -> float:
        """The factor by which scores are multiplied."""
        return 1 / math.sqrt(self.metas[0].shape[3]) if self.scale is None else self.scale

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths of query and key."""
        return self.metas[0].shape[2], self.metas[1].shape[2]


#: The sums' logarithms, and the state of a random generator that is not used.
_Saved = tuple[Ref, Ref, Ref]
_Gradients = tuple[Ref | None, ...]


@dataclass(frozen=True)
class _Kind:
    """A kind of fused attention.

    Attributes:
        dtypes, widest: the dtypes and the largest width that it takes; widths are multiples of 16 bytes.
        forward: the call that makes the result and the saved tensors.
        backward: the call that makes the gradients for query, key and value from the result's gradient and the saved
            tensors.
    """

    dtypes: tuple[torch.dtype, ...]
    widest: int
    forward: Callable[[_Attention, _Saved], Call]
    backward: Callable[[_Attention, Any, _Saved, _Gradients], Call]


def _flash(a: _Attention, saved: _Saved) -> Call:
    outs = (a.out, saved[0], None, None, None, None, *saved[1:], None)
    args = (a.query, a.key, a.value, 0.0, a.causal)
    return Call("aten._scaled_dot_product_flash_attention.default", args, a.kwargs, outs, True)


def _flash_backward(a: _Attention, grad: Any, saved: _Saved, outs: _Gradients) -> Call:
    tensors = (grad, a.query, a.key, a.value, a.out, saved[0])
    args = (*tensors, None, None, *a.lengths, 0.0, a.causal, *saved[1:])
    return Call("aten._scaled_dot_product_flash_attention_backward.default", args, a.kwargs, outs, True)


def _efficient(a: _Attention, saved: _Saved) -> Call:
    args = (a.query, a.key, a.value, None, True, 0.0, a.causal)
    return Call("aten._scaled_dot_product_efficient_attention.default", args, a.kwargs, (a.out, *saved), True)


def _efficient_backward(a: _Attention, grad: Any, saved: _Saved, outs: _Gradients) -> Call:
    args = (
        grad,
        a.query,
        a.key,
        a.value,
        None,
        a.out,
        *saved,
        0.0,
        [*(out is not None for out in outs), False],
        a.causal,
    )
    return Call("aten._scaled_dot_product_efficient_attention_backward.default", args, a.kwargs, (*outs, None), True)


def _cudnn(a: _Attention, saved: _Saved) -> Call:
    outs = (a.out, saved[0], None, None, None, None, *saved[1:], None)
    args = (a.query, a.key, a.value, None, True, 0.0, a.causal)
    return Call("aten._scaled_dot_product_cudnn_attention.default", args, a.kwargs, outs, True)


def _cudnn_backward(a: _Attention, grad: Any, saved: _Saved, outs: _Gradients) -> Call:
    tensors = (grad, a.query, a.key, a.value, a.out, *saved)
    args = (*tensors, None, None, None, *a.lengths, 0.0, a.causal)
    return Call("aten._scaled_dot_product_cudnn_attention_backward.default", args, a.kwargs, outs, True)


_KINDS: Mapping[str, _Kind] = {
    "flash": _Kind(_HALF, 256, _flash, _flash_backward),
    "efficient": _Kind((torch.float32, *_HALF), 2**16, _efficient, _efficient_backward),
    "cudnn": _Kind(_HALF, 128, _cudnn, _cudnn_backward),
}
_OPS = {f"aten._scaled_dot_product_{kind}_attention.default": kind for kind in _KINDS}
_BACKWARD_OPS = tuple(f"aten._scaled_dot_product_{kind}_attention_backward.default" for kind in _KINDS)


def offer(editor: Editor) -> None:
    """Offer, for the word ``algorithms``, the other kinds that take these dtypes and shapes, forward and gradients."""
    if ALGORITHMS not in editor.words or editor.device.type != "cuda":
        return
    for task in editor.tasks:
        own = _OPS.get(task.calls[-1].op) if task.calls else None
        if own is None or task.variant != "aten":
            continue
        found = _attention(editor, task)
        slots = [
            made for made in editor.find_slots(*_BACKWARD_OPS) if _argument(made[2], "out") == task.calls[-1].outs[0]
        ]
        if found is None or len(slots) != 1:
            continue
        for name, kind in _KINDS.items():
            if name != own and _takes(kind, found):
                _fused(editor, task, found, name, slots[0])
        if {meta.dtype for meta in found.metas} == {torch.float32}:
            _written_out(editor, task, found, slots[0])


def _argument(call: Call, name: str) -> Any:
    """An argument of an operator by its name in the schema; its default, if it was not given."""
    for position, argument in enumerate(overload(call.op)._schema.arguments):
        if argument.name == name:
            default = argument.default_value if argument.has_default_value() else None
            return dict(call.kwargs).get(name, call.args[position] if position < len(call.args) else default)
    return None


def _attention(editor: Editor, task: Task) -> _Attention | None:
    """The attention that a task computes; None with dropout, a mask, or shapes that not all kinds take."""
    call = task.calls[-1]
    query, key, value, out = *call.args[:3], call.outs[0]
    if out is None or _argument(call, "dropout_p") or _argument(call, "attn_bias") is not None:
        return None
    made = editor.results(task.calls)
    metas = tuple(made.get(ref) or editor.metas[ref.name] for ref in (query, key, value))
    shapes = [meta.shape for meta in metas]
    # As many heads and batches everywhere; which kinds align causal masks how, where lengths differ, is not told here.
    causal = bool(_argument(call, "is_causal"))
    alike = all(len(shape) == 4 and shape[:2] == shapes[0][:2] and shape[3] == shapes[0][3] for shape in shapes)
    if not alike or 0 in shapes[0] or 0 in shapes[1] or (causal and shapes[0][2] != shapes[1][2]):
        return None
    return _Attention(query, key, value, (metas[0], metas[1], metas[2]), causal, _argument(call, "scale"), out)


def _takes(kind: _Kind, found: _Attention) -> bool:
    width = found.metas[0].shape[3]
    return width <= kind.widest and all(
        meta.dtype in kind.dtypes and width * meta.dtype.itemsize % 16 == 0 and meta.stride[3] == 1
        for meta in found.metas
    )


def _fused(editor: Editor, task: Task, found: _Attention, name: str, slot: tuple[int, Task, Call]) -> None:
    """Add the forward of a kind, which saves values of its own, and the gradients from these values."""
    kind, (index, way, call) = _KINDS[name], slot
    temporary = (Ref("sums"), Ref("seed"), Ref("offset"))
    made = editor.results((*task.calls[:-1], kind.forward(found, temporary)))
    if made[found.out] != editor.meta_of(found.out):
        return
    saved = tuple(Ref(editor.value(f"{task.name}.{name}.{ref.name}", "forward", made[ref])) for ref in temporary)
    values = (saved[0], saved[1], saved[2])
    forward = (*task.calls[:-1], kind.forward(found, values))
    backward = (*way.calls[:-1], kind.backward(found, call.args[0], values, call.outs[:3]))
    results = editor.results(backward)
    if any(results[Ref(value)] != editor.metas[value] for value in way.writes):
        return
    writes = [ref.name for ref in (found.out, *values) if isinstance(ref.name, int)]
    editor.add(task, forward, writes, f"attention.{name}", word=ALGORITHMS, runs=task.runs)
    editor.add_way(index, backward, f"attention.{name}", word=ALGORITHMS)


def _written_out(editor: Editor, task: Task, found: _Attention, slot: tuple[int, Task, Call]) -> None:
    """Add attention as matrix products and a softmax; the gradients compute the probabilities again."""
    index, way, call = slot
    first = (*task.calls[:-1], *_probabilities(found))
    product = Call("aten.matmul.default", (Ref("probabilities"), found.value), (), (Ref("product"),))
    forward = (*first, product, *_into(editor, found.out, Ref("product")))
    editor.add(task, forward, task.writes[:1], "attention.written_out", word=ALGORITHMS, runs=task.runs)
    backward = (*way.calls[:-1], *_probabilities(found), *_gradients(editor, found, call.args[0], call.outs[:3]))
    editor.add_way(index, backward, "attention.written_out", word=ALGORITHMS)


def _probabilities(found: _Attention) -> Iterator[Call]:
    """softmax(scale * query @ key.T), and the scaled query."""
    scores = Ref("scores")
    yield Call("aten.mul.Scalar", (found.query, found.factor), (), (Ref("scaled"),))
    yield Call("aten.transpose.int", (found.key, -2, -1), (), (Ref("turned"),))
    yield Call("aten.matmul.default", (Ref("scaled"), Ref("turned")), (), (scores,))
    if found.causal:
        yield Call("aten.new_full.default", (scores, found.lengths, -math.inf), (), (Ref("full"),))
        yield Call("aten.triu.default", (Ref("full"), 1), (), (Ref("later"),))
        yield Call("aten.add_.Tensor", (scores, Ref("later")), (), (scores,))
    yield Call("aten._softmax.default", (scores, -1, False), (), (Ref("probabilities"),))


def _gradients(editor: Editor, found: _Attention, grad: Any, outs: Sequence[Ref | None]) -> Iterator[Call]:
    of_query, of_key, of_value = outs
    probabilities, of_scores = Ref("probabilities"), Ref("of_scores")
    if of_value is not None:
        yield Call("aten.transpose.int", (probabilities, -2, -1), (), (Ref("probabilities_turned"),))
        yield Call("aten.matmul.default", (Ref("probabilities_turned"), grad), (), (Ref("of_value"),))
        yield from _into(editor, of_value, Ref("of_value"))
    yield Call("aten.transpose.int", (found.value, -2, -1), (), (Ref("value_turned"),))
    yield Call("aten.matmul.default", (grad, Ref("value_turned")), (), (Ref("of_probabilities"),))
    args = (Ref("of_probabilities"), probabilities, -1, found.metas[0].dtype)
    yield Call("aten._softmax_backward_data.default", args, (), (of_scores,))
    if of_key is not None:
        yield Call("aten.transpose.int", (of_scores, -2, -1), (), (Ref("of_scores_turned"),))
        yield Call("aten.matmul.default", (Ref("of_scores_turned"), Ref("scaled")), (), (Ref("of_key"),))
        yield from _into(editor, of_key, Ref("of_key"))
    if of_query is not None:
        yield Call("aten.matmul.default", (of_scores, found.key), (), (Ref("of_scaled"),))
        yield Call("aten.mul_.Tensor", (Ref("of_scaled"), found.factor), (), (Ref("of_query"),))
        yield from _into(editor, of_query, Ref("of_query"))


def _into(editor: Editor, out: Ref, made: Ref) -> Iterator[Call]:
    """The calls that bring ``made`` into the layout of the value ``out``."""
    meta = editor.meta_of(out)
    assert meta is not None
    yield Call("aten.new_empty_strided.default", (made, meta.shape, meta.stride), (), (out,))
    yield Call("aten.copy_.default", (out, made), (), ())
