"""The zoo's models as the compiler takes them, without the time to fill their weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ...capture.captured import Captured
from ...compiler.pipeline import prepare
from ...compiler.prepared import Prepared
from ...compiler.request import captured_for
from ...profile.devices import DEVICES
from ...zoo.catalogue import MODE, PROFILES
from ..problem import Problem, read_problem


@functools.lru_cache(maxsize=2)  # of one model, for GPUs and CPUs: a program takes tens of megabytes
def captured_model(model: str, batch: int, device: str) -> tuple[Problem, Captured]:
    """Capture a model for one kind of device, without filling its weights, and without Liger's kernels wherever that
    is; all its profiles share the program.

    Args:
        device: ``cpu`` or ``cuda``, which need not be here.
    """
    with Unfilled():
        problem = read_problem(
            model=model, batch=str(batch), budget="1", mode=MODE, solver="HIGHS", device=device, dtype="float32",
            input_shape=None, measured=False,
        )  # fmt: skip
    problem = replace(problem, request=replace(problem.request, liger=False))
    return problem, captured_for(problem.request, problem.request.example)


@functools.lru_cache(maxsize=len(PROFILES))
def prepared_model(model: str, batch: int, profile: str) -> tuple[Problem, Prepared]:
    """A model's program with costs from the datasheet rates of a profile."""
    # The zoo's budgets, as MONeT's, are without cuBLAS's workspaces, which are others in each version of PyTorch.
    limits = replace(DEVICES[profile], cublas_bytes=0, product_bytes=0)
    problem, captured = captured_model(model, batch, limits.device)
    request = replace(problem.request, made_last=captured.made_last)  # for all cards the same program
    return problem, prepare(request, problem.device, profile=limits, captured=captured)


class Unfilled(TorchFunctionMode):
    """Leaves large new weights unfilled: only their shapes matter, and untouched memory costs nothing."""

    _FILL = (
        "uniform_", "normal_", "trunc_normal_", "zero_", "fill_", "constant_", "erfinv_", "mul_", "add_", "clamp_",
        "kaiming_uniform_",
    )  # fmt: skip
    _LARGE = 2**16

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args else (kwargs or {}).get("tensor")
        parameter = isinstance(first, nn.Parameter) and first.numel() > self._LARGE
        if parameter and name in self._FILL:
            return first
        return func(*args, **(kwargs or {}))
