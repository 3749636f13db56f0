"""Models whose layers' inputs can be dropped, what is dropped by definition, and the gradients that follow from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from later import Later
from torch import Tensor, nn
from training import Outcome, run, twin

from monet_like.ops.caches import LARGEST_BLOCK

transformers_utils = Later("transformers.pytorch_utils")


class Attention(nn.Module):
    """A small pre-norm transformer block, its layers of Hugging Face's and PyTorch's kind."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = transformers_utils.Conv1D(3 * width, width)
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(-2)))
        out: Tensor = x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.norms[1](x)))))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 36), nn.Tanh(), nn.Linear(36, 8, bias=False))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GELU(),
        nn.Conv2d(8, 12, 3, padding="same", groups=2),
        nn.SiLU(),
        nn.Conv2d(12, 6, 3, stride=2, padding=1, dilation=2, bias=False),
    )


def batch_normed() -> nn.Module:
    blocks = [
        layer
        for channels in (3, 16, 16, 16)
        for layer in (nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


Made = tuple[nn.Module, tuple[Tensor, ...]]
MODELS: Mapping[str, Callable[[], Made]] = {
    "mlp": lambda: (mlp(), (torch.randn(9, 24, requires_grad=True),)),
    "three_dimensions": lambda: (mlp(), (torch.randn(4, 5, 24, requires_grad=True),)),
    "bfloat16": lambda: (mlp().bfloat16(), (torch.randn(9, 24).bfloat16().requires_grad_(),)),
    "attention": lambda: (Attention(), (torch.randn(2, 6, 32, requires_grad=True),)),
    "convolutions": lambda: (convolutions(), (torch.randn(2, 3, 13, 12, requires_grad=True),)),
    "channels_last": lambda: (
        convolutions().to(memory_format=torch.channels_last),
        (torch.randn(2, 3, 13, 12).to(memory_format=torch.channels_last).requires_grad_(),),
    ),
    "strided": lambda: (mlp(), (torch.randn(24, 9).t().requires_grad_(),)),
    "batch_normed": lambda: (batch_normed(), (torch.randn(4, 3, 10, 10, requires_grad=True),)),
}
#: Names of the layers whose inputs can be dropped; Conv1D is Hugging Face's.
LAYERS = ("Linear", "Conv2d", "Conv1D")


def dropped(x: Tensor, share: float) -> Tensor:
    """The definition: of every block in memory order all but the largest magnitudes are zero."""
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
    dense = x.permute(order)
    if not dense.is_contiguous():
        order, dense = list(range(x.dim())), x.contiguous()
    flat = dense.reshape(-1).clone()
    for start in range(0, len(flat), LARGEST_BLOCK):
        block = flat[start : start + LARGEST_BLOCK]
        kept = math.ceil(len(block) * (LARGEST_BLOCK - round(share * LARGEST_BLOCK)) / LARGEST_BLOCK)
        block[block.abs().sort(descending=True, stable=True).indices[kept:]] = 0
    return flat.view(dense.shape).permute([order.index(d) for d in range(x.dim())])


def expected_weight_gradients(made: Made, drop: Callable[[Tensor], Tensor], first: bool = False) -> dict[str, Tensor]:
    """Of every layer: its own gradient where it reads, in the backward alone, what is left after dropping.

    Without ``first`` a layer that reads the model's input, which is there anyhow, is left out.
    """
    model, args = made
    model = twin(model)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, layer: nn.Module) -> None:
        def hook(_: nn.Module, given: Any, out: Tensor) -> None:
            kept = given[0].detach()
            if first or given[0].data_ptr() != args[0].data_ptr():
                out.register_hook(lambda grad: seen.__setitem__(name, (kept, grad.detach().clone())))

        layer.register_forward_hook(hook)

    for name, layer in model.named_modules():
        if type(layer).__name__ in LAYERS:
            watch(name, layer)
    run(model, args, {})
    found = {}
    for name, (x, grad) in seen.items():
        layer = copy.deepcopy(model.get_submodule(name))
        layer._forward_hooks.clear()
        layer.zero_grad()
        layer(drop(x)).backward(grad)
        found[f"gradient {name}.weight"] = layer.weight.grad
    return found


def assert_only_changed(plain: Outcome, outcome: Outcome, wanted: dict[str, Tensor], tolerance: float) -> set[str]:
    """Nothing but these gradients differs from plain PyTorch's, and they are the definition's; those that differ."""
    changed = {key for key, difference in plain.differences(outcome).items() if difference}
    assert changed <= set(wanted)
    for key, gradient in wanted.items():
        found = outcome.gradients[key.removeprefix("gradient ")]
        assert found is not None
        assert float((found - gradient).norm() / gradient.norm()) <= tolerance, key
    return changed
