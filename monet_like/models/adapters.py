"""LoRA adapters on frozen layers, whose weights may be quantised as bitsandbytes stores them: for planning, without
values.

Hu et al., LoRA, ICLR 2022; Dettmers et al., QLoRA, NeurIPS 2023, and LLM.int8(), NeurIPS 2022. The quantised layers
here are ours: they have the bytes of bitsandbytes' layers and call its operators in the same order, but have no
weights. An adapter has the model's dtype and no dropout.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from ..errors import UsageError

#: Layers of a block that get adapters, by the last part of their names.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: How frozen weights are stored; "": in the model's dtype. ``nf4_double``: the scales of nf4 are quantised as well.
QUANTISATIONS = ("", "nf4", "nf4_double", "int8")
#: Weights for each scale, and scales for each second scale, in bitsandbytes.
_SCALED, _SCALES = 64, 256


def check_quantisation(name: str) -> None:
    """Check the name of a quantisation, and that bitsandbytes, whose operators it is captured with, is installed.

    Raises:
        UsageError: it is unknown, or bitsandbytes is missing.
    """
    if name not in QUANTISATIONS:
        raise UsageError(
            f"quantisation {name!r} is unknown; give {', '.join(QUANTISATIONS[1:-1])} or {QUANTISATIONS[-1]}"
        )
    if name and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(
            f"{name} weights are planned by the operators of bitsandbytes, which is not installed; pip install "
            "bitsandbytes"
        )


def add_adapters(model: nn.Module, blocks: tuple[nn.Module, ...], rank: int, quantisation: str = "") -> int:
    """Freeze a model and put adapters on the linear layers of its blocks named in `ADAPTED`.

    Args:
        model: changed in place.
        blocks: its blocks.
        rank: of the adapters.
        quantisation: of the frozen weights of these layers, a name of `QUANTISATIONS`.

    Returns:
        How many layers have adapters.

    Raises:
        UsageError: there is no such layer, or ``rank`` is not positive; as `check_quantisation`.
    """
    check_quantisation(quantisation)
    if rank < 1:
        raise UsageError(f"LoRA rank {rank} must be at least 1")
    if quantisation:
        import bitsandbytes  # noqa: F401  # registers its operators
    model.requires_grad_(False)
    count = 0
    for block in blocks:
        owners = [(owner, name, layer) for owner in block.modules() for name, layer in owner.named_children()]
        for owner, name, layer in owners:
            if name in ADAPTED and isinstance(layer, nn.Linear):
                setattr(owner, name, Adapted(layer, rank, quantisation))
                count += 1
    if not count:
        raise UsageError(f"no block has a linear layer named {', '.join(ADAPTED)}, so nothing gets an adapter")
    return count


class Adapted(nn.Module):
    """A frozen linear layer and the product of two narrow ones, added up."""

    def __init__(self, layer: nn.Linear, rank: int, quantisation: str) -> None:
        super().__init__()
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.base = _quantised(layer, quantisation)
        self.lora_down = nn.Linear(layer.in_features, rank, bias=False, **like)
        self.lora_up = nn.Linear(rank, layer.out_features, bias=False, **like)
        self.scale = 2.0  # alpha is mostly twice the rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, length, outputs]."""
        result: torch.Tensor = self.base(x) + self.lora_up(self.lora_down(x)) * self.scale
        return result


def _quantised(layer: nn.Linear, quantisation: str) -> nn.Module:
    layer.requires_grad_(False)
    if not quantisation:
        return layer
    if layer.bias is not None:
        raise UsageError("layers with a bias are not quantised here; leave out the quantisation")
    return EightBit(layer) if quantisation == "int8" else FourBit(layer, nested=quantisation == "nf4_double")


class FourBit(nn.Module):
    """A frozen weight in NF4: two weights a byte, and a float32 scale for each 64; ``nested``: scales of one byte."""

    def __init__(self, layer: nn.Linear, *, nested: bool) -> None:
        super().__init__()
        self.shape, self.nested = (layer.out_features, layer.in_features), nested
        count, device = layer.weight.numel(), layer.weight.device
        scales = -(-count // _SCALED)
        self.register_buffer("weight", torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=device))
        self.register_buffer(
            "scales", torch.empty(scales, dtype=torch.uint8 if nested else torch.float32, device=device)
        )
        for name, shape in (("second", (-(-scales // _SCALES),)), ("code", (256,)), ("offset", ())) if nested else ():
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = (self.second, self.code, self.offset) if self.nested else ()
        result: torch.Tensor = _FourBitProduct.apply(x, self.shape, self.weight, self.scales, *more)
        return result


class _FourBitProduct(torch.autograd.Function):
    """A product with a 4-bit weight, which is dequantised for each use and never kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: tuple[int, int],
        weight: torch.Tensor,
        scales: torch.Tensor,
        *nested: torch.Tensor,
    ) -> torch.Tensor:
        ctx.shape = shape
        ctx.save_for_backward(weight, scales, *nested)
        product = torch.ops.bitsandbytes.gemm_4bit.default
        if not nested:
            result: torch.Tensor = product(x, weight, list(shape), scales, _SCALED, "nf4")
            return result
        second, code, offset = nested
        more = {"absmax_8bit": scales, "absmax_code": code, "absmax_offset": offset}
        nested_result: torch.Tensor = product(x, weight, list(shape), second, _SCALED, "nf4", **more)
        return nested_result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        weight, scales, *nested = ctx.saved_tensors
        operators = torch.ops.bitsandbytes
        if nested:
            second, code, offset = nested
            scales = operators.dequantize_blockwise.default(scales, second, code, _SCALES, torch.float32) + offset
        wide = operators.dequantize_4bit.default(weight, scales, _SCALED, "nf4", list(ctx.shape), grad.dtype)
        return (grad @ wide, *(None for _ in range(3 + len(nested))))


class EightBit(nn.Module):
    """A frozen weight in int8 with a float32 scale for each row; inputs are rounded to int8 row by row
    (threshold 0).
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        device = layer.weight.device
        self.register_buffer("weight", torch.empty(layer.weight.shape, dtype=torch.int8, device=device))
        self.register_buffer("scales", torch.empty(layer.out_features, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _EightBitProduct.apply(x, self.weight, self.scales)
        return result


class _EightBitProduct(torch.autograd.Function):
    """A product of int8 rows with an int8 weight; the gradient's product dequantises the weight.

    bitsandbytes scales the dequantised weight in place; here it is copied, which counts one copy of it more for a
    moment.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scales)
        operators = torch.ops.bitsandbytes
        rows, row_scales, _ = operators.int8_vectorwise_quant.default(x.flatten(0, -2).to(torch.float16), 0.0)
        product: torch.Tensor = operators.int8_scaled_mm.default(rows, weight, row_scales, scales, None, x.dtype)
        return product.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        weight, scales = ctx.saved_tensors
        wide = weight.to(grad.dtype) * scales.unsqueeze(1).mul(1 / 127).to(grad.dtype)
        return grad @ wide, None, None
