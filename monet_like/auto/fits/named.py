"""Steps of models that are asked for by a name, by a config, by a function in the user's file, or as they are."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...capture.captured import fake_mode
from ...capture.example_inputs import Example, each_once, length_of, with_batch, with_length
from ...capture.trace.meta_tensors import as_fakes
from ...capture.trees import tensors_of
from ...errors import CaptureError, UsageError
from ...models import SHAPES, build_model, decoder, function_of, told
from ..rehearsal.memory import ends_of
from .recorded import Recording, as_meta, recorded

_TRANSFORMERS = re.compile(r"transformers:(\w+)\((.+)\)")
#: A name on Hugging Face; a file of Python has a function behind a colon.
_ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")
#: What people call the shapes of Llama 3.1, 3.2 and 3.3.
_LLAMA = re.compile(r"^(?:meta-llama/)?(?:meta-)?llama-?3(?:\.[123])?-(\d+b)(?:-instruct)?$")


#: Tokens of a sample, unless another length is asked for.
LENGTH = 2048
#: Makes arguments for a batch and a length, in a mode of fake tensors.
Inputs = Callable[[int, int], Any]
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Steps:
    """Training steps of a model on the meta device, or of one that a function of the user's makes.

    Attributes:
        model: whose tensors are there during the step.
        inputs: of the model.
        loss: of the model's result; None: its own ``loss``, or any that takes no memory.
        function: a function of the user's, called with ``batch`` and ``length`` as far as it takes them: it runs a
            step, or returns a model and its inputs, perhaps with a loss, or a model and a function that runs a step.
        sizes: of ``batch`` and ``length`` those on which steps depend, as they are.
        own_dtype: dtypes were chosen with the inputs.
        prepare: changes a model before its step, as adapters do.
        dtype: that floating-point inputs get; None: their own.
        assumed: what was taken to be its input, in words.
        runs: the function runs the step itself, with a model that nobody else sees.
    """

    model: nn.Module
    inputs: Inputs | None = None
    loss: Loss | None = None
    function: Callable[..., Any] | None = None
    sizes: Mapping[str, int] = field(default_factory=lambda: {"batch": 1})
    own_dtype: bool = False
    prepare: Callable[[nn.Module], object] = lambda _: None
    dtype: torch.dtype | None = None
    assumed: str = ""
    runs: bool = False

    def recorded(self, batch: int, length: int) -> Recording:
        """The forward of a step of this size.

        Raises:
            CaptureError: there is no loss that requires a gradient, or the step needs what fake tensors do not have.
        """
        try:
            return self._recorded(batch, length)
        except (UsageError, CaptureError):
            raise
        except Exception as error:  # the user's code, or operators without a fake
            raise CaptureError(
                f"the training step does not run on fake tensors: {told(error)}{self.assumed}"
            ) from error

    def _recorded(self, batch: int, length: int) -> Recording:
        if self.function is not None:
            with fake_mode(), torch.device("cpu"):
                return recorded(lambda: self._made(batch, length))
        with fake_mode():
            example = example_of(self.inputs(batch, length) if self.inputs else ())
        args, kwargs = each_once(as_meta, self._cast(example))
        with as_fakes(self.model, args, kwargs) as (given, named):
            tensors: Iterable[Any] = (*tensors_of((given, named)), *self.model.parameters())
            with next(tensor.fake_mode for tensor in tensors):
                return recorded(lambda: (self.loss or ends_of)(self.model(*given, **named)))

    def _made(self, batch: int, length: int) -> Any:
        """Run the step of the user's function up to its loss, or its result; a backward ends this."""
        assert self.function is not None
        takes = inspect.signature(self.function).parameters
        made = self.function(**{n: size for n, size in (("batch", batch), ("length", length)) if n in takes})
        if not _is_pair(made):
            return made
        model, second, *loss = made
        self.prepare(model)
        if callable(second):
            return second()
        args, kwargs = example_of(second)
        args, kwargs = self._cast(each_once(_here, _sized(each_once(as_meta, (args, kwargs)), batch, length)))
        return (loss[0] if loss else ends_of)(model(*args, **kwargs))

    def _cast(self, example: Example) -> Example:
        """Floating-point inputs in the dtype that was asked for."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.dtype) if self.dtype and tensor.is_floating_point() else tensor

        return each_once(cast, example)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like one on the meta device, in the present mode."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _is_pair(made: Any) -> bool:
    return isinstance(made, tuple | list) and len(made) in (2, 3) and isinstance(made[0], nn.Module)


def example_of(inputs: Any) -> Example:
    """Arguments and keyword arguments that inputs stand for: one or several arguments, a dict, or both in a tuple."""
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return inputs[0], inputs[1]
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def steps_of(model: nn.Module, inputs: Any = None, loss: Loss | None = None) -> Steps:
    """Steps of a model on the meta device.

    Args:
        inputs: of one step, see `example_of`; None: those that such a model is known to take.
    """
    if inputs is None:
        return _known(model, loss)
    example = each_once(as_meta, example_of(inputs))
    return Steps(model, lambda batch, length: _sized(example, batch, length), loss, sizes=_own(example), own_dtype=True)


def _own(example: Example) -> dict[str, int]:
    """Batch of inputs, and length where they have tokens: integers [batch, length]."""
    tensors = tensors_of(example)
    found = {"batch": int(tensors[0].shape[0])} if tensors and tensors[0].dim() else {}
    texts = [t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    return {**found, "length": int(texts[0])} if texts and texts[0] == length_of(example) else found


def _sized(example: Example, batch: int, length: int) -> Example:
    """Inputs of another size; 0: of their own."""
    own = _own(example)
    if batch and own.get("batch", batch) != batch:
        example = with_batch(example, batch)
    return with_length(example, length) if length and own.get("length", length) != length else example


def named(text: str, batch: int | None, length: int | None) -> Steps:
    """Steps of what a MODEL of the command line names.

    Raises:
        UsageError: it is not understood, or its inputs are not known.
    """
    text = text.strip()
    short = re.sub(r"[-.]", "_", _LLAMA.sub(r"llama_\1", text.lower()))
    for name in (short, f"llama_{short}"):
        if name in SHAPES:
            return _known(decoder(name))
    if match := _TRANSFORMERS.fullmatch(text):
        return _known(_of_transformers(match[1], Path(match[2].strip("\"'"))))
    if path := _config_of(text.removeprefix("transformers:")):
        return _known(_of_transformers(_architecture(path), path))
    if ".py:" in text and (found := _of_function(text, {"batch": batch, "length": length})):
        return found
    with torch.device("meta"):
        spec = build_model(text)
    make = getattr(spec.source, "make_inputs", None)
    return _known(spec.module, shape=spec.input_shape, own=make)


def _of_function(text: str, wanted: Mapping[str, int | None]) -> Steps | None:
    """Steps that a function of the user's file makes; None: it returns a model alone."""
    _, function, _ = function_of(text)
    parameters = inspect.signature(function).parameters
    sizes = {
        name: wanted[name]
        or (usual if parameters[name].default is inspect.Parameter.empty else parameters[name].default)
        for name, usual in (("batch", 1), ("length", LENGTH))
        if name in parameters
    }
    made: list[Any] = []
    try:
        with fake_mode(), torch.device("cpu"):
            found = recorded(lambda: made.append(function(**sizes)))
    except CaptureError:
        found = None
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise UsageError(f"MODEL {text!r} failed: {told(error)}") from error
    if found is not None:
        model: nn.Module = nn.ModuleList(found.models)
    elif made and isinstance(made[0], nn.Module):
        return None
    elif made and _is_pair(made[0]):
        model = made[0][0]
    else:
        raise UsageError(
            f"MODEL {text!r} neither runs a training step (it calls no backward) nor returns a model, (model, inputs), "
            "(model, inputs, loss), or (model, step) with a function that runs a step"
        )
    _to_meta(model)
    if found is None and not callable(made[0][1]):
        sizes = {**_own(example_of(made[0][1])), **sizes}
    return Steps(model, function=function, sizes=sizes, own_dtype=True, runs=found is not None)


