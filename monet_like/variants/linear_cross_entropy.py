"""The last linear layer and cross-entropy for some of the rows at a time, so that the logits never exist at once.

With a large vocabulary the logits are by far the largest tensor of a language model, and they exist several times:
logits, their float32 copy, log-probabilities, and a gradient of each. In parts, the forward keeps only the loss, and
the backward computes the logits of each part again. One more product of the layer saves all but 1/parts of these
tensors.

``conv`` admits it: sums over rows are added part by part and agree up to rounding. 16-bit gradients of the weight are
summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from ..capture.captured import make_task
from ..ir.program import Call, Ref, Task
from . import linear
from .editor import Editor, cuts

#: Into how many parts the rows are cut; each is a variant of its own.
PARTS = (4, 16)
_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default"})
_BETWEEN = (["aten._log_softmax.default"], ["aten._to_copy.default", "aten._log_softmax.default"])
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Head:
    """A linear layer, a cast or none, log-softmax and the negative log-likelihood, with their gradients.

    Attributes:
        tasks: of the forward, in order.
        slots: numbers of the first slot and the one after the last.
        between: values of the backward that only these slots read.
        x, weight, target: the layer's input [N, D] and weight [V, D], and the classes [N], as `views` make them.
        views: calls that make these.
        gradients: of x, weight and bias, as values; None: not wanted.
    """

    tasks: tuple[Task, ...]
    slots: tuple[int, int]
    between: frozenset[int]
    x: Ref
    weight: Ref
    target: Ref
    views: tuple[Call, ...]
    gradients: tuple[int | None, int | None, int | None]


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, forward and gradients in parts; gradients become one slot, by PyTorch or in parts."""
    if "conv" not in editor.words:
        return  # apart, PyTorch's operators need less memory: something may be run again between them
    makers = {value: task for task in editor.tasks if task.variant == "aten" for value in task.writes}
    for nll in editor.tasks:
        if nll.variant != "aten" or not nll.calls or nll.calls[-1].op != "aten.nll_loss_forward.default":
            continue
        head = _find(editor, makers, nll)
        if head is None:
            continue
        first, end = head.slots
        plain = editor.in_turn([ways[0] for ways in editor.slots[first:end]], head.between)
        ways = [plain]
        for parts, onednn in product(PARTS, (False, True) if _by_onednn(editor, head) else (False,)):
            name = f"linear_cross_entropy.{parts}{'_onednn' if onednn else ''}"
            calls = list(_forward(editor, head, parts, onednn))
            editor.add(nll, calls, nll.writes, name, word="conv", runs=nll.runs)
            calls = list(_backward(editor, head, first, parts, onednn))
            ways.append(make_task(f"{plain.name}.{name}", calls, plain.writes, editor.metas, variant=name, word="conv"))
        editor.merge(first, ways, end - first)


def _find(editor: Editor, makers: dict[int, Task], nll: Task) -> _Head | None:
    """The head whose loss is ``nll``, if nothing outside of it reads the values between its operators."""
    tasks = [nll]
    while tasks[0].calls[-1].op not in _PRODUCTS:
        call = tasks[0].calls[-1]
        source = _origin(tasks[0].calls, call.args[0]) if call.args else None
        made_by = None if source is None else makers.get(source)
        if made_by is None or made_by.writes != (source,):
            return None
        tasks.insert(0, made_by)
    shapes = [editor.metas[tasks[place].writes[0]].shape for place in (0, -2)]
    if [task.calls[-1].op for task in tasks[1:-1]] not in _BETWEEN or shapes[0] != shapes[1]:
        return None
    first = next((i for i, ways in enumerate(editor.slots) if _reads_loss(ways[0], nll)), None)
    return None if first is None else _with_slots(editor, tasks, first)


def _reads_loss(way: Task, nll: Task) -> bool:
    call = way.calls[-1]
    return call.op == "aten.nll_loss_backward.default" and call.args[1] == nll.calls[-1].args[0]


