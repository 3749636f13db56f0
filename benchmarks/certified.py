"""How close to the best of all schedules, how soon: python -m benchmarks.certified [--solver CBC --seconds 300]

Seven models at shares of plain PyTorch's peak, and with ``--deep`` two very deep ones at shares of the activations.
All variants are on; costs are those of the committed roofline profiles in benchmarks/profiles (A100 rates).
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import click
import torch

from benchmarks import PROFILES
from monet_like.cli.problem import Problem, read_problem
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.prepared import Prepared
from monet_like.errors import InfeasibleError, SolverError
from monet_like.ir.defaults import MODE
from monet_like.ir.profile_file import Profile
from monet_like.ir.units import format_seconds
from monet_like.plan.ilp.search import Search
from monet_like.profile.devices import DEVICES

CPU = torch.device("cpu")
MODELS = {
    "resnet50": ("torchvision.models.resnet50()", 184),
    "googlenet": ("torchvision.models.googlenet(init_weights=False)", 320),
    "mobilenet_v2": ("torchvision.models.mobilenet_v2()", 272),
    "vgg16": ("torchvision.models.vgg16()", 176),
    "unet": ("unet", 11),
    "vit_b_16": ("torchvision.models.vit_b_16()", 64),
    "densenet121": ("torchvision.models.densenet121()", 128),
}
DEEP = {
    "decoder": (f"{Path(__file__).parent}/models/decoder.py:decoder", 8),
    "resnet1001": (f"{Path(__file__).parent}/models/resnet1001.py:resnet1001", 64),
}


def problem_of(name: str, mode: str = MODE) -> Problem:
    """A model of `MODELS` or `DEEP` on the CPU."""
    expression, batch = {**MODELS, **DEEP}[name]
    return read_problem(
        model=expression, batch=str(batch), budget="1", mode=mode, solver="HIGHS", device="cpu", dtype="float32",
        input_shape=None,
    )  # fmt: skip


@functools.cache
def prepared(name: str) -> tuple[Problem, Prepared]:
    """Capture, with the committed costs; they are written where there are none, or some are missing."""
    problem = problem_of(name)
    path = PROFILES / f"{name}_{problem.request.batch}_roofline_a100.json"
    known = Profile.load(path) if path.exists() else None
    ready = prepare(problem.request, CPU, profile=known or DEVICES["a100"])
    if ready.profile != known:
        ready.profile.save(path)
    return problem, ready


def line(name: str, share: float, of_activations: bool, solver: str, seconds: float, gap: float) -> tuple[str, bool]:
    """A row of the table, and whether the plan is as close as asked for."""
    problem, ready = prepared(name)
    program, plain = ready.captured.program, ready.plain
    resident = program.resident_bytes if of_activations else 0
    budget = int(resident + share * (plain.peak_bytes - resident))
    head = f"| {name} ({problem.request.batch}) | {100 * share:.0f} % | {budget / 2**30:.2f} |"
    began = time.monotonic()
    try:
        plan = Search(program, ready.costs, budget, solver, seconds, gap, extra_bytes=ready.extra_bytes).run()
    except (InfeasibleError, SolverError) as error:
        proven = isinstance(error, InfeasibleError) and error.proven
        words = "no schedule fits, proven" if proven else "none found"
        return f"{head} - | | {words} | {time.monotonic() - began:.0f} | |", proven
    ratio = 100 * (plan.report.seconds / plain.seconds - 1)
    step = f"{format_seconds(plan.report.seconds)} | {ratio:+.1f} % | {100 * plan.gap:.2f} % {plan.bound_kind}"
    good = plan.gap <= gap and plan.bound_kind == "unrestricted"
    return f"{head} {step} | {time.monotonic() - began:.0f} | {plan.found_by} |", good


@click.command()
@click.option("--solver", default="HIGHS", show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Wall seconds for each plan.")
@click.option("--gap", type=float, help="Stop when proven this close.  [default: 0.01, deep models 0.05]")
@click.option("--models", default="", help="Some of them, such as resnet50,unet.  [default: all]")
@click.option("--shares", default="", help="Such as 80,50.  [default: 80,60,50,40,33; deep models 50,25]")
@click.option("--deep", is_flag=True, help="The deep models.")
def main(solver: str, seconds: float, gap: float | None, models: str, shares: str, deep: bool) -> None:
    """Print the table."""
    names = models.split(",") if models else list(DEEP if deep else MODELS)
    wanted = [float(text) / 100 for text in (shares or ("50,25" if deep else "80,60,50,40,33")).split(",")]
    close = gap if gap is not None else 0.05 if deep else 0.01
    of = "the activations" if deep else "plain PyTorch's peak"
    click.echo(f"{solver}, {seconds:g} s each, gap {100 * close:g} %; shares are of {of}.\n")
    click.echo("| model (batch) | share | GB | step | against plain | gap, of | s | found by |")
    click.echo("|---|---|---|---|---|---|---|---|")
    rows = [(name, share) for name in names for share in wanted]
    good = 0
    for name, share in rows:
        text, closed = line(name, share, deep, solver, seconds, close)
        click.echo(text)
        good += closed
    click.echo(
        f"\nWithin {100 * close:g} % of the best of all schedules, or proven to be out of reach: {good} of {len(rows)}."
    )


if __name__ == "__main__":
    main()
