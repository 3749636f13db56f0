"""The commands largest-batch and tune: the largest batch that fits, and the batch of highest throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from torch import nn

from ..capture.absent_gpu.attention import attention_as
from ..capture.example_inputs import Example
from ..capture.precision import autocast_as
from ..compiler.pipeline import make_record, plan_for
from ..compiler.words import parse_batch
from ..errors import MonetError, UsageError
from ..ir.frames import frame
from ..ir.units import format_bytes, format_seconds
from ..plan import Plan
from ..plan.budgets import fits
from ..replay.verify.steps import real_example, step_peak, step_seconds
from ..replay.wrapper import ScheduleWrapper
from ..report.lines import Lines, Stars
from .batch_search import Batches, Trial, Tuner, largest_fitting
from .output import check_results, draw, write_table
from .prepare import problem_priced_by, say_input, schedule_path, source_of
from .problem import Problem, read_problem
from .terminal import Terminal, aligned_table

if TYPE_CHECKING:
    import pandas


def largest_batch(*, budget: str, profile_file: Path | None, terminal: Terminal, **options: Any) -> int:
    """The largest batch for which the search finds a schedule within a budget: doubling, then halving the step."""
    problem = problem_priced_by(profile_file, budget=budget, **{**options, "batch": "1"})
    limit = problem.budget_bytes
    batches, console = Batches(problem, source_of(problem, profile_file)), terminal.console
    say_input(terminal, problem)
    if batches.limits is None:  # operators are measured at two batches, and scaled to all others
        with terminal.progress() as progress:
            most = Tuner(batches, lambda what: progress.at("largest batch", what, None, None)).most()
            batches.measure(most, progress.profiling)
    tried: dict[int, bool] = {}

    def fitting(batch: int) -> bool:
        if batch not in tried:
            ready = batches.prepared(batch)
            found = fits(ready.captured.program, ready.costs, limit, extra_bytes=ready.extra_bytes)
            tried[batch] = found is not None
            plain = "fits" if ready.plain.peak_bytes <= limit else "does not"
            console.print(f"batch {batch}: {'fits' if found else 'does not fit'} (plain PyTorch {plain})")
        return tried[batch]

    low = largest_fitting(fitting, limit)
    console.print(f"largest batch found: {low}")
    terminal.result({"model": problem.request.expression, "budget_bytes": limit, "batch": low})
    return low


@dataclass(frozen=True)
class Candidate:
    """One of the best batches with its full plan and, if it was run, its measurements."""

    batch: int
    plan: Plan
    measured_seconds: float | None = None
    measured_bytes: int | None = None

    @property
    def throughput(self) -> float:
        """Samples per second: measured if the candidate was run, else predicted."""
        return self.batch / (self.measured_seconds or self.plan.report.seconds)


@dataclass(frozen=True)
class Tuned:
    """What a search has found.

    Attributes:
        candidates: the best batches.
        plain: the trial of plain PyTorch's best batch; None: it fits at none.
        plain_seconds: of plain PyTorch's step there, if it was run.
    """

    problem: Problem
    tuner: Tuner
    candidates: list[Candidate]
    plain: Trial | None
    plain_seconds: float | None

    @property
    def winner(self) -> Candidate:
        """The candidate with the highest throughput."""
        return max(self.candidates, key=lambda candidate: candidate.throughput)

    @property
    def trials(self) -> list[Trial]:
        """All batches that were tried, the smallest first."""
        return sorted(self.tuner.trials.values(), key=lambda trial: trial.batch)

    @property
    def plain_rate(self) -> float | None:
        """Samples per second of plain PyTorch: measured if it was run, else predicted."""
        if self.plain is None:
            return None
        measured = self.plain_seconds
        return self.plain.batch / measured if measured else self.plain.plain_throughput(self.problem.budget_bytes)

    @property
    def title(self) -> str:
        """Model, budget and mode."""
        request = self.problem.request
        return f"{request.expression} in {format_bytes(self.problem.budget_bytes)}, {request.mode}"

    def candidate(self, trial: Trial) -> Candidate | None:
        """The same batch, if it was planned in full."""
        return next((one for one in self.candidates if one.batch == trial.batch), None)

    @property
    def lines(self) -> Lines:
        """(batch, samples per second), for the picture."""
        limit = self.problem.budget_bytes
        plain = [(trial.batch, trial.plain_throughput(limit)) for trial in self.trials]
        ours = [(trial.batch, trial.throughput) for trial in self.trials]
        return {
            "plain PyTorch as far as it fits, predicted": [(batch, rate) for batch, rate in plain if rate],
            "monet_like, predicted": [(batch, rate) for batch, rate in ours if rate],
            "monet_like, measured": [(c.batch, c.throughput) for c in self.candidates if c.measured_seconds],
        }

    @property
    def stars(self) -> Stars:
        """Plain PyTorch's best batch, if it was run, for the picture."""
        if self.plain is None or self.plain_rate is None or not self.plain_seconds:
            return {}
        return {"plain PyTorch at its best, measured": (self.plain.batch, self.plain_rate)}

    def to_frame(self) -> pandas.DataFrame:
        """One row per batch that was tried: predicted figures, and those that were measured.

        Where a batch was planned in full, the figures are that plan's, else those of the local search.
        """
        rows = []
        for trial in self.trials:
            full = self.candidate(trial)
            report = full.plan.report if full else trial.report
            figures = (report.peak_bytes, report.seconds) if report else (None, None)
            measured = (full.measured_bytes, full.measured_seconds) if full else (None, None)
            rows.append((trial.batch, trial.plain.peak_bytes, trial.plain.seconds, *figures, *measured))
        columns = {"batch": "int64", "plain_peak_bytes": "int64", "plain_seconds": "float64", "peak_bytes": "Int64"}
        columns |= {"seconds": "float64", "measured_bytes": "Int64", "measured_seconds": "float64"}
        return frame(columns, rows)


