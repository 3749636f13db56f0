"""Keeps the backward of a rehearsal out of graphs that were made before it: their one backward is the caller's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...capture.example_inputs import Example
from ...capture.trees import map_tensors, tensors_of
from ...errors import UsageError


class OwnGraph:
    """The graph of a rehearsal, which begins now.

    Args:
        model: whose parameters get gradients.
        args, kwargs: of the step.

    Attributes:
        example: the arguments; the gradients of those that another computation has made lead nowhere.
    """

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._first = _number(torch.zeros((), requires_grad=True).view(1).grad_fn)
        self.example: Example = (args, kwargs)
        self._own = {*map(id, (*model.parameters(), *tensors_of(self.example)))}
        if any(tensor.grad_fn is not None for tensor in tensors_of(self.example)):
            self.example = map_tensors(_Cut.of, self.example)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward of the loss; tensors that are not the model's, such as global ones, have the gradient that they
        had.

        Raises:
            UsageError: it would free what an earlier computation has saved for its own backward.
        """
        waiting, seen = [loss.grad_fn], {None}
        others: dict[torch.Tensor, torch.Tensor | None] = {}
        while waiting:
            node: Any = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if _number(node) < self._first and _saves(node):
                raise UsageError(
                    f"the step reads a tensor that an earlier computation has made ({node.name()}) and that is no "
                    "argument; planning would run the backward of that computation: give the tensor as an argument, "
                    "or detach it"
                )
            if node.name().endswith("AccumulateGrad") and id(node.variable) not in self._own:
                others[node.variable] = node.variable.grad
            waiting += [before for before, _ in node.next_functions]
        try:
            for tensor in others:
                tensor.grad = None
            loss.backward()
        finally:
            for tensor, gradient in others.items():
                tensor.grad = gradient


def _number(node: Any) -> int:
    """Nodes of one thread are numbered in the order in which they are made; those of leaves have the highest number."""
    number: int = node._sequence_nr()
    return number


def _saves(node: Any) -> bool:
    """Whether a backward may free something that another one needs."""
    return hasattr(node, "saved_tensors") or any(name.startswith("_raw_saved") for name in dir(node))


class _Cut(torch.autograd.Function):
    """An input that another computation has made, whose own backward is the caller's: a rehearsal must not run it."""

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with a gradient that leads nowhere, if it has one."""
        if tensor.grad_fn is None:
            return tensor
        cut: torch.Tensor = _Cut.apply(tensor.detach().requires_grad_())
        return cut

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None
