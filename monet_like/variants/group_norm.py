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
from .calls import Calls
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

        calls, spread = Calls(), list[Ref]()
        for statistics in (mean, invstd):
            flat = calls.add("aten.view.default", statistics, (-1,))
            spread.append(calls.add("aten.repeat_interleave.self_int", flat, channels // groups))
        rows = calls.add("aten.view.default", x, (1, images * channels, pixels))
        parameters = [each and calls.add("aten.repeat.default", each, (images,)) for each in (weight, bias)]
        chain = following(editor, out.name)
        forms = [(out.name, "group_norm.apply", NOTHING, "")]
        if chain.tasks and chain.residual is None:
            variant = f"group_norm_{chain.activation[0]}.apply"
            forms.append((chain.tasks[-1].writes[0], variant, chain.activation, chain.word))
        for value, variant, activation, word in forms:
            operands = (rows, *parameters, *spread, None, *activation)
            apply = Call("monet_like.batch_norm_apply.default", operands, (), (Ref("normalised"),))
            shape = editor.metas[value].shape
            assert math.prod(shape) == images * channels * pixels
            back = Call("aten.view.default", (Ref("normalised"), shape), (), (Ref(value),))
            editor.add(task, (*calls, apply, back), (value,), variant, word=word, runs="again")