def _with_slots(editor: Editor, tasks: Sequence[Task], first: int) -> _Head | None:
    """The head with the slots of its gradients, which must be adjacent."""
    product, nll = tasks[0], tasks[-1]
    *_, x, turned = product.calls[-1].args[:3] if "addmm" in product.calls[-1].op else product.calls[-1].args
    weight = _turned(product.calls, turned)
    if weight is None or nll.calls[-1].outs[1] is None or nll.calls[-1].args[3] not in (1, 2):
        return None
    casts = len(tasks) - 3  # between the product and log-softmax
    chain = ["aten.nll_loss_backward.default", "aten._log_softmax_backward_data.default"]
    chain += ["aten._to_copy.default"] * casts
    between: list[int] = []
    for slot, op in enumerate(chain, first):
        way = editor.slots[slot][0] if slot < len(editor.slots) else None
        if way is None or way.calls[-1].op != op or len(way.writes) != 1:
            return None
        if between and _origin(way.calls, way.calls[-1].args[0]) != between[-1]:
            return None
        between.append(way.writes[0])
    end = first + len(chain)
    gradients: dict[str, int] = {}
    while end < len(editor.slots) and between[-1] in editor.slots[end][0].reads:
        way = editor.slots[end][0]
        kind = _kind(way, between[-1], x, weight, product.calls)
        if kind is None or kind in gradients or len(way.writes) != 1:
            return None
        gradients[kind] = way.writes[0]
        end += 1
    inner = {value for task in tasks[:-1] for value in task.writes}
    outside = [way for slot, ways in enumerate(editor.slots) if not first <= slot < end for way in ways]
    others = [task for task in editor.tasks if task not in tasks]
    escapes = any(not {*inner, *between}.isdisjoint(task.reads) for task in (*outside, *others))
    if escapes or not inner.isdisjoint(editor.captured.program.outputs) or not gradients:
        return None
    views = [call for task in (product, nll) for call in task.calls[:-1] if call.op != "aten.t.default"]
    return _Head(
        tuple(tasks),
        (first, end),
        frozenset(between),
        x,
        Ref(weight),
        nll.calls[-1].args[1],
        tuple(call for place, call in enumerate(views) if call not in views[:place]),
        (gradients.get("x"), gradients.get("weight"), gradients.get("bias")),
    )


def _kind(way: Task, grad: int, x: Ref, weight: int, views: Sequence[Call]) -> str | None:
    """Which gradient of the linear layer a slot computes from the gradient of the logits."""
    call = way.calls[-1]
    if call.op == "aten.sum.dim_IntList" and _origin(way.calls, call.args[0]) == grad and call.args[1:] == ([0], True):
        return "bias"
    if call.op != "aten.mm.default":
        return None
    one, other = call.args
    if _origin(way.calls, one) == grad and other == Ref(weight):
        return "x"
    turned = _turned(way.calls, one)
    same = other == x and all(call in views for call in way.calls if call.outs == (x,))
    return "weight" if turned == grad and same else None


def _origin(calls: Sequence[Call], ref: Any) -> int | None:
    """The value that ``ref`` is before calls that change only the shape."""
    made = {call.outs[0]: call for call in calls[:-1] if len(call.outs) == 1}
    while isinstance(ref, Ref) and isinstance(ref.name, str):
        call = made.get(ref)
        if call is None or call.op != "aten.view.default":
            return None
        ref = call.args[0]
    return ref.name if isinstance(ref, Ref) and isinstance(ref.name, int) else None


def _turned(calls: Sequence[Call], ref: Any) -> int | None:
    """The value of which ``ref`` is the transpose."""
    for call in calls[:-1]:
        if call.outs == (ref,) and call.op == "aten.t.default":
            return _origin(calls, call.args[0])
    return None


def _rows(editor: Editor, head: _Head, parts: int) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of every part."""
    return cuts(editor.metas[head.tasks[0].writes[0]].shape[0], parts)


def _by_onednn(editor: Editor, head: _Head) -> bool:
    """Whether oneDNN can compute the logits; which library is faster depends on the machine."""
    logits, weight = editor.metas[head.tasks[0].writes[0]], editor.metas[head.weight.name]  # type: ignore[index]
    return linear.usable(editor) and logits.dtype == torch.float32 and weight.contiguous


def _probabilities(head: _Head, part: int, begin: int, end: int, onednn: bool) -> tuple[list[Call], Ref, Ref, Ref]:
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


def _start(head: _Head, onednn: bool) -> Iterator[Call]:
    yield from head.views
    if not onednn:
        yield Call("aten.t.default", (head.weight,), (), (Ref("turned"),))


def _forward(editor: Editor, head: _Head, parts: int, onednn: bool) -> Iterator[Call]:
    """The calls that add the losses of all parts, in at least float32, and take the mean if the loss is one."""
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
    for name, refs, out in (("loss", [one for one, _ in sums], loss), ("total", [one for _, one in sums], total)):
        yield Call("aten.stack.default", (refs,), (), (Ref(f"{name}s"),))
        yield Call("aten.sum.default", (Ref(f"{name}s"),), wide, (Ref(f"{name}_sum"),))
        if name == "loss" and reduction == 1:
            continue
        yield Call("aten._to_copy.default", (Ref(f"{name}_sum"),), (("dtype", dtype),), (out,))
    if reduction == 1:
        yield Call("aten.div.Tensor", (Ref("loss_sum"), Ref("total_sum")), (), (Ref("mean"),))
        yield Call("aten._to_copy.default", (Ref("mean"),), (("dtype", dtype),), (loss,))


def _backward(editor: Editor, head: _Head, slot: int, parts: int, onednn: bool) -> Iterator[Call]:
    """The calls that compute the logits of each part again, their gradient, and the gradients of x, weight and bias."""
    of_loss = editor.slots[slot][0].calls[-1]
    of_softmax = editor.slots[slot + 1][0].calls[-1]
    casts = [ways[0].calls[-1] for ways in editor.slots[slot + 2 : slot + len(head.tasks) - 1]]
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
