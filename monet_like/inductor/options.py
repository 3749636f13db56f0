"""`compile_options`: has ``torch.compile`` save and recompute what a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError
from ..ir.defaults import SOLVER
from ..ir.units import Budget, parse_budget
from ..torch_versions import warn_if_untested

if TYPE_CHECKING:
    from ..ir.schedule import Schedule
    from .planned_graph import Settings


def compile_options(
    memory_budget: str | int | Budget | Path,
    *,
    extra_bytes: int = 0,
    calls: int = 1,
    quick: bool = False,
    measured: bool = True,
    solver: str = SOLVER,
    time_limit_seconds: float = 30.0,
    gap: float = 0.01,
) -> dict[str, Any]:
    """Options for ``torch.compile`` with which its step stays within a memory budget, as fast as a plan makes it.

    ``torch.compile(model, options=monet_like.compile_options("8 GB"))``. Inductor's joint graph of forward and backward
    is planned: what is saved, and what is recomputed when and how often. Inductor then fuses and generates as it does
    otherwise. On a GPU PyTorch's own partition is taken instead where it fits and is priced below the plan. The options
    serve one model: what one of its graphs holds, the next ones do not have. Plans are kept in the cache folder, so
    another process neither times nor plans these graphs again.

    Args:
        memory_budget: of forward and backward: parameters, inputs, saved activations, gradients, workspaces. ``"8
            GB"``, bytes as an int, or a percentage such as ``"60%"`` of what each graph needs with nothing recomputed.
            Or a file that ``monet-like export --to inductor`` has written, a path that ends with ``.json``: its plans
            are taken, and nothing else is planned.
        extra_bytes: memory that exists besides, such as the optimizer's state, and parameters and gradients that no
            graph of the model sees. It counts only where the budget is an amount.
        calls: how often a step calls each graph, each time with parameters of its own: for blocks that are compiled one
            by one. The budget is for all of them.
        quick: plan by the local search alone, in a second or two for a small graph. It ends at the time limit once it
            has a plan that fits.
        measured: time what Inductor does not generate, such as products and convolutions, and measure its workspace;
            else times come from the device's rates, and workspaces count as 0. On a GPU, time also the ways to run a
            graph that are priced alike.
        solver, time_limit_seconds, gap: as of `monet_like.plan.plan`, for every graph.

    Returns:
        The options. ``options["custom_partitioner_fn"].graphs`` has the plan and the predicted peak of every graph once
        the model has been called.

    Raises:
        UsageError: an argument is wrong, or this PyTorch has no such hook. In the first call of the model: a graph has
            what a plan cannot express, such as sizes that change.
        ScheduleFileError: the file is none of these.
        InfeasibleError: in the first call of the model: a graph does not fit; says what would.
    """
    if extra_bytes < 0 or calls < 1:
        raise UsageError(f"extra_bytes ({extra_bytes}) must be at least 0, and calls ({calls}) at least 1")
    if missing := missing_hook():
        raise UsageError(
            f"compile_options needs torch._inductor.config.{missing}, which PyTorch {torch.__version__} lacks; "
            "install a release that monet_like is tested with, or use monet_like.ScheduleWrapper"
        )
    from .planned_graph import Settings

    warn_if_untested()
    planned = {}
    if isinstance(memory_budget, Path) or str(memory_budget).endswith(".json"):
        from .plan_file import read_plan

        known = read_plan(Path(str(memory_budget)))
        memory_budget, extra_bytes = known.budget_bytes, known.extra_bytes
        planned = {graph.key: graph.schedule for graph in known.graphs}
    budget = parse_budget(memory_budget)
    found = options_of(Settings(budget, extra_bytes, calls, quick, measured, solver, time_limit_seconds, gap), planned)
    found["custom_partitioner_fn"].goes_on = True
    return found


def missing_hook() -> str:
    """The first setting of Inductor that plans need and this PyTorch lacks; "" if there is none."""
    from torch._inductor import config

    hooks = ("custom_partitioner_fn", "_pre_fusion_custom_pass", "_post_fusion_custom_pass")
    return next((name for name in hooks if not hasattr(config, name)), "")


def options_of(decides: Settings, planned: Mapping[str, Schedule] | None = None) -> dict[str, Any]:
    """Options of Inductor with which graphs are planned so; ``planned``: see `PlannedPartitioner`."""
    from torch._inductor import config

    from .groups import grouped, ungrouped
    from .partitioner import PlannedPartitioner
    from .passes import SchedulerPass
    from .portfolio import OwnSettings
    from .rehearsal import SETTINGS

    settings = {name: value for name, value in SETTINGS.items() if hasattr(config, name)}
    return {
        "custom_partitioner_fn": PlannedPartitioner(decides, planned),
        "_pre_fusion_custom_pass": SchedulerPass(grouped),
        "_post_fusion_custom_pass": SchedulerPass(ungrouped),
        "post_grad_custom_pre_pass": OwnSettings({name: getattr(config, name) for name in settings}),
        **settings,
    }
