"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..ir.defaults import MODE, SOLVER


def combined(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator that applies several, the first outermost."""

    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.  [default: off]"
)
dtype_option = click.option(
    "--dtype", default="float32", show_default=True, help="Of the model and its input, such as bfloat16."
)


def with_terminal(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --json and --quiet; the command gets them as one ``terminal``."""

    @json_option
    @click.option("--quiet", is_flag=True, help="No words and no progress, only errors.  [default: off]")
    @functools.wraps(function)
    def speaking(*, as_json: bool, quiet: bool, **options: Any) -> Any:
        from .terminal import Terminal

        return function(terminal=Terminal(as_json=as_json, quiet=quiet), **options)

    return speaking


attention_option = click.option(
    "--attention",
    default="",
    help=(
        "Kind of attention that PyTorch takes, such as flash; or efficient, cudnn, math.  [default: PyTorch's choice "
        "on that card]"
    ),
)
precision_options = combined(
    dtype_option,
    click.option(
        "--autocast", default="", help="Under torch.autocast to this dtype, such as bfloat16.  [default: off]"
    ),
    click.option("--channels-last", is_flag=True, help="Weights and inputs in that memory layout.  [default: off]"),
    attention_option,
)
profile_option = click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="Profile file to reuse and extend, or roofline:DEVICE (roofline:h100) to plan without measuring.  "
    "[default: the store of this device in ~/.cache/monet_like]",
)
#: Of commands that read a schedule FILE.
model_of_file_option = click.option(
    "--model",
    help=(
        "MODEL that FILE was solved for, such as net.py:make_model.  [default: what FILE says, where that is a net of "
        "torchvision or of this package]"
    ),
)
profile_of_file_option = click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help=(
        "Profile file, or roofline:DEVICE, such as roofline:a100.  [default: the rates FILE was solved with, or the "
        "store of this device]"
    ),
)
gap_option = click.option(
    "--gap",
    type=float,
    default=0.01,
    show_default=True,
    help="Stop when proven this close to the optimum, such as 0.001.",
)
threads_option = click.option(
    "--threads",
    type=int,
    default=1,
    show_default=True,
    help="Of the solver, such as 8 (GUROBI, HIGHS, SCIP and others; CBC has one).",
)
optimizer_option = combined(
    click.option(
        "--optimizer",
        default="none",
        show_default=True,
        help=(
            "Count this optimizer's state: none, sgd, momentum, adam, adamw, adam_fused, adamw_fused, adam8bit, "
            "adamw8bit, paged_adamw or paged_adamw8bit."
        ),
    ),
    click.option(
        "--optimizer-in-backward",
        is_flag=True,
        help="Hooks of the training loop step and free each gradient in the backward, so plan without all gradients at "
        "once.  [default: off]",
    ),
)


def device_option(what: str) -> Callable[[Any], Any]:
    return click.option("--device", default="auto", show_default=True, help=f"{what}: auto, cpu, cuda:1.")


def time_limit_option(seconds: float, what: str) -> Callable[[Any], Any]:
    return click.option(
        "--time-limit", type=float, default=seconds, show_default=True, help=f"Wall seconds for {what}, such as 300."
    )


input_shape_option = click.option(
    "--input-shape",
    help=(
        "Without the batch, such as 3,224,224.  [default: 3,224,224; unet 3,416,608; inception_v3 3,299,299; darts "
        "3,32,32]"
    ),
)
problem_arguments = combined(
    click.argument("model"),
    click.argument("batch"),
    click.argument("budget"),
    click.argument("mode", default=MODE),
    click.argument("solver", default=SOLVER),
)
planning_options = combined(
    click.argument("mode", default=MODE),
    click.argument("solver", default=SOLVER),
    device_option("Where to measure"),
    profile_option,
    time_limit_option(30.0, "each plan"),
    gap_option,
    threads_option,
    optimizer_option,
    precision_options,
    input_shape_option,
)


def csv_option(what: str) -> Callable[[Any], Any]:
    return click.option(
        "--csv", "csv_file", type=click.Path(path_type=Path), help=f"Also write {what}, such as out.csv.  [default: no]"
    )


files_options = combined(
    csv_option("the figures"),
    click.option("--plot", type=click.Path(path_type=Path), help="Also draw them, such as out.png (matplotlib)."),
)
