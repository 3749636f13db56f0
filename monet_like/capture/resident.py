"""What exists when a training step begins: parameters, buffers, inputs, and gradients of an earlier micro-step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn

from .example_inputs import Example
from .trees import tensors_of


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What is in this process's memory of a tensor: a sharded one's part, a quantised one's numbers and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, torch.Tensor):  # a sharded one has its mesh there, too
            yield from parts_of(part)


def resident_parts(model: nn.Module, example: Example) -> list[torch.Tensor]:
    """A tensor of each storage in this process's memory that exists when a step begins."""
    inputs = tensors_of(example)
    leaves = [*model.parameters(), *(tensor for tensor in inputs if tensor.is_leaf)]
    grads = (t.grad for t in leaves if t.grad is not None and t.grad.layout is torch.strided)
    tensors = chain.from_iterable(map(parts_of, (*model.parameters(), *model.buffers(), *inputs, *grads)))
    return list({t.untyped_storage().data_ptr(): t for t in tensors}.values())
