"""Fused RMS norm: forward in one pass, recomputation from its saved statistic, gradients in one slot.

PyTorch traces RMS norm operator by operator: square, mean, addition, reciprocal root, two products, and casts in 16
bits; its gradient has a dozen slots. The fused forward reads the input and writes the result and one number for each
row. The fused backward reads the input, these numbers and the incoming gradient. The normalised rows, twice the input
and their float32 copies are never made. A residual gradient that is added to the input's is added in the same pass.

It recognises torch.nn.RMSNorm and the norms of Hugging Face's models, with their casts, with or without a weight. Sums
are taken in another order and agree up to rounding: ``conv`` admits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ..capture.captured import TensorMeta, make_task
from ..ir.program import Call, Ref, Task
from .editor import Editor, root_of, views_of
from .gradient_slots import CAST, MUL, GradientSlots

VARIANT = "rms_norm"
_HALF = (torch.float16, torch.bfloat16)
_ADD = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})


@dataclass(frozen=True)
class _Norm:
    """The forward of one RMS norm.

    Attributes:
        root: the task that makes ``rstd``; fused tasks are placed after it.
        views: the calls that make ``x`` from a value.
        x: the tensor that is normalised, before its cast.
        wide: the value of ``x`` in the dtype of the computation, as the gradient reads it.
        normal: the values of the normalised rows, as they are and rounded.
        weight, out, rstd: weight (or None), result and statistic, as in `monet_like.ops.rms_norm`.
        dims: the number of the last dimensions that are a row.
        rounded: whether the normalised rows are rounded to the dtype of ``x`` before the product with the weight.
    """

    root: Task
    views: tuple[Call, ...]
    x: Ref
    wide: int
    normal: frozenset[int]
    weight: Ref | None
    out: int
    rstd: int
    dims: int
    eps: float
    rounded: bool


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, fused forward, recomputation and backward; gradients become one slot, PyTorch's or fused."""
    if "conv" not in editor.words:
        return  # apart, PyTorch's operators need less memory: something may be run again between them
    for root, _ in list(editor.find("aten.rsqrt.default")):
        norm = _find(editor, root)
        if norm is None:
            continue
        meta = editor.metas[norm.out]
        train = (norm.x, norm.weight, norm.dims, norm.eps, norm.rounded, meta.dtype)
        call = Call("monet_like.rms_norm.default", train, (), (Ref(norm.out), Ref(norm.rstd)), True)
        writes = (norm.out, norm.rstd)
        editor.add(root, (*norm.views, call), writes, f"{VARIANT}.train", word="conv", runs="first")
        again = (norm.x, norm.weight, Ref(norm.rstd), norm.dims, norm.rounded, meta.dtype)
        call = Call("monet_like.rms_norm_apply.default", again, (), (Ref(norm.out),))
        editor.add(root, (*norm.views, call), (norm.out,), f"{VARIANT}.apply", word="conv", runs="again")
        _merge_gradients(editor, norm)


