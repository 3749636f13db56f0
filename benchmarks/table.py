"""The README's figures from what `benchmarks.run` measured: python -m benchmarks.table [--write README.md]

Of every model the peak and the step of plain PyTorch, of others and of ours; where the plot is; the largest batch under a
limit; and how near the predictions were. With ``--write`` they go between the file's two markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from benchmarks.processes import ROOT
from benchmarks.report import MB, OVERHEAD_GOAL, PLAIN, SAME_TIME, accuracy, planned, trusted
from benchmarks.rows import Point, Trial, read_rows
from benchmarks.work import WORK
from monet_like.errors import UsageError
from monet_like.zoo.table import write_into

BEGIN, END = "<!-- rivals: begin (python -m benchmarks.table) -->", "<!-- rivals: end -->"
#: A step that is longer than plain PyTorch's by more than this share is no use to many, however little it takes.
USEFUL = 0.5
OURS, RESULTS = ("monet_like", "monet_like inductor"), ROOT / "benchmarks" / "results"


def figures(folder: Path) -> str:
    """Markdown of a folder's rows.

    Raises:
        UsageError: nothing was measured there.
    """
    points = [p for p in trusted(read_rows(folder / "points.csv", Point)) if p.status == "measured" and p.model in WORK]
    parts = [_table(points), _pictures(points, folder), _batches(read_rows(folder / "batches.csv", Trial))]
    if not points:
        raise UsageError(f"{folder} has no rows of models; measure with python -m benchmarks.run --suite cpu")
    found = planned(points)
    parts += [f"Predicted and measured: {accuracy(found)}"] if found else []
    parts.append(f"All contenders, settings and reasons: [{folder.name}](benchmarks/results/{folder.name}/rivals.md).")
    return "\n\n".join(part for part in parts if part)


def _table(points: Sequence[Point]) -> str:
    heads = "| peak, step against plain PyTorch's | plain | checkpoint per block | smallest of torch.compile's "
    heads += f"| monet_like, fastest | at most {100 * SAME_TIME:g} % slower than plain | at most {100 * USEFUL:g} % |"
    rows = [heads, "|---|---|---|---|---|---|---|"]
    for model, batch in sorted(
        {(p.model, p.batch) for p in points}, key=lambda pair: (list(WORK).index(pair[0]), pair)
    ):
        here = [p for p in points if (p.model, p.batch) == (model, batch) and p.correct]
        ours = [p for p in here if p.contender in OURS]
        cells = (
            _least(p for p in here if p.contender == PLAIN),
            _least(p for p in here if p.contender == "checkpoint per block"),
            _least(p for p in here if p.contender.startswith("torch.compile")),
            _cell(min(ours, key=lambda p: p.ratio, default=None)),
            _least(p for p in ours if p.ratio <= 1 + SAME_TIME),
            _least(p for p in ours if p.ratio <= 1 + USEFUL),
        )
        rows.append(f"| {model}, batch {batch} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _least(points: Iterable[Point]) -> str:
    return _cell(min(points, key=lambda p: (p.peak_bytes, p.ratio), default=None))


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    size = f"{point.peak_bytes / MB:,.0f} MB"
    return size if point.contender == PLAIN else f"{size}, {_percent(point.ratio - 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "\N{MINUS SIGN}")


def _pictures(points: Sequence[Point], folder: Path) -> str:
    first = min(((list(WORK).index(p.model), p.batch, p.model) for p in points), default=None)
    if first is None:
        return ""
    path = f"benchmarks/results/{folder.name}/plots/{first[2]}_{first[1]}.png"
    return f"![{first[2]}: step time against peak, all contenders]({path})"


def _batches(trials: Sequence[Trial]) -> str:
    told = []
    for model, limit in dict.fromkeys((t.model, t.limit_bytes) for t in trials):
        here = [t for t in trials if (t.model, t.limit_bytes) == (model, limit) and t.status == "fits"]
        largest = {t.contender: t for t in sorted(here, key=lambda t: t.batch)}
        if PLAIN not in largest:
            continue
        most = [f"{name} {t.batch} ({_percent(t.overhead)} per sample)" for name, t in largest.items() if name != PLAIN]
        cheap = [t.batch for t in here if t.contender == "monet_like" and t.overhead <= OVERHEAD_GOAL]
        text = f"Largest batch of {model} in a process that may hold {limit / MB:,.0f} MB a step: plain PyTorch "
        text += ", ".join([str(largest[PLAIN].batch), *most])
        if cheap:
            times = max(cheap) / largest[PLAIN].batch
            text += f"; monet_like at no more than {100 * OVERHEAD_GOAL:.0f} % further time: {max(cheap)}, {times:.1f} times"
        told.append(f"{text}.")
    return "\n\n".join(told)


def measured_folders() -> list[Path]:
    """Of all devices that the suite ran on."""
    return sorted(path.parent for path in RESULTS.glob("*/points.csv"))


@click.command()
@click.option("--device", help="Folder in benchmarks/results; may be left out where there is one.")
@click.option("--write", type=click.Path(path_type=Path), help="Into this file, between its markers.")
def main(device: str | None, write: Path | None) -> None:
    """Print the figures or write them."""
    folders = [RESULTS / device] if device else measured_folders()
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders) or "none"
        raise click.BadParameter(f"choose one of those measured: {names}", param_hint="--device")
    try:
        text = figures(folders[0])
        if write is None:
            click.echo(text)
            return
        write_into(write, text, BEGIN, END)
    except UsageError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"wrote {write}")


if __name__ == "__main__":
    main()
