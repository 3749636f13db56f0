"""CBC by PuLP, CBC by cylp, and HiGHS: python -m benchmarks.cbc [--seconds 20] [--models resnet50,unet]

Each solves the same integer programs, one after the other: those of the seven models of benchmarks/certified.py at
shares of plain PyTorch's peak, restricted as the planner restricts them, without the rows that it adds later. CBC by
PuLP and HiGHS start from the local search's schedule. cylp's CBC takes no start; `pip install cylp` for it.
"""

from __future__ import annotations

import time
from collections import Counter
from importlib.util import find_spec
from math import inf

import click

from benchmarks.cbc_cylp import solve_with_cylp
from benchmarks.certified import MODELS, prepared
from monet_like.errors import InfeasibleError
from monet_like.plan.ilp.decode import encode
from monet_like.plan.ilp.row_generation import RowGeneration
from monet_like.plan.ilp.search import Search
from monet_like.solvers.interface import Solution, solve

SOLVERS = ("CBC by PuLP", "CBC by cylp", "HiGHS")
#: Relative differences below this one do not count.
EQUAL = 1e-5


def compare(
    search: Search, seconds: float, gap: float, solvers: tuple[str, ...]
) -> tuple[int, float, dict[str, Solution]]:
    """The number of columns, seconds of the start (inf: none), and what each solver makes of one budget's program."""
    search._anneal(1)
    formulation = search._build(search._choose_options())
    RowGeneration(formulation, search.incumbent, lambda: seconds, 1)._add_likely_rows()
    start = encode(formulation, search.best) if search.best is not None else None
    problem = formulation.matrix()
    results = {}
    for solver in solvers:
        if solver == "CBC by cylp":
            results[solver] = solve_with_cylp(problem, seconds, gap)
        else:
            name = "CBC" if solver == "CBC by PuLP" else "HIGHS"
            results[solver] = solve(problem, name, time_limit_seconds=seconds, gap=gap, start=start)
    known = inf if start is None else float(problem.cost @ start + problem.offset) * problem.seconds_per_unit
    return problem.columns, known, results


def cell(known: float, found: Solution) -> str:
    """What a solver adds to the start, the gap to its own bound, and its wall seconds."""
    if found.status in ("infeasible", "error"):
        return f"{found.status}; {found.wall_seconds:.0f} s"
    objective = min(known, found.objective_seconds)
    gain = f"{100 * (1 - objective / known):.2f} %" if known < inf else "found" if objective < inf else "none"
    gap = f"{100 * (1 - found.bound_seconds / objective):.2f} %" if 0 < found.bound_seconds <= objective < inf else "-"
    return f"{gain}; {gap}; {found.wall_seconds:.0f} s"


def count(counts: dict[str, Counter[str]], known: float, results: dict[str, Solution]) -> None:
    """Count the cases in which a solver has a faster step, or a higher bound, than each of the others."""
    for solver, found in results.items():
        for other, its in results.items():
            step, its_step = min(known, found.objective_seconds), min(known, its.objective_seconds)
            counts[solver][f"faster step than {other}"] += step < its_step * (1 - EQUAL)
            counts[solver][f"higher bound than {other}"] += found.bound_seconds * (1 - EQUAL) > its.bound_seconds
        counts[solver]["within the gap"] += found.status in ("optimal", "infeasible")


@click.command()
@click.option("--seconds", default=20.0, show_default=True, help="Wall seconds for each solver and program.")
@click.option("--gap", default=0.01, show_default=True)
@click.option("--models", default="", help="Some of them, such as resnet50,unet.  [default: all]")
@click.option("--shares", default="80,60,50,40,33", show_default=True, help="Of plain PyTorch's peak, in per cent.")
def main(seconds: float, gap: float, models: str, shares: str) -> None:
    """Print a row for each program, and what each solver is best at."""
    solvers = tuple(solver for solver in SOLVERS if solver != "CBC by cylp" or find_spec("cylp") is not None)
    click.echo(f"{seconds:g} s each, gap {100 * gap:g} %. Cells: gain on the start; gap from its own bound; seconds.\n")
    click.echo(f"| model (batch) | share | columns | {' | '.join(solvers)} |")
    click.echo(f"|---|---|---|{'---|' * len(solvers)}")
    counts: dict[str, Counter[str]] = {solver: Counter() for solver in solvers}
    began, rows = time.monotonic(), 0
    for name in models.split(",") if models else MODELS:
        problem, ready = prepared(name)
        for share in map(float, shares.split(",")):
            budget = int(share / 100 * ready.plain.peak_bytes)
            head = f"| {name} ({problem.request.batch}) | {share:g} %"
            search = Search(
                ready.captured.program, ready.costs, budget, "HIGHS", seconds, gap, extra_bytes=ready.extra_bytes
            )
            try:
                search._check_lower_bound()
            except InfeasibleError:
                click.echo(f"{head} | no schedule fits |{' |' * len(solvers)}")
                continue
            columns, known, results = compare(search, seconds, gap, solvers)
            count(counts, known, results)
            rows += 1
            cells = " | ".join(cell(known, found) for found in results.values())
            click.echo(f"{head} | {columns} | {cells} |")
    click.echo(f"\nOf {rows} programs, in {(time.monotonic() - began) / 60:.0f} minutes:\n")
    click.echo(f"| | {' | '.join(solvers)} |\n|---|{'---|' * len(solvers)}")
    kinds = (
        "within the gap",
        *(f"{kind} than {solver}" for kind in ("faster step", "higher bound") for solver in solvers),
    )
    for kind in kinds:
        numbers = (str(counts[solver][kind]) if not kind.endswith(solver) else "" for solver in solvers)
        click.echo(f"| {kind} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
