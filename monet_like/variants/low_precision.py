"""Saved tensors kept in fewer bits: in bfloat16, or in 8 bits with a scale for every 256 elements.

The words ``lowp16`` and ``lowp8`` admit it. The forward copies the exact value into the smaller type; in the backward,
and only there, a task restores the value from its copy. So outputs, loss and buffers are exact: the forward never reads
a restored value, and no restored value is copied again. In the backward gradients and recomputed tasks may read it;
values recomputed from it are as inexact as the restored value.

Left out are statistics and other second results, which are small and enter every element; the noise of dropout, which
has one bit; and casts of parameters, which are cheaper to recompute.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ir.program import Call, Ref, Task
from ..ops.caches import int8_bytes
from .editor import Editor, like

_CAST = "aten._to_copy.default"


def offer(editor: Editor) -> None:
    """Offer copies in fewer bits: for ``lowp16`` of float32 values, for ``lowp8`` of all floating-point values."""
    if "lowp16" in editor.words:
        for value, maker in _cached(editor, torch.float32):
            meta = editor.metas[value]
            copy = editor.value(f"{editor.values[value].name}.bfloat16", "forward", like(meta, dtype=torch.bfloat16))
            pack = Call(_CAST, (Ref(value),), (("dtype", torch.bfloat16),), (Ref(copy),))
            restore = Call(_CAST, (Ref(copy),), (("dtype", meta.dtype),), (Ref(value),))
            _add(editor, maker, pack, restore, "lowp16")
    if "lowp8" in editor.words:
        for value, maker in _cached(editor, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            meta = editor.metas[value]
            flat = like(meta, dtype=torch.uint8, shape=(int8_bytes(meta.storage_bytes // meta.dtype.itemsize),))
            copy = editor.value(f"{editor.values[value].name}.int8", "forward", flat)
            pack = Call("monet_like.pack_int8.default", (Ref(value),), (), (Ref(copy),))
            wanted = (Ref(copy), meta.shape, meta.dtype, meta.stride)
            restore = Call("monet_like.unpack_int8.default", wanted, (), (Ref(value),))
            _add(editor, maker, pack, restore, "lowp8")


def _add(editor: Editor, maker: Task, pack: Call, restore: Call, word: str) -> None:
    for call, name, runs in ((restore, "restore", "again"), (pack, "pack", "first")):
        written = [out.name for out in call.outs if out is not None and isinstance(out.name, int)]
        editor.add(maker, (call,), written, f"{word}.{name}", word=word, runs=runs)


def _cached(editor: Editor, *dtypes: torch.dtype) -> Iterator[tuple[int, Task]]:
    """The values that slots read and that may be inexact there, each with PyTorch's own task that makes it."""
    for value, maker in editor.read_later():
        if editor.metas[value].dtype in dtypes and not any("bernoulli" in call.op for call in maker.calls):
            yield value, maker
