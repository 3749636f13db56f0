"""One training step, plain or scheduled, and everything it leaves behind, for comparison."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monet_like.capture.trees import tensors_of as tensors
from monet_like.profile.measure import allocated_peak
from monet_like.replay.verify.steps import unsaved_loss


@dataclass
class Outcome:
    """What one step leaves: everything a trainer could notice."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    input_gradients: list[torch.Tensor | None]
    structure: type
    rise_bytes: int = 0

    def differences(self, other: Outcome) -> dict[str, float]:
        """Relative 2-norm difference of every tensor; 0.0 only for equal bits."""
        pairs: dict[str, tuple[Any, Any]] = {
            f"output {i}": p for i, p in enumerate(zip(self.outputs, other.outputs, strict=True))
        }
        pairs |= {f"gradient {n}": (g, other.gradients[n]) for n, g in self.gradients.items()}
        pairs |= {f"buffer {n}": (b, other.buffers[n]) for n, b in self.buffers.items()}
        pairs |= {
            f"input gradient {i}": p
            for i, p in enumerate(zip(self.input_gradients, other.input_gradients, strict=True))
        }
        return {name: _difference(*pair) for name, pair in pairs.items()}


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-300))


def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, measured: bool = False) -> Outcome:
    """One step from a fixed seed; the incoming gradients belong to autograd alone, as a loss's do."""
    for tensor in tensors((args, kwargs)):
        tensor.grad = None
    kept: list[Any] = []

    def step() -> None:
        result = model(*args, **kwargs)
        outputs = [t for t in tensors(result) if t.requires_grad]
        unsaved_loss(outputs, _slope).backward()
        kept.extend((result, type(result)))

    torch.manual_seed(11)
    if measured:
        gc.collect()  # what dies of an earlier step during this one would make its rise smaller
    rise = allocated_peak(step, torch.device("cpu")) if measured else (step() or 0)
    result, structure = kept
    return Outcome(
        [t.detach() for t in tensors(result)],
        {n: p.grad for n, p in model.named_parameters()},
        {n: b.detach().clone() for n, b in model.named_buffers()},
        [t.grad for t in tensors((args, kwargs))],
        structure,
        rise,
    )


def _slope(gradient: torch.Tensor) -> None:
    """A fixed pattern, other for every element, so that gradients in wrong places are noticed."""
    gradient.copy_(torch.linspace(1, -1, gradient.numel(), dtype=gradient.dtype).view(gradient.shape))


def twin(model: nn.Module) -> nn.Module:
    """A copy that shares nothing."""
    return copy.deepcopy(model)
