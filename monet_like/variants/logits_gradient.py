"""The gradients of the last linear layer and cross-entropy for some of the vocabulary at a time, in closed form: each
row's probabilities, less 1 where its class is, times the row's share of the loss.

So none of the tensors between the loss and the layer exists at once, and each part of the vocabulary has its rows of
the weight's gradient from one product. (Part by part of the rows, a 16-bit weight's gradient would be summed in
float32, which takes twice the weight and a pass over it for each part.) Probabilities are those that the forward has
kept; or the logits are made again, after a forward by rows that keeps the logarithm of each row's sum of exponentials.
(Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025, do the latter in one kernel.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.program import Call, Ref, Task
from .calls import HALF, Calls, Total
from .editor import Editor, like

#: The variant of kept log-probabilities.
KEPT = "linear_cross_entropy.kept"
#: Parts of the vocabulary are multiples of this, but for the last: rows of 16 bytes and more are fast.
_STEP = 64


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
    if not _is_plain(editor, head) or head.gradients[1] is None or head.dtype(editor) not in HALF:
        return None
    meta = like(probabilities, shape=probabilities.shape[:1])
    return editor.value(f"{head.tasks[-1].name}.norms", "forward", meta)


def ways(editor: Editor, head: Head, norms: int | None, parts: Sequence[int]) -> dict[str, Calls]:
    """Of each variant, by name, the calls that write all gradients.

    Args:
        norms: as the function of this name returns them.
        parts: into how many the vocabulary is cut; the last for log-probabilities that were kept.
    """
    found: dict[str, Calls] = {}
    if _is_plain(editor, head):
        found[KEPT] = _by_columns(editor, head, parts[-1], None)
    if norms is not None:
        for count in parts:
            found[f"linear_cross_entropy.{count}_columns"] = _by_columns(editor, head, count, Ref(norms))
    return found


def _is_plain(editor: Editor, head: Head) -> bool:
    """Whether log-probabilities are in the layer's dtype, or in float32 for 16 bits, and classes have no weights."""
    made, own = editor.metas[head.tasks[-2].writes[0]].dtype, head.dtype(editor)
    wide = made == torch.float32 if own in HALF else made == own
    return wide and head.tasks[-1].calls[-1].args[2] is None


def _shares(calls: Calls, editor: Editor, head: Head) -> tuple[Ref, Ref]:
    """Of each row its share of the gradient, 0 if it is ignored; shares and classes as columns."""
    grad, _, _, _, reduction, ignored, total = head.backward[0].args
    rows = editor.metas[head.tasks[0].writes[0]].shape[0]
    counted = _differs(calls, head.target, ignored)
    share = calls.add("aten.div.Tensor", grad, total) if reduction == 1 else grad
    shares = calls.add("aten.where.ScalarOther", counted, share, 0.0)
    row_shares, classes = (calls.add("aten.view.default", of, [rows, 1]) for of in (shares, head.target))
    return row_shares, classes


def _by_columns(editor: Editor, head: Head, parts: int, norms: Ref | None) -> Calls:
    """The gradients of x, weight and bias from the logits of some of the vocabulary at a time.

    Args:
        norms: the logarithms of the rows' sums, with which the logits are made again; None: log-probabilities were
            kept.
    """
    kept = head.tasks[-2].writes[0]
    rows, vocabulary = editor.metas[kept].shape
    calls = Calls(head.views)
    shares, classes = _shares(calls, editor, head)
    for value in head.gradients[1:]:
        if value is not None:
            calls.empty(editor.metas[value], Ref(value))
    if norms is not None:
        norms = calls.add("aten.view.default", norms, [rows, 1])
    of_x = head.gradients[0]
    total = None if of_x is None else Total(calls, Ref(of_x), head.dtype(editor))
    step, half = -(-vocabulary // (parts * _STEP)) * _STEP, head.dtype(editor) in HALF
    for begin in range(0, vocabulary, step):
        end = min(begin + step, vocabulary)
        weight = calls.slice(head.weight, 0, begin, end)
        if norms is None:
            made = calls.add("aten.exp.default", calls.slice(Ref(kept), 1, begin, end))
        else:
            made = _probabilities(calls, head, weight, norms, begin, end)
        _less_one(calls, made, classes, begin, end)
        calls.add("aten.mul_.Tensor", made, shares, out=made)
        made = calls.cast(made, head.dtype(editor)) if half else made
        _of_classes(calls, head, made, begin, end, {"dtype": torch.float32} if half else {})
        if total is not None:
            total.add_product(made, weight)
    if total is not None:
        total.finish()
    return calls


def _probabilities(calls: Calls, head: Head, weight: Ref, norms: Ref, begin: int, end: int) -> Ref:
    """Those of some classes, from the layer's input and the classes' rows of its weight."""
    *bias, _, _ = head.tasks[0].calls[-1].args
    turned = calls.add("aten.t.default", weight)
    mine = [calls.slice(each, 0, begin, end) for each in bias]
    logits = calls.add(f"aten.{'addmm' if bias else 'mm'}.default", *mine, head.x, turned)
    made = calls.cast(logits, torch.float32)
    calls.add("aten.sub_.Tensor", made, norms, out=made)
    return calls.add("aten.exp_.default", made, out=made)


def _of_classes(calls: Calls, head: Head, made: Ref, begin: int, end: int, wide: dict[str, Any]) -> None:
    """Write the rows of weight and bias that some columns of the logits' gradient ``made`` give.

    Args:
        wide: the dtype in which sums are taken, if it is another one.
    """
    _, of_weight, of_bias = head.gradients
    if of_weight is not None:
        turned = calls.add("aten.t.default", made)
        calls.into("aten.mm.out", calls.slice(Ref(of_weight), 0, begin, end), turned, head.x)
    if of_bias is not None:
        summed = calls.add("aten.sum.dim_IntList", made, [0], **wide)
        calls.put(summed, calls.slice(Ref(of_bias), -1, begin, end))


def _less_one(calls: Calls, made: Ref, classes: Ref, begin: int, end: int) -> None:
    """Subtract 1 where a row's class is, if that is from ``begin`` to ``end``."""
    place = calls.add("aten.sub.Scalar", classes, begin)
    clamped = calls.add("aten.clamp.default", place, 0, end - begin - 1)
    outside = _differs(calls, place, clamped)
    was = calls.add("aten.gather.default", made, 1, clamped)
    least = calls.add("aten.sub.Scalar", was, 1)
    now = calls.add("aten.where.self", outside, was, least)
    calls.add("aten.scatter_.src", made, 1, clamped, now, out=made)


def _differs(calls: Calls, one: Ref, other: Any) -> Ref:
    """Whether integers differ. Operators that ask for equality are kept for floats (`bitwise_where_compared`)."""
    kind = "Tensor" if isinstance(other, Ref) else "Scalar"
    above, below = (calls.add(f"aten.{name}.{kind}", one, other) for name in ("gt", "lt"))
    return calls.add("aten.bitwise_or.Tensor", above, below)
