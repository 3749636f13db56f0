"""Writes results of commands into files: CSV tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..files import check_writable, write_atomically
from ..ir.frames import write_csv
from ..report.lines import Lines, Stars, check_picture, picture
from ..zoo.registry import check_not_registered

if TYPE_CHECKING:
    import pandas


def write_table(console: Console, path: Path | None, table: pandas.DataFrame) -> None:
    """Write a table as CSV, if a file was asked for."""
    if path is not None:
        write_csv(table, path)
        console.print(f"wrote {path}", soft_wrap=True)


def check_results(*files: Path | None, plot: Path | None = None) -> None:
    """Check, before hours of work, that the requested files and the picture can be written.

    Raises:
        UsageError: not a picture's name, matplotlib is not installed, a file belongs to a zoo, or as of
            `check_writable`.
    """
    for path in (plot, *files):
        if path is not None:
            check_not_registered(path)
            check_writable(path)
    if plot is not None:
        check_picture(plot)


def draw(
    console: Console, path: Path | None, title: str, lines: Lines, labels: tuple[str, str], stars: Stars | None = None
) -> None:
    """Draw named lines and single points, if a picture was asked for."""
    if path is not None:
        write_atomically(path, picture(path, title, lines, labels, stars))
        console.print(f"wrote {path}", soft_wrap=True)
