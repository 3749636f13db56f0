"""Our plans against MONeT's on MONeT's own prices: python -m benchmarks.monet_p100 --data FOLDER

FOLDER holds the five full-mode tables of the P100 benchmark. Every published budget is planned and the plan judged
by an independent reading of MONeT's rules (monet_rules.py), which first has to reproduce the published schedules'
milliseconds and peaks. Prints a Markdown table; a row where MONeT's plan is faster is marked.

The planner counts what exists; MONeT's rules count, while a task runs again, also what the full forward would still
read. A plan that breaks such a row is not accepted; its bound, where one is printed, is of the planner's rules.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.monet_rules import Table, Verdict, judge, monet_stages, published_stages, read_table
from monet_like.errors import MonetError, SolverError
from monet_like.ir.defaults import MODE
from monet_like.ir.schedule import Schedule
from monet_like.plan.ilp.search import Search
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import find_start
from monet_like.plan.result import Plan

MODELS = ("resnet50_184", "googlenet_320", "mobilenet_v2_272", "unet_11", "vgg16_176")
#: Seconds for another turn.
LEAST_SECONDS = 5.0
#: Short local searches before the first search, at most.
MOST_TRIALS = 8


def check_judge(table: Table) -> int:
    """How many published schedules the judge reproduces.

    Raises:
        MonetError: it does not reproduce one.
    """
    checked = 0
    for solution in table.data["solutions"]:
        if "schedule" not in solution:
            continue
        verdict = judge(table.data, published_stages(solution["schedule"]))
        known = solution["replay"]
        if verdict.violation or verdict.peak_bytes != known["peak_bytes"] or abs(verdict.ms - known["ms"]) > 1e-6:
            raise MonetError(f"the judge says {verdict} of a published schedule, its file says {known}")
        checked += 1
    return checked


def plan_by_rules(
    table: Table, budget_bytes: int, solver: str, seconds: float, gap: float
) -> tuple[Plan, Verdict, bool]:
    """The fastest plan found within the wall seconds that MONeT's rules accept, and whether its bound is one for them.

    Where they refuse what a short local search finds, and where they have refused every plan of a whole search, the
    runs whose rows are broken are priced with the missing bytes.
    """
    ends = time.monotonic() + seconds
    costs = dict(table.costs)
    refused: list[Verdict] = []

    def allowed(schedule: Schedule) -> bool:
        verdict = judge(table.data, monet_stages(table, schedule))
        if verdict.violation or verdict.peak_bytes > budget_bytes:
            refused.append(verdict)
            return False
        return True

    def reprice() -> None:
        for p, runs in enumerate(table.runs):
            over = max((refused[-1].rows.get(j, 0) - budget_bytes for j, _ in runs), default=0)
            key = table.program.tasks[p].cost
            if over > 0 and table.program.tasks[p].runs != "first":
                costs[key] = replace(costs[key], workspace_bytes=costs[key].workspace_bytes + over)
        refused.clear()

    for seed in range(MOST_TRIALS):
        trial = find_start(Instance(table.program, costs), budget_bytes, seed=seed, evaluations=20_000)
        if trial is None or allowed(trial):
            break
        reprice()
    while True:
        left = ends - time.monotonic()
        try:
            plan = Search(table.program, costs, budget_bytes, solver, left, gap, allowed=allowed).run()
            return plan, judge(table.data, monet_stages(table, plan.schedule)), costs == table.costs
        except SolverError:
            if not refused or ends - time.monotonic() < LEAST_SECONDS:
                raise
        reprice()


def row(table: Table, solution: dict[str, Any], solver: str, seconds: float, gap: float) -> tuple[str, bool]:
    """A line of the table, and whether our plan is at least as fast."""
    started = time.monotonic()
    theirs = solution["monet_predicted_ms"]
    head = f"| {table.data['model']} ({table.data['batch']}) | {solution['budget_gb']:g} |"
    tail = f"{theirs:.2f} | {solution['hours']:.2f} |"
    try:
        plan, verdict, exact = plan_by_rules(table, solution["budget_bytes"], solver, seconds, gap)
    except MonetError as error:
        return f"{head} - | | | {time.monotonic() - started:.0f} | {tail} {error} |", False
    bound = f"{1000 * plan.bound_seconds:.2f} | {100 * plan.gap:.2f} % {plan.bound_kind}" if exact else "| none"
    won = verdict.ms <= theirs + 1e-9
    mark = f"{100 * (verdict.ms / theirs - 1):+.2f} %" + ("" if won else " **slower**")
    return f"{head} {verdict.ms:.2f} | {bound} | {time.monotonic() - started:.0f} | {tail} {mark} |", won


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Folder of the tables.")
@click.option("--solver", default="HIGHS", show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Wall seconds for each budget.")
@click.option("--gap", default=1e-6, show_default=True, help="Stop when proven this close.")
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--budgets", default="", help="Only these, in GB, such as 10,8.  [default: all]")
def main(data: Path, solver: str, seconds: float, gap: float, models: str, budgets: str) -> None:
    """Print the table."""
    only = {float(text) for text in budgets.split(",") if text}
    click.echo(f"{solver}, {seconds:g} s a row. Bounds are of the program named beside the gap.\n")
    click.echo("| model (batch) | GB | our ms | bound | gap, of | s | MONeT's ms | its hours | ours against MONeT's |")
    click.echo("|---|---|---|---|---|---|---|---|---|")
    wins = rows = 0
    for name in models.split(","):
        table = read_table(data / f"{name}.json")
        check_judge(table)
        for solution in table.data["solutions"]:
            if solution["mode"] != MODE or solution.get("monet_predicted_ms") is None:
                continue
            if only and solution["budget_gb"] not in only:
                continue
            line, won = row(table, solution, solver, seconds, gap)
            click.echo(line)
            rows, wins = rows + 1, wins + won
    click.echo(f"\nAt least as fast as MONeT's plan in {wins} of {rows} rows.")


if __name__ == "__main__":
    main()