def _find(editor: Editor, root: Task) -> _Norm | None:
    """The RMS norm whose reciprocal root ``root`` is; None if other tasks read the values between its operators."""
    makers = {value: task for task in editor.tasks if task.variant == "aten" for value in task.writes}
    order = {task.name: place for place, task in enumerate(editor.tasks)}
    (rstd,) = root.writes
    tasks = [root]
    for op in ("aten.add.", "aten.mean.dim", "aten.pow.Tensor_Scalar"):
        source = tasks[0].calls[-1].args[0]
        made_by = makers.get(source.name) if editor.is_own(source) else None
        if made_by is None or len(editor.forward_readers(source.name)) != 1:
            return None
        if not made_by.calls[-1].op.startswith(op) or made_by.calls[-1].kwargs or len(made_by.writes) != 1:
            return None
        tasks.insert(0, made_by)
    square, mean, add = (task.calls[-1] for task in tasks[:3])
    eps = add.args[1]
    wide = root_of(tasks[0].calls, square.args[0])
    seen = editor.results(tasks[0].calls)[square.outs[0]] if square.outs[0] else None
    if (
        square.args[1] != 2
        or not isinstance(eps, float)
        or len(add.args) > 2
        or mean.args[2:] != (True,)
        or not seen
        or wide is None
    ):
        return None
    dims = len(mean.args[1])
    if sorted(d % len(seen.shape) for d in mean.args[1]) != list(range(len(seen.shape) - dims, len(seen.shape))):
        return None
    chain = _scaled(editor, root, wide, seen, dims)
    cast = makers.get(wide)
    views, x = tasks[0].calls[:-1], square.args[0]
    if cast is not None and cast.calls[-1].op == CAST:
        views, x = cast.calls[:-1], cast.calls[-1].args[0]
        if _dtype_of(editor, cast.calls, x) not in _HALF or seen.dtype != torch.float32:
            return None
    narrow = _dtype_of(editor, views, x)
    full = torch.float64 if narrow == torch.float64 else torch.float32
    metas = [editor.metas[value] for value in (rstd, *(chain.writes if chain else ()))]
    if chain is None or editor.metas[rstd].dtype != full or not all(meta.contiguous for meta in metas):
        return None
    weight = chain.weight
    if weight is not None:
        made_by = makers.get(int(weight.name))
        late = made_by is not None and order[made_by.name] > order[root.name]
        if late or (chain.rounded and {editor.metas[v].dtype for v in chain.normal} != {narrow, torch.float32}):
            return None
    return _Norm(
        root, tuple(views), x, wide, chain.normal, weight, chain.writes[0], rstd, dims, eps, chain.rounded
    )  # fmt: skip


@dataclass(frozen=True)
class _Scaled:
    """The tasks after the reciprocal root: the product with it, casts, and the product with the weight."""

    normal: frozenset[int]
    weight: Ref | None
    writes: tuple[int, ...]
    rounded: bool


def _scaled(editor: Editor, root: Task, wide: int, seen: TensorMeta, dims: int) -> _Scaled | None:
    """The longest chain of such tasks after a reciprocal root."""
    (rstd,) = root.writes
    readers = [task for task in editor.forward_readers(rstd) if task.calls[-1].op == MUL]
    if len(readers) != 1 or {root_of(readers[0].calls, arg) for arg in readers[0].calls[-1].args} != {wide, rstd}:
        return None
    task, normal, weight, rounded = readers[0], [readers[0].writes[0]], None, False
    while editor.metas[task.writes[0]].shape == seen.shape:
        (value,) = task.writes
        following = editor.only_reader(value)
        call = following.calls[-1] if following is not None else None
        if following is None or call is None or editor.metas[following.writes[0]].shape != seen.shape:
            break
        cast = call.op == CAST and {name for name, _ in call.kwargs} <= {"dtype", "layout", "device"}
        others = [arg for arg in call.args if arg != Ref(value)]
        meta = editor.meta_of(others[0]) if len(others) == 1 else None
        if call.op == MUL and weight is None and meta is not None and meta.shape == seen.shape[-dims:]:
            (weight,) = others
        elif not cast or (weight is None and rounded):
            break
        elif weight is None:
            normal.append(following.writes[0])
            rounded = True
        elif editor.metas[value].dtype.itemsize < editor.metas[following.writes[0]].dtype.itemsize:
            break  # a result that is widened was rounded
        task = following
        if cast and weight is not None:
            break
    if rounded and weight is None:  # the cast is of the result
        rounded, normal = False, normal[:1]
    return _Scaled(frozenset(normal), weight, task.writes, rounded)


def _dtype_of(editor: Editor, calls: Sequence[Call], operand: Any) -> torch.dtype:
    value = root_of(calls, operand)
    assert value is not None
    return editor.metas[value].dtype


# ---- gradients ----


