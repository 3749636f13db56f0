"""The gradients of the last linear layer and cross-entropy for some of the vocabulary at a time, in closed form: each
row's probabilities, less 1 where its class is, times the row's share of the loss.

So none of the tensors between the loss and the layer exists at once, and each part of the vocabulary has its rows of
the weight's gradient from one product. (Part by part of the rows, a 16-bit weight's gradient would be summed in
float32, which takes twice the weight and a pass over it for each part.) Probabilities are those that the forward has
kept; or the logits are made again, after a forward by rows that keeps the logarithm of each row's sum of exponentials.
(Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025, do the latter in one kernel.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.program import Call, Ref, Task
from .editor import Editor, like

#: The variant of kept log-probabilities.
KEPT = "linear_cross_entropy.kept"
#: Parts of the vocabulary are multiples of this, but for the last: rows of 16 bytes and more are fast.
_STEP = 64
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Head:
    """A linear layer, a cast or none, log-softmax and the negative log-likelihood, with their gradients.

    Attributes:
        tasks: of the forward, in order.
        slots: numbers of the slots.
        backward: the last calls of these: of the loss, of log-softmax, of casts, of the layer.
        x, weight, target: the layer's input [N, D] and weight [V, D], and the classes [N], as `views` make them.
        views: calls that make these.
        gradients: of x, weight and bias, as values; None: not wanted.
    """

    tasks: tuple[Task, ...]
    slots: tuple[int, ...]
    backward: tuple[Call, ...]
    x: Ref
    weight: Ref
    target: Ref
    views: tuple[Call, ...]
    gradients: tuple[int | None, int | None, int | None]

    def dtype(self, editor: Editor) -> torch.dtype:
        """Of the layer."""
        return editor.metas[self.tasks[0].writes[0]].dtype


def norms(editor: Editor, head: Head) -> int | None:
    """A new value: the logarithms of the rows' sums of exponentials; None if nothing is made by columns."""
    probabilities = editor.metas[head.tasks[-2].writes[0]]
    if not _is_plain(editor, head) or head.gradients[1] is None or head.dtype(editor) not in _HALF:
        return None
    meta = like(probabilities, shape=probabilities.shape[:1])
    return editor.value(f"{head.tasks[-1].name}.norms", "forward", meta)


def ways(editor: Editor, head: Head, norms: int | None, parts: Sequence[int]) -> dict[str, list[Call]]:
    """Of each variant, by name, the calls that write all gradients.

    Args:
        norms: as the function of this name returns them.
        parts: into how many the vocabulary is cut; the last for log-probabilities that were kept.
    """
    found: dict[str, list[Call]] = {}
    if _is_plain(editor, head):
        found[KEPT] = list(_by_columns(editor, head, parts[-1], None))
    if norms is not None:
        for count in parts:
            found[f"linear_cross_entropy.{count}_columns"] = list(_by_columns(editor, head, count, Ref(norms)))
    return found


def _is_plain(editor: Editor, head: Head) -> bool:
    """Whether log-probabilities are in the layer's dtype, or in float32 for 16 bits, and classes have no weights."""
    made, own = editor.metas[head.tasks[-2].writes[0]].dtype, head.dtype(editor)
    wide = made == torch.float32 if own in _HALF else made == own
    return wide and head.tasks[-1].calls[-1].args[2] is None


def _shares(editor: Editor, head: Head) -> Iterator[Call]:
    """Of each row its share of the gradient, 0 if it is ignored; shares and classes as columns."""
    grad, _, _, _, reduction, ignored, total = head.backward[0].args
    rows = editor.metas[head.tasks[0].writes[0]].shape[0]
    share = Ref("share") if reduction == 1 else grad
    yield from head.views
    yield from _differs(head.target, ignored, Ref("counted"))
    if reduction == 1:
        yield Call("aten.div.Tensor", (grad, total), (), (share,))
    yield Call("aten.where.ScalarOther", (Ref("counted"), share, 0.0), (), (Ref("shares"),))
    for name, of in {"row_shares": Ref("shares"), "targets": head.target}.items():
        yield Call("aten.view.default", (of, [rows, 1]), (), (Ref(name),))