def _to_meta(model: nn.Module) -> None:
    """Put a model on the meta device."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        members: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in members:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = known.setdefault(id(tensor), as_meta(tensor))


def _known(
    model: nn.Module, loss: Loss | None = None, *, shape: tuple[int, ...] = (3, 224, 224),
    own: Any = None,
) -> Steps:  # fmt: skip
    """Steps of a model whose inputs follow from its class or its file, else images."""
    if hasattr(model, "main_input_name"):
        inputs, text = _of_class(model)
        return Steps(model, inputs, loss, sizes={"batch": 1, "length": LENGTH} if text else {"batch": 1})
    make: Any = own or getattr(model, "make_inputs", None)
    if make is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        assumed = f"; its input was taken to be {['batch', *shape]}: return (model, inputs) from a function instead"
        return Steps(model, lambda batch, _: torch.empty(batch, *shape, dtype=dtype), loss, assumed=assumed)
    if "length" in inspect.signature(make).parameters:
        return Steps(model, make, loss, sizes={"batch": 1, "length": LENGTH})
    return Steps(model, lambda batch, _: make(batch), loss)


def _of_class(model: Any) -> tuple[Inputs, bool]:
    """Inputs of a model of Transformers, and whether they are texts of any length."""
    config, name = model.config, model.main_input_name
    one_label = any(part in type(model).__name__ for part in ("ImageClassification", "SequenceClassification"))
    has_labels = "labels" in inspect.signature(model.forward).parameters

    def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch, length, dtype=torch.long)
        dtype = next(model.parameters()).dtype
        if name == "input_ids":
            found = {name: tokens}
        elif name == "pixel_values":
            height, width = size if isinstance(size := config.image_size, list | tuple) else (size, size)
            found = {name: torch.empty(batch, config.num_channels, height, width, dtype=dtype)}
        else:
            frames = 2 * config.max_source_positions  # its first convolutions halve them
            found = {name: torch.empty(batch, config.num_mel_bins, frames, dtype=dtype)}
            tokens = tokens[:, : config.max_target_positions]
        if has_labels:
            found["labels"] = tokens[:, 0] if one_label else tokens
        return found

    needed = {
        "input_ids": (), "pixel_values": ("image_size", "num_channels"),
        "input_features": ("max_source_positions", "num_mel_bins", "max_target_positions"),
    }  # fmt: skip
    if name not in needed or not all(hasattr(config, field) for field in needed[name]):
        raise UsageError(
            f"which inputs {type(model).__name__} takes is not known (its first is {name}); give "
            "fits(model, inputs) or path/to/file.py:make_step, a function that returns the model and its inputs"
        )
    return inputs, name == "input_ids"


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
    """The class of Transformers that a config names."""
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
    """A model of Transformers on the meta device, from a ``config.json`` or the folder with it."""
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"transformers:{kind} needs Transformers, which is not installed; pip install transformers"
        ) from None
    make = getattr(transformers, kind, None)
    if not (isinstance(make, type) and issubclass(make, nn.Module) and hasattr(make, "config_class")):
        raise UsageError(f"Transformers has no model {kind!r}; give such as transformers:LlamaForCausalLM(config.json)")
    path = path / "config.json" if path.is_dir() else path
    content = _content(path)
    try:
        config = make.config_class.from_dict(content)
        config.use_cache = False
        config._attn_implementation = "sdpa" if getattr(make, "_supports_sdpa", False) else "eager"
        with torch.device("meta"):
            return make(config)
    except Exception as error:  # whatever Transformers raises
        raise UsageError(f"transformers:{kind} could not be built from {path}: {told(error)}") from error
