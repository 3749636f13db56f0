"""The command group ``monet-like``. Commands report errors in one line and end on Ctrl-C without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from .._version import __version__
from ..errors import MonetError, shortened
from ..interrupts import MESSAGE, raised

CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    # Long options take - and _ alike, as MONeT's users type them. (click hands over names without their dashes.)
    "token_normalize_func": lambda token: token.replace("_", "-"),
}


class Command(click.Command):
    """Errors of this package are one line on stderr and exit code 2, without a traceback."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["context_settings"] = CONTEXT  # its group's, also where a script calls it
        super().__init__(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        return _guarded(lambda: super(Command, self).invoke(ctx))


class Group(click.Group):
    """A group of such commands, and of groups like itself."""

    command_class = Command
    group_class = type

    def invoke(self, ctx: click.Context) -> Any:
        return _guarded(lambda: super(Group, self).invoke(ctx))


def _guarded(function: Callable[[], Any]) -> Any:
    try:
        with raised():
            return function()
    except MonetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # of a path that somebody gave; one without a name is a fault of ours, or the output's
        if error.filename is None:
            raise
        click.echo(f"error: cannot use {shortened(str(error.filename))}: {error.strerror}; give another path", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo(MESSAGE, err=True)
        sys.exit(130)


@click.group(cls=Group, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="monet-like")
def main() -> None:
    """Training steps that fit the memory you have."""