def _merge_gradients(editor: Editor, norm: _Norm) -> None:
    """Merge the slots of a norm's gradients, if they are adjacent and no other slot reads the values between them."""
    slots = GradientSlots(editor)
    found = _gradients(editor, slots, norm)
    if found is None:
        return
    first, count = min(found.chain), len(found.chain)
    inner = {slots.made(slot) for slot in found.chain} - set(found.results)
    elsewhere = {slot for value in inner for slot in slots.readers.get(value, ())} - set(found.chain)
    if sorted(found.chain) != list(range(first, first + count)) or elsewhere or inner & slots.kept:
        return
    own = slots.ways[first : first + count]
    taken = [way.overwrites for way in own if way.overwrites is not None and way.overwrites not in inner]
    if taken and editor.metas[taken[0]].storage_bytes != editor.metas[found.results[0]].storage_bytes:
        return
    plain = editor.in_turn(own, inner, **({"overwrites": taken[0]} if taken else {}))
    plain = replace(plain, writes=found.results)  # the tensor that is overwritten becomes the first of them
    calls = [*norm.views]
    calls += [call for call in views_of(own, found.grad, found.residual) if call not in calls]
    operands = (found.grad, norm.x, norm.weight, Ref(norm.rstd), found.residual, norm.dims)
    made = (Ref("grad_x"), Ref("grad_weight") if len(found.results) > 1 else None)
    calls.append(Call("monet_like.rms_norm_backward.default", operands, (), made, True))
    for value, ref in zip(found.results, made, strict=False):
        calls.append(Call("aten.view.default", (ref, editor.metas[value].shape), (), (Ref(value),)))
    name = f"{VARIANT}.backward"
    fused = make_task(f"{plain.name}.{name}", calls, plain.writes, editor.metas, variant=name, word="conv")
    editor.merge(first, (plain, fused), count)


@dataclass(frozen=True)
class _Gradients:
    """The backward of a norm: its inputs and results.

    Attributes:
        grad: the incoming gradient.
        residual: the gradient that is added to the input's, or None.
        results: gradients of the input and, if it is wanted, of the weight.
        chain: numbers of the slots that make them.
    """

    grad: Ref
    residual: Ref | None
    results: tuple[int, ...]
    chain: list[int]


def _gradients(editor: Editor, slots: GradientSlots, norm: _Norm) -> _Gradients | None:
    """The slots of sum(g w x) * -0.5 * rstd^3 / N * 2 x + g w rstd, found from their middle, rstd^3."""
    cubes = set(_powers(editor, norm.rstd, 3))
    twice = {value for once in _powers(editor, norm.wide, 1) for value in _doubled(editor, once)}
    cubed = [slot for cube in cubes for slot in slots.readers.get(cube, ())]
    if len(cubed) != 1:
        return None
    scaled = slots.before(cubed[0], "aten.mul.Scalar")
    summed = slots.before(scaled, "aten.sum.dim_IntList")
    dot = slots.before(summed, MUL)
    mean = slots.after(cubed[0], "aten.div.Scalar")
    second = slots.after(mean, MUL)
    if scaled is None or summed is None or dot is None or mean is None or second is None:
        return None
    width = prod(editor.metas[norm.wide].shape) // max(1, prod(editor.metas[norm.rstd].shape))
    factors = slots.ways[scaled].calls[-1].args[1], slots.ways[mean].calls[-1].args[1]
    through = [v for v in slots.operands(dot) if v != norm.wide]
    if factors != (-0.5, width) or len(through) != 1 or through[0] is None or twice.isdisjoint(slots.operands(second)):
        return None
    first = slots.product(through[0], (norm.rstd,))
    if first is None:
        return None
    chain = [scaled, summed, dot, cubed[0], mean, second, first]
    joined = _joined(editor, slots, slots.made(first), slots.made(second), chain)
    if joined is None:
        return None
    residual, last = joined
    narrow = _dtype_of(editor, norm.views, norm.x)
    if editor.metas[slots.made(last)].dtype != narrow:
        cast = slots.after(last, CAST)
        if cast is None or editor.metas[slots.made(cast)].dtype != narrow:
            return None
        chain.append(cast)
        last = cast
    grad, of_weight = _incoming(editor, slots, norm, through[0], chain)
    added = slots.after(last, *_ADD) if residual is None else None
    if added is not None and added == max(chain) + 1 and _alike(editor, slots.made(added), slots.made(last)):
        residual = slots.other(added, slots.made(last))
        last = last if residual is None else added
        chain += [added] * (last == added)
    result = slots.made(last)
    if grad is None or not editor.metas[result].contiguous:
        return None
    return _Gradients(grad, residual, (result, *of_weight), chain)


