"""A strategy of one's own: keep first what costs most to make again for the bytes it takes.

python examples/custom_strategy.py [--budgets 90%,80%,70%]
"""

from __future__ import annotations

from collections.abc import Mapping

import click

import monet_like
from monet_like.cli.group import main as command_line
from monet_like.ir.program import Cost, Program
from monet_like.ir.schedule import Schedule
from monet_like.plan.strategies.checkpointing import Keeping


@monet_like.register_strategy
def dearest_first(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Keep the results with the most seconds for each byte, as many as fit; run the rest again.

    Of plain PyTorch's schedule and those that keep the first n of that order, the fastest within the budget; where none
    is, the smallest.
    """
    keeping = Keeping(program, costs, extra_bytes)  # plain PyTorch's operators only, and what follows from keeping some
    seconds, sizes = keeping.forward.seconds, keeping.forward.bytes
    order = sorted(
        (place for place, size in enumerate(sizes) if size),
        key=lambda place: seconds[place] / sizes[place],
        reverse=True,
    )
    step = max(1, len(order) // 40)
    tried = [keeping.schedule(order[:count]) for count in range(0, len(order), step)]
    return keeping.whole(keeping.fastest([keeping.forward.schedule, *tried], budget_bytes))


@click.command()
@click.option("--model", default="torchvision.models.resnet18()", show_default=True)
@click.option("--batch", default="32", show_default=True)
@click.option("--budgets", default="90%,80%,70%", show_default=True, help="Of plain PyTorch's peak.")
def main(model: str, batch: str, budgets: str) -> None:
    """Compare it with others that use plain PyTorch's operators only, at A100 rates: `monet-like compare`."""
    names = "dearest_first,chen_greedy,chen_sqrt,store_all"
    rates = ["--profile", "roofline:a100"]
    command_line(["compare", model, batch, budgets, "normal", "HIGHS", *rates, "--strategies", names])


if __name__ == "__main__":
    main()
