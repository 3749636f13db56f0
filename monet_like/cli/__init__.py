"""The command line: ``monet-like solve | schedule | compare | pareto | ...``, also as ``solve.py`` and ``scripts/schedule.py``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._version import __version__
from ..errors import MonetError
from ..interrupts import MESSAGE, raised

if TYPE_CHECKING:
    from .terminal import Terminal

_CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    # Long options take - and _ alike, as MONeT's users type them. (click hands over names without their dashes.)
    "token_normalize_func": lambda token: token.replace("_", "-"),
}


class _Group(click.Group):
    """Errors of this package are one line on stderr and exit code 2, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        return _guarded(lambda: super(_Group, self).invoke(ctx))


class _Command(click.Command):
    def invoke(self, ctx: click.Context) -> Any:
        return _guarded(lambda: super(_Command, self).invoke(ctx))


def _guarded(function: Callable[[], Any]) -> Any:
    try:
        with raised():
            return function()
    except MonetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo(MESSAGE, err=True)
        sys.exit(130)


@click.group(cls=_Group, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="monet-like")
def main() -> None:
    """Training steps that fit the memory you have."""


def _options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.  [default: off]")
_dtype = click.option(
    "--dtype", default="float32", show_default=True, help="Of the model and its input, such as bfloat16."
)


def _speaking(function: Callable[..., Any]) -> Callable[..., Any]:
    """--json and --quiet, handed over as one ``terminal``."""

    @_json
    @click.option("--quiet", is_flag=True, help="No words and no progress, only errors.  [default: off]")
    @functools.wraps(function)
    def speaking(*, as_json: bool, quiet: bool, **options: Any) -> Any:
        from .terminal import Terminal

        return function(terminal=Terminal(as_json=as_json, quiet=quiet), **options)

    return speaking


_precision = _options(
    _dtype,
    click.option(
        "--autocast", default="", help="Under torch.autocast to this dtype, such as bfloat16.  [default: off]"
    ),
    click.option("--channels-last", is_flag=True, help="Weights and inputs in that memory layout.  [default: off]"),
)
_profile = click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="Profile file to reuse and extend, or roofline:DEVICE (roofline:h100) to plan without measuring.  "
    "[default: solutions/profiles/profile_NAME_BATCH_DEVICE.json]",
)
_gap = click.option(
    "--gap",
    type=float,
    default=0.01,
    show_default=True,
    help="Stop when proven this close to the optimum, such as 0.001.",
)
_threads = click.option(
    "--threads",
    type=int,
    default=1,
    show_default=True,
    help="Of the solver, such as 8 (GUROBI, HIGHS, SCIP and others; CBC has one).",
)
_optimizer = click.option(
    "--optimizer", default="none", show_default=True, help="Count this optimizer's state: none, sgd, momentum or adam."
)


def _device(what: str) -> Callable[[Any], Any]:
    return click.option("--device", default="auto", show_default=True, help=f"{what}: auto, cpu, cuda:1.")


def _time_limit(seconds: float, what: str) -> Callable[[Any], Any]:
    return click.option(
        "--time-limit", type=float, default=seconds, show_default=True, help=f"Wall seconds for {what}, such as 300."
    )


_input_shape = click.option(
    "--input-shape",
    help="Without the batch, such as 3,224,224.  [default: 3,224,224; unet 3,416,608; inception_v3 3,299,299; darts 3,32,32]",
)
_problem = _options(
    click.argument("model"),
    click.argument("batch"),
    click.argument("budget"),
    click.argument("mode"),
    click.argument("solver", default="CBC"),
)


