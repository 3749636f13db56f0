"""Dropped caches: a weight's gradient from the largest elements of what its layer read.

DropIT (Chen et al., ICLR 2023) keeps for the backward only the elements of largest magnitude. Here they are chosen in
blocks of 16,384 in memory order, so that a block is in the cache while it is searched, and each has its place there as
a bit, or 16 bits where fewer than a 16th are kept.

``dropit<share>`` admits it. The forward is exact; the weight's gradient takes the dropped elements for zeros, those of
the layer's input and bias are exact. The cache is one more way of the weight's slot: where the layer's input is kept for
another operator anyhow, or costs less to make again, the planner has no use for it. The product of a linear layer is
made of the kept elements alone, or, as a convolution's, of a temporary tensor with zeros in it. With ``lowp8`` in the
mode too there is a second cache, whose elements are in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ir.mode import dropit_share, dropit_word
from ..ir.program import Call, Ref, Task
from ..ops.caches import LARGEST_BLOCK, int8_bytes, largest_bytes, largest_kept
from .editor import Editor, like, renamed

_BACKWARD = "aten.convolution_backward.default"
#: What may stand between a weight's gradient and the parameter's: autocast's casts, and sums where a weight is shared.
_HANDED_ON = frozenset({"aten._to_copy.default", "aten.add.Tensor", "aten.add_.Tensor", "aten.clone.default"})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def offer(editor: Editor) -> None:
    """dropit: for the weights of linear layers (and Hugging Face's Conv1D) and convolutions."""
    word = dropit_word(editor.words)
    keep = LARGEST_BLOCK if word is None else kept_of_block(dropit_share(word))
    if word is None or keep == LARGEST_BLOCK:
        return
    owners = _owners(editor)
    caches: dict[int, tuple[_Cache, ...]] = {}
    for slot, ways in enumerate(editor.slots):
        way = ways[0]
        x = _layer_input(editor, way)
        wanted = {parameter for value in way.writes for parameter in owners.get(value, ())}
        if x is None or not wanted or wanted & editor.captured.no_dropit:
            continue
        if x not in caches:
            caches[x] = tuple(_caches(editor, x, keep, word))
        meta, dropped = editor.metas[x], Ref("dropped")
        calls = [replace(call, args=renamed(call.args, {Ref(x): dropped})) for call in way.calls]
        product = _product(editor, way, x)
        for cache in caches[x]:
            if product is not None:
                (*views, mm) = product
                direct = replace(mm, args=(mm.args[0], cache.packed, keep, *mm.args[1:]))
                editor.add_way(slot, (*cache.calls, *views, direct), f"{cache.variant}.product", word=word)
            size = (cache.packed, keep, meta.shape, meta.dtype, meta.stride)
            unpack = Call("monet_like.unpack_largest.default", size, (), (dropped,))
            editor.add_way(slot, (*cache.calls, unpack, *calls), cache.variant, word=word)


def kept_of_block(share: float) -> int:
    """How many elements of a whole block stay where ``share`` of them is dropped; at least one."""
    return max(1, LARGEST_BLOCK - round(share * LARGEST_BLOCK))


@dataclass(frozen=True)
class _Cache:
    """The largest elements of a layer's input, kept in some way.

    Attributes:
        variant: of the slot's way that reads it.
        calls: from what is kept to ``packed``.
        packed: as `pack_largest` makes it.
    """

    variant: str
    calls: tuple[Call, ...]
    packed: Ref


def _caches(editor: Editor, x: int, keep: int, word: str) -> Iterator[_Cache]:
    """The largest elements of ``x`` as they are; with ``lowp8`` also in 8 bits, as all other values are there.

    Made in the forward: what runs again may be inexact.
    """
    maker, meta = editor.maker(x), editor.metas[x]
    assert maker is not None
    elements, itemsize = meta.storage_bytes // meta.dtype.itemsize, meta.dtype.itemsize
    size, kept = largest_bytes(elements, keep, itemsize), largest_kept(elements, keep)

    def cache(name: str, count: int) -> Ref:
        flat = like(meta, dtype=torch.uint8, shape=(count,))
        return Ref(editor.value(f"{editor.values[x].name}.largest{name}", "forward", flat))

    def pack(into: Ref) -> Call:
        return Call("monet_like.pack_largest.default", (Ref(x), keep), (), (into,))

    whole = cache("", size)
    editor.add(maker, (pack(whole),), (int(whole.name),), "dropit.pack", word=word, runs="first")
    yield _Cache("dropit", (), whole)
    if "lowp8" not in editor.words:
        return
    values, index = cache(".int8", int8_bytes(kept)), cache(".index", size - kept * itemsize)
    largest, part, typed = Ref("largest"), Ref("part"), Ref("typed")
    calls = (
        pack(largest),
        Call("aten.slice.Tensor", (largest, 0, kept * itemsize, size), (), (part,)),
        Call("aten.clone.default", (part,), (), (index,)),
        Call("aten.slice.Tensor", (largest, 0, 0, kept * itemsize), (), (part,)),
        Call("aten.view.dtype", (part, meta.dtype), (), (typed,)),
        Call("monet_like.pack_int8.default", (typed,), (), (values,)),
    )
    written = (int(values.name), int(index.name))
    editor.add(maker, calls, written, "dropit.int8.pack", word=word, runs="first")
    restore = (
        Call("monet_like.unpack_int8.default", (values, (kept,), meta.dtype, (1,)), (), (typed,)),
        Call("aten.view.dtype", (typed, torch.uint8), (), (part,)),
        Call("aten.cat.default", ((part, index),), (), (largest,)),
    )
    yield _Cache("dropit.int8", restore, largest)


def _product(editor: Editor, way: Task, x: int) -> tuple[Call, ...] | None:
    """The calls that multiply the incoming gradient with the kept elements of ``x``, whose cache is still to be named.

    None unless ``x`` is all of one operand of a product, row by row.
    """
    mm = way.calls[-1]
    if mm.op != "aten.mm.default":
        return None
    place = next(i for i, operand in enumerate(mm.args) if _root(way.calls, operand) == x)
    meta, made = editor.metas[x], editor.results(way.calls)
    seen = made.get(mm.args[place], meta)
    rows, columns = seen.shape if place else seen.shape[::-1]
    if seen.stride != ((columns, 1) if place else (1, columns)) or seen.offset:
        return None
    if rows * columns * meta.dtype.itemsize != meta.storage_bytes:
        return None
    grad = mm.args[1 - place]
    makers = {call.outs[0]: call for call in way.calls}
    views: list[Call] = []
    while not isinstance(grad.name, int):
        views.insert(0, makers[grad])
        grad = views[0].args[0]
    grad = mm.args[1 - place]
    if place and views and views[-1].op == "aten.t.default":
        grad = views.pop().args[0]
    elif place:
        views.append(Call("aten.t.default", (grad,), (), (Ref("grad"),)))
        grad = Ref("grad")
    return (*views, Call("monet_like.mm_largest.default", (grad, columns, place == 0), (), mm.outs))


def _layer_input(editor: Editor, way: Task) -> int | None:
    """The forward value that a weight's gradient is made from beside the incoming one, if it can be dropped."""
    call = way.calls[-1]
    if call.op == "aten.mm.default":
        operands = call.args
    elif call.op == _BACKWARD and not call.args[-1][0]:
        operands = call.args[:2]
    else:
        return None
    roots = [_root(way.calls, operand) for operand in operands]
    forward, backward = ([v for v in roots if editor.values[v].kind == kind] for kind in ("forward", "backward"))
    if len(forward) != 1 or len(backward) != 1:
        return None
    (x,) = forward
    plain = editor.metas[x].dtype in _FLOATS and editor.dense(x) and x not in editor.captured.program.outputs
    return x if plain and editor.maker(x) is not None and not editor.of_parameters(x) else None


def _root(calls: Sequence[Call], operand: Any) -> int:
    """The value that an operand is, or is a view of."""
    makers = {call.outs[0]: call for call in calls}
    while not isinstance(operand.name, int):
        operand = makers[operand].args[0]
    return int(operand.name)


def _owners(editor: Editor) -> dict[int, set[int]]:
    """For every gradient that becomes a parameter's, alone or in a sum, the parameters' values."""
    captured = editor.captured
    found: dict[int, set[int]] = {}
    for index, gradient in captured.parameter_gradients:
        found.setdefault(gradient.value, set()).add(captured.parameters[index][1])
    for ways in reversed(editor.slots):
        owners = set().union(*(found.get(value, set()) for value in ways[0].writes))
        if owners and ways[0].calls[-1].op in _HANDED_ON:
            for value in ways[0].reads:
                if editor.values[value].kind == "backward":
                    found.setdefault(value, set()).update(owners)
    return found
