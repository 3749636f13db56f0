"""All contenders on the same work, in one run: python -m benchmarks.run --suite cpu|gpu|gpu16

Every contender runs in a process of its own, on an unmodified model, and takes steps in turn with plain PyTorch's
process, so that what else the machine does meets both. Rows are kept in ``benchmarks/results/DEVICE/*.csv`` as they are
measured: a run that was ended goes on where it was. Markdown and plots are made from them after every model, or at once
with ``--report``.

    python -m benchmarks.run --suite cpu --quick              # one or two settings of each
    python -m benchmarks.run --suite cpu --models resnet50    # all settings of one model
    python -m benchmarks.run --suite cpu --minutes 25         # as far as it gets, and on from there the next time
    python -m benchmarks.run --suite gpu16                    # in bfloat16 autocast and channels-last
"""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import click
import torch

from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.malloc import EXACT, KEEPING
from benchmarks.processes import ROOT, DiedError, Running, take_turns
from benchmarks.report import BATCH_GOAL, PROBE, pareto, trusted, usable, write_report
from benchmarks.rows import Point, Trial, merged, read_rows, write_rows
from benchmarks.work import ASIDE, WORK, Job
from monet_like.profile.devices import device_slug

PLAIN, MB = "plain PyTorch", 10**6
#: Told in each row. As text: what PyTorch has compares as versions do.
TORCH = str(torch.__version__)
#: Of the limit in the search for the largest batch, in units of plain PyTorch's peak at the work's own batch.
LIMIT = 1.05
#: Beyond what a process was seen to need for other things than tensors: pages, stacks, scratch memory of libraries.
SLACK_BYTES = 2 * 2**20
#: Ours that are also planned for what the others' points take, and how near to that is near enough.
MATCHED, NEAR = ("monet_like", "monet_like inductor"), 0.97
#: What is measured first, of all models, and the largest batch of the first model.
ESSENTIAL = (PLAIN, "checkpoint per block", "torch.compile", "torch.compile budget", "monet_like")
#: How many times as large as any batch whose peak is known the next one may be: small batches' peaks, where weights
#: outweigh all else, may lie on another line.
FURTHER = 3
#: Batches that are tried, at most, for one contender.
TRIALS = 12
#: A trial's steps may take so long, or three turns: at the least memory of all a step can take 50 times plain
#: PyTorch's.
LONG_SECONDS = 60.0


@dataclass
class Suite:
    """What is to be measured, and what was.

    Attributes:
        folder: of the rows.
        steps: timed, of each contender.
        together: so many processes take turns with plain PyTorch's.
        deadline: of ``time.monotonic``; nothing is started after it.
        pythons: interpreters of contenders that need another than this.
    """

    name: str
    folder: Path
    steps: int
    together: int
    solver_seconds: float
    deadline: float
    scratch: Path
    pythons: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.points = read_rows(self.folder / "points.csv", Point)
        self.trials = read_rows(self.folder / "batches.csv", Trial)

    def say(self, text: str) -> None:
        """Tell people."""
        click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)

    def late(self) -> bool:
        """Whether nothing more may be started."""
        return time.monotonic() > self.deadline

    def job(self, model: str, batch: int, contender: str, setting: str) -> Job:
        """What one process does."""
        job = Job(model, self.name, batch, contender, setting, 0, str(self.scratch / "profiles"), self.solver_seconds)
        if contender == PLAIN:
            return job
        plain = self.plain(model, batch)
        share, amount = re.search(r"(\d+)%", setting), re.search(r"([\d.]+) MB", setting)
        budget = plain.static_bytes + int(share[1]) * (plain.peak_bytes - plain.static_bytes) // 100 if share else 0
        budget = round(float(amount[1]) * MB) if amount else budget
        return replace(job, budget_bytes=budget, rounding=plain.rounding)

    def start(self, job: Job) -> Running:
        """A process for a job, after one that measures what operators cost if that is needed and was not yet done."""
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(self.scratch), TOKENIZERS_PARALLELISM="false")
        if CONTENDERS[job.contender].plans:
            own = job.size.batches[0]
            for batch in [job.batch] if job.batch in job.size.batches else [own, job.batch]:
                measured = replace(job, batch=batch)
                if not measured.costs_file.exists():
                    self.say(f"{job.model}, batch {batch}: what operators cost")
                    Running(measured, {**environment, **KEEPING}, module="benchmarks.costs").close()
        return Running(job, {**environment, **EXACT}, self.pythons.get(job.contender, sys.executable))

    def plain(self, model: str, batch: int) -> Point:
        """Plain PyTorch's row."""
        return next(p for p in self.points if p.key == (model, batch, PLAIN, ""))

    def keep_points(self, more: Sequence[Point]) -> None:
        """Add rows and write the file."""
        self.points = merged(self.points, more)
        write_rows(self.folder / "points.csv", self.points)

    def keep_trial(self, more: Trial) -> Trial:
        """Add a row and write the file."""
        self.trials = merged(self.trials, [more])
        write_rows(self.folder / "batches.csv", self.trials)
        return more


