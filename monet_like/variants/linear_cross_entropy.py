"""The last linear layer and cross-entropy for some of the rows at a time, so that the logits never exist at once.

With a large vocabulary the logits are by far the largest tensor of a language model, and they exist several times:
logits, their float32 copy, log-probabilities, and a gradient of each. In parts, the forward keeps only the loss, and
the backward computes the logits of each part again. One more product of the layer saves all but 1/parts of these
tensors.

``conv`` admits it: sums over rows are added part by part and agree up to rounding. 16-bit gradients of the
weight are summed in float32 by rows, which is so where classes have weights; else they are made by parts of the
vocabulary (`logits_gradient`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ir.program import Call, Ref, Task
from . import linear, logits_gradient
from .calls import HALF, Calls, Total
from .editor import Editor, cuts, views_of
from .logits_gradient import Head
from .patterns import CAST, Operators, record

#: Into how many parts the rows are cut; each is a variant of its own.
PARTS = (4, 16)
_TURNED = Ref("turned")


def head(
    x: Tensor, weight: Tensor, target: Tensor, wide: bool, bias: Any = None, classes: Any = None, **how: Any
) -> Tensor:
    """Cross-entropy of a linear layer's results, as they are or in float32."""
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.float() if wide else logits, target, classes, **how)


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, forward and gradients in parts; gradients become one slot, by PyTorch or in parts."""
    if "conv" not in editor.words:
        return  # apart, PyTorch's operators need less memory: something may be run again between them
    operators = Operators(editor)
    merges: list[tuple[int, int, list[Task]]] = []
    for nll in editor.tasks:
        found = _find(operators, nll) if nll.variant == "aten" else None
        if found is None:
            continue
        head, plain = found
        gradients: dict[str, Sequence[Call]] = {}
        norms = logits_gradient.norms(editor, head)
        for parts, onednn in product(PARTS, (False, True) if _by_onednn(editor, head) else (False,)):
            name = f"linear_cross_entropy.{parts}{'_onednn' if onednn else ''}"
            writes = nll.writes if norms is None else (*nll.writes, norms)
            editor.add(nll, _forward(editor, head, parts, onednn, norms), writes, name, word="conv", runs=nll.runs)
            if norms is None:  # else by columns, in less time and memory
                gradients[name] = _backward(editor, head, parts, onednn)
        gradients |= logits_gradient.ways(editor, head, norms, PARTS)
        if logits_gradient.KEPT in gradients:
            softmax = head.tasks[-2]
            calls = _kept(editor, head, PARTS[-1])
            editor.add(softmax, calls, softmax.writes, logits_gradient.KEPT, word="conv", runs=softmax.runs)
        others = (editor.beside(plain, calls, name, word="conv") for name, calls in gradients.items())
        merges.append((head.slots[0], len(head.slots), [plain, *others]))
    editor.merge_all(merges)


def _find(operators: Operators, nll: Task) -> tuple[Head, Task] | None:
    """The head whose loss is ``nll`` and one way for its gradients, if nothing else reads the values between its
    operators.
    """
    loss = operators.operator(nll)
    if loss is None or loss.op != "nll_loss_forward" or None in loss.outs or loss.args[3] not in (1, 2):
        return None
    wide = bool(operators.before(nll, "_log_softmax", CAST))
    found = operators.before(nll, "_log_softmax", *[CAST] * wide, "mm|addmm")
    if not found:
        return None
    *bias, x, turned = found[-1].args[:3]
    named = [("x", x), ("target", loss.args[1]), *(("bias", b) for b in bias), ("classes", loss.args[2])]
    inputs = tuple((name, seen.shape, seen.dtype) for name, seen in named if seen is not None)
    inputs += (("weight", (*reversed(turned.shape),), turned.dtype),)
    how = {"wide": wide, "reduction": "mean" if loss.args[3] == 1 else "sum", "ignore_index": loss.args[4]}
    wanted = ("x", "weight", "bias")[: 2 + len(bias)]
    for of in (some for count in range(len(wanted), 0, -1) for some in combinations(wanted, count)):
        match = operators.match(record(head, inputs, "nll_loss_forward", of=of, **how), nll)
        if match is None or not operators.alone(match) or not isinstance(match.values["weight"], int):
            continue
        plain = operators.in_turn(
            match.slots, tuple(sorted(match.gradients, key=lambda v: operators.writers[v][1] or 0))
        )
        if plain is not None:
            tasks = [task for task in operators.editor.tasks if task in match.tasks]
            backward = tuple(operators.ways[slot].calls[-1] for slot in match.slots)
            refs, values = match.refs, dict(zip(of, match.gradients, strict=True))
            views = tuple(views_of(tasks, refs["x"], refs["target"]))
            operands = (refs["x"], Ref(match.values["weight"]), refs["target"])
            gradients = (values.get("x"), values.get("weight"), values.get("bias"))
            return Head(tuple(tasks), match.slots, backward, *operands, views, gradients), plain
    return None


def _rows(editor: Editor, head: Head, parts: int) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of every part."""
    return cuts(editor.metas[head.tasks[0].writes[0]].shape[0], parts)


