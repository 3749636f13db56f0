"""Figures of the manual from what `benchmarks.run` measured.

    python -m benchmarks.table --write docs/measured.md

What is gained over all models; of every one the peak and the step of plain PyTorch, of others and of ours; where the
plot is; how near the predictions were; and the largest batches under a limit: all of the device where the most models
were measured. With ``--write`` they go between the file's two markers.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from benchmarks.processes import ROOT
from benchmarks.report import MB, OVERHEAD_GOAL, PLAIN, SAME_TIME, accuracy, planned, trusted
from benchmarks.rows import Point, Trial, markdown_table, read_rows
from benchmarks.work import WORK
from monet_like.cli.zoo.table import write_into
from monet_like.errors import UsageError

BEGIN, END = "<!-- rivals: begin (python -m benchmarks.table) -->", "<!-- rivals: end -->"
#: A step that is longer than plain PyTorch's by more than this share is no use to many, however little it takes.
USEFUL = 0.5
RESULTS = ROOT / "benchmarks" / "results"
#: Beside torch.compile's as beside eager contenders': compiled or not is the user's choice.
OURS = ("monet_like", "monet_like inductor")


def figures(folder: Path, place: Path = ROOT) -> str:
    """Markdown of a folder's points and largest batches.

    Args:
        place: the folder of the page, where its links start.

    Raises:
        UsageError: nothing was measured there.
    """
    points = [p for p in trusted(read_rows(folder / "points.csv", Point)) if p.status == "measured" and p.model in WORK]
    if not points:
        raise UsageError(f"{folder} has no rows of models; measure with python -m benchmarks.run --suite cpu")
    wrong = {(p.model, p.contender, p.setting) for p in points if not p.correct}
    trials = [t for t in read_rows(folder / "batches.csv", Trial) if (t.model, t.contender, t.setting) not in wrong]
    links = os.path.relpath(folder, place)
    parts = [*_gained(points, trials), _table(points), _pictures(points, links)]
    found = planned(points)
    parts += [f"Predicted and measured: {accuracy(found)}"] if found else []
    parts.append(f"All contenders, settings and reasons: [{folder.name}]({links}/rivals.md).")
    if trials:
        said = (
            "The largest batch in a process that may hold what plain PyTorch's own takes and 5 % more, and time per "
            "sample"
        )
        parts += [f"{said} against plain PyTorch's (-: none measured):", _batches(trials)]
    return "\n\n".join(parts)


def _gained(points: Sequence[Point], trials: Sequence[Trial]) -> list[str]:
    """Over all models: the share of plain PyTorch's memory in its time, and the batch in its memory."""
    shares, times = dict[str, float](), dict[str, float]()
    for plain in (p for p in points if p.contender == PLAIN):
        here = [p for p in points if (p.model, p.batch) == (plain.model, plain.batch) and p.correct]
        ours = [p.peak_bytes for p in here if p.contender in OURS and p.ratio <= 1 + SAME_TIME]
        if ours:
            shares[plain.model] = 100 * min(ours) / plain.peak_bytes
    for model in dict.fromkeys(t.model for t in trials):
        plain_most, _, cheap = _ours(trials, model)
        if plain_most is not None and cheap is not None:
            times[model] = cheap.batch / plain_most.batch
    said = []
    if shares:
        said.append(
            f"* Memory, at most {100 * SAME_TIME:g} % slower than plain PyTorch: "
            f"{_range(shares, '.0f', ' %', 'of its peak')}"
        )
    if times:
        slower = f"at most {100 * OVERHEAD_GOAL:.0f} % slower per sample"
        said.append(f"* Batch in its memory and 5 % more, {slower}: {_range(times, '.1f', '', 'times its own')}")
    return ["\n".join(said)] if said else []


def _range(found: Mapping[str, float], digits: str, unit: str, of: str) -> str:
    """The least and the most, and of what models; of several, what is in the middle."""
    models = sorted(found, key=lambda model: found[model])
    ends = " to ".join(
        f"**{found[model]:{digits}}{unit}** ({model})" for model in dict.fromkeys((models[0], models[-1]))
    )
    middle = f"; median of {len(models)} models: {statistics.median(found.values()):{digits}}{unit}"
    return f"{ends} {of}{middle if len(models) > 1 else ''}."


