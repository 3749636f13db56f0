"""A decoder with frozen layers and adapters, planned; and its weights streamed as a plan would have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from block_models import Decoder, Layer, Short
from torch import nn

from monet_like.auto.block import blocks_of
from monet_like.runtime.frozen_weights import frozen_weights
from monet_like.runtime.streamed_block import Streamed
from monet_like.runtime.streamed_weights import Stage, WeightStream


class Lora(nn.Module):
    """A frozen layer and an adapter of rank 4 with dropout."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base.requires_grad_(False), nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.up(self.down(self.drop(x)))
        return adapted


def adapted_layer(width: int) -> nn.Module:
    """A decoder layer of which adapters alone are trained."""
    layer = Layer(width).requires_grad_(False)
    for name in ("qkv", "up", "down"):
        setattr(layer, name, Lora(getattr(layer, name)))
    return layer


def adapted_short(width: int) -> nn.Module:
    """A block of few operators of which adapters alone are trained."""
    block = Short(width)
    for name in ("up", "down"):
        setattr(block, name, Lora(getattr(block, name)))
    return block


def adapted_decoder(blocks: int = 4, block: Callable[[int], nn.Module] = adapted_layer) -> Decoder:
    """A decoder of such layers."""
    torch.manual_seed(0)
    model = Decoder(block, blocks)
    model.embedding.requires_grad_(False)
    return model


def stream(model: nn.Module, slots: int = 2, ahead: int = 1, blocks: Sequence[int] | None = None) -> WeightStream:
    """Stream the frozen weights of blocks; default: of all."""
    found = blocks_of(model)
    weights = frozen_weights(model, [block._model for block in found])
    order = range(len(found))
    visits: list[tuple[int, Stage]] = [*((b, "forward") for b in order), *((b, "backward") for b in reversed(order))]
    taken = {number: own for number, own in enumerate(weights) if own and (blocks is None or number in blocks)}
    device = next(model.parameters()).device
    made = WeightStream(device)
    made.keep(taken)
    made.arrange(visits, slots, ahead)
    for number in taken:
        found[number]._streamed = Streamed(made, number)
    return made
