"""Reads the problem, the source of costs and the files that a command was given, and makes a job of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from ..compiler.labels import default_names
from ..compiler.sources import Cached, Filed, Source, is_roofline
from ..ir.profile_file import Profile
from ..job.job import Job
from ..zoo.registry import is_zoo_file
from .output import check_results
from .problem import Problem, assumed_input, read_problem
from .terminal import Terminal

#: Where the zoo's schedules are in a checkout.
SOLUTIONS = Path("solutions")


def problem_priced_by(profile_file: Path | None, **options: Any) -> Problem:
    """Read what a user typed, to be priced by a profile, if there is one.

    Where it has datasheet rates or was measured on a GPU, no GPU is needed here; the latter's operators are a GPU's
    alone.
    """
    of_a_gpu = _is_of_a_gpu(profile_file)
    if of_a_gpu and options["device"] == "auto":
        options["device"] = "cuda"
    return read_problem(**options, measured=not (of_a_gpu or is_roofline(profile_file)))


def _is_of_a_gpu(profile_file: Path | None) -> bool:
    """Whether it is a file of costs that were measured on a GPU."""
    if profile_file is None or is_roofline(profile_file) or not profile_file.is_file():
        return False
    return Profile.load(profile_file).device.startswith("cuda")


def say_input(terminal: Terminal, problem: Problem) -> None:
    """Print the input that was assumed, if nobody said what MODEL takes."""
    if text := assumed_input(problem):
        terminal.console.print(Text(text), soft_wrap=True)


def schedule_path(problem: Problem) -> Path:
    """The default name of a problem's schedule file, in the current folder."""
    return default_names(problem.spec.name, problem.request, problem.budget, Path())


def source_of(problem: Problem, profile_file: Path | None) -> Filed | Cached:
    """The costs that ``--profile`` names; by default the store of this device, which `auto_schedule` uses, too.

    A profile of the zoo is extended in a file of the same name in the current folder.

    Raises:
        UsageError: an unknown device name, or a folder that cannot be written to.
        ScheduleFileError: the file is no profile.
    """
    path = profile_file
    if path is None:
        return Cached.of(problem.device)
    if is_roofline(path) or not is_zoo_file(path):
        return Filed.of(path)
    extended = Path(path.name)
    check_results(extended)
    return Filed.of(extended if extended.exists() else path, extended)


def job_of(terminal: Terminal, problem: Problem, source: Source) -> Job:
    """The job of a problem, whose progress the terminal shows. Nothing is captured yet."""
    return Job(problem.request, problem.device, source, progress=terminal.progress)


def read_job(terminal: Terminal, profile_file: Path | None, options: dict[str, Any]) -> Job:
    """The job of a command without one budget, captured and profiled."""
    problem = problem_priced_by(profile_file, budget="1", **options)
    say_input(terminal, problem)
    job = job_of(terminal, problem, source_of(problem, profile_file))
    _ = job.ready
    return job