@main.command("solve", cls=_Command, context_settings=_CONTEXT)
@_problem
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Where to measure: auto (CUDA if there is one), cpu, cuda:1. With --profile roofline:DEVICE, or a file recorded "
    "on a GPU, cuda need not be here.",
)
@_profile
@click.option(
    "--profile-batch",
    type=int,
    help="Measure at this batch and scale, such as 8.  [default: BATCH, or less where that would take over about a minute]",
)
@_time_limit(60.0, "the plan")
@_gap
@_threads
@click.option("--ablation", is_flag=True, help="Operator choice only: nothing is recomputed.  [default: off]")
@_optimizer
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
@_precision
@_input_shape
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Schedule file to write, such as mine.pkl.  [default: solutions/solution_NAME_BATCH_MODE_BUDGET.pkl]",
)
@_speaking
def solve_command(**options: Any) -> None:
    """Find the fastest training step of MODEL at BATCH that fits BUDGET (GB), and write a schedule file.

    MODEL is a dotted call with literal arguments ("torchvision.models.resnet18(num_classes=10)"), unet, nasnet,
    amoebanet, darts, or path/to/file.py:make_model. MODE is some of the words inplace, conv, multiway, newnode, normal,
    joined by "_"; dropit0.9, lowp16 and lowp8 admit inexact gradients, offload copies on the host,
    algorithms those of cuDNN.
    SOLVER is CBC (the default), HIGHS, GUROBI or another that cvxpy finds.

    \b
    Examples:
      python solve.py "torchvision.models.resnet50()" 184 10 inplace_conv_multiway_newnode CBC
      python solve.py unet 11 6 inplace_conv_multiway_newnode HIGHS --time-limit 120 --gap 0.02
      python solve.py model.py:make_model 64 5.5 normal CBC --input-shape 3,32,32 --optimizer adam
    """
    from .solve import solve

    solve(**options)


@main.command("schedule", cls=_Command, context_settings=_CONTEXT)
@_problem
@click.option(
    "--solution-file",
    type=click.Path(path_type=Path),
    help="Schedule file to check, such as solutions/mine.pkl.  [default: the name that solve.py gives it]",
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
@_device("Where to run")
@_precision
@_input_shape
@click.option(
    "--steps", type=int, default=5, show_default=True, help="Timed steps of each kind in --check-runtime, such as 20."
)
@_speaking
def schedule_command(**options: Any) -> None:
    """Check a schedule by running it: --check-runtime, --check-diff or --run-bs.

    \b
    Example:
      python scripts/schedule.py "torchvision.models.resnet50()" 8 0.5 inplace_conv_multiway_newnode CBC \\
          --solution_file solutions/solution_resnet50_8_inplace_conv_multiway_newnode_0.50.pkl --check_diff
    """
    from .schedule import check

    check(**options)


_exploring = _options(
    click.argument("mode", default="inplace_conv_multiway_newnode"),
    click.argument("solver", default="HIGHS"),
    _device("Where to measure"),
    _profile,
    _time_limit(30.0, "each plan"),
    _gap,
    _threads,
    _optimizer,
    _precision,
    _input_shape,
)
_files = _options(
    click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="Also write the figures, such as out.csv."),
    click.option("--plot", type=click.Path(path_type=Path), help="Also draw them, such as out.png (matplotlib)."),
)


@main.command("compare", cls=_Command, context_settings=_CONTEXT)
@click.argument("model")
@click.argument("batch")
@click.argument("budgets")
@_exploring
@click.option(
    "--strategies",
    default="",
    help="Some of milp, heuristic, checkmate, ogc, chen_greedy, chen_sqrt, griewank, torch_budget, store_all.  "
    "[default: all]",
)
@_files
@_speaking
def compare_command(**options: Any) -> None:
    """Step time of every strategy at every one of BUDGETS (GB, or % of plain PyTorch's peak), by one simulator.

    \b
    Example:
      monet-like compare "torchvision.models.resnet50()" 184 12,10,8 --profile roofline:a100 --plot fronts.png
    """
    from .compare import compare

    compare(**options)


@main.command("pareto", cls=_Command, context_settings=_CONTEXT)
@click.argument("model")
@click.argument("batch")
@_exploring
@click.option("--points", type=int, default=8, show_default=True, help="How many budgets, evenly spread.")
@click.option("--budgets", default="", help="These instead, such as 10,8,6 or 80%,60%.")
@_files
@_speaking
def pareto_command(**options: Any) -> None:
    """The time-memory front of a model, and what each further GB would buy.

    \b
    Example:
      monet-like pareto "torchvision.models.resnet50()" 184 --profile roofline:a100 --points 6 --csv front.csv
    """
    from .compare import front

    front(**options)


