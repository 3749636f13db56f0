"""Progress bars on stderr for capture, profile and plan."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

_log = logging.getLogger("monet_like")


def is_watched() -> bool:
    """Whether somebody sees what is shown on stderr: it is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or Console(stderr=True).is_jupyter


def announce(line: str, verbose: bool | None) -> None:
    """Log a line (level INFO), and show it on stderr if ``verbose``; None: if somebody sees stderr."""
    _log.info(line)
    if verbose or (verbose is None and is_watched()):
        print(f"monet_like: {line}", file=sys.stderr)


class Progress:
    """A progress bar for each stage, on stderr. Silent if stderr is neither a terminal nor a notebook."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.bar = Bar(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(28),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}", markup=False, style="dim"),
            console=Console(stderr=True),
            transient=True,
            disable=quiet or not is_watched(),
        )
        self.stage, self.task = "", TaskID(0)

    def __enter__(self) -> Progress:
        self.bar.start()
        self.at("capture")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def at(self, stage: str, what: str = "", done: int | None = None, total: int | None = None) -> None:
        """Show that work has reached ``stage``, and at which item; earlier stages are done."""
        if stage != self.stage:
            if self.stage:
                self.bar.update(self.task, total=1, completed=1, count="", what="")
            self.stage, self.task = stage, self.bar.add_task(stage, total=total, count="", what="")
        count = f"{done}/{total}" if total else ""
        self.bar.update(self.task, completed=done, total=total, count=count, what=what[:60])

    def profiling(self, what: str, done: int, total: int) -> None:
        """Show which operator is measured next."""
        self.at("profile", what, done, total)

    def planning(self, message: str) -> None:
        """Show progress of the planner."""
        self.at("plan", message)