def _by_columns(editor: Editor, head: Head, parts: int, norms: Ref | None) -> Iterator[Call]:
    """The gradients of x, weight and bias from the logits of some of the vocabulary at a time.

    Args:
        norms: the logarithms of the rows' sums, with which the logits are made again; None: log-probabilities were
            kept.
    """
    kept = head.tasks[-2].writes[0]
    rows, vocabulary = editor.metas[kept].shape
    yield from _shares(editor, head)
    for value in head.gradients[1:]:
        if value is not None:
            meta = editor.metas[value]
            place = (("dtype", meta.dtype), ("device", meta.device))
            yield Call("aten.empty_strided.default", (meta.shape, meta.stride), place, (Ref(value),))
    if norms is not None:
        yield Call("aten.view.default", (norms, [rows, 1]), (), (Ref("row_norms"),))
    step = -(-vocabulary // (parts * _STEP)) * _STEP
    for part, begin in enumerate(range(0, vocabulary, step)):
        end, made = min(begin + step, vocabulary), Ref(f"made_{part}")
        weight = Ref(f"weight_{part}")
        yield Call("aten.slice.Tensor", (head.weight, 0, begin, end), (), (weight,))
        if norms is None:
            yield Call("aten.slice.Tensor", (Ref(kept), 1, begin, end), (), (Ref(f"kept_{part}"),))
            yield Call("aten.exp.default", (Ref(f"kept_{part}"),), (), (made,))
        else:
            yield from _probabilities(head, weight, part, begin, end, made)
        yield from _less_one(made, part, begin, end)
        yield Call("aten.mul_.Tensor", (made, Ref("row_shares")), (), (made,))
        yield from _gradients(editor, head, made, weight, part, begin, end)
    if head.gradients[0] is not None and head.dtype(editor) in _HALF:
        narrow = (("dtype", head.dtype(editor)),)
        yield Call("aten._to_copy.default", (Ref("wide_x"),), narrow, (Ref(head.gradients[0]),))


def _probabilities(head: Head, weight: Ref, part: int, begin: int, end: int, made: Ref) -> Iterator[Call]:
    """Those of some classes, from the layer's input."""
    turned, logits = Ref(f"turned_{part}"), Ref(f"logits_{part}")
    *bias, _, _ = head.tasks[0].calls[-1].args
    yield Call("aten.t.default", (weight,), (), (turned,))
    if bias:
        yield Call("aten.slice.Tensor", (bias[0], 0, begin, end), (), (Ref(f"bias_{part}"),))
    operands = (*[Ref(f"bias_{part}")] * len(bias), head.x, turned)
    yield Call(f"aten.{'addmm' if bias else 'mm'}.default", operands, (), (logits,))
    yield Call("aten._to_copy.default", (logits,), (("dtype", torch.float32),), (made,))
    yield Call("aten.sub_.Tensor", (made, Ref("row_norms")), (), (made,))
    yield Call("aten.exp_.default", (made,), (), (made,))


def _gradients(editor: Editor, head: Head, made: Ref, weight: Ref, part: int, begin: int, end: int) -> Iterator[Call]:
    """What some columns of the logits' gradient ``made`` give to x, and their rows of weight and bias."""
    of_x, of_weight, of_bias = head.gradients
    half, grads = head.dtype(editor) in _HALF, made
    wide = (("dtype", torch.float32),) if half else ()
    if half:
        grads = Ref(f"narrow_{part}")
        yield Call("aten._to_copy.default", (made,), (("dtype", head.dtype(editor)),), (grads,))
    if of_weight is not None:
        turned, mine = Ref(f"by_class_{part}"), Ref(f"of_weight_{part}")
        yield Call("aten.t.default", (grads,), (), (turned,))
        yield Call("aten.slice.Tensor", (Ref(of_weight), 0, begin, end), (), (mine,))
        yield Call("aten.mm.out", (turned, head.x), (("out", mine),), (mine,))
    if of_bias is not None:
        summed, mine = Ref(f"summed_{part}"), Ref(f"of_bias_{part}")
        yield Call("aten.sum.dim_IntList", (grads, [0]), wide, (summed,))
        yield Call("aten.slice.Tensor", (Ref(of_bias), -1, begin, end), (), (mine,))
        yield Call("aten.copy_.default", (mine, summed), (), (mine,))
    if of_x is None:
        return
    total, mine = Ref("wide_x") if half else Ref(of_x), Ref(f"of_x_{part}")
    if part and not half:
        yield Call("aten.addmm.out", (total, grads, weight), (("out", total),), (total,))
        return
    yield Call("aten.mm.default", (grads, weight), (), (mine if half else total,))
    if part:
        yield Call("aten.add_.Tensor", (total, mine), (), (total,))
    elif half:
        yield Call("aten._to_copy.default", (mine,), wide, (total,))


def _less_one(made: Ref, part: int, begin: int, end: int) -> Iterator[Call]:
    """Subtract 1 where a row's class is, if that is from ``begin`` to ``end``."""
    names = ("place", "clamped", "outside", "least", "was", "is")
    place, clamped, outside, least, was, now = (Ref(f"{name}_{part}") for name in names)
    yield Call("aten.sub.Scalar", (Ref("targets"), begin), (), (place,))
    yield Call("aten.clamp.default", (place, 0, end - begin - 1), (), (clamped,))
    yield from _differs(place, clamped, outside)
    yield Call("aten.gather.default", (made, 1, clamped), (), (was,))
    yield Call("aten.sub.Scalar", (was, 1), (), (least,))
    yield Call("aten.where.self", (outside, was, least), (), (now,))
    yield Call("aten.scatter_.src", (made, 1, clamped, now), (), (made,))


def _differs(one: Ref, other: Any, made: Ref) -> Iterator[Call]:
    """Whether integers differ. Operators that ask for equality are kept for floats (`bitwise_where_compared`)."""
    kind = "Tensor" if isinstance(other, Ref) else "Scalar"
    above, below = Ref(f"above_{made.name}"), Ref(f"below_{made.name}")
    yield Call(f"aten.gt.{kind}", (one, other), (), (above,))
    yield Call(f"aten.lt.{kind}", (one, other), (), (below,))
    yield Call("aten.bitwise_or.Tensor", (above, below), (), (made,))