def tune(
    *,
    budget: str,
    batches: str,
    best: int,
    steps: int,
    profile_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    out: Path | None,
    terminal: Terminal,
    **options: Any,
) -> Candidate:
    """The batch and schedule with the highest throughput within a budget; writes the schedule file."""
    listed = sorted({parse_batch(part.strip()) for part in batches.split(",") if part.strip()})
    if best < 1 or steps < 0:
        raise UsageError(f"--best {best} must be at least 1 and --steps {steps} at least 0")
    check_results(csv_file, out, plot=plot)
    problem = read_problem(budget=budget, batch=str(listed[-1]) if listed else "1", **options)
    _ = problem.budget_bytes  # a share is refused before any work
    family = Batches(problem, source_of(problem, profile_file))
    say_input(terminal, problem)
    with terminal.progress() as progress:

        def say(what: str, done: int | None = None, total: int | None = None) -> None:
            progress.at("tune", what, done, total)

        found = _searched(family, listed, best, steps, say)
    winner = found.winner
    _show(terminal.console, found)
    request, ready = family.request(winner.batch), family.prepared(winner.batch)
    path = out or schedule_path(replace(problem, request=request))
    check_results(path)
    make_record(request, ready, winner.plan, problem.budget_bytes).save(path)
    terminal.console.print(f"wrote {path}", soft_wrap=True)
    terminal.result(_described(found, path))
    write_table(terminal.console, csv_file, found.to_frame())
    draw(terminal.console, plot, found.title, found.lines, ("batch", "samples per second"), found.stars)
    return winner


def _searched(family: Batches, listed: list[int], best: int, steps: int, say: Callable[..., None]) -> Tuned:
    """Try the listed batches, or seek them; plan the best ones in full and measure them.

    Raises:
        UsageError: none of the batches fits.
    """
    problem, tuner = family.problem, Tuner(family, say)
    most = listed[-1] if listed else tuner.most()
    family.measure(most, lambda *news: say(f"profile {news[0]}", *news[1:]))
    if listed:
        for batch in listed:
            tuner.trial(batch)
    else:
        tuner.search(most)
        tuner.try_plain()
    plain = tuner.plain_best()
    chosen = tuner.ranked()[:best]
    if not chosen:
        raise UsageError(
            f"none of the batches {', '.join(map(str, sorted(tuner.trials)))} fits into "
            f"{format_bytes(problem.budget_bytes)}"
        )
    candidates = _planned(family, chosen, say)
    plain_seconds: float | None = None
    if family.limits is None and steps:
        say("measure")
        candidates, plain_seconds = _measured(family, candidates, plain, steps, say)
    return Tuned(problem, tuner, candidates, plain, plain_seconds)


def _described(found: Tuned, path: Path) -> dict[str, Any]:
    """The result as fields of the JSON output."""
    winner = found.winner
    return {
        "model": found.problem.request.expression,
        "mode": found.problem.request.mode,
        "budget_bytes": found.problem.budget_bytes,
        "batch": winner.batch,
        "peak_bytes": winner.plan.report.peak_bytes,
        "seconds": winner.plan.report.seconds,
        "measured_seconds": winner.measured_seconds,
        "measured_bytes": winner.measured_bytes,
        "samples_per_second": winner.throughput,
        "plain_batch": found.plain.batch if found.plain else None,
        "plain_samples_per_second": found.plain_rate,
        "tried": {trial.batch: trial.throughput for trial in found.trials},
        "schedule_file": str(path),
    }