def measure_points(suite: Suite, model: str, batch: int, wanted: Sequence[tuple[str, str]]) -> None:
    """Measure contenders and settings of one model, in groups that take turns with plain PyTorch."""
    done = {p.key for p in suite.points}
    missing = [pair for pair in wanted if (model, batch, *pair) not in done]
    if not missing or suite.late():
        return
    job = suite.job(model, batch, PLAIN, "")
    try:
        plain = suite.start(job)
    except DiedError as error:  # too large for this machine, say: there is nothing to compare with
        suite.keep_points([_failed(job, error)])
        return
    try:
        if (model, batch, PLAIN, "") not in done:
            missing = [pair for pair in missing if pair != (PLAIN, "")]
            _measure_group(suite, plain, [])
        for first in range(0, len(missing), suite.together):
            if suite.late():
                break
            _measure_group(
                suite, plain, [suite.job(model, batch, *pair) for pair in missing[first : first + suite.together]]
            )
    finally:
        plain.close()


def _measure_group(suite: Suite, plain: Running, jobs: Sequence[Job]) -> None:
    """Measure some contenders, or plain PyTorch itself if there are none."""
    rows: list[Point] = []
    runs: list[Running] = []
    for job in jobs:
        if suite.late():
            break
        suite.say(f"{job.model}, batch {job.batch}: {job.contender} {job.setting}")
        try:
            runs.append(suite.start(job))
        except DiedError as error:
            rows.append(_failed(job, error))
    try:
        times, *others = take_turns([plain, *runs], suite.steps)
        if isinstance(times, DiedError):
            raise times
        load = os.getloadavg()[0]
        if not jobs:
            rows.append(_point(plain, times, times, load))
        for run, found in zip(runs, others, strict=True):
            rows.append(_failed(run.job, found) if isinstance(found, DiedError) else _point(run, found, times, load))
    finally:
        for run in runs:
            run.close()
    suite.keep_points(rows)


def _failed(job: Job, error: DiedError) -> Point:
    _, _, told = error.reason.partition("NotApplicableError: ")
    status, reason = ("not applicable", told) if told else ("failed", error.reason)
    if "InfeasibleError" in reason:
        status = "refused"
    return Point(job.model, job.batch, job.contender, job.setting, status, reason, torch=TORCH)


def ratio_of(times: Sequence[float], plain: Sequence[float]) -> float:
    """Steps to plain PyTorch's of the same turn: the median. The machine's pace drops out."""
    return statistics.median(mine / other for mine, other in zip(times, plain, strict=True))


def _point(run: Running, times: list[float], plain: list[float], load: float) -> Point:
    job, ready, seconds = run.job, run.ready, statistics.median(times)
    low, _, top = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (seconds,) * 3
    told = {f.name: ready[f.name] for f in fields(Point) if f.name in ready}
    if CONTENDERS[job.contender].compiles:
        told["planning_seconds"] += max(0.0, ready["first_seconds"] - seconds)
    return Point(
        job.model, job.batch, job.contender, job.setting,
        seconds=seconds, spread_seconds=(top - low) / 2, plain_seconds=seconds / ratio_of(times, plain), load=load,
        torch=TORCH, **told,
    )  # fmt: skip


def others_peaks(suite: Suite, model: str, batch: int, names: Sequence[str]) -> list[tuple[str, str]]:
    """Ours for as much memory as the points of the others' front take, where there is none of ours yet."""
    here = [p for p in trusted(suite.points) if (p.model, p.batch) == (model, batch)]
    found = []
    for name in names:
        if name not in MATCHED:
            continue
        kind = CONTENDERS[name].front
        mine = [p.peak_bytes for p in usable(here, kind, ours=True)]
        for other in pareto(usable(here, kind, ours=False)):
            if not any(NEAR * other.peak_bytes <= peak <= other.peak_bytes for peak in mine):
                amount = math.ceil(other.peak_bytes / 10**4) / 100  # no less: it may be the least possible
                found.append((name, f"{amount:.10g} MB"))
    return found


def measure_batches(suite: Suite, model: str, batch: int, names: Sequence[str]) -> None:
    """Seek the largest batch of every contender under a limit that plain PyTorch's own batch just fits."""
    measure_points(suite, model, batch, [(PLAIN, "")])
    if suite.late() or suite.plain(model, batch).status != "measured":
        return
    limit = int(LIMIT * suite.plain(model, batch).peak_bytes)
    plain = suite.start(suite.job(model, batch, PLAIN, ""))
    try:
        for name in names:
            setting = CONTENDERS[name].batches
            if setting is not None:
                _largest(suite, plain, name, setting, limit)
    finally:
        plain.close()


