"""Decoders of the Llama 3 family in plain PyTorch, on the meta device by default: shapes without weights, of any size.

The blocks are those of the paper: RMS norm, rotary positions, causal attention with grouped heads, and a gated MLP (The
Llama 3 Herd of Models, 2024, section 3.2). Where the sizes are from: table 3 there for 8B and 70B; for 1B and 3B the
model cards of Llama 3.2 and the ``config.json`` published with them. Layers are named as in Hugging Face's
Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        width: of the residual stream.
        blocks: how many there are.
        heads, groups: attention heads, and those of keys and values.
        hidden: width of the MLP.
        vocabulary: number of tokens.
        tied: the head has the embedding's weight.
        base: of the rotary positions' frequencies.
    """

    width: int
    blocks: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int = 128256
    tied: bool = False
    base: float = 500000.0


#: Llama 3.2 1B and 3B, Llama 3.1 8B and 70B.
SHAPES: Mapping[str, Shape] = {
    "llama_1b": Shape(width=2048, blocks=16, heads=32, groups=8, hidden=8192, tied=True),
    "llama_3b": Shape(width=3072, blocks=28, heads=24, groups=8, hidden=8192, tied=True),
    "llama_8b": Shape(width=4096, blocks=32, heads=32, groups=8, hidden=14336),
    "llama_70b": Shape(width=8192, blocks=80, heads=64, groups=8, hidden=28672),
}


def decoder(name: str) -> Decoder:
    """The decoder of one of `SHAPES`, on the meta device: no memory is allocated."""
    with torch.device("meta"):
        return Decoder(SHAPES[name])


class Decoder(nn.Module):
    """A decoder for next-token prediction.

    Args:
        shape: its sizes.
        length: tokens of a sample in `make_inputs`.
    """

    def __init__(self, shape: Shape, *, length: int = 2048) -> None:
        super().__init__()
        self.shape, self.length = shape, length
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The mean loss of ``labels``, or without them the logits.

        Args:
            tokens: int64 [N, length].
            labels: int64 [N, length], already shifted by one; -100 counts nothing.

        Returns:
            A float32 scalar, or logits [N, length, vocabulary] in the dtype of the parameters.
        """
        x = self.embed_tokens(tokens)
        tables = self._tables(tokens, x.dtype)
        for layer in self.layers:
            x = layer(x, *tables)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _tables(self, tokens: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary positions [length, width of a head], the same for all layers."""
        width = self.shape.width // self.shape.heads
        places = torch.arange(0, width, 2, dtype=torch.float32, device=tokens.device)
        steps = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        angles = torch.outer(steps, self.shape.base ** (-places / width)).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def make_inputs(self, batch: int, length: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of ``length`` tokens each; 0: of the decoder's own."""
        return tuple(torch.zeros(batch, length or self.length, dtype=torch.long) for _ in range(2))  # type: ignore[return-value]


class Block(nn.Module):
    """Causal attention and a gated MLP, each behind an RMS norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=1e-5)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = _Mlp(shape)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """[N, length, width], as ``x``."""
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = shape.width // shape.heads
        self.grouped = shape.groups != shape.heads
        narrow = shape.groups * self.width
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, narrow, bias=False)
        self.v_proj = nn.Linear(shape.width, narrow, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        parts = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = parts
        attended = nn.functional.scaled_dot_product_attention(
            _rotated(query, cosines, sines),
            _rotated(key, cosines, sines),
            value,
            is_causal=True,
            enable_gqa=self.grouped,
        )
        result: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return result


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """``x`` [N, heads, length, width] with each pair of elements turned by its position's angle."""
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines
