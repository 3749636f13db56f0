"""An operator variant of one's own: softshrink's gradient from its output, or from one bit for each element.

python examples/custom_variant.py [--budget 60%]
"""

from __future__ import annotations

import copy

import click
import torch
from torch import nn

import monet_like
from monet_like.ir.program import Call, Ref
from monet_like.variants import unregister_variant
from monet_like.variants.editor import Editor, like


@monet_like.register_variant
def offer_softshrink(editor: Editor) -> None:
    """PyTorch keeps softshrink's input x for ``grad where |x| > lambda, else 0``: exactly where its output is not 0."""
    makers = {call.args[0]: (task, call) for task, call in editor.find("aten.softshrink.default")}
    for slot, way, call in list(editor.find_slots("aten.softshrink_backward.default")):
        grad, source, _ = call.args
        if source not in makers or not editor.is_own(source):
            continue  # the gradient reads a view of the input, or an input made some other way
        task, forward = makers[source]
        (out,) = forward.outs
        views = way.calls[:-1]  # what comes before an operator in its slot are views of its arguments

        # One more way to do the slot: PyTorch's own operator, on the output, with lambda = 0.
        from_output = Call(call.op, (grad, out, 0.0), (), call.outs)
        editor.add_way(slot, (*views, from_output), "softshrink.from_output", word="multiway")

        # One more forward task, which packs the bits, and a way that reads them. Both kernels exist.
        if editor.dense(out.name):
            meta = editor.metas[out.name]
            elements = meta.storage_bytes // meta.dtype.itemsize
            packed = like(meta, dtype=torch.uint8, shape=(-(-elements // 8),))
            bits, nonzero = Ref(editor.value(f"{task.name}.bits", "forward", packed)), Ref("nonzero")
            pack = (
                Call("aten.ne.Scalar", (out, 0), (), (nonzero,)),
                Call("monet_like.pack_bool.default", (nonzero,), (), (bits,)),
            )
            editor.add(task, pack, (bits.name,), "softshrink.pack", word="newnode")
            unpack = Call("monet_like.keep_where.default", (grad, bits, meta.stride), (), call.outs)
            editor.add_way(slot, (*views, unpack), "softshrink.packed", word="newnode")


def make_model() -> nn.Module:
    """A sparse encoder: convolutions and soft thresholds."""
    layers = [
        layer
        for inputs, outputs in ((3, 16), (16, 16), (16, 16), (16, 16))
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.Softshrink(0.05))
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


@click.command()
@click.option("--budget", default="60%", show_default=True, help="Of plain PyTorch's peak, or such as 20 MB.")
def main(budget: str) -> None:
    """Plan the encoder with the variant and without it, and compare its gradients with plain PyTorch's."""
    torch.manual_seed(0)
    plain, images = make_model(), torch.randn(32, 3, 32, 32)
    plain(images).square().sum().backward()
    for name in ("with", "without"):
        if name == "without":
            unregister_variant("softshrink")
        model = copy.deepcopy(plain)
        model.zero_grad()
        mode = "inplace_multiway_newnode"  # conv would round differently
        scheduled = monet_like.auto_schedule(model, images, memory_budget=budget, mode=mode, time_limit_seconds=10.0)
        scheduled(images).square().sum().backward()
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        equal = all(torch.equal(one.grad, other.grad) for one, other in pairs)
        record = scheduled.record
        used = sum(count for key, count in record.counts.items() if key.startswith("variant softshrink"))
        print(
            f"{name}: peak {record.peak_bytes / record.plain_peak_bytes:.0%} of plain PyTorch's, "
            f"{record.counts['reruns']} operators run again, variant used {used} times, gradients equal: {equal}"
        )


if __name__ == "__main__":
    main()
