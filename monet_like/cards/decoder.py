"""Reads the decoder that is asked about: a named shape, a model of Transformers from its config, or one of
the user's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..capture.absent_gpu.attention import check_attention
from ..compiler.problem import read_dtype
from ..compiler.request import optimizer_bytes
from ..errors import UsageError
from ..ir.defaults import MODE
from ..ir.mode import parse_mode
from ..ir.units import format_bytes
from ..models import SHAPES, Parts, add_adapters, build_model, check_quantisation, decoder, parts_of, told

#: Frozen weights of at least this many bytes are named if they are not quantised.
_WORTH_TELLING = 2**20
_TRANSFORMERS = re.compile(r"transformers:(\w+)\((.+)\)")
#: A name on Hugging Face; a file of Python has a function behind a colon.
_ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")
#: What people call the shapes of Llama 3.1, 3.2 and 3.3.
_LLAMA = re.compile(r"^(?:meta-llama/)?(?:meta-)?llama-?3(?:\.[123])?-(\d+b)(?:-instruct)?$")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A decoder and how it is trained.

    Attributes:
        name: as it was asked for.
        model: on the meta device.
        parts: of the model.
        dtype: of parameters and activations.
        optimizer, optimizer_in_backward: as of `Request`.
        attention: kind of attention; "": PyTorch's choice on each card.
        mode: which variants our plans may use.
        lora, quantisation: rank of the adapters and how frozen weights are stored; 0: all parameters are trained.
    """

    name: str
    model: nn.Module
    parts: Parts
    dtype: torch.dtype
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    attention: str = ""
    mode: str = MODE
    lora: int = 0
    quantisation: str = ""

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's state; with `optimizer_in_backward` also what its largest step takes."""
        return optimizer_bytes(self.model, self.optimizer, in_backward=self.optimizer_in_backward)

    @property
    def _unquantised(self) -> str:
        """Which frozen weights of the blocks are not stored so, as those of experts, in words."""
        sizes: Counter[str] = Counter()
        for block in self.parts.blocks:
            for name, parameter in block.named_parameters():
                if not parameter.requires_grad and parameter.dim() > 1:
                    sizes[name.removeprefix("layer.")] += parameter.numel() * parameter.element_size()
        told = [f"{name} of {format_bytes(size)}" for name, size in sizes.most_common() if size >= _WORTH_TELLING]
        return f" (not quantised: {', '.join(told)})" if told else ""

    def __str__(self) -> str:
        trained = f"LoRA of rank {self.lora}" if self.lora else "all parameters trained"
        stored = f" on {self.quantisation} weights{self._unquantised}" if self.quantisation else ""
        back = " in the backward" if self.optimizer_in_backward else ""
        attention = f", {self.attention} attention" if self.attention else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}, {trained}{stored}, {dtype}, {self.optimizer}{back}{attention}"


def read_question(
    model: str | nn.Module,
    *,
    dtype: str = "bfloat16",
    lora: int = 0,
    quant: str = "",
    optimizer: str = "adamw",
    optimizer_in_backward: bool = False,
    attention: str = "",
    mode: str = MODE,
) -> Question:
    """Build the decoder, without memory for its weights, and put adapters on it.

    Args:
        model: a name of `monet_like.models.SHAPES` (llama_8b; 8B and Llama-3.1-8B are the same), a ``config.json`` or
            the folder with it, a name on Hugging Face whose config is in the cache,
            ``transformers:CLASS(CONFIG.json)``, another MODEL of the command line, or a module on the meta device. It
            is changed: its dtype, and its adapters.

    Raises:
        UsageError: an argument is wrong, or the model is no decoder whose blocks are known.
    """
    kind = read_dtype(dtype)
    check_attention(attention)
    parse_mode(mode)
    check_quantisation(quant)
    if quant and not lora:
        raise UsageError(
            f"--quant {quant} is for frozen weights, and without --lora all weights are trained; add --lora 16"
        )
    name = model if isinstance(model, str) else type(model).__name__
    built = _built(model) if isinstance(model, str) else model
    if not all(tensor.is_meta for tensor in (*built.parameters(), *built.buffers())):
        raise UsageError(
            f"{name} is not on the meta device, and its weights are not needed here; build it inside `with "
            "torch.device('meta'):`"
        )
    built.to(kind).train()
    parts = parts_of(built)
    if lora:
        add_adapters(built, parts.blocks, lora, quant)
        parts = parts_of(built)
    if not any(p.requires_grad for p in built.parameters()):
        raise UsageError(f"nothing in {name} requires a gradient; leave some parameters trainable, or add --lora 16")
    asked = Question(
        name=name, model=built, parts=parts, dtype=kind, optimizer=optimizer,
        optimizer_in_backward=optimizer_in_backward,
        attention=attention, mode=mode, lora=lora, quantisation=quant,
    )  # fmt: skip
    _ = asked.optimizer_bytes
    return asked


