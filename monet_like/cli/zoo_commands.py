"""The commands ``monet-like zoo ...``: options and help. Their code is in `monet_like.cli.zoo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .group import main
from .options import csv_option, json_option


@main.group("zoo")
def zoo_group() -> None:
    """Schedules solved in advance, such as zoo:resnet50_184_10.00 (for ScheduleWrapper)."""


names_argument = click.argument("names", nargs=-1)


base_url_option = click.option(
    "--base-url", help="Where files are, such as https://example.org/zoo.  [default: $MONET_LIKE_ZOO_URL]"
)


@zoo_group.command("list")
@click.option("--profile", default="", help="Only this one's, such as h100.  [default: all]")
@csv_option("the schedules")
@json_option
def zoo_list_command(**options: Any) -> None:
    """The schedules there are, what they promise, and budgets that cannot be met.

    \b
    Example:
      monet-like zoo list --profile a100
    """
    from .zoo import list_files

    list_files(**options)


@zoo_group.command("show")
@click.argument("name")
@base_url_option
@json_option
def zoo_show_command(**options: Any) -> None:
    """All about the schedule NAME (NAME@PROFILE): the registry's entry and what is in the file.

    For the name of a model, such as resnet50, a table of its schedules.

    \b
    Examples:
      monet-like zoo show resnet50
      monet-like zoo show resnet50_184_10.00@h100
    """
    from .zoo import show

    show(**options)


@zoo_group.command("download")
@names_argument
@click.option("--profile", default="", help="Without NAMES: only this one's, such as h100.  [default: all]")
@base_url_option
def zoo_download_command(**options: Any) -> None:
    """Get schedules (NAME or NAME@PROFILE; none: all) into the cache, checked; what broke off is gone on with.

    \b
    Example:
      monet-like zoo download resnet50_184_10.00@h100 --base-url https://example.org/zoo
    """
    from .zoo import download_files

    download_files(**options)


@zoo_group.command("verify")
@names_argument
@click.option(
    "--simulate/--no-simulate", "simulated", default=True, show_default=True, help="Capture models, simulate schedules."
)
def zoo_verify_command(**options: Any) -> None:
    """Check schedules (NAME or NAME@PROFILE; none: all): hash, content, and by the simulator peak and step.

    \b
    Example:
      monet-like zoo verify --no-simulate
    """
    from .zoo import verify_files

    verify_files(**options)


@zoo_group.command("build")
@names_argument
@click.option("--profiles", default="", help="Some of them, such as a100,h100.  [default: all of the catalogue]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder to make it in, such as mine.  [default: where the zoo is]"
)
@click.option("--again", is_flag=True, help="Make what is there, too.  [default: off]")
@click.option(
    "--evaluations",
    type=click.IntRange(0, 10**12),
    help="Of the local search for each plan, such as 60000.  [default: 25000]",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="That plan at the same time; the files are the same for any number.",
)
def zoo_build_command(**options: Any) -> None:
    """Make the zoo, or the models NAMES of it, from datasheet rates; what is there and unchanged is left alone.

    \b
    Example:
      monet-like zoo build resnet50 --profiles a100 --out mine
    """
    from .zoo import build_files

    build_files(**options)


@zoo_group.command("add")
@click.argument("name")
@click.argument("machine")
@click.argument("solution_file", type=click.Path(path_type=Path))
@click.argument("profile_file", type=click.Path(path_type=Path))
def zoo_add_command(**options: Any) -> None:
    """Enter a schedule that was solved from a measured profile; both files must be in the zoo's folder.

    NAME is the model's in the zoo, such as resnet50; MACHINE names what was measured, such as h200-sxm.

    \b
    Example:
      monet-like zoo add resnet50 h200-sxm solutions/mine.json solutions/profiles/profile_resnet50_184_h200.json
    """
    from .zoo import add

    add(**options)


@zoo_group.command("table")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Put it between the markers of this file, such as README.md.  [default: print it]",
)
@click.option(
    "--summary", "summary_for", default="", help="One row a model for this profile, such as a100.  [default: all rows]"
)
def zoo_table_command(**options: Any) -> None:
    """The registry as Markdown tables.

    \b
    Example:
      monet-like zoo table --write solutions/README.md
    """
    from .zoo import print_table

    print_table(**options)
