"""A decoder in parts: what stands before its blocks, the blocks, and the head with the loss."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UsageError


@dataclass(frozen=True)
class Parts:
    """A model as modules that run one after the other; they share its parameters.

    Attributes:
        start: from tokens [N, length] to a tuple: the residual stream [N, length, width], and tensors that all blocks
            read.
        blocks: from the residual stream and these tensors to the residual stream.
        end: from the residual stream and labels [N, length] to the loss.
    """

    start: nn.Module
    blocks: tuple[nn.Module, ...]
    end: nn.Module


def parts_of(model: nn.Module) -> Parts:
    """The parts of a model: its own, by a method ``parts``, or those of a causal language model of Transformers.

    Raises:
        UsageError: it has neither.
    """
    if callable(found := getattr(model, "parts", None)):
        parts = found()
        if isinstance(parts, Parts):
            return parts
    inner, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    wanted = ("embed_tokens", "layers", "norm", "rotary_emb")
    missing = [f"model.{name}" for name in wanted if not isinstance(getattr(inner, name, None), nn.Module)]
    if head is None:
        missing.append("lm_head")
    if missing:
        raise UsageError(
            f"{type(model).__name__} is not a decoder whose blocks are known: it has no {', '.join(missing)}; give "
            "llama_8b or another named shape, a causal language model of Transformers with these names, or a model "
            "with a method parts() that returns monet_like.models.Parts"
        )
    if "layer_type" in inspect.signature(inner.rotary_emb.forward).parameters:  # type: ignore[union-attr]
        raise UsageError(
            f"{type(model).__name__} has rotary positions for each kind of layer, as Gemma 3 has, and only blocks that "
            "read the same positions are known; give a model with a method parts() that returns monet_like.models.Parts"
        )
    return Parts(_Start(model), tuple(_Block(layer) for layer in inner.layers), _End(model))  # type: ignore[union-attr]


def attention_window(model: nn.Module) -> int:
    """How many tokens back the layers of a model of Transformers look, at least one of them; 0: all look at all."""
    config = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return int(getattr(config, "sliding_window", None) or 0) if slides else 0


class _Start(nn.Module):
    """The embedding and the tables of the rotary positions of a model of Transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.model.embed_tokens, model.model.rotary_emb

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embed_tokens(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cosines, sines = self.rotary_emb(x, places)
        return x, cosines, sines


class _Block(nn.Module):
    """A layer of a model of Transformers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        found = self.layer(x, position_embeddings=tables, attention_mask=None)
        result: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return result


class _End(nn.Module):
    """The last norm, the head, and the mean cross-entropy of float32 logits, as the loss of Transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
