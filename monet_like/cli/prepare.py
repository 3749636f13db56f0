"""Reads the problem, the profile and the budgets that a command was given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from ..capture.captured import Captured
from ..compiler.pipeline import Prepared, default_names, prepare
from ..compiler.problem import Problem, assumed_input, read_problem
from ..compiler.progress import Progress
from ..errors import UsageError
from ..files import check_writable
from ..ir.profile_file import Profile
from ..ir.units import parse_bytes
from ..profile.devices import DEVICES, DeviceLimits, device_slug
from ..zoo.registry import check_not_registered, is_zoo_file
from .terminal import Terminal

#: Where profiles are written, and where the zoo's schedules are in a checkout.
SOLUTIONS = Path("solutions")


def read_budgets(text: str, plain_peak_bytes: int) -> list[int]:
    """Read budgets such as ``10,8,6.5`` (GB) or ``80%,50%`` (of plain PyTorch's peak).

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


def is_roofline(profile_file: Path | None) -> bool:
    """Whether ``--profile`` asks for datasheet rates (``roofline:DEVICE``) instead of a file."""
    return str(profile_file).startswith("roofline:")


def is_for_another_machine(profile_file: Path | None) -> bool:
    """Whether the costs come from datasheet rates or were recorded on a GPU, so that no GPU is needed here."""
    if profile_file is None or is_roofline(profile_file) or not profile_file.is_file():
        return is_roofline(profile_file)
    return Profile.load(profile_file).device.startswith("cuda")


def profile_path(problem: Problem, label: str = "") -> Path:
    """The file that keeps this model's profile on this device; ``label`` replaces the batch in its name."""
    device = device_slug(problem.device)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in problem.request.model.parameters()), "float32")
    suffix = "" if dtype == "float32" else f"_{dtype}"
    return (
        SOLUTIONS / "profiles" / f"profile_{problem.spec.name}_{label or problem.request.batch}{suffix}_{device}.json"
    )


def say_input(terminal: Terminal, problem: Problem) -> None:
    """Print the input that was assumed, if nobody said what MODEL takes."""
    if text := assumed_input(problem):
        terminal.console.print(Text(text), soft_wrap=True)


def schedule_path(problem: Problem) -> Path:
    """The default name of a problem's schedule file, in the current folder."""
    return default_names(problem.spec.name, problem.request, problem.budget_bytes, Path())


def check_out(path: Path) -> None:
    """Check, before hours of work, that a result can be written to ``path``.

    Raises:
        UsageError: it cannot, or the file belongs to a zoo.
    """
    check_not_registered(path)
    check_writable(path)


@dataclass(frozen=True)
class CostSource:
    """The profile file or datasheet rates from which the costs of a model's operators come.

    Attributes:
        path: of the profile file to read; ``roofline:DEVICE`` for datasheet rates.
        known: what is known before anything is measured: the file's costs, a device's rates, or None.
        extended: the file to write what is measured into: the same, or, for a profile of the zoo, one of the same name in
            the current folder.
    """

    path: Path
    known: Profile | DeviceLimits | None
    extended: Path

    @staticmethod
    def of(problem: Problem, profile_file: Path | None, label: str = "") -> CostSource:
        """The source that ``--profile`` names; by default this model's own file on this device.

        Args:
            label: of the file's name, instead of the batch.

        Raises:
            UsageError: an unknown device name, or a folder that cannot be written to.
            ProfileError: the file is no profile.
        """
        path = profile_file or profile_path(problem, label)
        extended = path
        if not is_roofline(path) and is_zoo_file(path):
            extended = Path(path.name)
            check_out(extended)
            path = extended if extended.exists() else path
        return CostSource(path, read_profile(path), extended)

    def save(self, profile: Profile) -> None:
        """Write a profile into the file, for the next command."""
        profile.save(self.extended)

    @property
    def latest(self) -> Path:
        """The file that has the costs, as far as they are known: the one that was written, if there is one."""
        return self.extended if self.extended.exists() else self.path

    def prepare(self, problem: Problem, progress: Progress, captured: Captured | None = None) -> Prepared:
        """Capture and profile; what is measured is saved.

        Args:
            captured: the program of this problem, if it is at hand.
        """
        return prepare(
            problem.request,
            problem.device,
            profile=self.known,
            save_profile=self.save,
            progress=progress.profiling,
            captured=captured,
        )


def read_and_prepare(
    terminal: Terminal, profile_file: Path | None, options: dict[str, Any]
) -> tuple[Problem, Prepared]:
    """Read the problem of a command without one budget, capture and profile it."""
    problem = read_problem(budget="1", **options)
    say_input(terminal, problem)
    source = CostSource.of(problem, profile_file)
    with terminal.progress() as progress:
        return problem, source.prepare(problem, progress)


def read_profile(path: Path) -> Profile | DeviceLimits | None:
    """Read costs: the rates of a device for ``roofline:a100``, else the profile in a file; None if there is no file.

    Raises:
        UsageError: an unknown device name, or a folder that cannot be written to.
        ProfileError: the file is no profile.
    """
    if not is_roofline(path):
        check_writable(path)
        return Profile.load(path) if path.exists() else None
    name = str(path).partition(":")[2]
    if name not in DEVICES:
        raise UsageError(f"there is no roofline for {name!r}; choose one of {', '.join(DEVICES)}")
    return DEVICES[name]
