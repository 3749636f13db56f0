"""The command ``monet-like export``: its options and help. Its code is in `monet_like.cli.export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .group import CONTEXT, Command, main
from .options import device_option, with_terminal


@main.command("export", cls=Command, context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["json", "sac", "inductor", "torchtitan"]),
    default="json",
    show_default=True,
    help=(
        "json: what becomes of the results of every operator, by module. sac: the best answers to PyTorch's selective "
        "activation checkpointing for the same budget, for monet_like.checkpoint_policy. inductor: plans of "
        "torch.compile's graphs for the same budget, for monet_like.compile_options; one step runs. torchtitan: as "
        "sac, with all random draws saved, for the memory policy of examples/torchtitan_policy.py."
    ),
)
@click.option(
    "--regions",
    multiple=True,
    help=(
        "For sac and torchtitan: the modules that are checkpointed, such as 'layers.*'; may be given several times.  "
        "[default: the whole model for sac, 'layers.*' for torchtitan]"
    ),
)
@click.option(
    "--model",
    help=(
        "MODEL that FILE was solved for, such as net.py:make_model.  [default: what FILE says, where that is a net of "
        "torchvision or of this package]"
    ),
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help=(
        "File to write, such as d.json.  [default: FILE with .decisions.json, .sac.json, .inductor.json or "
        ".torchtitan.json]"
    ),
)
@device_option("Where to measure")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help=(
        "Profile file, or roofline:DEVICE, such as roofline:a100.  [default: the rates FILE was solved with, or the "
        "store of this device]"
    ),
)
@with_terminal
def export_command(**options: Any) -> None:
    """Write the decisions of a schedule FILE for people and for other programs.

    A schedule file holds numbers of tasks; their names, modules and sizes come from the model, which is captured again.

    \b
    Examples:
      monet-like export mine.pkl --to json --model net.py:make_model
      monet-like export mine.pkl --to sac --model net.py:make_model --regions 'layers.*'
      monet-like export mine.pkl --to inductor --model net.py:make_model
      monet-like export mine.pkl --to torchtitan --model net.py:make_model
    """
    from .export import export

    export(**options)
