"""Language models of the zoo, built from configurations of Hugging Face's transformers, with random weights.

Each takes token numbers [N, length], int64, and returns the mean loss of predicting every next one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UsageError


class TokenLoss(nn.Module):
    """A causal language model with its loss: one input, one number.

    Args:
        model: takes ``input_ids`` and ``labels``, and returns an object with ``loss``.
        length: tokens of a text.
    """

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.model, self.length = model, length

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[N, length]`` int64 to a float32 number."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def make_inputs(self, batch: int) -> torch.Tensor:
        """Tokens to train on, all 0."""
        return torch.zeros(batch, self.length, dtype=torch.int64)


def gpt2(length: int = 1024, layers: int = 12) -> TokenLoss:
    """GPT-2 small (Radford et al. 2019, table 2): 124 million parameters. Without dropout."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        n_layer=layers, n_positions=length, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return TokenLoss(transformers.GPT2LMHeadModel(config), length)


def llama_1b(length: int = 2048, layers: int = 16) -> TokenLoss:
    """A decoder of Llama's shape with 1.1 billion parameters: 16 layers, width 2048, 32 heads, 32,000 tokens."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return TokenLoss(transformers.LlamaForCausalLM(config), length)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "this model of the zoo is built by transformers: pip install 'transformers>=4.57,<6'"
        ) from None
    return transformers
