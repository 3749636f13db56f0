"""How much memory a step takes from the device: with blocks that PyTorch's allocator chooses, and with tensors placed
ahead.

    python -m benchmarks.placement --models resnet50,vgg16 --shares 60,40 --write

Plans are made by the local search, at the rates of an A100's datasheet. What the allocator takes is worked out, not
measured: tensors above a MiB go, as in PyTorch's caching allocator, into the smallest free block that is large enough,
are cut off where more than a MiB is left, and where no block is large enough another one is taken.
``monet_like.reserve`` is one block of the step's peak to begin with. The lifetimes are the simulator's.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.certified import CPU, MODELS, problem_of
from monet_like.capture.captured import Captured
from monet_like.compiler.pipeline import plan_for, prepare
from monet_like.errors import InfeasibleError, SolverError
from monet_like.files import write_atomically
from monet_like.ir.program import Cost, Program
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import cost_of, running
from monet_like.profile.devices import DEVICES
from monet_like.replay.memory.placement import Lifetime, most_at_once, place

PAGE = Path(__file__).parent / "results" / "placement.md"
MIB, GB = 2**20, 10**9


def lifetimes(
    program: Program, schedule: Schedule, costs: Mapping[str, Cost], least_bytes: int = MIB
) -> list[Lifetime]:
    """Of all values and workspaces of a step but residents; a task begins at every third point in time.

    A value that takes over another's storage goes on where that one is.
    """
    steps = [(moment.task, frozenset(moment.alive)) for moment in running(program, schedule, costs)]
    since: dict[int, int] = {}
    found: list[Lifetime] = []

    def ended(value: int, at: int) -> None:
        found.append(Lifetime(program.values[value].bytes, since.pop(value), at))

    for step, (task, alive) in enumerate(steps):
        now = 3 * step
        for value in [v for v in since if v not in alive]:
            ended(value, now)
        since |= {value: now for value in alive if value not in since}  # the backward's incoming gradients
        if workspace := cost_of(task, costs).workspace_bytes:
            found.append(Lifetime(workspace, now + 1, now + 2))
        since |= {value: now + 1 for value in task.writes if value not in since}
        if task.overwrites is not None:
            storage = program.values[task.overwrites].bytes
            since[next(v for v in task.writes if program.values[v].bytes == storage)] = since.pop(task.overwrites)
    for value in tuple(since):
        ended(value, 3 * len(steps))
    return [one for one in found if one.bytes > least_bytes and one.end > one.begin]


def best_fit(tensors: Sequence[Lifetime], first_block: int = 0) -> int:
    """Bytes that PyTorch's caching allocator has taken in the end."""
    taken, free = first_block, [(first_block, 0, 0)] if first_block else []  # bytes, offset and block of what is free
    blocks, held = 1, dict[int, tuple[int, int, int]]()
    changes = sorted(
        [(one.end, 0, i) for i, one in enumerate(tensors)] + [(one.begin, 1, i) for i, one in enumerate(tensors)]
    )
    for _, begins, i in changes:
        if not begins:
            size, at, block = held.pop(i)
            for part in [f for f in free if f[2] == block and (f[1] + f[0] == at or at + size == f[1])]:
                free.remove(part)
                at, size = min(at, part[1]), size + part[0]
            bisect.insort(free, (size, at, block))
            continue
        wanted = tensors[i].bytes
        place_in = bisect.bisect_left(free, (wanted, -1, -1))
        if place_in == len(free):
            size = 20 * MIB if wanted < 10 * MIB else -(-wanted // (2 * MIB)) * 2 * MIB
            taken, blocks = taken + size, blocks + 1
            free.append((size, 0, blocks))
        size, at, block = free.pop(place_in)
        if size - wanted > MIB:
            bisect.insort(free, (size - wanted, at + wanted, block))
            size = wanted
        held[i] = (size, at, block)
    return taken


def row(name: str, captured: Captured, share: float, schedule: Schedule, costs: Mapping[str, Cost]) -> str:
    """A row of the table."""
    tensors = [in_grains(one) for one in lifetimes(captured.program, schedule, costs)]
    most, placed = most_at_once(tensors), place(tensors)
    over = [100 * (taken / most - 1) for taken in (best_fit(tensors), best_fit(tensors, most), placed.height)]
    return f"| {name}, {100 * share:.0f} % | {most / GB:.2f} GB | " + " | ".join(f"+{o:.1f} %" for o in over) + " |"


def in_grains(one: Lifetime) -> Lifetime:
    """As the allocator rounds its bytes."""
    return one._replace(bytes=-(-one.bytes // 512) * 512)


@click.command()
@click.option(
    "--models", default="resnet50,googlenet,mobilenet_v2,vgg16,unet", show_default=True, help=", ".join(MODELS)
)
@click.option("--shares", default="60,40", show_default=True, help="Percent of plain PyTorch's peak.")
@click.option("--write", is_flag=True, help=f"Also write the table to {PAGE.name}.")
def main(models: str, shares: str, write: bool) -> None:
    """Print the table."""
    lines = [
        "# What a step takes from the device", "",
        "By `python -m benchmarks.placement`, which says how: worked out from the lifetimes of tensors above a MiB, "
        "not measured.", "",
        "| model, share of plain PyTorch's peak | most at one time | PyTorch's allocator | "
        "after `reserve` | `place_memory` |", "|---|---|---|---|---|",
    ]  # fmt: skip
    print(*lines, sep="\n", flush=True)
    for name in models.split(","):
        request = replace(problem_of(name).request, strategy="heuristic")
        ready = prepare(request, CPU, profile=DEVICES["a100"])
        for share in (float(text) / 100 for text in shares.split(",")):
            try:
                found = plan_for(ready, request, int(share * ready.plain.peak_bytes))
            except (InfeasibleError, SolverError):
                continue
            lines.append(row(name, ready.captured, share, found.schedule, ready.costs))
            print(lines[-1], flush=True)
    if write:
        write_atomically(PAGE, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
