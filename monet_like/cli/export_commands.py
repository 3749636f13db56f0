"""The command ``monet-like export``: its options and help. Its code is in `monet_like.cli.export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .group import main
from .options import device_option, model_of_file_option, profile_of_file_option, with_terminal


@main.command("export")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["json", "sac", "inductor", "torchtitan", "remat"]),
    default="json",
    show_default=True,
    help=(
        "json: what becomes of the results of every operator, by module. sac: the best answers to PyTorch's selective "
        "activation checkpointing for the same budget, for monet_like.checkpoint_policy. inductor: plans of "
        "torch.compile's graphs for the same budget, for monet_like.compile_options; one step runs. torchtitan: as "
        "sac, with all random draws saved, for the memory policy of examples/torchtitan_policy.py. remat: which "
        "modules of each layer are saved, for torch_remat's regions and torchtitan's save_regions."
    ),
)
@click.option(
    "--regions",
    multiple=True,
    help=(
        "For sac, torchtitan and remat: the modules that are checkpointed, such as 'layers.*'; may be given several "
        "times.  [default: the whole model for sac, 'layers.*' for the others]"
    ),
)
@model_of_file_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help=(
        "File to write, such as d.json.  [default: FILE with .decisions.json, .sac.json, .inductor.json, "
        ".torchtitan.json or .remat.json]"
    ),
)
@device_option("Where to measure")
@profile_of_file_option
@with_terminal
def export_command(**options: Any) -> None:
    """Write the decisions of a schedule FILE for people and for other programs.

    A schedule file holds numbers of tasks; their names, modules and sizes come from the model, which is captured again.

    \b
    Examples:
      monet-like export mine.json --to json --model net.py:make_model
      monet-like export mine.json --to sac --model net.py:make_model --regions 'layers.*'
      monet-like export mine.json --to inductor --model net.py:make_model
      monet-like export mine.json --to torchtitan --model net.py:make_model
      monet-like export mine.json --to remat --model net.py:make_model --regions 'layers.*'
    """
    from .export import export

    export(**options)
