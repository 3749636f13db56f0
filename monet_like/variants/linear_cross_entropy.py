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

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..capture.captured import make_task
from ..ir.program import Call, Ref, Task
from . import linear, logits_gradient
from .editor import Editor, cuts, views_of
from .logits_gradient import Head
from .patterns import CAST, Operators, record

#: Into how many parts the rows are cut; each is a variant of its own.
PARTS = (4, 16)
_HALF = (torch.float16, torch.bfloat16)


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
        gradients: dict[str, list[Call]] = {}
        norms = logits_gradient.norms(editor, head)
        for parts, onednn in product(PARTS, (False, True) if _by_onednn(editor, head) else (False,)):
            name = f"linear_cross_entropy.{parts}{'_onednn' if onednn else ''}"
            calls = list(_forward(editor, head, parts, onednn, norms))
            writes = nll.writes if norms is None else (*nll.writes, norms)
            editor.add(nll, calls, writes, name, word="conv", runs=nll.runs)
            if norms is None:  # else by columns, in less time and memory
                gradients[name] = list(_backward(editor, head, parts, onednn))
        gradients |= logits_gradient.ways(editor, head, norms, PARTS)
        if logits_gradient.KEPT in gradients:
            softmax = head.tasks[-2]
            calls = list(_kept(editor, head, PARTS[-1]))
            editor.add(softmax, calls, softmax.writes, logits_gradient.KEPT, word="conv", runs=softmax.runs)
        others = (
            make_task(f"{plain.name}.{name}", calls, plain.writes, editor.metas, variant=name, word="conv")
            for name, calls in gradients.items()
        )
        merges.append((head.slots[0], len(head.slots), [plain, *others]))
    for first, count, ways in sorted(merges, reverse=True, key=lambda merge: merge[0]):
        editor.merge(first, ways, count)


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


def _probabilities(head: Head, part: int, begin: int, end: int, onednn: bool) -> tuple[list[Call], Ref, Ref, Ref]:
    """The calls that compute the log-probabilities of some rows; their result, these rows of x, and the classes."""
    x, target = Ref(f"x_{part}"), Ref(f"target_{part}")
    calls = [
        Call("aten.slice.Tensor", (head.x, 0, begin, end), (), (x,)),
        Call("aten.slice.Tensor", (head.target, 0, begin, end), (), (target,)),
    ]
    last = x
    for number, task in enumerate(head.tasks[:-1]):
        call, made = task.calls[-1], Ref(f"made_{part}_{number}")
        if number:
            calls.append(replace(call, args=(last, *call.args[1:]), outs=(made,)))
        elif onednn:
            bias = call.args[0] if len(call.args) == 3 else None
            calls.append(linear.product(x, head.weight, bias, (made,)))
        else:
            calls.append(replace(call, args=(*call.args[:-2], x, Ref("turned")), outs=(made,)))
        last = made
    return calls, last, x, target


def _start(head: Head, onednn: bool) -> Iterator[Call]:
    yield from head.views
    if not onednn:
        yield Call("aten.t.default", (head.weight,), (), (Ref("turned"),))


def _forward(editor: Editor, head: Head, parts: int, onednn: bool, norms: int | None) -> Iterator[Call]:
    """The calls that add the losses of all parts, in at least float32, and take the mean if the loss is one.

    Args:
        norms: the value of the logarithms of the rows' sums; None: they are not made.
    """
    nll = head.tasks[-1].calls[-1]
    _, _, classes, reduction, ignored = nll.args
    loss, total = nll.outs
    dtype = editor.metas[head.tasks[-1].writes[0]].dtype
    wide = (("dtype", torch.float32 if dtype in _HALF else dtype),)
    yield from _start(head, onednn)
    sums: list[tuple[Ref, Ref]] = []
    for part, begin, end in _rows(editor, head, parts):
        calls, probabilities, _, target = _probabilities(head, part, begin, end, onednn)
        yield from calls
        parted = (Ref(f"loss_{part}"), Ref(f"total_{part}"))
        yield replace(nll, args=(probabilities, target, classes, 2, ignored), outs=parted)
        sums.append(parted)
        if norms is not None:  # the first logit of a row less its log-probability
            first = [Ref(f"first_{part}_{name}") for name in ("logit", "probability")]
            for column, of in zip(first, (calls[-1].args[0], probabilities), strict=True):
                yield Call("aten.select.int", (of, 1, 0), (), (column,))
            yield Call("aten.sub.Tensor", (*first,), (), (Ref(f"norms_{part}"),))
    if norms is not None:
        yield Call("aten.cat.default", ([Ref(f"norms_{part}") for part in range(parts)],), (), (Ref(norms),))
    for name, refs, out in (("loss", [one for one, _ in sums], loss), ("total", [one for _, one in sums], total)):
        yield Call("aten.stack.default", (refs,), (), (Ref(f"{name}s"),))
        yield Call("aten.sum.default", (Ref(f"{name}s"),), wide, (Ref(f"{name}_sum"),))
        if name == "loss" and reduction == 1:
            continue
        yield Call("aten._to_copy.default", (Ref(f"{name}_sum"),), (("dtype", dtype),), (out,))
    if reduction == 1:
        yield Call("aten.div.Tensor", (Ref("loss_sum"), Ref("total_sum")), (), (Ref("mean"),))
        yield Call("aten._to_copy.default", (Ref("mean"),), (("dtype", dtype),), (loss,))


