"""Group norm recomputed from its saved statistics, alone or together with the activation after it.

Given the statistics, group norm is a batch norm of one image whose channels are all channels of all images: the
same kernel, and on a CPU ATen's bits. 16-bit statistics are rounded more coarsely than those that the forward used, and
CUDA's formula rounds differently: there it is not offered.
"""

from __future__ import annotations

import math

import torch

from ..ir.program import Call, Ref
from .batch_norm import NOTHING, following
from .editor import Editor


def offer(editor: Editor) -> None:
    """Offer recomputation for every group norm of a whole contiguous tensor, on a CPU, in float32 or float64."""
    for task, call in editor.find("aten.native_group_norm.default"):
        x, weight, bias, images, channels, pixels, groups, _ = call.args
        out, mean, invstd = call.outs
        if not editor.is_own(x) or out is None or mean is None or invstd is None:
            continue
        assert isinstance(out.name, int)
        meta = editor.metas[out.name]
        full = meta.dtype in (torch.float32, torch.float64)
        if editor.device.type != "cpu" or not full or not meta.contiguous or editor.metas[x.name] != meta:
            continue

        def spread(statistics: Ref, name: str, members: int = channels // groups) -> tuple[Call, Call]:
            flat = Call("aten.view.default", (statistics, (-1,)), (), (Ref(f"{name}_of_groups"),))
            each = (Ref(f"{name}_of_groups"), members)
            return flat, Call("aten.repeat_interleave.self_int", each, (), (Ref(name),))

        calls = [*spread(mean, "mean"), *spread(invstd, "invstd")]
        calls.append(Call("aten.view.default", (x, (1, images * channels, pixels)), (), (Ref("rows"),)))
        parameters: list[Ref | None] = []
        for parameter, name in ((weight, "weight"), (bias, "bias")):
            parameters.append(None if parameter is None else Ref(name))
            if parameter is not None:
                calls.append(Call("aten.repeat.default", (parameter, (images,)), (), (Ref(name),)))
        chain = following(editor, out.name)
        followed = [] if chain.residual is not None or not chain.tasks else [(chain.tasks[-1].writes[0], chain)]
        for value, what in ((out.name, None), *followed):
            activation = NOTHING if what is None else what.activation
            operands = (Ref("rows"), *parameters, Ref("mean"), Ref("invstd"), None, *activation)
            apply = Call("monet_like.batch_norm_apply.default", operands, (), (Ref("made"),))
            shape = editor.metas[value].shape
            assert math.prod(shape) == images * channels * pixels
            back = Call("aten.view.default", (Ref("made"), shape), (), (Ref(value),))
            variant = "group_norm.apply" if what is None else f"group_norm_{activation[0]}.apply"
            word = "" if what is None else what.word
            editor.add(task, (*calls, apply, back), (value,), variant, word=word, runs="again")
