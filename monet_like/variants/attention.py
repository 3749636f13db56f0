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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.captured import TensorMeta
from ..ir.mode import ALGORITHMS
from ..ir.program import Call, Ref, Task
from ..runtime.operators import overload
from .calls import HALF, Calls
from .editor import Editor


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
    def kwargs(self) -> tuple[tuple[str, Any], ...]:
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
#: Of each kind of fused attention the dtypes and the largest width that it takes; widths are multiples of 16 bytes.
_KINDS: Mapping[str, tuple[tuple[torch.dtype, ...], int]] = {
    "flash": (HALF, 256),
    "efficient": ((torch.float32, *HALF), 2**16),
    "cudnn": (HALF, 128),
}
#: Of sequences of several lengths, which these are not.
_LENGTHS = (None,) * 4
_OPS = {f"aten._scaled_dot_product_{kind}_attention.default": kind for kind in _KINDS}
_BACKWARD_OPS = tuple(f"aten._scaled_dot_product_{kind}_attention_backward.default" for kind in _KINDS)


def _forward(kind: str, a: _Attention, saved: _Saved) -> Call:
    """The call that makes the result and the saved tensors."""
    named = {"attn_bias": None, "compute_log_sumexp": True, "dropout_p": 0.0, "is_causal": a.causal}
    outs = (a.out, *saved) if kind == "efficient" else (a.out, saved[0], *_LENGTHS, *saved[1:], None)
    return _call(f"aten._scaled_dot_product_{kind}_attention.default", a, named, outs)


def _backward(kind: str, a: _Attention, grad: Any, saved: _Saved, outs: tuple[Ref | None, ...]) -> Call:
    """The call that makes the gradients for query, key and value from the result's gradient and the saved tensors."""
    named = dict.fromkeys(("attn_bias", "cum_seq_q", "cum_seq_k")) | {"grad_out": grad, "grad_out_": grad}
    named |= {"out": a.out, "max_q": a.lengths[0], "max_k": a.lengths[1], "dropout_p": 0.0, "is_causal": a.causal}
    named |= dict(zip(("logsumexp", "philox_seed", "philox_offset"), saved, strict=True))
    named |= {"grad_input_mask": [*(out is not None for out in outs), False]}
    outs = (*outs, None) if kind == "efficient" else outs
    return _call(f"aten._scaled_dot_product_{kind}_attention_backward.default", a, named, outs)


def _call(op: str, a: _Attention, named: Mapping[str, Any], outs: tuple[Ref | None, ...]) -> Call:
    """A call of an operator with those of the arguments that it has, by their names in its schema."""
    named = {"query": a.query, "key": a.key, "value": a.value, **named}
    args = (named[argument.name] for argument in overload(op)._schema.arguments if argument.name in named)
    return Call(op, tuple(args), a.kwargs, outs, True)


def offer(editor: Editor) -> None:
    """Offer, for the word ``algorithms``, the other kinds that take these dtypes and shapes, forward and gradients."""
    if ALGORITHMS not in editor.words or editor.device.type != "cuda":
        return
    for task, call in editor.find_last(*_OPS):
        found = _attention(editor, task)
        slots = [made for made in editor.find_slots(*_BACKWARD_OPS) if _argument(made[2], "out") == call.outs[0]]
        if found is None or len(slots) != 1:
            continue
        for kind in _KINDS:
            if kind != _OPS[call.op] and _takes(kind, found):
                _fused(editor, task, found, kind, slots[0])
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
    metas = tuple(editor.seen(task.calls, ref) for ref in (query, key, value))
    shapes = [meta.shape for meta in metas]
    # As many heads and batches everywhere; which kinds align causal masks how, where lengths differ, is not told here.
    causal = bool(_argument(call, "is_causal"))
    alike = all(len(shape) == 4 and shape[:2] == shapes[0][:2] and shape[3] == shapes[0][3] for shape in shapes)
    if not alike or 0 in shapes[0] or 0 in shapes[1] or (causal and shapes[0][2] != shapes[1][2]):
        return None
    return _Attention(query, key, value, (metas[0], metas[1], metas[2]), causal, _argument(call, "scale"), out)


