"""Layers that people train, by name: of real sizes for the fake GPU, and small ones with values for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, tuple[Any, ...]]


class LoRA(nn.Module):
    """A frozen linear layer with an adapter of rank 16, in float32 as PEFT has it."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.base = nn.Linear(given, made, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(given, 16, bias=False), nn.Linear(16, made, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return (result + self.up(self.down(x.to(self.down.weight.dtype))) * 2.0).to(result.dtype)


def linear(given: int, made: int) -> nn.Module:
    """A linear layer without bias."""
    return nn.Linear(given, made, bias=False)


class RMSNorm(nn.Module):
    """As Llama's: in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaLayer(nn.Module):
    """A decoder layer with rotary positions and grouped heads."""

    def __init__(self, width: int, heads: int, groups: int, make: Callable[[int, int], nn.Module] = linear) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.o = make(width, width), make(width, width)
        self.k, self.v = make(width, groups * self.size), make(width, groups * self.size)
        hidden = 7 * width // 2
        self.gate, self.up, self.down = make(width, hidden), make(width, hidden), make(hidden, width)
        self.first, self.second = RMSNorm(width), RMSNorm(width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (make(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for make in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., self.size // 2 :], t[..., : self.size // 2]), -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(attended)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Block(nn.Module):
    """A block with layer norms and a GELU: of a ViT, or with a causal mask of GPT-2."""

    def __init__(self, width: int, heads: int, *, causal: bool, tanh: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.approximate = heads, causal, "tanh" if tanh else "none"
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)), approximate=self.approximate)))


class Level(nn.Module):
    """A level of a U-Net: two convolutions, down and up again, and two on the concatenation."""

    def __init__(self, given: int, width: int, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> None:
        super().__init__()

        def twice(start: int, end: int) -> nn.Sequential:
            pairs = ((start, end), (end, end))
            return nn.Sequential(*(m for a, b in pairs for m in (nn.Conv2d(a, b, 3, padding=1), norm(b), act())))

        self.before, self.within, self.after = twice(given, width), twice(width, 2 * width), twice(2 * width, width)
        self.raised = nn.ConvTranspose2d(2 * width, width, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        return self.after(torch.cat((y, self.raised(self.within(F.max_pool2d(y, 2)))), 1))


def _llama(small: bool, make: Callable[[int, int], nn.Module]) -> Made:
    width, heads, groups, tokens = (64, 4, 2, 256) if small else (4096, 32, 8, 4096)
    dtype = torch.float32 if small else torch.bfloat16
    layer = LlamaLayer(width, heads, groups, make)
    for module in layer.modules():
        if not isinstance(module, LoRA) and not any(isinstance(child, LoRA) for child in module.children()):
            module.to(dtype)
    for module in layer.modules():
        if isinstance(module, LoRA):
            module.down.float(), module.up.float()
    if make is LoRA:
        layer.first.requires_grad_(False), layer.second.requires_grad_(False)
    angles = torch.randn(tokens, width // heads)
    positions = angles.cos().to(dtype), angles.sin().to(dtype)
    return layer, (torch.randn(1, tokens, width).to(dtype).requires_grad_(), *positions)


def _block(small: bool, width: int, heads: int, shape: tuple[int, int], *, causal: bool, tanh: bool) -> Made:
    layer = Block(32 if small else width, 2 if small else heads, causal=causal, tanh=tanh)
    batch, tokens = (8, 64) if small else shape
    x = torch.randn(batch, tokens, 32 if small else width)
    dtype = torch.float32 if small else torch.bfloat16
    return layer.to(dtype), (x.to(dtype).requires_grad_(),)


def _bottleneck(small: bool) -> Made:
    from torchvision.models.resnet import Bottleneck

    layer, x = (Bottleneck(16, 4), (8, 16, 16, 16)) if small else (Bottleneck(256, 64), (64, 256, 56, 56))
    return layer, (torch.randn(x).requires_grad_(),)


def _level(small: bool, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> Made:
    layer, x = (Level(4, 4, norm, act), (4, 4, 32, 32)) if small else (Level(64, 64, norm, act), (16, 64, 128, 128))
    return layer, (torch.randn(x).requires_grad_(),)


#: Each makes a layer and its arguments: small ones in float32, or such as people train.
LAYERS: dict[str, Callable[[bool], Made]] = {
    "llama": lambda small: _llama(small, linear),
    "llama with LoRA": lambda small: _llama(small, LoRA),
    "vit": lambda small: _block(small, 768, 12, (64, 197), causal=False, tanh=False),
    "gpt2": lambda small: _block(small, 768, 12, (8, 1024), causal=True, tanh=True),
    "bottleneck": _bottleneck,
    "unet": lambda small: _level(small, nn.BatchNorm2d, nn.ReLU),
    "nnunet": lambda small: _level(
        small, lambda width: nn.InstanceNorm2d(width, affine=True), lambda: nn.LeakyReLU(0.01)
    ),
}
