"""Writes results of commands into files: CSV tables and pictures."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import UsageError
from ..files import check_writable, write_atomically
from ..zoo.registry import check_not_registered


def write_table(console: Console, path: Path | None, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as CSV, if a file was asked for."""
    if path is None:
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
    console.print(f"wrote {path}", soft_wrap=True)


_PICTURES = (".png", ".svg", ".pdf")


def check_results(plot: Path | None, *files: Path | None) -> None:
    """Check, before hours of work, that the requested picture and files can be written.

    Raises:
        UsageError: not a picture's name, matplotlib is not installed, or as of `check_writable`.
    """
    for path in (plot, *files):
        if path is not None:
            check_not_registered(path)
            check_writable(path)
    if plot is not None and plot.suffix not in _PICTURES:
        raise UsageError(f"--plot {plot} must end in one of {', '.join(_PICTURES)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'monet_like[plots]'")


def draw(
    console: Console,
    path: Path | None,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    labels: tuple[str, str],
    stars: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Draw named lines and single points, if a picture was asked for.

    Raises:
        UsageError: as `check_results`.
    """
    check_results(path)
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (name, points) in enumerate(lines.items()):
        if points:  # hollow, and each of its own shape and size: what lies on another is still seen
            style: dict[str, Any] = {
                "marker": "osD^v"[number % 5],
                "markersize": 4 + 2 * (number % 5),
                "fillstyle": "none",
            }
            axes.plot(*zip(*sorted(points), strict=True), linewidth=1.2, label=name, **style)
    for name, point in (stars or {}).items():
        axes.plot(*([extent] for extent in point), "k*", markersize=11, label=name)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip("."), dpi=130)
    pyplot.close(figure)
    write_atomically(path, data.getvalue())
    console.print(f"wrote {path}", soft_wrap=True)