def _takes(kind: str, found: _Attention) -> bool:
    (dtypes, widest), width = _KINDS[kind], found.metas[0].shape[3]
    return width <= widest and all(
        meta.dtype in dtypes and width * meta.dtype.itemsize % 16 == 0 and meta.stride[3] == 1 for meta in found.metas
    )


def _fused(editor: Editor, task: Task, found: _Attention, kind: str, slot: tuple[int, Task, Call]) -> None:
    """Add the forward of a kind, which saves values of its own, and the gradients from these values."""
    index, way, call = slot
    temporary = (Ref("sums"), Ref("seed"), Ref("offset"))
    made = editor.results((*task.calls[:-1], _forward(kind, found, temporary)))
    if made[found.out] != editor.meta_of(found.out):
        return
    sums, seed, offset = (editor.value(f"{task.name}.{kind}.{ref.name}", "forward", made[ref]) for ref in temporary)
    saved = (Ref(sums), Ref(seed), Ref(offset))
    forward = (*task.calls[:-1], _forward(kind, found, saved))
    backward = (*way.calls[:-1], _backward(kind, found, call.args[0], saved, call.outs[:3]))
    results = editor.results(backward)
    if any(results[Ref(value)] != editor.metas[value] for value in way.writes):
        return
    writes = (task.writes[0], sums, seed, offset)
    editor.add(task, forward, writes, f"attention.{kind}", word=ALGORITHMS, runs=task.runs)
    editor.add_way(index, backward, f"attention.{kind}", word=ALGORITHMS)


def _written_out(editor: Editor, task: Task, found: _Attention, slot: tuple[int, Task, Call]) -> None:
    """Add attention as matrix products and a softmax; the gradients compute the probabilities again."""
    index, way, call = slot
    forward, backward = Calls(task.calls[:-1]), Calls(way.calls[:-1])
    _, probabilities = _probabilities(forward, found)
    product = forward.add("aten.matmul.default", probabilities, found.value)
    _lay_out(editor, forward, product, found.out)
    editor.add(task, forward, task.writes[:1], "attention.written_out", word=ALGORITHMS, runs=task.runs)
    _gradients(editor, backward, found, call.args[0], call.outs[:3])
    editor.add_way(index, backward, "attention.written_out", word=ALGORITHMS)


def _probabilities(calls: Calls, found: _Attention) -> tuple[Ref, Ref]:
    """The scaled query, and softmax(scaled query @ key.T)."""
    scaled = calls.add("aten.mul.Scalar", found.query, found.factor)
    scores = calls.add("aten.matmul.default", scaled, _turned(calls, found.key))
    if found.causal:
        full = calls.add("aten.new_full.default", scores, found.lengths, -math.inf)
        calls.add("aten.add_.Tensor", scores, calls.add("aten.triu.default", full, 1), out=scores)
    return scaled, calls.add("aten._softmax.default", scores, -1, False)


def _gradients(editor: Editor, calls: Calls, found: _Attention, grad: Any, outs: Sequence[Ref | None]) -> None:
    of_query, of_key, of_value = outs
    scaled, probabilities = _probabilities(calls, found)
    if of_value is not None:
        made = calls.add("aten.matmul.default", _turned(calls, probabilities), grad)
        _lay_out(editor, calls, made, of_value)
    of_probabilities = calls.add("aten.matmul.default", grad, _turned(calls, found.value))
    dtype = found.metas[0].dtype
    of_scores = calls.add("aten._softmax_backward_data.default", of_probabilities, probabilities, -1, dtype)
    if of_key is not None:
        made = calls.add("aten.matmul.default", _turned(calls, of_scores), scaled)
        _lay_out(editor, calls, made, of_key)
    if of_query is not None:
        of_scaled = calls.add("aten.matmul.default", of_scores, found.key)
        _lay_out(editor, calls, calls.add("aten.mul_.Tensor", of_scaled, found.factor), of_query)


def _turned(calls: Calls, matrices: Any) -> Ref:
    return calls.add("aten.transpose.int", matrices, -2, -1)


def _lay_out(editor: Editor, calls: Calls, made: Ref, out: Ref) -> None:
    """Bring a tensor into the layout of the value ``out``."""
    meta = editor.meta_of(out)
    assert meta is not None
    calls.add("aten.new_empty_strided.default", made, meta.shape, meta.stride, out=out)
    calls.append(Call("aten.copy_.default", (out, made), (), ()))
