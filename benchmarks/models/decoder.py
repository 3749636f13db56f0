"""A decoder-only transformer of many identical blocks, as MODEL: ``benchmarks/models/decoder.py:decoder``.

RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), SwiGLU (Shazeer 2020), causal attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

DEPTH, WIDTH, HEADS, HIDDEN = 80, 512, 8, 1408
TOKENS, VOCABULARY = 512, 8192


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, in the operators that most code spells out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[.., width] to the same."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x [batch, heads, tokens, size], cos and sin [tokens, size]."""
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-two, one], dim=-1) * sin


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Token numbers to the loss of predicting each next one."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(TOKENS), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, TOKENS] whole numbers to a scalar."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def decoder() -> nn.Module:
    """80 blocks."""
    return Decoder()


def make_inputs(batch: int) -> tuple[Tensor]:
    """A batch of token numbers."""
    return (torch.zeros(batch, TOKENS, dtype=torch.long),)
