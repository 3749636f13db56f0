"""Small nets with frozen quantised weights and adapters on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from later import Later
from torch import nn

bitsandbytes, peft, quantization, transformers = map(
    Later, ("bitsandbytes", "peft", "torchao.quantization", "transformers")
)

#: From the sizes of a layer to a layer whose frozen weight is quantised.
Make = Callable[[int, int], nn.Module]


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank 4."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def adapted(make: Make, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A plain layer, two adapted ones, and a plain layer."""
    torch.manual_seed(0)
    first, second = Adapted(make(64, 256), 64, 256), Adapted(make(256, 128), 256, 128)
    net = nn.Sequential(nn.Linear(64, 64), first, nn.GELU(), second, nn.GELU(), nn.Linear(128, 8))
    return net.to(dtype).to("cpu")  # where bitsandbytes quantises


def four_bit(quant_type: str = "nf4", dtype: torch.dtype = torch.float32, **options: Any) -> Make:
    return lambda i, o: bitsandbytes.nn.Linear4bit(i, o, quant_type=quant_type, compute_dtype=dtype, **options)


def eight_bit(**options: Any) -> Make:
    return lambda i, o: bitsandbytes.nn.Linear8bitLt(i, o, has_fp16_weights=False, **options)


def by_torchao(config: str, *arguments: Any, dtype: torch.dtype = torch.float32) -> Make:
    """A layer quantised as the configuration of this name says; the arguments are the configuration's."""

    def make(inputs: int, outputs: int) -> nn.Module:
        layer = nn.Linear(inputs, outputs, dtype=dtype)
        quantization.quantize_(layer, getattr(quantization, config)(*arguments))
        return layer

    return make


def adapted_llama(kind: str) -> nn.Module:
    """A Llama of one block with quantised projections and PEFT's LoRA on two of them, as `from_pretrained` makes it.

    Args:
        kind: ``4bit`` or ``8bit``, bitsandbytes' layers, or ``torchao``.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, use_cache=False, **sizes))
    for owner in [module for name, module in model.named_modules() if name.endswith(("self_attn", "mlp"))]:
        for name, layer in [pair for pair in owner.named_children() if isinstance(pair[1], nn.Linear)]:
            if kind == "torchao":
                quantization.quantize_(layer.requires_grad_(False), quantization.Int8WeightOnlyConfig())
                continue
            make = four_bit(bias=False) if kind == "4bit" else eight_bit(bias=False, threshold=6.0)
            other = make(layer.in_features, layer.out_features)
            other.weight.data = layer.weight.data
            setattr(owner, name, other)
    if kind != "torchao":
        setattr(model, f"is_loaded_in_{kind}", True)  # PEFT then takes its own layers for bitsandbytes'
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model.to("cpu"), config).train()