def _table(points: Sequence[Point]) -> str:
    heads = ["peak, step against plain PyTorch's", "plain", "checkpoint per block", "smallest of torch.compile's"]
    heads += ["monet_like, fastest", f"at most {100 * SAME_TIME:g} % slower than plain", f"at most {100 * USEFUL:g} %"]
    rows = []
    for model, batch in sorted(
        {(p.model, p.batch) for p in points}, key=lambda pair: (list(WORK).index(pair[0]), pair)
    ):
        here = [p for p in points if (p.model, p.batch) == (model, batch) and p.correct]
        ours = [p for p in here if p.contender in OURS]
        cells = (
            f"{model}, batch {batch}",
            _least(p for p in here if p.contender == PLAIN),
            _least(p for p in here if p.contender == "checkpoint per block"),
            _least(p for p in here if p.contender.startswith("torch.compile")),
            _cell(min(ours, key=lambda p: p.ratio, default=None)),
            _least(p for p in ours if p.ratio <= 1 + SAME_TIME),
            _least(p for p in ours if p.ratio <= 1 + USEFUL),
        )
        rows.append(cells)
    return markdown_table(heads, rows)


def _least(points: Iterable[Point]) -> str:
    return _cell(min(points, key=lambda p: (p.peak_bytes, p.ratio), default=None))


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    size = f"{point.peak_bytes / MB:,.0f} MB"
    return size if point.contender == PLAIN else f"{size}, {_percent(point.ratio - 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "\N{MINUS SIGN}")


def _pictures(points: Sequence[Point], links: str) -> str:
    first = min(((list(WORK).index(p.model), p.batch, p.model) for p in points), default=None)
    if first is None:
        return ""
    path = f"{links}/plots/{first[2]}_{first[1]}.png"
    return f"![{first[2]}: step time against peak, all contenders]({path})"


def _batches(trials: Sequence[Trial]) -> str:
    heads = ["a step may hold", "plain PyTorch", "checkpoint per block", "largest of torch.compile's", "monet_like"]
    rows = []
    for model in sorted({t.model for t in trials}, key=list(WORK).index):
        here = [t for t in trials if t.model == model and t.status == "fits"]
        plain, ours, cheap = _ours(trials, model)
        if plain is None or ours is None:
            continue
        others = (
            _largest(t for t in here if t.contender == "checkpoint per block"),
            _largest(t for t in here if t.contender.startswith("torch.compile")),
            ours,
            cheap,
        )
        ended = {t.contender for t in trials if t.model == model and t.status != "fits"}
        cells = [_batch(t, at_least=t is not None and t.contender not in ended) for t in others]
        if cheap is not None:
            cells[-1] += f": {cheap.batch / plain.batch:.1f} times plain's"
        rows.append([f"{model}, {plain.limit_bytes / MB:,.0f} MB", plain.batch, *cells])
    return markdown_table([*heads, f"at most {100 * OVERHEAD_GOAL:.0f} % slower"], rows)


def _ours(trials: Sequence[Trial], model: str) -> tuple[Trial | None, Trial | None, Trial | None]:
    """The largest batches of a model that fit: plain PyTorch's, ours, and ours that is hardly slower per sample.

    Of equal ones the faster.
    """
    here = [t for t in trials if t.model == model and t.status == "fits"]
    ours = [t for t in here if t.contender in OURS]
    return (
        _largest(t for t in here if t.contender == PLAIN),
        _largest(ours),
        _largest(t for t in ours if t.overhead <= OVERHEAD_GOAL),
    )


def _batch(trial: Trial | None, *, at_least: bool) -> str:
    if trial is None:
        return "-"
    return f"{'at least ' * at_least}{trial.batch}, {_percent(trial.overhead)}"


def _largest(trials: Iterable[Trial]) -> Trial | None:
    return max(trials, key=lambda t: (t.batch, -t.overhead), default=None)


def fullest() -> Path | None:
    """Of the folders of all devices the one with points and largest batches of the most models, then with
    most of them.
    """

    def count(folder: Path) -> tuple[int, int]:
        both = read_rows(folder / "points.csv", Point), read_rows(folder / "batches.csv", Trial)
        models = sum(len({row.model for row in rows}) for rows in both)
        return models, sum(len({(row.model, row.contender, row.setting) for row in rows}) for rows in both)

    return max((path.parent for path in sorted(RESULTS.glob("*/points.csv"))), key=count, default=None)


@click.command()
@click.option("--device", help="Folder in benchmarks/results; by default the one with the most models.")
@click.option("--write", type=click.Path(path_type=Path), help="Into this file, between its markers.")
def main(device: str | None, write: Path | None) -> None:
    """Print the figures or write them."""
    folder = RESULTS / device if device else fullest()
    if folder is None:
        raise click.ClickException("nothing was measured yet; measure with python -m benchmarks.run --suite cpu")
    try:
        text = figures(folder, write.resolve().parent if write else ROOT)
        if write is None:
            click.echo(text)
            return
        write_into(write, text, BEGIN, END)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"wrote {write}")


if __name__ == "__main__":
    main()
