"""A request to the compiler (model, example inputs, device, mode), and the capture of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.example_inputs import Example
from ..capture.lower.step import capture
from ..capture.precision import autocast_as
from ..capture.trace.meta_tensors import traced_device
from ..capture.trees import tensors_of
from ..errors import UsageError
from ..ir.defaults import SOLVER
from ..ir.display import short_repr
from ..ir.mode import NHWC, parse_mode
from ..variants import admitted


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps and takes, in units of a parameter's bytes.

    Attributes:
        states: tensors like the parameter that it keeps.
        temporaries: tensors like the parameter that its step allocates, one parameter at a time.
        quantised: the states are 8-bit, as bitsandbytes keeps them (Dettmers et al., 8-bit Optimizers via Block-wise
            Quantization, ICLR 2022): one byte for an element and a float32 for each block of 256; float32 for
            parameters of fewer than 4,096 elements.
    """

    states: int
    temporaries: int
    quantised: bool = False

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes of the state of one parameter."""
        count = parameter.numel()
        if not self.quantised:
            return self.states * count * parameter.element_size()
        return self.states * (4 * count if count < 4096 else count + 4 * -(-count // 256))


#: By name. ``_fused`` ones are PyTorch's with ``fused=True``. ``paged`` ones are bitsandbytes': their states are in
#: managed memory, which the driver moves to the host when a step needs the GPU's.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "none": Optimizer(0, 0),
    "sgd": Optimizer(0, 0),
    "momentum": Optimizer(1, 0),
    "adam": Optimizer(2, 2),
    "adamw": Optimizer(2, 2),
    "adam_fused": Optimizer(2, 0),
    "adamw_fused": Optimizer(2, 0),
    "adam8bit": Optimizer(2, 0, quantised=True),
    "adamw8bit": Optimizer(2, 0, quantised=True),
    "paged_adamw": Optimizer(0, 0),
    "paged_adamw8bit": Optimizer(0, 0),
}


@dataclass(frozen=True, repr=False)
class Request:
    """A request to the compiler. The command line has options of the same names.

    ``target`` is the device to plan for where the model itself is on another; it need not be here, but then nothing can
    be measured. ``processes`` share SyncBatchNorm's statistics; None: those of this process's group. ``made_last`` are
    the parameters whose gradients are made last; None: those with which the step needs less memory. With
    ``optimizer_in_backward`` hooks on the parameters step and free each gradient as soon as it is there. ``attention``
    is the kind of attention that PyTorch takes (flash, efficient, cudnn or math; "": its own choice), ``capability``
    the compute capability of ``target``, by which it chooses; None: not known. ``liger``: whether Liger's kernels are
    offered; None: where they run.
    """

    __repr__ = short_repr

    model: nn.Module
    example: Example
    mode: str
    expression: str = ""
    ablation: bool = False
    optimizer: str = "none"
    strategy: str = "milp"
    solver: str = SOLVER
    time_limit_seconds: float = 60.0
    gap: float = 0.01
    threads: int = 1
    profile_batch: int | None = None
    autocast: str = ""
    target: torch.device | None = None
    processes: int | None = None
    made_last: tuple[str, ...] | None = None
    optimizer_in_backward: bool = False
    attention: str = ""
    capability: tuple[int, int] | None = None
    liger: bool | None = None

    @property
    def batch(self) -> int:
        """The leading extent of the first tensor argument."""
        tensors = tensors_of(self.example)
        return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1

    @property
    def optimizer_bytes(self) -> int:
        """See the function of that name."""
        return optimizer_bytes(self.model, self.optimizer, in_backward=self.optimizer_in_backward)


def solver_and_strategy(solver: str, strategy: str) -> tuple[str, str]:
    """What these words mean: "heuristic" in the solver's place is a strategy, which needs none."""
    return (SOLVER, "heuristic") if solver.lower() == "heuristic" else (solver, strategy)


def captured_for(request: Request, example: Example) -> Captured:
    """Capture a request's model on these inputs, with the variants that its mode admits."""
    with autocast_as(request.autocast, traced_device(request.model, request.example)):
        captured = capture(
            request.model, *example, target=request.target, processes=request.processes, made_last=request.made_last,
            optimizer_in_backward=request.optimizer_in_backward, attention=request.attention,
            capability=request.capability, channels_last=NHWC in parse_mode(request.mode),
        )  # fmt: skip
        return admitted(captured, request.mode, ablation=request.ablation, liger=request.liger)


def in_autograd_order(request: Request, captured: Captured) -> Captured:
    """A captured request with no gradient delayed, as ``made_last=()`` would give it. Nothing is traced again."""
    if captured.undelayed is None:
        return captured
    return admitted(captured.undelayed, request.mode, ablation=request.ablation, liger=request.liger)


def readmitted(request: Request, captured: Captured) -> Captured:
    """A captured step with the variants of this request instead of those it has. Nothing is traced again."""
    assert captured.without_variants is not None
    return admitted(captured.without_variants, request.mode, ablation=request.ablation, liger=request.liger)


def optimizer_bytes(model: nn.Module, optimizer: str, *, in_backward: bool = False) -> int:
    """Bytes of the optimizer's state for the model's trainable parameters.

    Args:
        in_backward: it steps in the backward; then the temporaries of its largest step count, too.

    Raises:
        UsageError: an unknown optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    kind, trained = OPTIMIZERS[optimizer], [p for p in model.parameters() if p.requires_grad]
    largest = max((p.numel() * p.element_size() for p in trained), default=0)
    return sum(map(kind.state_bytes, trained)) + kind.temporaries * largest * in_backward
