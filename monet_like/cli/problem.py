"""Reads what a user typed: the model, its example inputs, the budget and the device. All commands share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.absent_gpu.attention import check_attention
from ..capture.captured import fake_mode
from ..capture.checks import check_initialized, check_unscripted
from ..capture.example_inputs import Example
from ..capture.precision import AUTOCASTS, LAYOUTS, in_layout
from ..capture.trace.meta_tensors import is_meta
from ..capture.trees import flattened, map_tensors
from ..compiler.request import Request, optimizer_bytes, solver_and_strategy
from ..compiler.words import absent_device, parse_batch, parse_shape, read_device, read_dtype, shortened
from ..errors import UsageError
from ..ir.display import short_repr
from ..ir.mode import parse_mode
from ..ir.units import MOST_SECONDS, Budget, parse_budget
from ..models import ModelSpec, build_model, told
from ..nn.sync_batch_norm import is_synchronised

#: Of a solver, and that share statistics: more than any machine has.
MOST_THREADS, MOST_PROCESSES = 4096, 2**20


@dataclass(frozen=True, repr=False)
class Problem:
    """A model with example inputs, a budget and a device.

    Attributes:
        shape: of an input, without the batch, if one was given.
        layout: of inputs and weights; "": the default.
    """

    __repr__ = short_repr

    spec: ModelSpec
    request: Request
    budget: Budget
    device: torch.device
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    layout: str

    @property
    def budget_bytes(self) -> int:
        """The budget, for commands that know no plain step of which it could be a share.

        Raises:
            UsageError: it is a share, or what is free on the card.
        """
        if self.budget.bytes is None:
            what = "what is free on the card for one step" if self.budget.is_card else "a share of plain PyTorch's peak"
            raise UsageError(
                f"budget {self.budget} is {what}, which differs from batch to batch; give GB as a number (10, 5.5) or "
                'an amount with its unit ("565 MB")'
            )
        return self.budget.bytes


def read_problem(
    *,
    model: str,
    batch: str,
    budget: str,
    mode: str,
    solver: str,
    device: str,
    dtype: str,
    input_shape: str | None,
    profile_batch: int | None = None,
    time_limit: float = 60.0,
    gap: float = 0.01,
    threads: int = 1,
    ablation: bool = False,
    optimizer: str = "none",
    optimizer_in_backward: bool = False,
    strategy: str = "milp",
    autocast: str = "",
    channels_last: bool = False,
    attention: str = "",
    processes: int | None = None,
    measured: bool = True,
) -> Problem:
    """Check every argument before any work, the cheapest checks first.

    Args:
        measured: operators will be measured, so ``device`` must be here; else the model is captured as on it.

    Raises:
        UsageError: the first argument that is wrong.
    """
    from ..plan.strategies import check_strategy
    from ..solvers.interface import check_solver

    solver, strategy = solver_and_strategy(solver, strategy)
    size, limit, shape = parse_batch(batch), parse_budget(budget), parse_shape(input_shape)
    parse_mode(mode)
    _check_numbers(profile_batch, time_limit, gap, threads, processes)
    check_solver(solver)
    check_strategy(strategy)
    if autocast not in AUTOCASTS:
        raise UsageError(f"--autocast {autocast!r} is unknown; give {' or '.join(filter(None, AUTOCASTS))}")
    check_attention(attention)
    kind = read_dtype(dtype)
    target = None if measured else absent_device(device)
    where = torch.device("cpu") if target else read_device(device)
    layout = "channels_last" if channels_last else ""
    elsewhere = not measured and device in ("auto", "cuda", "cuda:0")
    spec = _built(model, where, kind, layout, processes, elsewhere)
    if target is None and is_meta(spec.module):
        target = absent_device("cuda")
    optimizer_bytes(spec.module, optimizer)
    request = Request(
        model=spec.module,
        example=((), {}),
        mode=mode,
        expression=spec.expression,
        ablation=ablation,
        optimizer=optimizer,
        strategy=strategy,
        solver=solver,
        time_limit_seconds=time_limit,
        gap=gap,
        threads=threads,
        profile_batch=profile_batch,
        autocast=autocast,
        target=target,
        processes=processes,
        optimizer_in_backward=optimizer_in_backward,
        attention=attention,
    )
    problem = Problem(spec, request, limit, where, shape, kind, layout)
    example = example_for(problem, size)
    _check_trainable(spec, example)
    return replace(problem, request=replace(request, example=example))


def _check_numbers(
    profile_batch: int | None, time_limit: float, gap: float, threads: int, processes: int | None
) -> None:
    """Refuse numbers that are out of range; each message names the option."""
    if profile_batch is not None and profile_batch < 1:
        raise UsageError(f"--profile-batch {profile_batch} must be at least 1")
    if not time_limit > 0:
        raise UsageError(f"--time-limit {time_limit} must be more than 0 seconds")
    if time_limit > MOST_SECONDS:
        raise UsageError(f"--time-limit {time_limit} must be at most {MOST_SECONDS:g} seconds")
    if not 0 <= gap < 1:
        raise UsageError(f"--gap {gap} must be at least 0 and less than 1, such as 0.01 for 1 %")
    for name, count, most in (("threads", threads, MOST_THREADS), ("processes", processes, MOST_PROCESSES)):
        if count is not None and count < 1:
            raise UsageError(f"--{name} {count} must be at least 1")
        if count is not None and count > most:
            raise UsageError(f"--{name} {shortened(count)} must be at most {most}")


def _built(
    model: str, device: torch.device, dtype: torch.dtype, layout: str, processes: int | None, planned: bool
) -> ModelSpec:
    """Build a model as it will be trained; ``planned``: elsewhere, so that it may be on the meta device.

    Raises:
        UsageError: unknown model, or ``processes`` that a model without SyncBatchNorm cannot use.
    """
    spec = build_model(model)
    if processes is not None and processes > 1 and not is_synchronised(spec.module):
        raise UsageError(
            f"--processes {processes} is for models with SyncBatchNorm, and {spec.expression} has none; leave it out, "
            "or give a file with a function that returns monet_like.convert_sync_batchnorm(...)"
        )
    check_unscripted(spec.module)
    check_initialized(spec.module, planned=planned)
    spec.module.to(dtype) if is_meta(spec.module) else spec.module.to(device, dtype)
    if layout:
        spec.module.to(memory_format=LAYOUTS[layout])
    return spec


def _check_trainable(spec: ModelSpec, example: Example) -> None:
    """Refuse a model of which neither a parameter nor an input requires a gradient."""
    leaves = (*spec.module.parameters(), *flattened(example)[0])
    if not any(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)):
        raise UsageError(
            f"nothing in {spec.expression} requires a gradient: its parameters are frozen, or there are none; set "
            "requires_grad_(True) on what is to be trained"
        )


def assumed_input(problem: Problem) -> str:
    """The input that was assumed because nobody said what MODEL takes, in words; "": it was said."""
    if _make_inputs(problem) is not None or problem.shape is not None:
        return ""
    dtype, extents = str(problem.dtype).removeprefix("torch."), [problem.request.batch, *problem.spec.input_shape]
    return f"input: {dtype}{extents}, assumed; another: --input-shape, or make_inputs(batch) in MODEL's file"


def _make_inputs(problem: Problem) -> Any:
    return getattr(problem.spec.source or problem.spec.module, "make_inputs", None)


def example_for(problem: Problem, batch: int) -> Example:
    """Fake example inputs: by ``make_inputs(batch)`` of MODEL's file or of the model itself, else one
    batch of images.
    """
    make = _make_inputs(problem)
    with fake_mode(), problem.device:
        if make is None or problem.shape is not None:
            extents = (batch, *(problem.shape or problem.spec.input_shape))
            if math.prod(extents) >= 2**53:  # PyTorch's own messages for such sizes are no help
                raise UsageError(
                    f"an input of shape {list(extents)} is too large; give a smaller batch or --input-shape"
                )
            made = (torch.empty(extents, dtype=problem.dtype),)
        else:
            try:
                made = make(batch)
            except (Exception, SystemExit) as error:  # whatever the user's code raises
                raise UsageError(f"make_inputs({batch}) of MODEL failed: {told(error)}") from error
        if problem.layout:
            made = map_tensors(lambda tensor: in_layout(tensor, problem.layout), made)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict):
        return made
    if isinstance(made, dict):
        return (), made
    return (made if isinstance(made, tuple) else (made,)), {}
