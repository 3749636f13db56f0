"""Dropped caches: a weight's gradient from the largest elements of what its layer read.

DropIT (Chen et al., ICLR 2023) keeps for the backward only the elements of largest magnitude. Here they are chosen in
blocks of 16,384 in memory order, so that a block is in the cache while it is searched, and each has its place there as
a bit, or 16 bits where fewer than a 16th are kept.

``dropit<share>`` admits it. The forward is exact; the weight's gradient takes the dropped elements for zeros, those of
the layer's input and bias are exact. The cache is one more way of the weight's slot: where the layer's input is kept for
another operator anyhow, or costs less to make again, the planner has no use for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..kernels.reference import LARGEST_BLOCK, largest_bytes
from ..mode import dropit_share, dropit_word
from ..program import Call, Ref, Task
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
    caches: dict[int, Ref] = {}
    for slot, ways in enumerate(editor.slots):
        way = ways[0]
        x = _layer_input(editor, way)
        wanted = {parameter for value in way.writes for parameter in owners.get(value, ())}
        if x is None or not wanted or wanted & editor.captured.no_dropit:
            continue
        if x not in caches:
            caches[x] = _cache(editor, x, keep, word)
        meta, dropped = editor.metas[x], Ref("dropped")
        size = (caches[x], keep, meta.shape, meta.dtype, meta.stride)
        unpack = Call("monet_like.unpack_largest.default", size, (), (dropped,))
        calls = [replace(call, args=renamed(call.args, {Ref(x): dropped})) for call in way.calls]
        editor.add_way(slot, (unpack, *calls), "dropit", word=word)


def kept_of_block(share: float) -> int:
    """How many elements of a whole block stay where ``share`` of them is dropped; at least one."""
    return max(1, LARGEST_BLOCK - round(share * LARGEST_BLOCK))


def _cache(editor: Editor, x: int, keep: int, word: str) -> Ref:
    """A value that holds the largest elements of ``x``, made in the forward: what runs again may be inexact."""
    maker, meta = editor.maker(x), editor.metas[x]
    assert maker is not None
    elements = meta.storage_bytes // meta.dtype.itemsize
    size = largest_bytes(elements, keep, meta.dtype.itemsize)
    cache = editor.value(f"{editor.values[x].name}.largest", "forward", like(meta, dtype=torch.uint8, shape=(size,)))
    pack = Call("monet_like.pack_largest.default", (Ref(x), keep), (), (Ref(cache),))
    editor.add(maker, (pack,), (cache,), "dropit.pack", word=word, runs="first")
    return Ref(cache)


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
