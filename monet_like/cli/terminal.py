"""Terminal output: progress bars while a command works, a table when it is done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..compiler.progress import Progress

#: Columns where nothing says how wide the output is: a file or a pipe.
_WIDTH = 160


class Terminal:
    """The output of a command: text for people, or JSON for programs.

    Args:
        as_json: nothing but one JSON object on stdout, at the end.
        quiet: nothing on stdout, and no progress; errors are still told.

    Attributes:
        console: for people; silent in either case. Without colours where it is not a terminal.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(
            highlight=False, markup=False, quiet=as_json or quiet, width=None if narrow else _WIDTH
        )  # no markup: names come from files and models

    def progress(self) -> Progress:
        """Show progress on stderr during a ``with`` statement."""
        return Progress(quiet=self.quiet)

    def result(self, content: Mapping[str, Any]) -> None:
        """Print the result of the command as JSON, if that was asked for."""
        if self.as_json:
            click.echo(json.dumps(content))


def aligned_table(*columns: str, texts: int = 2) -> Table:
    """A table without lines: the first column left, numbers right; without names, as many columns of text as said."""
    table = Table(show_header=bool(columns), box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns or ("",) * texts):
        table.add_column(column, justify="left" if index == 0 or not columns else "right", overflow="fold")
    return table