@main.command("smallest", cls=_Command, context_settings=_CONTEXT)
@click.argument("model")
@click.argument("batch")
@_exploring
@_speaking
def smallest_command(**options: Any) -> None:
    """The smallest budget that is feasible: the lowest peak found, and what is proven.

    \b
    Example:
      monet-like smallest "torchvision.models.resnet50()" 184 --profile roofline:a100
    """
    from .compare import smallest

    smallest(**options)


@main.command("largest-batch", cls=_Command, context_settings=_CONTEXT)
@click.argument("model")
@click.argument("budget")
@_exploring
@_speaking
def largest_batch_command(**options: Any) -> None:
    """The largest batch for which a schedule within BUDGET (GB) is found.

    \b
    Example:
      monet-like largest-batch "torchvision.models.resnet50()" 10 --profile roofline:a100
    """
    from .tune import largest_batch

    largest_batch(**options)


@main.command("tune", cls=_Command, context_settings=_CONTEXT)
@click.argument("model")
@click.argument("budget")
@_exploring
@click.option(
    "--batches", default="", help="Only these, such as 64,96,128.  [default: powers of two, then around the best]"
)
@click.option("--best", type=int, default=3, show_default=True, help="How many batches are planned in full, measured.")
@click.option("--steps", type=int, default=3, show_default=True, help="Timed steps of each; 0: nothing is measured.")
@click.option(
    "--profile-batch", type=int, help="Measure operators at this batch and half of it.  [default: as for solve]"
)
@_files
@click.option("--out", type=click.Path(path_type=Path), help="Schedule file to write.  [default: as for solve]")
@_speaking
def tune_command(**options: Any) -> None:
    """The batch and schedule with the highest throughput (samples/s) within BUDGET (GB); writes the schedule.

    Every batch tried is planned by the local search; the best few are planned in full and run, beside plain PyTorch
    at its best batch (with --profile roofline:DEVICE nothing is run).

    \b
    Examples:
      monet-like tune "torchvision.models.resnet50()" 2
      monet-like tune "torchvision.models.resnet50()" 40 --profile roofline:a100 --plot tune.png
    """
    from .tune import tune

    tune(**options)


@main.command("benchmark", cls=_Command, context_settings=_CONTEXT)
@click.option("--arch", required=True, help="A net of OGC's table, such as resnet101, densenet201 or darts.")
@_device("Where to run")
@click.option("--strategy", default="ogc", show_default=True, help="How to plan, such as milp; as for solve.")
@click.option(
    "--budget",
    help="Of the whole step in GB, such as 8, or % of plain PyTorch's peak.  [default: what the ogc strategy needs]",
)
@click.option("--batch", help="Such as 8.  [default: as in OGC's table]")
@click.option("--input-size", type=int, help="Side of the images, such as 64.  [default: as in OGC's table]")
@click.option(
    "--mode", default="inplace_conv_multiway_newnode", show_default=True, help="Such as normal; as for solve."
)
@click.option("--solver", default="HIGHS", show_default=True, help="Such as CBC; as for solve.")
@_profile
@_time_limit(60.0, "the plan")
@click.option("--steps", type=int, default=5, show_default=True, help="Timed steps of each kind, such as 20.")
@_dtype
@_speaking
def benchmark_command(**options: Any) -> None:
    """OGC's benchmark: plan a net, compare a step with plain PyTorch's, measure memory and time of both.

    \b
    Examples:
      python scripts/benchmark.py --arch resnet101 --device cuda:0
      python scripts/benchmark.py --arch darts --batch 4 --device cpu --strategy milp --budget 30%
    """
    from .benchmark import benchmark

    benchmark(**options)


