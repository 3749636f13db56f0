"""Dropout whose noise is kept in one bit per element: recomputation unpacks the bits instead of drawing new numbers."""

from __future__ import annotations

from ..ir.program import Call, Ref
from .editor import Editor


def offer(editor: Editor) -> None:
    """Offer, for ``newnode``, to draw the noise of a dropout (0 or 1 / (1 - p)) and pack it, and to unpack it again."""
    for task in editor.tasks:
        draw = next((call for call in task.calls if call.op == "aten.bernoulli_.float"), None)
        if draw is None or task.calls[-1].op != "aten.div_.Scalar" or task.runs != "first" or task.variant != "aten":
            continue
        noise, keep = draw.args
        meta = editor.metas[noise.name]
        if not editor.dense(noise.name):
            continue
        bits = editor.bits(task.name, noise.name)
        pack = Call("monet_like.pack_sign.default", (noise,), (), (Ref(bits),))
        editor.add(task, (*task.calls, pack), (*task.writes, bits), "dropout.pack", word="newnode", runs="first")
        # The same division as in the forward, so that the scale rounds the same way.
        unpack = (
            Call("monet_like.unpack_bool.default", (Ref(bits), meta.shape, meta.stride), (), (Ref("mask"),)),
            Call("aten._to_copy.default", (Ref("mask"),), (("dtype", meta.dtype),), (noise,)),
            Call("aten.div_.Scalar", (noise, keep), (), ()),
        )
        editor.add(task, unpack, (noise.name,), "dropout.unpack", word="newnode", runs="again")
