"""Layers of bitsandbytes whose frozen weights are quantised: which of them can be captured, and their state before a
trace.

The layers settle in their first call: they move scales from the weight to the layer and cast the bias for good.
`settle` does so before a trace, which keeps nothing that a forward assigns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CaptureError

#: Devices for which bitsandbytes trains 8-bit layers by a plain matrix product with the dequantised weight.
_DEQUANTISING = ("cpu", "xpu")


def settle(model: nn.Module) -> None:
    """Bring quantised layers into the state that they have after their first call, and refuse those not yet quantised.

    Raises:
        CaptureError: a layer's weight has not been quantised.
    """
    for name, layer in _layers(model, "Linear4bit", "Embedding4bit"):
        if getattr(layer.weight, "quant_state", None) is None:
            if getattr(layer, "quant_state", None) is None:
                raise CaptureError(_not_quantised(name, layer))
            layer.weight.quant_state = layer.quant_state  # of a parameter that was sharded and gathered
        bias, dtype = getattr(layer, "bias", None), getattr(layer, "compute_dtype", None)
        if bias is not None and dtype not in (None, bias.dtype) and layer.compute_type_is_set:
            bias.data = bias.data.to(dtype)
    for _, layer in _layers(model, "Linear8bitLt"):
        layer.state.is_training = layer.training
        if layer.weight.CB is not None:
            layer.init_8bit_state()
        if not layer.state.has_fp16_weights and layer.state.CB is not None:
            layer.weight.data = layer.state.CB


def check_quantised(model: nn.Module, target: torch.device | None) -> None:
    """Refuse quantised layers whose step depends on values, or changes their weights.

    Args:
        target: the device that the model is captured for; None: its own.

    Raises:
        CaptureError: there is one; the message names it.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and is_traceable_wrapper_subclass(parameter):
            raise CaptureError(
                f"{name} is a {type(parameter).__name__} that requires a gradient, and a schedule has gradients of "
                "plain tensors alone; freeze it with requires_grad_(False) and train an adapter, or quantise after the "
                "training"
            )
    for name, layer in _layers(model, "Embedding4bit"):
        raise CaptureError(
            f"{name or type(model).__name__} is a {type(layer).__name__}, which copies its scales in every call; keep "
            "embeddings in 16 bits, or use Embedding8bit"
        )
    for name, layer in _layers(model, "Linear8bitLt"):
        said = f"{name or type(model).__name__} is a Linear8bitLt"
        state, device = layer.state, layer.weight.device
        if state.has_fp16_weights:
            raise CaptureError(
                f"{said} with has_fp16_weights=True, which quantises its weight anew in every step and keeps it; "
                "freeze it with has_fp16_weights=False and train an adapter"
            )
        if state.CB is None:
            raise CaptureError(_not_quantised(name, layer))
        if target is not None and target.type != device.type:
            raise CaptureError(
                f"{said}, and bitsandbytes computes it on a {target.type} device in another way than on {device.type}; "
                "plan where it trains, or use Linear4bit"
            )
        if state.threshold > 0 and not (layer.training and device.type in _DEQUANTISING):
            raise CaptureError(
                f"{said} with threshold={state.threshold}, which computes apart as many columns as hold large values; "
                "set threshold=0.0 (BitsAndBytesConfig: llm_int8_threshold=0.0), or use Linear4bit"
            )


def is_quantised(model: nn.Module) -> bool:
    """Whether all weights are that a layer of bitsandbytes quantises when they are moved to a device."""
    four = (
        getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)
        for _, layer in _layers(model, "Linear4bit")
    )
    eight = (
        layer.state.has_fp16_weights or layer.state.CB is not None or layer.weight.CB is not None
        for _, layer in _layers(model, "Linear8bitLt")
    )  # fmt: skip
    return all(four) and all(eight)


def int8_weights(model: nn.Module) -> frozenset[str]:
    """Names of the int8 weights that bitsandbytes casts to another dtype and scales in place whenever it needs them."""
    return frozenset(f"{name}.weight".lstrip(".") for name, _ in _layers(model, "Linear8bitLt"))


def _not_quantised(name: str, layer: nn.Module) -> str:
    return (
        f"{name or type(layer).__name__} is a {type(layer).__name__} whose weight is not quantised yet; move the model "
        "to its device first: model.to(device)"
    )


def _layers(model: nn.Module, *names: str) -> Iterator[tuple[str, Any]]:
    """The model's layers of these classes of bitsandbytes, and their names."""
    library = sys.modules.get("bitsandbytes")
    if library is None:  # then the model has none of its layers
        return
    kinds = tuple(kind for name in names if (kind := getattr(library.nn, name, None)) is not None)
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            yield name, module