def _by_onednn(editor: Editor, head: Head) -> bool:
    """Whether oneDNN can compute the logits; which library is faster depends on the machine."""
    logits, weight = editor.metas[head.tasks[0].writes[0]], editor.metas[head.weight.name]  # type: ignore[index]
    return linear.usable(editor) and logits.dtype == torch.float32 and weight.contiguous


def _start(head: Head, onednn: bool) -> Calls:
    """The views that all parts read, and the turned weight."""
    calls = Calls(head.views)
    if not onednn:
        calls.add("aten.t.default", head.weight, out=_TURNED)
    return calls


def _probabilities(calls: Calls, head: Head, begin: int, end: int, onednn: bool) -> tuple[Ref, Ref, Ref]:
    """Compute the log-probabilities of some rows; these, the rows of x, and the classes."""
    x, target = calls.slice(head.x, 0, begin, end), calls.slice(head.target, 0, begin, end)
    layer, *others = (task.calls[-1] for task in head.tasks[:-1])
    *bias, _, _ = layer.args
    if onednn:
        last = calls.name()
        calls.append(linear.product(x, head.weight, bias[0] if bias else None, (last,)))
    else:
        last = calls.again(layer, *bias, x, _TURNED)
    for call in others:
        last = calls.again(call, last, *call.args[1:])
    return last, x, target


def _forward(editor: Editor, head: Head, parts: int, onednn: bool, norms: int | None) -> Calls:
    """The calls that add the losses of all parts, in at least float32, and take the mean if the loss is one.

    Args:
        norms: the value of the logarithms of the rows' sums; None: they are not made.
    """
    nll = head.tasks[-1].calls[-1]
    _, _, classes, reduction, ignored = nll.args
    loss, total = nll.outs
    dtype = editor.metas[head.tasks[-1].writes[0]].dtype
    wide = torch.float32 if dtype in HALF else dtype
    calls, losses, totals, made_norms = _start(head, onednn), list[Ref](), list[Ref](), list[Ref]()
    for _, begin, end in _rows(editor, head, parts):
        probabilities, _, target = _probabilities(calls, head, begin, end, onednn)
        logits = calls[-1].args[0]
        losses.append(calls.name())
        totals.append(calls.name())
        args = (probabilities, target, classes, 2, ignored)
        calls.append(replace(nll, args=args, outs=(losses[-1], totals[-1])))
        if norms is not None:  # the first logit of a row less its log-probability
            first = [calls.add("aten.select.int", of, 1, 0) for of in (logits, probabilities)]
            made_norms.append(calls.add("aten.sub.Tensor", *first))
    if norms is not None:
        calls.add("aten.cat.default", made_norms, out=Ref(norms))
    sum_of_losses = calls.add("aten.sum.default", calls.add("aten.stack.default", losses), dtype=wide)
    if reduction != 1:
        calls.cast(sum_of_losses, dtype, out=loss)
    sum_of_totals = calls.add("aten.sum.default", calls.add("aten.stack.default", totals), dtype=wide)
    calls.cast(sum_of_totals, dtype, out=total)
    if reduction == 1:
        calls.cast(calls.add("aten.div.Tensor", sum_of_losses, sum_of_totals), dtype, out=loss)
    return calls


def _kept(editor: Editor, head: Head, parts: int) -> Calls:
    """The calls that make all log-probabilities, from the logits of each part."""
    (kept,) = head.tasks[-2].writes
    calls = _start(head, onednn=False)
    calls.empty(editor.metas[kept], Ref(kept))
    for _, begin, end in _rows(editor, head, parts):
        _probabilities(calls, head, begin, end, onednn=False)
        softmax = calls.pop()
        calls.into("aten._log_softmax.out", calls.slice(Ref(kept), 0, begin, end), *softmax.args)
    return calls


def _backward(editor: Editor, head: Head, parts: int, onednn: bool) -> Calls:
    """The calls that compute the logits of each part again, their gradient, and the gradients of x, weight and bias."""
    of_loss, of_softmax, *casts = head.backward[: len(head.tasks) - 1]
    grad, _, _, classes, reduction, ignored, total = of_loss.args
    of_x, of_weight, of_bias = head.gradients
    dtype = editor.metas[next(value for value in head.gradients if value is not None)].dtype
    calls = _start(head, onednn)
    if of_x is not None:
        calls.empty(editor.metas[of_x], Ref(of_x))
    weights, biases = (None if value is None else Total(calls, Ref(value), dtype) for value in (of_weight, of_bias))
    for _, begin, end in _rows(editor, head, parts):
        probabilities, x, target = _probabilities(calls, head, begin, end, onednn)
        made = calls.again(of_loss, grad, probabilities, target, classes, reduction, ignored, total)
        made = calls.again(of_softmax, made, probabilities, *of_softmax.args[2:])
        for cast in casts:
            made = calls.again(cast, made, *cast.args[1:])
        if of_x is not None:
            calls.into("aten.mm.out", calls.slice(Ref(of_x), 0, begin, end), made, head.weight)
        if weights is not None:
            weights.add_product(calls.add("aten.t.default", made), x)
        if biases is not None:
            wide = {"dtype": torch.float32} if dtype in HALF else {}
            biases.add(calls.add("aten.sum.dim_IntList", made, [0], True, out=biases.place(), **wide))
    for sums in (weights, biases):
        if sums is not None:
            sums.finish()
    return calls