@main.command("inspect", cls=_Command, context_settings=_CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@_speaking
def inspect_command(file: Path, terminal: Terminal) -> None:
    """Print what a schedule FILE was made for, what it promises and what it does.

    \b
    Example:
      monet-like inspect solutions/solution_resnet50_184_inplace_conv_multiway_newnode_10.00.pkl
    """
    from ..ir.schedule_file import ScheduleRecord
    from .inspect import show_record

    show_record(terminal, ScheduleRecord.load(file))


@main.command("report", cls=_Command, context_settings=_CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--model",
    help="MODEL that FILE was solved for, such as net.py:make_model.  [default: what FILE says, where that is a net of torchvision "
    "or of this package]",
)
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
    "--live", is_flag=True, help="Run a real step, and draw its memory beside what was predicted.  [default: off]"
)
@_device("Where to measure and to run")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="Profile file, or roofline:DEVICE, such as roofline:a100.  [default: the rates FILE was solved with, or solve's own profile]",
)
@_time_limit(30.0, "each plan of --front full")
@_speaking
def report_command(**options: Any) -> None:
    """Draw a schedule FILE: one page for a browser, with everything in it, that needs no network.

    Memory over the step beside plain PyTorch's; where it lies, layer by layer; what runs again and what that costs; what
    other strategies would do; every run in a table to search. Needs pip install 'monet_like[plots]'.

    \b
    Examples:
      monet-like report solutions/solution_resnet50_184_inplace_conv_multiway_newnode_10.00.pkl --png
      monet-like report mine.pkl --model net.py:make_model --front off --live
    """
    from .report import report

    report(**options)


@main.command("doctor", cls=_Command, context_settings=_CONTEXT)
@_json
def doctor_command(as_json: bool) -> None:
    """Say what this machine has: packages, solvers, compiled kernels, GPUs, memory, the cache.

    Exit status 1 if something required is missing or broken, else 0. What only planning needs is not required.

    \b
    Example:
      monet-like doctor --json
    """
    from .doctor import doctor

    sys.exit(doctor(as_json=as_json))


@main.group("zoo", cls=_Group, context_settings=_CONTEXT)
def zoo_group() -> None:
    """Schedules solved in advance, such as zoo:resnet50_184_10.00 (for ScheduleWrapper)."""


_names = click.argument("names", nargs=-1)
_base_url = click.option(
    "--base-url", help="Where files are, such as https://example.org/zoo.  [default: $MONET_LIKE_ZOO_URL]"
)


@zoo_group.command("list", cls=_Command, context_settings=_CONTEXT)
@click.option("--profile", default="", help="Only this one's, such as h100.  [default: all]")
@_json
def zoo_list_command(**options: Any) -> None:
    """The schedules there are, what they promise, and budgets that cannot be met.

    \b
    Example:
      monet-like zoo list --profile a100
    """
    from .zoo import list_files

    list_files(**options)


@zoo_group.command("show", cls=_Command, context_settings=_CONTEXT)
@click.argument("name")
@_base_url
@_json
def zoo_show_command(**options: Any) -> None:
    """All about the schedule NAME (NAME@PROFILE): the registry's entry and what is in the file.

    \b
    Example:
      monet-like zoo show resnet50_184_10.00@h100
    """
    from .zoo import show

    show(**options)


@zoo_group.command("download", cls=_Command, context_settings=_CONTEXT)
@_names
@click.option("--profile", default="", help="Without NAMES: only this one's, such as h100.  [default: all]")
@_base_url
def zoo_download_command(**options: Any) -> None:
    """Get schedules (NAME or NAME@PROFILE; none: all) into the cache, checked; what broke off is gone on with.

    \b
    Example:
      monet-like zoo download resnet50_184_10.00@h100 --base-url https://example.org/zoo
    """
    from .zoo import download_files

    download_files(**options)


@zoo_group.command("verify", cls=_Command, context_settings=_CONTEXT)
@_names
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


@zoo_group.command("build", cls=_Command, context_settings=_CONTEXT)
@_names
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


@zoo_group.command("add", cls=_Command, context_settings=_CONTEXT)
@click.argument("name")
@click.argument("machine")
@click.argument("solution_file", type=click.Path(path_type=Path))
@click.argument("profile_file", type=click.Path(path_type=Path))
def zoo_add_command(**options: Any) -> None:
    """Enter a schedule that was solved from a measured profile; both files must be in the zoo's folder.

    NAME is the model's in the zoo, such as resnet50; MACHINE names what was measured, such as h200-sxm.

    \b
    Example:
      monet-like zoo add resnet50 h200-sxm solutions/mine.pkl solutions/profiles/profile_resnet50_184_h200.json
    """
    from .zoo import add

    add(**options)


@zoo_group.command("table", cls=_Command, context_settings=_CONTEXT)
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
    from .zoo import table

    table(**options)