def _kept(editor: Editor, head: Head, parts: int) -> Iterator[Call]:
    """The calls that make all log-probabilities, from the logits of each part."""
    (kept,) = head.tasks[-2].writes
    meta = editor.metas[kept]
    place = (("dtype", meta.dtype), ("device", meta.device))
    yield from _start(head, onednn=False)
    yield Call("aten.empty_strided.default", (meta.shape, meta.stride), place, (Ref(kept),))
    for part, begin, end in _rows(editor, head, parts):
        (*calls, softmax), into = _probabilities(head, part, begin, end, onednn=False)[0], Ref(f"kept_{part}")
        yield from calls
        yield Call("aten.slice.Tensor", (Ref(kept), 0, begin, end), (), (into,))
        yield Call("aten._log_softmax.out", softmax.args, (("out", into),), (into,))


def _backward(editor: Editor, head: Head, parts: int, onednn: bool) -> Iterator[Call]:
    """The calls that compute the logits of each part again, their gradient, and the gradients of x, weight and bias."""
    of_loss, of_softmax, *casts = head.backward[: len(head.tasks) - 1]
    grad, _, _, classes, reduction, ignored, total = of_loss.args
    of_x, of_weight, of_bias = head.gradients
    dtype = editor.metas[next(value for value in head.gradients if value is not None)].dtype
    half = dtype in _HALF
    yield from _start(head, onednn)
    if of_x is not None:
        meta = editor.metas[of_x]
        place = (("dtype", meta.dtype), ("device", meta.device))
        yield Call("aten.empty_strided.default", (meta.shape, meta.stride), place, (Ref(of_x),))
    sums = {"weight": of_weight, "bias": of_bias}
    for part, begin, end in _rows(editor, head, parts):
        calls, probabilities, x, target = _probabilities(head, part, begin, end, onednn)
        yield from calls
        one, two = Ref(f"of_loss_{part}"), Ref(f"of_softmax_{part}")
        yield replace(of_loss, args=(grad, probabilities, target, classes, reduction, ignored, total), outs=(one,))
        yield replace(of_softmax, args=(one, probabilities, *of_softmax.args[2:]), outs=(two,))
        for number, cast in enumerate(casts):
            two, narrow = Ref(f"narrow_{part}_{number}"), two
            yield replace(cast, args=(narrow, *cast.args[1:]), outs=(two,))
        if of_x is not None:
            rows_of_x = Ref(f"part_{part}")
            yield Call("aten.slice.Tensor", (Ref(of_x), 0, begin, end), (), (rows_of_x,))
            yield Call("aten.mm.out", (two, head.weight), (("out", rows_of_x),), (rows_of_x,))
        for name, value in sums.items():
            if value is None:
                continue
            into = Ref(f"wide_{name}") if half else Ref(value)
            made = into if not part and not half else Ref(f"{name}_{part}")
            if name == "weight":
                rows = Ref(f"rows_{part}")
                yield Call("aten.t.default", (two,), (), (rows,))
                if part and not half:
                    yield Call("aten.addmm.out", (into, rows, x), (("out", into),), (into,))
                    continue
                yield Call("aten.mm.default", (rows, x), (), (made,))
            else:
                options = (("dtype", torch.float32),) if half else ()
                yield Call("aten.sum.dim_IntList", (two, [0], True), options, (made,))
            if part:
                yield Call("aten.add_.Tensor", (into, made), (), (into,))
            elif half:
                yield Call("aten._to_copy.default", (made,), (("dtype", torch.float32),), (into,))
    for name, value in sums.items():
        if half and value is not None:
            yield Call("aten._to_copy.default", (Ref(f"wide_{name}"),), (("dtype", dtype),), (Ref(value),))