def _built(text: str) -> nn.Module:
    """Build a model of the command line on the meta device."""
    text = text.strip()
    short = re.sub(r"[-.]", "_", _LLAMA.sub(r"llama_\1", text.lower()))
    for name in (short, f"llama_{short}"):
        if name in SHAPES:
            return decoder(name)
    if match := _TRANSFORMERS.fullmatch(text):
        return _of_transformers(match[1], Path(match[2].strip("\"'")))
    if path := _config_of(text.removeprefix("transformers:")):
        return _of_transformers(_architecture(path), path)
    with torch.device("meta"):
        return build_model(text).module


def _config_of(text: str) -> Path | None:
    """The ``config.json`` that is meant: a file, the folder with it, or that of a model on Hugging Face in the cache;
    None: none of these.
    """
    path = Path(text)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return path / "config.json" if path.is_dir() else path
    if not _ON_THE_HUB.fullmatch(text) or path.suffix == ".py":
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(text, "config.json")
    if not isinstance(found, str):
        raise UsageError(
            f"the config of {text} is not in Hugging Face's cache; load it once "
            f"(transformers.AutoConfig.from_pretrained({text!r})), or give its config.json"
        )
    return Path(found)


def _architecture(path: Path) -> str:
    """The class of Transformers that a config names.

    Raises:
        UsageError: it names none.
    """
    kinds = _content(path).get("architectures")
    if not kinds:
        raise UsageError(
            f"{path} does not say of which class the model is (architectures); give such as "
            f"transformers:LlamaForCausalLM({path})"
        )
    return str(kinds[0])


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not the config.json of a model: {error}; give a file or folder that is here"
        ) from None
    return content if isinstance(content, dict) else {}


def _of_transformers(kind: str, path: Path) -> nn.Module:
    """A model of Transformers on the meta device, from a ``config.json`` or the folder with it.

    Raises:
        UsageError: Transformers is missing, has no such class, or the file is no config of it.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"transformers:{kind} needs Transformers, which is not installed; pip install transformers"
        ) from None
    make = getattr(transformers, kind, None)
    if not (isinstance(make, type) and issubclass(make, nn.Module) and hasattr(make, "config_class")):
        raise UsageError(f"Transformers has no model {kind!r}; give such as transformers:LlamaForCausalLM(config.json)")
    if not getattr(make, "_supports_sdpa", False):
        raise UsageError(
            f"transformers:{kind} computes attention by code of its own (caps or sinks of its scores, or none at all), "
            "and fits knows PyTorch's scaled_dot_product_attention alone; give a module on the meta device with a "
            "method parts() that returns monet_like.models.Parts"
        )
    path = path / "config.json" if path.is_dir() else path
    content = _content(path)
    try:
        config = make.config_class.from_dict(content)
        config.use_cache = False
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            return make(config)
    except Exception as error:  # whatever Transformers raises
        raise UsageError(f"transformers:{kind} could not be built from {path}: {told(error)}") from error
