"""The least memory that a step needs, known before anything is planned: for budgets, and for the order of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..capture.captured import Captured
from ..capture.lower.delayed_gradients import LEAST_GAIN
from ..errors import InfeasibleError
from ..ir.profile_file import Profile
from ..ir.program import FREE, Cost
from ..ir.schedule import Schedule
from ..ir.simulate import Report
from ..ir.units import format_apart, format_bytes
from ..plan.baseline import plain_report
from ..plan.ilp.lowest_peak import smallest_known_budget
from ..plan.instance import Instance
from ..profile.devices import device_name
from ..profile.settings import changed_settings, settings_of
from .costs import measured_costs, to_profile
from .prepared import Prepared, prepared
from .request import Request


def check_floor(
    request: Request,
    captured: Captured,
    budget: int | Callable[[int], int],
    device: torch.device,
    profile: Profile | None,
    lowest: Callable[[], tuple[Prepared, Schedule, Report] | None],
) -> None:
    """Refuse a budget in which one task does not fit by itself, even without workspace.

    A share of plain PyTorch's peak is known up to the workspaces. Where it would be too little without them, they are
    measured, each by one run of the operator.

    Args:
        lowest: the step of the lowest peak that is found quickly, for the error.

    Raises:
        InfeasibleError: proven.
    """
    free = {task.cost: FREE for task in captured.every_task()}
    optimizer = request.optimizer_bytes
    least, step = Instance(captured.program, free, optimizer).floor
    told = "nothing was measured"
    plain = plain_report(captured.plain, free, optimizer, autograd_nodes=captured.autograd_nodes)
    if isinstance(budget, int):
        limit = budget
    else:
        limit = budget(plain.peak_bytes)
        if least > limit:
            if profile and profile.device != device_name(device):
                return  # of another machine: nothing will be measured
            changed = profile and changed_settings(profile.settings, settings_of(device))
            known = profile.costs if profile and not changed else None
            costs, _ = measured_costs(request, captured, device, known=known, timed=False)
            plain = prepared(request, captured, to_profile(costs, device, ""), costs, {}).plain
            limit = budget(plain.peak_bytes)
            told = f"of the {format_bytes(plain.peak_bytes)} of plain PyTorch, no time was measured"
    if least > limit:
        given, needed = format_apart(limit, least)
        ready, schedule, found = lowest() or (None, None, None)
        enough = f"; {smallest_known_budget(found)}, which {found.peak_step.task} needs" if found else ""
        error = InfeasibleError(
            f"no schedule fits into {given} (proven, {told}): {step or 'what is resident'} alone needs {needed}, "
            f"parameters, inputs and results included{enough}; give more memory or a smaller batch",
            found.peak_bytes if found else None,
            step,
            proven=True,
            least_bytes=least,
        )
        error.plain_peak_bytes = plain.peak_bytes
        error.smallest, error.found_for = schedule, ready
        raise error


def delays_cost(request: Request, captured: Captured, costs: Mapping[str, Cost]) -> bool:
    """Whether the gradients that were delayed make the step need more memory than in autograd's order.

    Which are delayed is chosen before any cost is known, without workspaces. A delayed gradient whose operator has a
    large one can need more at the end, beside all other gradients: more than the smallest step in autograd's order by
    so much as a delay is worth at least, or more than plain PyTorch's whole step.
    """
    if request.made_last is not None or not captured.made_last:
        return False
    most = plain_report(captured.plain, costs, 0, autograd_nodes=captured.autograd_nodes).peak_bytes
    most = min(most, int((1 + LEAST_GAIN) * Instance(captured.plain, costs).floor[0]))
    return Instance(captured.program, costs).floor[0] > most