def _incoming(
    editor: Editor, slots: GradientSlots, norm: _Norm, through: int, chain: list[int]
) -> tuple[Ref | None, tuple[int, ...]]:
    """Find g from g w, back through the product with the weight and casts, and from g the weight's gradient."""
    value = through
    of_weight: tuple[int, ...] = ()
    if norm.weight is not None:
        value = slots.uncast(through, chain)
        weight = int(norm.weight.name)
        slot = slots.maker(value, MUL)
        if slot is None or weight not in slots.operands(slot) or not set(slots.readers[value]) <= set(chain):
            return None, ()
        chain.append(slot)
        value = next(v for v in slots.operands(slot) if v is not None and v != weight)
        product = slots.product(value, norm.normal)
        if product is not None:
            of_weight = _weight_gradient(editor, slots, weight, product, chain)
            if not of_weight:
                return None, ()
    # A cast of the incoming gradient may stand apart; then it stays a slot of its own.
    if slots.maker(value, CAST) == min(chain) - 1:
        value = slots.uncast(value, chain)
    way = slots.ways[min(slot for slot in chain if value in slots.ways[slot].reads)]
    return next(arg for arg in way.calls[-1].args if root_of(way.calls, arg) == value), of_weight


def _weight_gradient(
    editor: Editor, slots: GradientSlots, weight: int, product: int, chain: list[int]
) -> tuple[int, ...]:
    """The weight's gradient from the product of g and the normalised rows: a sum and, in some models, a cast."""
    last = slots.after(product, "aten.sum.dim_IntList")
    if last is None:
        return ()
    chain += [product, last]
    meta = editor.metas[weight]
    if editor.metas[slots.made(last)].dtype != meta.dtype:
        last = slots.after(last, CAST)
        if last is None or editor.metas[slots.made(last)].dtype != meta.dtype:
            return ()
        chain.append(last)
    result = slots.made(last)
    return (result,) if prod(editor.metas[result].shape) == prod(meta.shape) else ()


def _joined(
    editor: Editor, slots: GradientSlots, first: int, second: int, chain: list[int]
) -> tuple[Ref | None, int] | None:
    """The slot that adds both parts of the input's gradient, and another gradient that is added before."""
    residual: Ref | None = None
    for _ in range(2):
        slot = slots.next(first, *_ADD)
        other = None if slot is None else slots.other(slot, first)
        if slot is None or other is None or not _alike(editor, slots.made(slot), first):
            return None
        chain.append(slot)
        if root_of(slots.ways[slot].calls, other) == second:
            return residual, slot
        residual, first = other, slots.made(slot)
    return None


def _alike(editor: Editor, one: int, other: int) -> bool:
    """Whether two values have the same shape; a sum can have a view as its operand."""
    return editor.metas[one].shape == editor.metas[other].shape


def _powers(editor: Editor, value: int, exponent: int) -> list[int]:
    """The powers of a value that forward tasks compute for the backward."""
    return [
        task.writes[0]
        for task in editor.forward_readers(value)
        if task.calls[-1].op == "aten.pow.Tensor_Scalar" and task.calls[-1].args[1] == exponent
    ]


def _doubled(editor: Editor, value: int) -> list[int]:
    return [
        task.writes[0]
        for task in editor.forward_readers(value)
        if task.calls[-1].op == "aten.mul.Scalar" and task.calls[-1].args[1] == 2
    ]
