"""DropIT: the weight gradient of a layer from the largest elements of the layer's input.

DropIT (Chen et al., ICLR 2023) keeps only the elements of largest magnitude for the backward. Here they are chosen in
blocks of 16,384 in memory order, so that a block stays in the cache while it is searched. The place of each element is
stored as a bit, or in 16 bits where fewer than a 16th are kept.

The word ``dropit<share>`` admits it. The forward is exact; the weight gradient takes dropped elements as zeros; the
gradients of the layer's input and bias are exact. It is one more way of the weight's slot, which the planner leaves if
the input is kept for another operator anyway or is cheap to recompute. The product of a linear layer uses only the
elements that are kept, or, like a convolution, a temporary tensor with zeros. If the mode also has ``lowp8``, there is
a second cache, whose elements have 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..ir.mode import dropit_share, dropit_word
from ..ir.program import Call, Ref, Task
from ..ops.caches import LARGEST_BLOCK, int8_bytes, kept_of_block, largest_bytes, largest_kept
from .editor import Editor, like, root_of, views_of, with_names

_BACKWARD = "aten.convolution_backward.default"
#: Operators that may stand between the gradient of a weight and that of the parameter: autocast's casts, sums of shared
#: weights.
_HANDED_ON = frozenset({"aten._to_copy.default", "aten.add.Tensor", "aten.add_.Tensor", "aten.clone.default"})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def offer(editor: Editor) -> None:
    """Offer dropped inputs for the weight gradients of linear layers (and Hugging Face's Conv1D) and convolutions."""
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
        calls = [with_names(call, {Ref(x): dropped}) for call in way.calls]
        product = _product(editor, way, x)
        for cache in caches[x]:
            if product is not None:
                (*views, mm) = product
                direct = replace(mm, args=(mm.args[0], cache.packed, keep, *mm.args[1:]))
                editor.add_way(slot, (*cache.calls, *views, direct), f"{cache.variant}.product", word=word)
            size = (cache.packed, keep, meta.shape, meta.dtype, meta.stride)
            unpack = Call("monet_like.unpack_largest.default", size, (), (dropped,))
            editor.add_way(slot, (*cache.calls, unpack, *calls), cache.variant, word=word)


@dataclass(frozen=True)
class _Cache:
    """A cache of the largest elements of a layer's input.

    Attributes:
        variant: the name of the slot's way that reads it.
        calls: the calls that make ``packed`` from the values that are kept.
        packed: the result of `pack_largest`.
    """

    variant: str
    calls: tuple[Call, ...]
    packed: Ref


def _caches(editor: Editor, x: int, keep: int, word: str) -> Iterator[_Cache]:
    """Add caches of the largest elements of ``x``: as they are and, with ``lowp8``, in 8 bits, as other values there.

    They are made in the forward only, because recomputed values may be inexact.
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
    """The calls that multiply the incoming gradient with the kept elements of ``x``; the cache is inserted later.

    None unless ``x`` is the whole of one operand of the product, row by row.
    """
    mm = way.calls[-1]
    if mm.op != "aten.mm.default":
        return None
    place = next(i for i, operand in enumerate(mm.args) if root_of(way.calls, operand) == x)
    meta, seen = editor.metas[x], editor.seen(way.calls, mm.args[place])
    rows, columns = seen.shape if place else seen.shape[::-1]
    if seen.stride != ((columns, 1) if place else (1, columns)) or seen.offset:
        return None
    if rows * columns * meta.dtype.itemsize != meta.storage_bytes:
        return None
    grad = mm.args[1 - place]
    views = views_of([way], grad)
    if place and views and views[-1].op == "aten.t.default":
        grad = views.pop().args[0]
    elif place:
        views.append(Call("aten.t.default", (grad,), (), (Ref("grad"),)))
        grad = Ref("grad")
    return (*views, Call("monet_like.mm_largest.default", (grad, columns, place == 0), (), mm.outs))


def _layer_input(editor: Editor, way: Task) -> int | None:
    """The forward value from which a weight gradient is computed, if it can be dropped; else None."""
    call = way.calls[-1]
    if call.op == "aten.mm.default":
        operands = call.args
    elif call.op == _BACKWARD and not call.args[-1][0]:
        operands = call.args[:2]
    else:
        return None
    roots = [root for operand in operands if (root := root_of(way.calls, operand)) is not None]
    forward, backward = ([v for v in roots if editor.values[v].kind == kind] for kind in ("forward", "backward"))
    if len(forward) != 1 or len(backward) != 1:
        return None
    (x,) = forward
    plain = editor.metas[x].dtype in _FLOATS and editor.dense(x) and x not in editor.captured.program.outputs
    return x if plain and editor.maker(x) is not None and not editor.of_parameters(x) else None


def _owners(editor: Editor) -> dict[int, set[int]]:
    """The parameters of every gradient that is one of a parameter, or is added to one."""
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
