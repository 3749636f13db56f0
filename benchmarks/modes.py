"""What every mode buys: python -m benchmarks.modes [--models resnet50,googlenet] [--write]

The step of the best plan found for each of MONeT's twelve modes, against plain PyTorch's, at shares of plain PyTorch's
peak; with ``--ablation`` nothing is run again, so that what remains is the choice of operators. Costs are those of
a roofline (A100 rates). ``--write`` puts the tables into benchmarks/results/modes.md, in place of those of the same
name.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.certified import CPU, MODELS, problem_of
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.prepared import Prepared
from monet_like.errors import InfeasibleError, SolverError
from monet_like.files import write_atomically
from monet_like.plan.ilp.search import Search
from monet_like.profile.devices import DEVICES

PAGE = Path(__file__).parent / "results" / "modes.md"
#: MONeT's twelve modes.
MONET_MODES = tuple(
    prefix + rest
    for prefix, rest in itertools.product(
        ("", "inplace_"), ("normal", "conv_normal", "multiway", "newnode", "multiway_newnode", "conv_multiway_newnode")
    )
)


def cell(ready: Prepared, share: float, seconds: float) -> str:
    """The step against plain PyTorch's; "-" where no plan was found."""
    budget = int(share * ready.plain.peak_bytes)
    try:
        plan = Search(
            ready.captured.program, ready.costs, budget, "HIGHS", seconds, 0.01, extra_bytes=ready.extra_bytes
        ).run()
    except (InfeasibleError, SolverError):
        return "-"
    return f"{100 * (plan.report.seconds / ready.plain.seconds - 1):+.1f} %"


def with_table(page: str, lines: list[str]) -> str:
    """The page with a table in place of the one under the same heading, or behind all others."""
    first, *others = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    tables = {text.partition("\n")[0]: text.rstrip() for text in others}
    tables[lines[0]] = "\n".join(lines)
    return "\n\n".join([first.rstrip(), *tables.values()]) + "\n"


@click.command()
@click.option("--models", default="resnet50,googlenet,mobilenet_v2", show_default=True, help=", ".join(MODELS))
@click.option("--shares", default="80,60,50,40,33", show_default=True, help="Percent of plain PyTorch's peak.")
@click.option("--seconds", default=20.0, show_default=True, help="Wall seconds for each plan; gap 1 %.")
@click.option("--ablation", is_flag=True, help="Nothing is run again.")
@click.option("--write", is_flag=True, help=f"Also put the tables into {PAGE.name}.")
def main(models: str, shares: str, seconds: float, ablation: bool, write: bool) -> None:
    """Print a table for every model."""
    wanted = [float(text) / 100 for text in shares.split(",")]
    for name in models.split(","):
        lines = [f"## {name}, batch {MODELS[name][1]}{', nothing run again' if ablation else ''}", ""]
        lines += [
            f"| mode | {' | '.join(f'{100 * share:.0f} %' for share in wanted)} |",
            f"|---|{'---|' * len(wanted)}",
        ]
        print("", *lines, sep="\n", flush=True)
        for mode in MONET_MODES:
            request = replace(problem_of(name, mode).request, ablation=ablation)
            ready = prepare(request, CPU, profile=DEVICES["a100"])
            lines.append(f"| {mode} | {' | '.join(cell(ready, share, seconds) for share in wanted)} |")
            print(lines[-1], flush=True)
        if write:
            write_atomically(PAGE, with_table(PAGE.read_text(), lines).encode())


if __name__ == "__main__":
    main()
