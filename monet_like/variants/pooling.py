"""Pooling whose gradients need only the shape of the input, and max pooling with positions in one byte or half a byte.

PyTorch keeps the input, and an int64 for each position.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..ir.program import Call, Ref, Task
from ..ops.max_pool import pair
from .calls import Calls
from .editor import Editor, like


def offer(editor: Editor) -> None:
    """Offer ways for the gradients of max pooling and of adaptive average pooling."""
    _shape_only(editor, "aten.max_pool2d_with_indices_backward.default", 1)
    _shape_only(editor, "aten._adaptive_avg_pool2d_backward.default", 1)
    _offsets(editor)


def _shape_only(editor: Editor, op: str, position: int) -> None:
    """Add a way with one expanded number for the pool's input, of which PyTorch's gradient reads only the shape."""
    for slot, way, call in list(editor.find_slots(op)):
        source = call.args[position]
        if not editor.is_own(source) or not editor.metas[source.name].contiguous:
            continue
        calls = Calls(way.calls[:-1])
        one = calls.one_number(editor.metas[source.name])
        calls.append(replace(call, args=tuple(one if arg == source else arg for arg in call.args)))
        editor.add_way(slot, calls, "pool.shape_only")


def _offsets(editor: Editor) -> None:
    """Add, for ``newnode``, a forward that writes the offset of each maximum in its window as a byte."""
    makers = {task.writes: (task, call) for task, call in editor.find("aten.max_pool2d_with_indices.default")}
    by_indices = {writes[1]: made for writes, made in makers.items() if len(writes) == 2}
    for slot, way, call in list(editor.find_slots("aten.max_pool2d_with_indices_backward.default")):
        grad, _, kernel, stride, padding, dilation, ceil_mode, indices = call.args
        if not isinstance(indices, Ref) or indices.name not in by_indices:
            continue
        task, forward = by_indices[indices.name]
        source = forward.args[0]
        kernel, stride, padding, dilation = (pair(v) for v in (kernel, stride or kernel, padding, dilation))
        out = task.writes[0]
        if math.prod(kernel) > 256 or len(editor.metas[out].shape) != 4:
            continue
        offsets = editor.value(f"{task.name}.offsets", "forward", like(editor.metas[out], dtype=torch.uint8))
        window, results = (kernel, stride, padding, dilation), (Ref(out), Ref(offsets))
        pool = Call("monet_like.max_pool2d_with_offsets.default", (source, *window, ceil_mode), (), results, True)
        editor.add(task, (pool,), (out, offsets), "pool.offsets", word="newnode")
        size = editor.metas[source.name].shape if isinstance(source.name, int) else None
        if size is None:
            continue
        args = (grad, Ref(offsets), size, *window)
        unpack = Call("monet_like.max_pool2d_offsets_backward.default", args, (), call.outs)
        editor.add_way(slot, (*way.calls[:-1], unpack), "pool.offsets", word="newnode")
        if math.prod(kernel) <= 16:
            _half_bytes(editor, task, slot, offsets, unpack, way.calls[:-1])


def _half_bytes(editor: Editor, task: Task, slot: int, offsets: int, gradient: Call, views: tuple[Call, ...]) -> None:
    """Add offsets of windows of at most 16 elements, packed two to the byte."""
    meta = editor.metas[offsets]
    half = editor.value(f"{task.name}.half_bytes", "forward", like(meta, shape=(-(-meta.storage_bytes // 2),)))
    pack = Call("monet_like.pack_nibbles.default", (Ref(offsets),), (), (Ref(half),))
    editor.add(task, (pack,), (half,), "pool.pack", word="newnode")
    split = Call("monet_like.unpack_nibbles.default", (Ref(half), meta.shape, meta.stride), (), (Ref("positions"),))
    args = tuple(Ref("positions") if arg == Ref(offsets) else arg for arg in gradient.args)
    editor.add_way(slot, (*views, split, replace(gradient, args=args)), "pool.packed", word="newnode")
