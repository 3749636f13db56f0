"""The command fits: on which cards a model trains."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..auto.fits.fits import fits as predict
from ..errors import UsageError
from .output import check_results, write_table
from .terminal import Terminal, aligned_table


def fits(
    *,
    model: str,
    batch: str | None,
    seq: int | None,
    cards: str,
    reserve: str | None,
    largest: str,
    csv_file: Path | None,
    terminal: Terminal,
    **options: Any,
) -> None:
    """Print the table; as JSON or CSV there is a row for each card and way.

    Raises:
        UsageError: an argument is wrong.
    """
    if batch is not None and not batch.isdecimal():
        raise UsageError(f"batch {batch[:40]!r} must be a whole number of at least 1, such as 4")
    names = [name.strip() for name in cards.split(",") if name.strip()]
    if not names:
        raise UsageError("--cards names no card; give such as rtx4090,h100")
    check_results(csv_file)
    with terminal.progress() as progress:
        found = predict(
            model, batch=None if batch is None else int(batch), length=seq, cards=names, reserve=reserve,
            largest="" if largest == "off" else largest,
            progress=progress.planning, **options,
        )  # fmt: skip
    header, cells = found.table()
    table = aligned_table(*header)
    for line in cells:
        table.add_row(*line)
    terminal.console.print(found.title, soft_wrap=True)
    terminal.console.print(table)
    terminal.console.print(found.note, soft_wrap=True)
    write_table(terminal.console, csv_file, found.to_frame())
    terminal.result(asdict(found))
