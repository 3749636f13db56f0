"""What `fits` is asked: a model, its step, and how it is trained."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...capture.absent_gpu.attention import check_attention
from ...compiler.request import optimizer_bytes
from ...compiler.words import read_dtype
from ...errors import UsageError
from ...ir.defaults import MODE
from ...ir.mode import parse_mode
from ...ir.units import format_bytes
from ...models import add_adapters, check_quantisation
from .named import Loss, Steps, named, steps_of

#: Frozen weights of at least this many bytes are named if they are not quantised.
_WORTH_TELLING = 2**20


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model and how it is trained.

    Attributes:
        name: as it was asked for.
        steps: of the model.
        dtype: of parameters and activations; None: those that the user has chosen.
        optimizer, optimizer_in_backward: as of `Request`.
        attention: kind of attention; "": PyTorch's choice on each card.
        mode: which variants our plans may use.
        lora, quantisation: rank of the adapters and how frozen weights are stored; 0: what requires a gradient is
            trained.
    """

    name: str
    steps: Steps
    dtype: torch.dtype | None
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    attention: str = ""
    mode: str = MODE
    lora: int = 0
    quantisation: str = ""

    @property
    def model(self) -> nn.Module:
        """On the meta device, or of fake tensors."""
        return self.steps.model

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's state; with `optimizer_in_backward` also what its largest step takes."""
        return optimizer_bytes(self.model, self.optimizer, in_backward=self.optimizer_in_backward)

    @property
    def _unquantised(self) -> str:
        """Which frozen weights of layers are not stored so, as those of experts, in words."""
        sizes: Counter[str] = Counter()
        for name, parameter in self.model.named_parameters():
            *_, in_layer = re.split(r"\.\d+\.", name, maxsplit=1)
            if in_layer != name and not parameter.requires_grad and parameter.dim() > 1:
                sizes[in_layer] += parameter.numel() * parameter.element_size()
        told = [f"{name} of {format_bytes(size)}" for name, size in sizes.most_common() if size >= _WORTH_TELLING]
        return f" (not quantised: {', '.join(told)})" if told else ""

    def __str__(self) -> str:
        frozen = any(not parameter.requires_grad for parameter in self.model.parameters())
        trained = "some parameters frozen" if frozen else "all parameters trained"
        trained = f"LoRA of rank {self.lora}" if self.lora else trained
        stored = f" on {self.quantisation} weights{self._unquantised}" if self.quantisation else ""
        back = " in the backward" if self.optimizer_in_backward else ""
        attention = f", {self.attention} attention" if self.attention else ""
        dtype = "" if self.dtype is None else f", {str(self.dtype).removeprefix('torch.')}"
        return f"{self.name}, {trained}{stored}{dtype}, {self.optimizer}{back}{attention}"


def read_question(
    model: str | nn.Module,
    inputs: Any = None,
    *,
    loss: Loss | None = None,
    batch: int | None = None,
    length: int | None = None,
    dtype: str = "",
    lora: int = 0,
    quant: str = "",
    optimizer: str = "adamw",
    optimizer_in_backward: bool = False,
    attention: str = "",
    mode: str = MODE,
) -> Question:
    """Build the model, without memory for its weights, and put adapters on it.

    Args:
        model: a name of `monet_like.models.SHAPES` (llama_8b; 8B and Llama-3.1-8B are the same), a ``config.json`` or
            the folder with it, a name on Hugging Face whose config is in the cache,
            ``transformers:CLASS(CONFIG.json)``, ``file.py:function`` (`Steps.function`), another MODEL of the command
            line, or a module on the meta device. It is changed: its dtype, and its adapters.
        inputs: of a module: a tensor, a tuple of arguments, a dict of keyword arguments, or both in a tuple; None:
            those that such a model is known to take.
        loss: from the model's result to a scalar; None: the result's own ``loss``, or one that takes no memory.
        batch, length: of the step; None: see `monet_like.fits`.
        dtype: "": bfloat16, or with inputs, or a function that makes them, the dtypes that these have.

    Raises:
        UsageError: an argument is wrong, or the model's inputs are not known.
    """
    kind = read_dtype(dtype or "bfloat16")
    check_attention(attention)
    parse_mode(mode)
    check_quantisation(quant)
    if quant and not lora:
        raise UsageError(
            f"--quant {quant} is for frozen weights, and without --lora all weights are trained; add --lora 16"
        )
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, nn.Module):
        if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise UsageError(
                f"{name} is not on the meta device, and its weights are not needed here; build it inside `with "
                "torch.device('meta'):`"
            )
        steps = steps_of(model, inputs, loss)
    else:
        steps = named(model, batch, length)
    wanted = {"batch": batch, "length": length}
    steps = replace(steps, sizes={name: wanted[name] or size for name, size in steps.sizes.items()})
    own = steps.own_dtype and not dtype
    if steps.runs and (lora or dtype):
        raise UsageError(
            f"{name} runs its step with a model of its own, which gets no adapters and no other dtype; return "
            "(model, inputs) or (model, step) instead"
        )

    def prepare(module: nn.Module) -> None:
        if not own:
            module.to(kind)
        module.train()
        if lora:
            add_adapters(module, (module,), lora, quant)

    prepare(steps.model)
    if not any(p.requires_grad for p in steps.model.parameters()):
        raise UsageError(f"nothing in {name} requires a gradient; leave some parameters trainable, or add --lora 16")
    asked = Question(
        name=name, steps=replace(steps, prepare=prepare, dtype=None if own else kind), dtype=None if own else kind,
        optimizer=optimizer, optimizer_in_backward=optimizer_in_backward,
        attention=attention, mode=mode, lora=lora, quantisation=quant,
    )  # fmt: skip
    _ = asked.optimizer_bytes
    return asked