def _largest(suite: Suite, plain: Running, name: str, setting: str, limit: int) -> None:
    model, base = plain.job.model, plain.job.batch
    known = {t.batch: t for t in suite.trials if t.key == (model, t.batch, name, setting, limit)}
    candidates = _batches(suite, model, base, name, setting, limit)
    batch = next(candidates)
    for _ in range(TRIALS):
        if batch not in known:
            if suite.late():
                return
            suite.say(f"{model}, batch {batch} in {limit / 1e6:,.0f} MB: {name} {setting}")
            known[batch] = suite.keep_trial(_trial(suite, plain, batch, name, setting, limit))
        if known[batch].status == "failed":  # at no batch will it do
            return
        try:
            batch = candidates.send(known[batch])
        except StopIteration:
            return


def _batches(suite: Suite, model: str, base: int, name: str, setting: str, limit: int) -> Generator[int, Trial, None]:
    """What to try next, until one fits and one not much larger does not.

    What keeps and runs the same at every batch has peaks that lie on a line: the next guess is where it meets the
    limit, and a little more where that fits. What is planned for the limit takes all of it at any batch: from the goal
    up in steps of a third, or halfway down to plain PyTorch's, then halfway between what fits and what does not; so is
    what dies at the limit though its tensors would fit.
    """
    plain = suite.plain(model, base)
    peaks = {0: plain.static_bytes}  # the inputs of ``base`` among it, which are little
    plain_fits = _meeting({**peaks, base: plain.peak_bytes}, limit)
    peaks |= {p.batch: p.peak_bytes for p in suite.points
              if (p.model, p.contender, p.setting, p.status) == (model, name, setting, "measured")}  # fmt: skip
    low = high = 0
    told = setting != "limit"  # whether the peaks say what fits
    while not (low and high and high - low <= _near(low)):
        if told:
            guess = min(_meeting(peaks, limit), FURTHER * max(peaks)) if len(peaks) > 1 else base
        elif high:
            guess = ((low or plain_fits if plain_fits < high else low) + high) // 2
        else:
            guess = -(-4 * low // 3) if low else int(BATCH_GOAL) * plain_fits
        guess = max(guess, low + _near(low)) if low else guess
        guess = min(guess, high - 1) if high else guess
        if guess < 1:
            return
        trial = yield guess
        if trial.peak_bytes:
            peaks[guess] = trial.peak_bytes
            told &= trial.status == "fits" or trial.peak_bytes > limit  # scratch memory of libraries may not fit
        low, high = (guess, high) if trial.status == "fits" else (low, guess)


def _near(batch: int) -> int:
    """So much more is not worth another trial."""
    return max(1, batch // 8)


def _meeting(peaks: Mapping[int, int], limit: int) -> int:
    """The batch at which a line through two peaks meets a limit: the nearest below and above, or else the two nearest.

    Peaks below it that do not rise yet say nothing: then one much larger.
    """
    nearest = sorted(peaks.items(), key=lambda known: abs(known[1] - limit))
    sides = [next((known for known in nearest if (known[1] > limit) is above), None) for above in (False, True)]
    (low, less), (high, more) = sorted([known for known in sides if known] if all(sides) else nearest[:2])
    if more > less:
        return max(1, low + (limit - less) * (high - low) // (more - less))
    return max(1, FURTHER * high if less <= limit else high)


def _trial(suite: Suite, plain: Running, batch: int, name: str, setting: str, limit: int) -> Trial:
    model, base = plain.job.model, plain.job.batch
    row = Trial(model, name, setting, limit, batch, "failed", plain_batch=base, torch=TORCH)
    job = suite.job(model, base, name, "" if setting == "limit" else setting)
    job = replace(job, batch=batch, judged=False)
    if setting == "limit":
        job = replace(job, budget_bytes=limit)
    try:
        run = suite.start(job)
    except DiedError as error:
        kinds = {"InfeasibleError": "refused", "SolverError": "not found"}
        status = next((status for kind, status in kinds.items() if kind in error.reason), "failed")
        return replace(row, status=status, reason=error.reason)
    peak = run.ready["peak_bytes"]
    row = replace(row, peak_bytes=peak)
    try:
        run.ask(f"limit {limit + max(0, run.ready['process_bytes'] - peak) + SLACK_BYTES}")
        if peak > limit:
            return replace(row, status="over", reason=f"its peak is {peak / MB:,.1f} MB")
        times, others = take_turns([run, plain], suite.steps, most_seconds=LONG_SECONDS)
    except DiedError as error:
        return replace(row, status="died", reason=error.reason)
    finally:
        run.close()
    if isinstance(others, DiedError):
        raise others
    if isinstance(times, DiedError):
        return replace(row, reason=times.reason)
    seconds = statistics.median(times)
    plain_seconds = seconds / ratio_of(times, others)
    return replace(row, status="fits", seconds=seconds, plain_seconds=plain_seconds, load=os.getloadavg()[0])


def _measure(suite: Suite, models: Sequence[str], names: Sequence[str], parts: Sequence[str], quick: bool) -> None:
    """Measure what is missing, the most important of all models first: a deadline takes from the end."""
    first = [name for name in names if name in ESSENTIAL]
    for some, few in ((first, True), (names, True), (names, quick)):
        wanted = [(PLAIN, ""), *(pair for pair in pairs_of(some, few) if pair != (PLAIN, ""))]
        if "dropout" in parts:  # it tells which points are right
            measure_points(suite, PROBE, Job(PROBE, suite.name, 1, PLAIN).size.batches[0], wanted)
        for model in models:
            sizes = Job(model, suite.name, 1, PLAIN).size.batches
            for batch in sizes[:1] if few else sizes:
                if "points" in parts:
                    measure_points(suite, model, batch, wanted)
                    if some is not first:
                        measure_points(suite, model, batch, others_peaks(suite, model, batch, names))
            if "batches" in parts and (model == models[0] if some is first else not few):
                measure_batches(suite, model, sizes[0], some)
            write_report(suite.folder, suite.name, suite.points, suite.trials)


def pairs_of(names: Sequence[str], quick: bool) -> list[tuple[str, str]]:
    """Contenders and their settings."""
    return [(name, setting) for name in names for setting in settings_of(CONTENDERS[name], quick)]


def settings_of(contender: Contender, quick: bool) -> tuple[str, ...]:
    """What is measured of a contender."""
    return contender.quick if quick and contender.quick is not None else contender.settings


def _chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in known:
            raise click.BadParameter(f"there is no {what} {name!r}; choose of {', '.join(known)}")
    return found


@click.command()
@click.option("--suite", "name", type=click.Choice(["cpu", "gpu", "gpu16"]), required=True)
@click.option("--models", default=",".join(WORK), show_default=True)
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True)
@click.option("--parts", default="points,dropout,batches", show_default=True, help="What to measure.")
@click.option(
    "--quick", is_flag=True, help="Few settings; the largest batch of the first model and the essential contenders."
)
@click.option("--steps", default=7, show_default=True, help="Timed steps of each.")
@click.option("--together", type=int, help="Processes that take turns with plain PyTorch's; default 4, on a GPU 1.")
@click.option("--seconds", default=10.0, show_default=True, help="For the solver, per budget.")
@click.option(
    "--minutes", default=1e6, help="Start nothing after so many, the least important being last; a later run goes on."
)
@click.option("--again", is_flag=True, help="Measure anew what is asked for.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing.")
@click.option("--rockmate-python", default="", help="Interpreter of an environment with Rockmate, if not this one.")
@click.option("--out", type=click.Path(path_type=Path), help="Default: benchmarks/results/DEVICE.")
def main(
    name: str, models: str, contenders: str, parts: str, quick: bool, steps: int, together: int | None, seconds: float,
    minutes: float, again: bool, only_report: bool, rockmate_python: str, out: Path | None,
) -> None:  # fmt: skip
    """Measure what is missing and write the report."""
    if name != "cpu" and not torch.cuda.is_available():
        click.echo("not measured")
        return
    folder = out or ROOT / "benchmarks" / "results" / device_slug(torch.device("cpu" if name == "cpu" else "cuda"))
    folder = folder / "bfloat16" if name == "gpu16" and out is None else folder
    chosen = _chosen(models, [*WORK, *ASIDE], "model")
    named = _chosen(contenders, list(CONTENDERS), "contender")
    asked = _chosen(parts, ["points", "dropout", "batches"], "part")
    pythons = {"Rockmate": rockmate_python} if rockmate_python else {}
    deadline = time.monotonic() + 60 * minutes
    pairs = pairs_of(named, quick)
    with tempfile.TemporaryDirectory() as scratch:
        suite = Suite(
            name, folder, steps, together or (4 if name == "cpu" else 1), seconds, deadline, Path(scratch), pythons
        )
        if again:
            suite.points = [p for p in suite.points if p.model not in chosen or (p.contender, p.setting) not in pairs]
            suite.trials = [t for t in suite.trials if t.model not in chosen or t.contender not in named]
        if not only_report:
            _measure(suite, chosen, named, asked, quick)
        write_report(folder, name, suite.points, suite.trials)
    click.echo(str(folder / "rivals.md"))


if __name__ == "__main__":
    main()
