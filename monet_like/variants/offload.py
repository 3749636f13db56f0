"""Offloading: values that the backward reads are copied to the host in the forward and fetched back, exact to the bit.

The word ``offload`` admits it. A copy takes bytes of the host (`Value.host_bytes`). The step waits for ``offload.send``
and ``offload.fetch``. The other copies run beside the step: ``send_start`` begins a copy that ends with one of several
``sent<n>``, which stand n forward tasks after the task that makes the value and hold the value until then;
``fetch_start`` begins a copy that becomes the value with ``fetched``, at best several slots later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..capture.captured import cost_key
from ..ir.mode import OFFLOAD
from ..ir.program import Call, Ref, Task
from .editor import Editor, like

#: Smaller values are not worth a copy: a page.
LEAST_BYTES = 4096
#: Tasks of the forward between a value's maker and the places where its copy may end.
DISTANCES = (2, 4, 8, 16, 32, 64, 128)


def offer(editor: Editor) -> None:
    """Offer, for ``offload``, copies of values of a page or more that slots read; not of outputs or cast parameters."""
    if OFFLOAD not in editor.words:
        return
    places = {task.name: place for place, task in enumerate(editor.tasks)}
    for value, maker in _read_later(editor):
        meta, name = editor.metas[value], editor.values[value].name
        flat = like(meta, dtype=torch.uint8, shape=(meta.storage_bytes,), device=torch.device("cpu"))
        sending = editor.value(f"{name}.sending", "forward", flat, on_host=True)
        copy = editor.value(f"{name}.host", "forward", flat, on_host=True)
        landing = editor.value(f"{name}.landing", "forward", meta)
        shape = (Ref(copy), meta.shape, meta.stride, meta.dtype, meta.device)

        fetch = Call("monet_like.fetch", shape, (), (Ref(value),))
        start = Call("monet_like.fetch_start", shape, (), (Ref(landing),))
        end = Call("monet_like.fetch_end", (Ref(landing),), (), (Ref(value),))
        price = cost_key((fetch,), editor.metas)  # a copy takes as long whoever waits for it
        options: dict[str, Any] = {"word": OFFLOAD, "runs": "again"}
        editor.add(maker, (start,), (landing,), "offload.fetch_start", copies="start", cost=price, **options)
        editor.add(maker, (end,), (value,), "offload.fetched", copies="end", cost="", overwrites=landing, **options)
        editor.add(maker, (fetch,), (value,), "offload.fetch", copies="whole", **options)

        send = Call("monet_like.send", (Ref(value),), (), (Ref(copy),))
        start = Call("monet_like.send_start", (Ref(value),), (), (Ref(sending),))
        end = Call("monet_like.send_end", (Ref(value), Ref(sending)), (), (Ref(copy),))
        price = cost_key((send,), editor.metas)
        options = {"word": OFFLOAD, "runs": "first"}
        editor.add(maker, (send,), (copy,), "offload.send", copies="whole", **options)
        editor.add(maker, (start,), (sending,), "offload.send_start", copies="start", cost=price, **options)
        for distance in DISTANCES:
            place = places[maker.name] + distance
            if place < len(editor.tasks):
                where: dict[str, Any] = {"before": editor.tasks[place], "overwrites": sending, **options}
                editor.add(maker, (end,), (copy,), f"offload.sent{distance}", copies="end", cost="", **where)


def _read_later(editor: Editor) -> Iterator[tuple[int, Task]]:
    """The values that slots read and that are large enough to copy, each with PyTorch's own task that makes it."""
    for value, maker in editor.read_later():
        if maker.runs != "again" and editor.values[value].bytes >= LEAST_BYTES:
            yield value, maker
