"""A plan for ``torch_remat``: each layer is a checkpoint, and the modules that the plan names keep what the backward
reads. torchtitan takes the same names: ``RematAC.Config(save_regions=[...])``.

    monet-like export mine.json --to remat --model net.py:make_model --regions "layers.*"
    python examples/remat_regions.py mine.remat.json net.py:make_model
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_remat as remat
from torch import nn

from monet_like.export.remat import RematPlan, SavedRegion
from monet_like.models import build_model


def apply(model: nn.Module, plan: RematPlan) -> nn.Module:
    """Checkpoint the layers of the plan and save its regions; the model itself is changed and returned."""
    for name in plan.layers:
        layer = model.get_submodule(name)
        for region in plan.regions:
            if any(path == region.name for path, _ in layer.named_modules()):
                module = layer.get_submodule(region.name)
                module.forward = _saved(module.forward, region)
        layer.forward = remat.checkpoint(region_name=name)(layer.forward)
    return model


def _saved(forward: Callable[..., Any], region: SavedRegion) -> Callable[..., Any]:
    run = remat.region(forward, region.name, recompute=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if region.needs_tensor:
            found = result if isinstance(result, tuple | list) else (result,)
            remat.recompute_needs_tensor(*(tensor for tensor in found if tensor is not None))
        return result

    return call


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", help="file of monet-like export --to remat")
    parser.add_argument("model", help="as for monet-like solve; its file has make_inputs(batch)")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    spec = build_model(args.model)
    model = apply(spec.module.train(), RematPlan.read(Path(args.plan)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        inputs = spec.source.make_inputs(args.batch)
        loss = model(*inputs if isinstance(inputs, tuple) else (inputs,)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
