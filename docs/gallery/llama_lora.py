"""A decoder of Llama 3.2 1B's shape, frozen, with adapters of rank 16 (LoRA)."""

import torch

from monet_like.models import Decoder, add_adapters, decoder


def make_model() -> Decoder:
    """On the meta device: no memory is allocated."""
    model = decoder("llama_1b")
    add_adapters(model, tuple(model.layers), 16)
    return model


def make_inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, 2,048 of a sample."""
    return make_model().make_inputs(batch, 2048)
