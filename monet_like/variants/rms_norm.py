"""Fused RMS norm: forward in one pass, recomputation from its saved statistic, gradients in one slot.

PyTorch traces RMS norm operator by operator: square, mean, addition, reciprocal root, two products, and casts in 16
bits; its gradient has a dozen slots. The fused forward reads the input and writes the result and one number for each
row. The fused backward reads the input, these numbers and the incoming gradient. The normalised rows, twice the input
and their float32 copies are never made. A residual gradient that is added to the input's is added in the same pass.

It recognises torch.nn.RMSNorm and the norms of Hugging Face's models, with their casts, with or without a weight. Sums
are taken in another order and agree up to rounding: ``conv`` admits it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..ir.program import Call, Ref, Task
from .calls import HALF
from .editor import Editor, views_of
from .patterns import ANY, CAST, Input, Match, Operators, record, root_of_view

VARIANT = "rms_norm"
#: Dtypes of weights and results, the narrowest first.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    dims: int,
    rounded: bool,
    dtype: Any = None,
    reader: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm over the last ``dims`` dimensions, of ``dtype``.

    ``rounded``: to the dtype of ``x`` before the product with the weight; ``reader``: there is an earlier or later
    reader of ``x``, whose gradient is added.
    """
    earlier = x.view_as(x) if reader == "earlier" else None
    wide = x.float() if x.dtype in HALF else x
    y = wide * torch.rsqrt(wide.pow(2).mean(tuple(range(-dims, 0)), keepdim=True) + eps)
    y = y.to(x.dtype) if rounded else y
    y = y if weight is None else y * weight
    y = y if dtype is None else y.to(dtype)
    return (y, x.view_as(x) if earlier is None else earlier) if reader else y


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, fused forward, recomputation and backward; gradients become one slot, PyTorch's or fused."""
    if "conv" not in editor.words:
        return  # apart, PyTorch's operators need less memory: something may be run again between them
    operators = Operators(editor)
    merges: list[tuple[int, int, tuple[Task, Task]]] = []
    for root, _ in list(editor.find("aten.rsqrt.default")):
        for inputs, options in _forms(operators, root):
            found = operators.match(record(norm, inputs, "rsqrt", eps=ANY, **options), root)
            if found is not None and operators.alone(found) and _is_usable(editor, root, found):
                _add(editor, root, found, **options)
                merges += _merged(operators, root, inputs, options)
                break
    editor.merge_all(merges)


def _forms(operators: Operators, root: Task) -> Iterator[tuple[tuple[Input, ...], dict[str, Any]]]:
    """The norms of which ``root`` may be the reciprocal root: their inputs and options, the longest first."""
    chain = operators.before(root, "add", "mean", "pow")
    if not chain or len(chain[1].args) < 2:
        return
    (x, _), dims = chain[2].args, len(chain[1].args[1])
    cast = operators.maker(x.value, CAST)
    narrow = wide = x.dtype
    if cast is not None and cast.args[0].dtype in HALF:
        narrow = cast.args[0].dtype
    for weight in (*_FLOATS, None):
        for rounded in (True, False) if weight is not None and narrow != wide else (False,):
            own = narrow if rounded else wide
            own = own if weight is None else torch.promote_types(own, weight)
            inputs = (("x", x.shape, narrow), *([] if weight is None else [("weight", x.shape[-dims:], weight)]))
            for dtype in (*(d for d in _FLOATS if d != own and d.itemsize <= own.itemsize), None):
                yield inputs, {"dims": dims, "rounded": rounded, "dtype": dtype}


def _is_usable(editor: Editor, root: Task, found: Match) -> bool:
    """Whether results lie in rows, and the weight is there when ``root`` has run."""
    maker = editor.maker(root_of_view(found.values["weight"])) if "weight" in found.values else None
    late = maker is not None and editor.tasks.index(maker) > editor.tasks.index(root)
    return not late and all(editor.metas[value].contiguous for value in (root.writes[0], found.results[0]))


def _add(editor: Editor, root: Task, found: Match, *, dims: int, rounded: bool, **_: Any) -> None:
    """Add the fused forward and the recomputation from the statistic."""
    x, weight, out, rstd = found.refs["x"], found.refs.get("weight"), Ref(found.results[0]), Ref(root.writes[0])
    views, dtype = views_of(found.tasks, x), editor.metas[found.results[0]].dtype
    train = Call(
        "monet_like.rms_norm.default", (x, weight, dims, found.values[ANY], rounded, dtype), (), (out, rstd), True
    )
    editor.add(root, (*views, train), (found.results[0], *root.writes), f"{VARIANT}.train", word="conv", runs="first")
    apply = Call("monet_like.rms_norm_apply.default", (x, weight, rstd, dims, rounded, dtype), (), (out,))
    editor.add(root, (*views, apply), found.results, f"{VARIANT}.apply", word="conv", runs="again")


def _merged(
    operators: Operators, root: Task, inputs: tuple[Input, ...], options: dict[str, Any]
) -> list[tuple[int, int, tuple[Task, Task]]]:
    """First and number of the slots of a norm's gradients, and the ways of one for all, if nothing else reads what is
    between.
    """
    names, metas = tuple(name for name, *_ in inputs), operators.editor.metas
    for reader, of in product(("later", "earlier", ""), dict.fromkeys((names, ("x",)))):
        pattern = record(norm, inputs, "rsqrt", of=of, eps=ANY, **(options | {"dtype": None, "reader": reader}))
        found = operators.match(pattern, root)
        if found is None:
            continue
        (grad, slots), results = operators.with_casts(found, "grad0"), found.gradients
        plain = operators.in_turn(slots, results)
        if plain is None or not metas[results[0]].contiguous:
            continue
        x, weight, residual = (found.refs.get(name) for name in ("x", "weight", "grad1"))
        views = (*views_of(found.tasks, x), *views_of([operators.ways[slot] for slot in slots], grad, residual))
        made = (Ref("grad_x"), Ref("grad_weight") if len(results) > 1 else None)
        operands = (grad, x, weight, Ref(root.writes[0]), residual, options["dims"])
        calls = [*dict.fromkeys(views), Call("monet_like.rms_norm_backward.default", operands, (), made, True)]
        for value, ref in zip(results, made, strict=False):
            calls.append(Call("aten.view.default", (ref, metas[value].shape), (), (Ref(value),)))
        fused = operators.editor.beside(plain, calls, f"{VARIANT}.backward", word="conv")
        return [(slots[0], len(slots), (plain, fused))]
    return []
