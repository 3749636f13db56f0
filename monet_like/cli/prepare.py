"""What commands begin with: the problem, its profile and its budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..capture.captured import Captured
from ..compiler.pipeline import Prepared, prepare
from ..compiler.problem import Problem, read_problem
from ..errors import UsageError
from ..files import check_writable
from ..ir.profile_file import Profile
from ..profile.devices import DEVICES, DeviceLimits, device_slug
from ..units import parse_bytes
from .terminal import Progress, Terminal


def read_and_prepare(
    terminal: Terminal, profile_file: Path | None, options: dict[str, Any]
) -> tuple[Problem, Prepared]:
    """Read the arguments, capture and profile."""
    problem = read_problem(budget="1", **options)
    store = profile_file or profile_path(problem)
    profile = read_profile(store)
    with terminal.progress() as progress:
        return problem, prepare_with(profile, store, problem, progress)


def read_budgets(text: str, plain_peak_bytes: int) -> list[int]:
    """``10,8,6.5`` in GB, or ``80%,50%`` of plain PyTorch's peak.

    Raises:
        UsageError: not such a list.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.endswith("%"):
            try:
                share = float(part[:-1])
            except ValueError:
                raise UsageError(f"budget {part!r} is no percentage; give such as 50%") from None
            if not 0 < share <= 1000:
                raise UsageError(f"budget {part!r} must be more than 0 %")
            found.append(int(plain_peak_bytes * share / 100))
        else:
            found.append(parse_bytes(part))
    if not found:
        raise UsageError(f"budgets {text!r} must be a list such as 10,8,6 or 80%,50%")
    return found


SOLUTIONS = Path("solutions")


def is_roofline(profile_file: Path | None) -> bool:
    """Whether costs come from datasheet rates, by ``roofline:DEVICE`` instead of a file."""
    return str(profile_file).startswith("roofline:")


def is_for_another_machine(profile_file: Path | None) -> bool:
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
