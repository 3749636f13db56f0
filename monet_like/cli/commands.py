"""The commands: arguments, options and help. Their code is imported when a command runs, so ``--help`` is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..ir.defaults import MODE, SOLVER
from .group import main
from .options import (
    csv_option,
    device_option,
    dtype_option,
    files_options,
    gap_option,
    input_shape_option,
    json_option,
    model_of_file_option,
    optimizer_option,
    planning_options,
    precision_options,
    problem_arguments,
    profile_of_file_option,
    profile_option,
    threads_option,
    time_limit_option,
    with_terminal,
)

if TYPE_CHECKING:
    from .terminal import Terminal


@main.command("solve")
@problem_arguments
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help=(
        "Where to measure: auto (CUDA if there is one), cpu, cuda:1. With --profile roofline:DEVICE, or a file "
        "recorded on a GPU, cuda need not be here."
    ),
)
@profile_option
@click.option(
    "--profile-batch",
    type=int,
    help=(
        "Measure at this batch and scale, such as 8.  [default: BATCH, or less where that would take over about a "
        "minute]"
    ),
)
@time_limit_option(60.0, "the plan")
@gap_option
@threads_option
@click.option(
    "--quick",
    is_flag=True,
    help="In about 10 seconds: times partly estimated, local search; memory is as exact.  [default: off]",
)
@click.option("--ablation", is_flag=True, help="Operator choice only: nothing is recomputed.  [default: off]")
@optimizer_option
@click.option(
    "--strategy",
    default="milp",
    show_default=True,
    help="How to plan: milp, heuristic, checkmate, ogc, chen_greedy, chen_sqrt, griewank, torch_budget or store_all.",
)
@click.option(
    "--processes",
    type=int,
    help="So many share the statistics of the model's SyncBatchNorm, such as 8.  [default: 1, where it is batch norm]",
)
@precision_options
@input_shape_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Schedule file to write, such as mine.json.  [default: solution_NAME_BATCH_MODE_BUDGET.json, in this folder]",
)
@csv_option("the step's memory timeline")
@with_terminal
def solve_command(**options: Any) -> None:
    """Find the fastest training step of MODEL at BATCH that fits BUDGET, and write a schedule file.

    BUDGET is a number of GB (10), an amount with its unit (565MB), a share of plain PyTorch's peak (60%), or card: what
    is free on the GPU, less 5 % of it and at least 1 GB.
    MODEL is a dotted call with literal arguments ("torchvision.models.resnet18(num_classes=10)"), unet, nasnet,
    amoebanet, darts, or path/to/file.py:make_model (or the class of a module). MODE is some of the words inplace, conv,
    multiway, newnode, normal, joined by "_"; dropit0.9, lowp16 and lowp8 admit inexact gradients, offload copies on the
    host, algorithms those of cuDNN, nhwc has convolutions in channels-last; by default it has all that are
    exact, inplace_conv_multiway_newnode. SOLVER is HIGHS (the default), CBC, GUROBI or another that cvxpy finds, or
    heuristic, which needs none.

    \b
    Examples:
      monet-like solve net.py:Net 8 60%
      python solve.py "torchvision.models.resnet50()" 184 10 inplace_conv_multiway_newnode CBC
      python solve.py unet 11 6 inplace_conv_multiway_newnode HIGHS --time-limit 120 --gap 0.02
      python solve.py model.py:make_model 64 5.5 normal CBC --input-shape 3,32,32 --optimizer adam
    """
    from .solve import solve

    solve(**options)


@main.command("schedule")
@problem_arguments
@click.option(
    "--solution-file",
    type=click.Path(path_type=Path),
    help="Schedule file to check, such as mine.json.  [default: the name that solve.py gives it, in this folder or in "
    "solutions/]",
)
@click.option(
    "--check-runtime",
    is_flag=True,
    help="Step time and measured peak beside plain PyTorch's, in this process.  [default: off]",
)
@click.option(
    "--check-diff",
    is_flag=True,
    help="Compare outputs, every gradient and every buffer with plain PyTorch's.  [default: off]",
)
@click.option("--run-bs", is_flag=True, help="Run one step and say whether it fitted the budget.  [default: off]")
@device_option("Where to run")
@precision_options
@input_shape_option
@click.option(
    "--steps", type=int, default=5, show_default=True, help="Timed steps of each kind in --check-runtime, such as 20."
)
@with_terminal
def schedule_command(**options: Any) -> None:
    """Check a schedule by running it: --check-runtime, --check-diff or --run-bs.

    \b
    Example:
      python scripts/schedule.py "torchvision.models.resnet50()" 8 0.5 inplace_conv_multiway_newnode CBC \\
          --solution_file solution_resnet50_8_inplace_conv_multiway_newnode_0.50.json --check_diff
    """
    from .schedule import check

    check(**options)


@main.command("compare")
@click.argument("model")
@click.argument("batch")
@click.argument("budgets")
@planning_options
@click.option(
    "--strategies",
    default="",
    help="Some of milp, heuristic, checkmate, ogc, chen_greedy, chen_sqrt, griewank, torch_budget, store_all.  "
    "[default: all]",
)
@files_options
@with_terminal
def compare_command(**options: Any) -> None:
    """Step time of every strategy at every one of BUDGETS (10,8 in GB, 565MB or 80%,60%), predicted by one simulator.

    \b
    Example:
      monet-like compare "torchvision.models.resnet50()" 184 12,10,8 --profile roofline:a100 --plot fronts.png
    """
    from .compare import compare

    compare(**options)


@main.command("pareto")
@click.argument("model")
@click.argument("batch")
@planning_options
@click.option("--points", type=int, default=8, show_default=True, help="How many budgets, evenly spread.")
@click.option("--budgets", default="", help="These instead, such as 10,8,6 or 80%,60%; as for solve.")
@files_options
@with_terminal
def pareto_command(**options: Any) -> None:
    """The time-memory front of a model, predicted: how much of the step 10 % more memory saves.

    \b
    Example:
      monet-like pareto "torchvision.models.resnet50()" 184 --profile roofline:a100 --points 6 --csv front.csv
    """
    from .compare import front

    front(**options)


@main.command("smallest")
@click.argument("model")
@click.argument("batch")
@planning_options
@with_terminal
def smallest_command(**options: Any) -> None:
    """The smallest budget that is feasible: the lowest peak found, and what is proven.

    \b
    Example:
      monet-like smallest "torchvision.models.resnet50()" 184 --profile roofline:a100
    """
    from .compare import smallest

    smallest(**options)


@main.command("largest-batch")
@click.argument("model")
@click.argument("budget")
@planning_options
@with_terminal
def largest_batch_command(**options: Any) -> None:
    """The largest batch for which a schedule within BUDGET (GB, or an amount such as 565MB) is found.

    Operators are measured at two batches and scaled to the others; with --profile roofline:DEVICE nothing is measured.

    \b
    Examples:
      monet-like largest-batch "torchvision.models.resnet50()" 10
      monet-like largest-batch "torchvision.models.resnet50()" 10 --profile roofline:a100
    """
    from .tune import largest_batch

    largest_batch(**options)


@main.command("tune")
@click.argument("model")
@click.argument("budget")
@planning_options
@click.option(
    "--batches", default="", help="Only these, such as 64,96,128.  [default: powers of two, then around the best]"
)
@click.option("--best", type=int, default=3, show_default=True, help="How many batches are planned in full, measured.")
@click.option("--steps", type=int, default=3, show_default=True, help="Timed steps of each; 0: nothing is measured.")
@click.option(
    "--profile-batch", type=int, help="Measure operators at this batch and half of it.  [default: as for solve]"
)
@files_options
@click.option("--out", type=click.Path(path_type=Path), help="Schedule file to write.  [default: as for solve]")
@with_terminal
def tune_command(**options: Any) -> None:
    """The batch and schedule with the highest throughput (samples/s) within BUDGET (GB, or such as 565MB); writes the
    schedule.

    Every batch tried is planned by the local search; the best few are planned in full and run, beside plain PyTorch
    at its best batch (with --profile roofline:DEVICE nothing is run).

    \b
    Examples:
      monet-like tune "torchvision.models.resnet50()" 2
      monet-like tune "torchvision.models.resnet50()" 40 --profile roofline:a100 --plot tune.png
    """
    from .tune import tune

    tune(**options)


@main.command("benchmark")
@click.option("--arch", required=True, help="A net of OGC's table, such as resnet101, densenet201 or darts.")
@device_option("Where to run")
@click.option("--strategy", default="ogc", show_default=True, help="How to plan, such as milp; as for solve.")
@click.option(
    "--budget",
    help="Of the whole step, such as 8 (GB), 565MB or 60%; as for solve.  [default: what the ogc strategy needs]",
)
@click.option("--batch", help="Such as 8.  [default: as in OGC's table]")
@click.option("--input-size", type=int, help="Side of the images, such as 64.  [default: as in OGC's table]")
@click.option("--mode", default=MODE, show_default=True, help="Such as normal; as for solve.")
@click.option("--solver", default=SOLVER, show_default=True, help="Such as CBC; as for solve.")
@profile_option
@time_limit_option(60.0, "the plan")
@click.option("--steps", type=int, default=5, show_default=True, help="Timed steps of each kind, such as 20.")
@dtype_option
@csv_option("the figures")
@with_terminal
def benchmark_command(**options: Any) -> None:
    """OGC's benchmark: plan a net, compare a step with plain PyTorch's, measure memory and time of both.

    \b
    Examples:
      python scripts/benchmark.py --arch resnet101 --device cuda:0
      python scripts/benchmark.py --arch darts --batch 4 --device cpu --strategy milp --budget 30%
    """
    from .benchmark import benchmark

    benchmark(**options)


@main.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@csv_option("a row for each backward slot")
@with_terminal
def inspect_command(file: Path, csv_file: Path | None, terminal: Terminal) -> None:
    """Print what a schedule FILE was made for, what it promises and what it does.

    \b
    Example:
      monet-like inspect solutions/solution_resnet50_184_inplace_conv_multiway_newnode_10.00.json
    """
    from ..ir.schedule_file import ScheduleRecord
    from .inspect import show_record
    from .output import check_results, write_table

    record = ScheduleRecord.load(file)
    check_results(csv_file)
    show_record(terminal, record)
    if csv_file is not None:
        write_table(terminal.console, csv_file, record.schedule.to_frame())


@main.command("report")
@click.argument("file", type=click.Path(path_type=Path))
@model_of_file_option
@click.option(
    "--out", type=click.Path(path_type=Path), help="Page to write, such as mine.html.  [default: FILE with .html]"
)
@click.option("--png", is_flag=True, help="Every picture also as a PNG beside the page.  [default: off]")
@click.option(
    "--front",
    type=click.Choice(["off", "quick", "full"]),
    default="quick",
    show_default=True,
    help="The time-memory front: none, by the strategies that need no solver, or by all of them.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Run real steps; what is measured stands first, beside what was predicted.  [default: off]",
)
@device_option("Where to measure and to run")
@profile_of_file_option
@time_limit_option(30.0, "each plan of --front full")
@csv_option("the step's memory timeline")
@with_terminal
def report_command(**options: Any) -> None:
    """Draw a schedule FILE: one page for a browser, with everything in it, that needs no network.

    Memory over the step beside plain PyTorch's; where it lies, layer by layer; what runs again and what that costs;
    what other strategies would do; every run in a table to search. Needs pip install 'monet_like[plots]'.

    \b
    Examples:
      monet-like report solutions/solution_resnet50_184_inplace_conv_multiway_newnode_10.00.json --png
      monet-like report mine.json --model net.py:make_model --front off --live
    """
    from .report import report

    report(**options)


@main.command("doctor")
@json_option
def doctor_command(as_json: bool) -> None:
    """Say what this machine has: packages, solvers, compiled kernels, GPUs, memory, the cache.

    Exit status 1 if something required is missing or broken, else 0. What only planning needs is not required.

    \b
    Example:
      monet-like doctor --json
    """
    from .doctor import doctor

    sys.exit(doctor(as_json=as_json))
