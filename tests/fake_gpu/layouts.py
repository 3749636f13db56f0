"""How values of a step lie on the fake GPU: by the trace, for the profiler, and in a step of plain PyTorch's operators.

``python layouts.py CASE...`` prints for each case a line of JSON: how many values there are, of how many the trace says
another layout than they have in a step, and of how many the profiler does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import torch
import torchvision
from torch import nn
from torchvision.models import convnext

from monet_like.capture.captured import Captured, TensorMeta
from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import inputs_on
from monet_like.profile.task_inputs import Inputs
from monet_like.runtime.codegen import Block, compile_block
from monet_like.variants import admitted

CUDA = torch.device("cuda", 0)


def _convnext() -> nn.Module:
    blocks = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 2)]
    return convnext.ConvNeXt(blocks, num_classes=10)


def _swin() -> nn.Module:
    return torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=10)


CASES: dict[str, Callable[[], nn.Module]] = {"convnext": _convnext, "swin": _swin}


def in_a_step(captured: Captured) -> dict[int, TensorMeta]:
    """What the values of plain PyTorch's step look like: every task once, on what the tasks before it have made."""
    maker, program = Inputs(captured, CUDA), captured.plain
    values = {v: maker.make(v) for v, value in enumerate(program.values) if value.kind not in ("forward", "backward")}
    values |= {v: maker.make(v) for v in program.tangents}
    found: dict[int, TensorMeta] = {}
    tasks = [t for t in program.tasks if t.runs != "again"] + [slot[0] for slot in program.slots]
    late = [t for t in program.tasks if t.runs == "again"]
    for task in tasks:
        for needed in (*late, task):
            if needed is not task and not (set(needed.writes) & set(task.reads) - values.keys()):
                continue
            made = tuple(
                v for v in needed.writes if any(o is not None and o.name == v for c in needed.calls for o in c.outs)
            )
            run = compile_block(Block(needed.reads, (needed,), (), made), needed.name)
            results = run([values[v] for v in needed.reads])[1]
            values |= zip(made, results, strict=True)
            tensors = {v: values[v] for v in made if program.values[v].spec != "state"}
            found |= {v: TensorMeta.of(tensor) for v, tensor in tensors.items()}
    return found


def differing(metas: Sequence[TensorMeta], real: dict[int, TensorMeta]) -> int:
    return sum(metas[v].stride != meta.stride for v, meta in real.items())


def told(name: str) -> dict[str, int]:
    model = CASES[name]().to(CUDA)
    captured = admitted(capture(model, (torch.randn(4, 3, 32, 32, device=CUDA),)), "inplace_conv_multiway_newnode")
    measured = inputs_on(captured, CUDA).captured
    assert measured.program is captured.program
    with torch.no_grad():
        real = in_a_step(captured)
    return {"values": len(real), "trace": differing(captured.metas, real), "measured": differing(measured.metas, real)}


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        print(json.dumps(told(case)))
