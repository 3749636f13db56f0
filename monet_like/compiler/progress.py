"""Progress bars on stderr: rehearse, capture, profile, plan, choose and compile."""

from __future__ import annotations

import io
import logging
import random
import re
import sys
import threading
import time
from types import TracebackType
from typing import Any

_drawn = random.getstate()  # rich draws a number when it is imported, and the generator is the user's
try:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
    from rich.text import Text
finally:
    random.setstate(_drawn)

_log = logging.getLogger("monet_like")


def is_watched() -> bool:
    """Whether somebody sees what is shown on stderr: it is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or Console(stderr=True).is_jupyter


def announce(line: str, verbose: bool | None) -> None:
    """Log a line (level INFO), and show it on stderr if ``verbose``; None: if somebody sees stderr."""
    _log.info(line)
    if verbose or (verbose is None and is_watched()):
        print(f"monet_like: {line}", file=sys.stderr)


#: Colours and movements of a terminal's cursor.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class _Cell(io.StringIO):
    """A terminal's place in a notebook: the cell shows what was written last, and needs no ipywidgets for that."""

    def __init__(self) -> None:
        super().__init__()
        from IPython.display import display

        self.handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def flush(self) -> None:
        """Show what was written since the last time."""
        shown = _CONTROL.sub("", self.getvalue()).strip("\n")
        self.seek(0)
        self.truncate()
        if shown:
            self.handle.update({"text/plain": shown}, raw=True)

    def end(self) -> None:
        """Show nothing any more."""
        self.handle.update({"text/plain": ""}, raw=True)


def _console(*, own: bool) -> Console:
    """Where a bar is shown; ``own``: it is not inside another one, and is shown at all."""
    console = Console(stderr=True)
    if not own or not console.is_jupyter:
        return console
    return Console(file=_Cell(), force_terminal=True, force_jupyter=False, width=NOTEBOOK_COLUMNS)


#: Of a bar in a notebook.
NOTEBOOK_COLUMNS = 100
#: The bars that each thread shows.
_shown = threading.local()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class _Times(ProgressColumn):
    """How long a stage has taken, and how long the rest is likely to take, or takes at most."""

    def render(self, task: Task) -> Text:
        """Such as ``0:12, 0:30 left``; ``≤`` stands before a limit, after which work that has begun is finished."""
        spent = _clock((task.finished_time if task.finished else task.elapsed) or 0.0)
        ends, left = task.fields["ends"], task.time_remaining
        if task.finished:
            return Text(spent)
        if left is not None:
            return Text(f"{spent}, {_clock(left)} left")
        if ends is None:
            return Text(spent)
        left = ends - time.monotonic()
        return Text(f"{spent}, ≤ {_clock(left)} left" if left > 0 else f"{spent}, finishing")


class Progress:
    """A progress bar for each stage, on stderr: what is done, how long it took, how long the rest is likely to take.

    Silent if stderr is neither a terminal nor a notebook. Inside another one its stages are shown there.

    Args:
        first: the stage that work begins with.
    """

    def __init__(self, *, quiet: bool = False, first: str = "capture") -> None:
        quiet = quiet or not is_watched()
        console = _console(own=not quiet and getattr(_shown, "progress", None) is None)
        self.bar = Bar(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(10, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[count]}", justify="right", table_column=Column(no_wrap=True)),
            _Times(table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.fields[what]}",
                markup=False,
                style="dim",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # or else what is written to a file would be shown here
            redirect_stderr=not isinstance(console.file, _Cell),
            expand=True,
            disable=quiet,
        )
        self.stage, self.task, self.first = "", TaskID(0), first

    def __enter__(self) -> Progress:
        outer: Progress | None = getattr(_shown, "progress", None)
        if outer is not None and not self.bar.disable:
            outer.at(self.first)
            return outer
        if not self.bar.disable:
            _shown.progress = self
            self.bar.start()
        self.at(self.first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if getattr(_shown, "progress", None) is self:
            self.bar.stop()
            _shown.progress = None
            if isinstance(cell := self.bar.console.file, _Cell):
                cell.end()

    def at(
        self, stage: str, what: str = "", done: int | None = None, total: int | None = None, most: float | None = None
    ) -> None:
        """Show that work has reached ``stage``, and at which item; earlier stages are done.

        Args:
            most: the seconds that the stage will take at most, from now.
        """
        if stage != self.stage:
            if self.stage:
                self.bar.update(self.task, total=1, completed=1, count="", what="")
            earlier = next((task for task in self.bar.tasks if task.description == stage), None)
            if earlier is None:
                self.task = self.bar.add_task(stage, total=total, count="", what="", ends=None)
            else:
                began, self.task = earlier.start_time, earlier.id
                self.bar.reset(self.task)
                earlier.total, earlier.start_time = total, began
            self.stage = stage
        shown: dict[str, Any] = {"what": what}
        if total:
            shown["count"] = f"{done}/{total}"
        if most is not None:
            shown["ends"] = time.monotonic() + most
        self.bar.update(self.task, completed=done, total=total, **shown)

    def profiling(self, what: str, done: int, total: int) -> None:
        """Show which operator is measured next."""
        self.at("profile", what, done, total)

    def planning(self, message: str) -> None:
        """Show progress of the planner."""
        self.at("plan", message)