def _planned(family: Batches, chosen: Iterable[Trial], say: Callable[[str], None]) -> list[Candidate]:
    """Plan the chosen batches by the integer program; where it finds no plan, the local search's plan is taken."""
    found = []
    for trial in chosen:
        request, ready = family.request(trial.batch), family.prepared(trial.batch)

        def news(line: str, batch: int = trial.batch) -> None:
            say(f"batch {batch}: {line}")

        try:
            plan = plan_for(ready, request, family.problem.budget_bytes, progress=news)
        except MonetError:
            plan = plan_for(ready, request, family.problem.budget_bytes, strategy="heuristic")
        found.append(Candidate(trial.batch, plan))
    return found


def _measured(
    family: Batches, candidates: list[Candidate], plain: Trial | None, steps: int, say: Callable[[str], None]
) -> tuple[list[Candidate], float | None]:
    """Measure real steps of every candidate and of plain PyTorch at its best batch, in turns."""
    problem = family.problem
    model = problem.spec.module
    runs: list[tuple[nn.Module, Example]] = []
    peaks = []
    for candidate in candidates:
        request, ready = family.request(candidate.batch), family.prepared(candidate.batch)
        record = make_record(request, ready, candidate.plan, problem.budget_bytes)
        wrapped = ScheduleWrapper(model, record, example=request.example, captured=ready.captured, cuda_graphs=False)
        example = real_example(request.example, problem.device)
        say(f"batch {candidate.batch}: measure")
        with autocast_as(problem.request.autocast, problem.device), attention_as(problem.request.attention):
            peaks.append(step_peak(wrapped, example, problem.device) + record.extra_bytes)
        runs.append((wrapped, example))
    if plain is not None:
        runs.append((model, real_example(family.request(plain.batch).example, problem.device)))
    with autocast_as(problem.request.autocast, problem.device), attention_as(problem.request.attention):
        seconds = step_seconds(runs, problem.device, steps)
    found = [
        replace(candidate, measured_seconds=time, measured_bytes=peak)
        for candidate, time, peak in zip(candidates, seconds, peaks, strict=False)
    ]
    return found, seconds[-1] if plain is not None else None


def _show(console: Console, found: Tuned) -> None:
    winner, plain = found.winner, found.plain
    device = found.tuner.batches.prepared(winner.batch).profile.device
    console.print(f"{found.title} ({device})", soft_wrap=True)
    table = aligned_table(
        "batch", "plain peak", "peak", "overhead", "samples/s", "in full", "measured samples/s", "measured peak"
    )
    for trial in found.trials:
        _add_trial(table, trial, found.candidate(trial), trial.batch == winner.batch)
    console.print(table)
    console.print(
        "-: no schedule fits; peaks, overhead and samples/s are predicted, for the quick plan and the one in full, "
        "where the column does not say measured"
    )
    if plain is None:
        console.print("plain PyTorch fits at none of these batches")
    else:
        rate = f"{found.plain_rate:.4g} samples/s, {'measured' if found.plain_seconds else 'predicted'}"
        console.print(f"plain PyTorch at its best batch within the memory, {plain.batch}: {rate}")
    how = "measured" if winner.measured_seconds else "predicted"
    console.print(
        f"best: batch {winner.batch}, {winner.throughput:.4g} samples/s {how}, a step of "
        f"{format_seconds(winner.measured_seconds or winner.plan.report.seconds)} in "
        f"{format_bytes(winner.measured_bytes or winner.plan.report.peak_bytes)}"
    )


def _add_trial(table: Table, trial: Trial, full: Candidate | None, best: bool) -> None:
    report = full.plan.report if full else trial.report
    table.add_row(
        f"{trial.batch}{' *' if best else ''}",
        format_bytes(trial.plain.peak_bytes),
        format_bytes(report.peak_bytes) if report else "-",
        f"{100 * (report.seconds / trial.plain.seconds - 1):+.1f} %" if report else "",
        f"{trial.throughput:.4g}" if trial.report else "",
        f"{full.batch / full.plan.report.seconds:.4g}" if full else "",
        f"{full.throughput:.4g}" if full and full.measured_seconds else "",
        format_bytes(full.measured_bytes) if full and full.measured_bytes else "",
    )
