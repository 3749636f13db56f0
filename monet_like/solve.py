"""The solve command: compile, tell, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .compiler import Compiled, compile_schedule, default_names
from .errors import UsageError
from .files import check_writable
from .problem import Problem, read_problem
from .profile_data import Profile
from .profiler import device_slug
from .show import Progress, show_compiled

SOLUTIONS = Path("solutions")


def solve(*, profile_file: Path | None, out: Path | None, **options: Any) -> Compiled:
    """Read the problem, compile it, print a summary and write the schedule and profile files."""
    problem = read_problem(**options)
    request = problem.request
    path = out or default_names(problem.spec.name, request, problem.budget_bytes, SOLUTIONS)
    check_writable(path)
    store = profile_file or profile_path(problem)
    roofline = str(store).startswith("roofline:")
    profile = roofline_profile(str(store), problem) if roofline else None
    if not roofline:
        check_writable(store)
        profile = Profile.load(store) if store.exists() else None
    with Progress() as progress:
        compiled = compile_schedule(
            request,
            problem.budget_bytes,
            problem.device,
            profile=profile,
            save_profile=None if roofline else lambda found: found.save(store),
            progress=progress.profiling,
            plan_progress=progress.planning,
        )
    compiled.record.save(path)
    show_compiled(problem, compiled, path, store)
    return compiled


def profile_path(problem: Problem) -> Path:
    """Where this model's profile on this device is kept."""
    device = device_slug(problem.device)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in problem.request.model.parameters()), "float32")
    suffix = "" if dtype == "float32" else f"_{dtype}"
    return SOLUTIONS / "profiles" / f"profile_{problem.spec.name}_{problem.request.batch}{suffix}_{device}.json"


def roofline_profile(text: str, problem: Problem) -> Profile:
    """Costs from a datasheet: ``roofline:a100``.

    Raises:
        UsageError: unknown device name.
    """
    from .capture import capture
    from .replay import admitted
    from .roofline import DEVICES, roofline

    name = text.partition(":")[2]
    if name not in DEVICES:
        raise UsageError(f"there is no roofline for {name!r}; choose one of {', '.join(DEVICES)}")
    request = problem.request
    captured = admitted(capture(request.model, *request.example), request.mode, ablation=request.ablation)
    costs = roofline(captured, captured.program, DEVICES[name])
    return Profile(text, costs, "estimated from datasheet rates", {"torch": torch.__version__})
