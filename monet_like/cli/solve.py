"""The solve command: compile, tell, write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.lowering import Captured
from ..compiler.pipeline import Compiled, Prepared, compile_schedule, default_names, prepare
from ..compiler.problem import Problem, read_problem
from ..errors import UsageError
from ..files import check_writable
from ..ir.profile_file import Profile
from ..profile.profiler import device_slug
from ..profile.roofline import DEVICES, DeviceLimits
from .terminal import Progress, Terminal, show_compiled

SOLUTIONS = Path("solutions")


def solve(*, profile_file: Path | None, out: Path | None, terminal: Terminal | None = None, **options: Any) -> Compiled:
    """Read the problem, compile it, print a summary and write the schedule and profile files."""
    terminal = terminal or Terminal()
    problem = read_problem(**options, measured=not _is_of_elsewhere(profile_file))
    request = problem.request
    path = out or default_names(problem.spec.name, request, problem.budget_bytes, SOLUTIONS)
    check_writable(path)
    store = profile_file or profile_path(problem)
    profile = read_profile(store)
    with terminal.progress() as progress:
        compiled = compile_schedule(
            request,
            problem.budget_bytes,
            problem.device,
            profile=profile,
            save_profile=lambda found: found.save(store),
            progress=progress.profiling,
            plan_progress=progress.planning,
        )
    compiled.record.save(path)
    show_compiled(terminal, problem, compiled, path, store)
    return compiled


def is_roofline(profile_file: Path | None) -> bool:
    """Whether costs come from datasheet rates, by ``roofline:DEVICE`` instead of a file."""
    return str(profile_file).startswith("roofline:")


def _is_of_elsewhere(profile_file: Path | None) -> bool:
    """Whether costs come from datasheet rates or were recorded on a GPU: a GPU need not be here then."""
    if profile_file is None or is_roofline(profile_file) or not profile_file.is_file():
        return is_roofline(profile_file)
    return Profile.load(profile_file).device.startswith("cuda")


def profile_path(problem: Problem, label: str = "") -> Path:
    """Where this model's profile on this device is kept; ``label`` instead of the batch."""
    device = device_slug(problem.device)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in problem.request.model.parameters()), "float32")
    suffix = "" if dtype == "float32" else f"_{dtype}"
    return (
        SOLUTIONS / "profiles" / f"profile_{problem.spec.name}_{label or problem.request.batch}{suffix}_{device}.json"
    )


def read_profile(store: Path) -> Profile | DeviceLimits | None:
    """Where costs come from: a device's rates for ``roofline:a100``, else what the file holds, if there is one.

    Raises:
        UsageError: an unknown device name, or a folder that cannot be written to.
        ProfileError: the file is no profile.
    """
    if not is_roofline(store):
        check_writable(store)
        return Profile.load(store) if store.exists() else None
    name = str(store).partition(":")[2]
    if name not in DEVICES:
        raise UsageError(f"there is no roofline for {name!r}; choose one of {', '.join(DEVICES)}")
    return DEVICES[name]


def prepare_with(
    profile: Profile | DeviceLimits | None,
    store: Path,
    problem: Problem,
    progress: Progress,
    captured: Captured | None = None,
) -> Prepared:
    """Capture and profile; ``profile`` is what was read from ``store``, and what is measured beside it is saved there.

    Args:
        captured: of this problem, if that is at hand.
    """
    return prepare(
        problem.request,
        problem.device,
        profile=profile,
        save_profile=lambda found: found.save(store),
        progress=progress.profiling,
        captured=captured,
    )
