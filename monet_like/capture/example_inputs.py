"""Example inputs of a model: their descriptions, and fake tensors made from a description."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import ScheduleFileError, UsageError
from ..ir.schedule_file import InputSpec
from ..runtime.streamed_weights import computed_on
from .captured import fake_mode
from .precision import LAYOUTS, in_layout, layout_of
from .trees import map_tensors, tensors_of

Example = tuple[tuple[Any, ...], dict[str, Any]]


def each_once(change: Callable[[torch.Tensor], Any], example: Example) -> Example:
    """The example with its tensors changed; one that is given several times stays one."""
    args, kwargs = map_tensors(change, example)
    return args, kwargs


def with_batch(example: Example, wanted: int) -> Example:
    """The example at another batch size: ``wanted`` replaces the leading extent of tensors that have the batch's."""
    tensors = [t for t in tensors_of(example) if t.dim()]
    batch = tensors[0].shape[0] if tensors else wanted

    def resized(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        made = torch.empty((wanted, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
        return in_layout(made, layout_of(leaf)).requires_grad_(leaf.requires_grad)

    with fake_mode():
        return each_once(resized, example)


def length_of(example: Example) -> int:
    """The second extent of the first tensor that has one.

    Raises:
        UsageError: no tensor has.
    """
    tensors = [t for t in tensors_of(example) if t.dim() > 1]
    if not tensors:
        raise UsageError("lengths are of the second dimension of the inputs, and no input has one; leave lengths out")
    return int(tensors[0].shape[1])


def with_length(example: Example, wanted: int) -> Example:
    """The example at another length: ``wanted`` replaces that extent in every dimension but the first of every tensor,
    whose content is cut or repeated.

    The length is the second extent of the first tensor that has one.

    Raises:
        UsageError: no tensor has a second dimension.
    """
    length = length_of(example)

    def resized(leaf: torch.Tensor) -> torch.Tensor:
        new = leaf.detach()
        for dimension, extent in enumerate(leaf.shape):
            if dimension and extent == length:
                new = new.index_select(dimension, torch.arange(wanted, device=leaf.device) % length)
        return leaf if new.shape == leaf.shape else in_layout(new, layout_of(leaf)).requires_grad_(leaf.requires_grad)

    return each_once(resized, example)


def device_of(module: nn.Module, example: Example | None = None) -> torch.device:
    """The device of a module's parameters; without any that of its buffers, else of its inputs, else the CPU.

    Args:
        example: the inputs, where they are known.
    """
    own = next(chain(module.parameters(), module.buffers()), None)
    if own is not None:
        return computed_on(own)
    return next((tensor.device for tensor in tensors_of(example)), torch.device("cpu"))


def may_be_saved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; of one that was made in inference mode, which autograd does not save, another one in its memory."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for one that was made in inference mode, which does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def is_for_shapes(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a call gets tensors on meta or fake ones: nothing is computed, and no memory taken."""
    return any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


def example_of(inputs: Sequence[InputSpec], device: torch.device) -> Example:
    """Fake inputs as a schedule file describes them, as (args, kwargs).

    Raises:
        ScheduleFileError: they are of a dtype or layout that is not known here.
    """
    with fake_mode():
        return tuple(_empty(spec, device) for spec in inputs), {}


def _empty(spec: InputSpec, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ScheduleFileError(f"the schedule's input has dtype {spec.dtype!r}, which this PyTorch does not know")
    if spec.layout and spec.layout not in LAYOUTS:
        raise ScheduleFileError(f"the schedule's input has layout {spec.layout!r}, which this version does not know")
    try:
        made = in_layout(torch.empty(spec.shape, dtype=dtype, device=device), spec.layout)
        return made.requires_grad_(spec.requires_grad)
    except (RuntimeError, TypeError, ValueError) as error:  # a gradient of integers, a dtype without an empty tensor
        raise ScheduleFileError(f"the schedule's input {specs_in_words((spec,))} cannot be made: {error}") from None


def extents_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a nested one, whose parts differ in theirs, the number of its elements."""
    return (tensor.numel(),) if tensor.is_nested else tuple(map(int, tensor.shape))


def input_spec(tensor: torch.Tensor) -> InputSpec:
    """The description of an input in a schedule file: shape, dtype, ``requires_grad`` and memory layout."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return InputSpec(extents_of(tensor), dtype, tensor.requires_grad, layout_of(tensor))


def input_specs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InputSpec, ...]:
    """The descriptions of all tensors among the arguments, in the order of their leaves."""
    return tuple(map(input_spec, tensors_of((args, kwargs))))


def specs_in_words(specs: tuple[InputSpec, ...]) -> str:
    """Input descriptions as text for messages, such as ``float32[8, 3, 224, 224] channels_last``."""
    return (
        ", ".join(
            f"{s.dtype}{list(s.shape)}{' ' + s.layout if s.layout else ''}"
            f"{' (requires grad)' if s.requires_grad else ''}"
            for s in specs
        )
        or "no tensor"
    )


def outline_of_call(example: Example) -> Example:
    """Arguments whose tensors have no memory."""
    with fake_mode():
        return materialised(example)


def materialised(example: Example) -> Example:
    """Arguments with new tensors, of any content, that look like those of an outline."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return new.requires_grad_(tensor.requires_grad)

    found: Example = map_tensors(made, example)
    return found
