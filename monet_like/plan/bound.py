"""An honest bound for every schedule of a program, small enough for any program: the backward in a few blocks.

The stages are gathered into blocks of neighbouring ones. Within a block nothing has an order: a task that runs in it
runs once, however often it really did; what is made anywhere in a block can be read anywhere in it; and memory is
counted only where a block begins, and in the slots that are blocks by themselves. Every schedule, its useless runs
removed, is a solution of this program, at no more seconds: so its optimum, or any bound of it, is a bound for all
schedules, those with many reruns included.

    x[p]    task p runs in the forward                 e[p,b]  task p runs again in block b
    w[k,t]  slot t takes its way k                     K[v,b]  value v is carried into block b

     (1) min  sum seconds(p) x[p] + sum seconds(p) e[p,b] + sum seconds(k) w[k,t]
     (2) sum_{p in M(v)} x[p] = 1 for outputs v;   x[p] <= sum_{q in M(u)} x[q] for every u that p reads
     (3) sum_k w[k,t] = 1
     (4) K[v,0] <= sum_{p in M(v)} x[p];           K[v,b+1] <= K[v,b] + sum_{p in M(v)} e[p,b]
     (5) e[p,b] <= K[u,b] + sum_{q in M(u)} e[q,b] for every u that p reads
         sum_{k reads u} w[k,t] <= K[u,b] + sum_{q in M(u)} e[q,b] for t in block b
     (6) resident + before(t) + sum_v b(v) K[v,b] <= B, t being the first slot of block b
     (7) resident + during(t) + sum_v b(v) Y[v] + sum_k extra(k) w[k,t] <= B where slot t is block b by itself,
         Y[v] >= K[v,b+1] and Y[v] >= sum_{k reads v} w[k,t]: row (8) of `Formulation`

With one block it is the question what the forward keeps, in some thousand columns. Measured on MONeT's P100 costs: in
two seconds it proves 964.5 ms for ResNet-50 at 5 GB and 921.2 ms at 8 GB, where MONeT's own program, of some
hundred times the size, proves 943.8 and 916.0 ms in 24 hours. Where another step than the start of the backward
needs the most memory (U-Net), it says little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..program import Cost, Program
from ..simulate import cost_of
from .matrix import ONE, ZERO, Builder, Expr, MatrixProgram, total
from .needs import dominated_tasks, find_backward_bytes, find_needs, net_workspace, useful_ways

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The budget of a program without one.
NO_BUDGET = 2**62


@dataclass(frozen=True)
class BlockProgram:
    """The program, and how to read a point of it.

    Attributes:
        matrix: the program.
        carried: for every block, K of the values that may be carried into it.
        ways: for every slot, w of its useful ways.
        kept_bytes: for every column, the bytes that the forward keeps by it.
    """

    matrix: MatrixProgram
    carried: tuple[Mapping[int, Expr], ...]
    ways: tuple[Mapping[int, Expr], ...]
    kept_bytes: NDArray[Any]

    def priced(self, seconds_per_byte: float) -> MatrixProgram:
        """The program with a price on every byte that the forward keeps."""
        price = seconds_per_byte / self.matrix.seconds_per_unit
        return replace(self.matrix, cost=self.matrix.cost + price * self.kept_bytes)

    def kept(self, x: NDArray[Any]) -> tuple[int, ...]:
        """The values that the forward keeps."""
        return tuple(v for v, held in self.carried[0].items() if held.value(x) > 0.5) if self.carried else ()

    def chosen(self, x: NDArray[Any]) -> tuple[int, ...]:
        """The way of every slot."""
        return tuple(max(ways, key=lambda k, w=ways: w[k].value(x)) for ways in self.ways)  # type: ignore[misc]


def block_program(
    program: Program,
    costs: Mapping[str, Cost],
    budget_bytes: int = NO_BUDGET,
    alone: Iterable[int] = (),
    extra_bytes: int = 0,
    required: Iterable[int] = (),
) -> BlockProgram:
    """The program above.

    Args:
        alone: slots that are blocks by themselves; what lies between them are the other blocks.
        required: values that the forward must make besides the outputs.
    """
    import numpy as np

    needs, backward = find_needs(program), find_backward_bytes(program)
    useless = dominated_tasks(program, costs, needs.groups)
    builder, outputs = Builder(), set(program.outputs)
    sizes = [value.bytes for value in program.values]
    all_seconds = [cost_of(task, costs).seconds for group in (program.tasks, *program.slots) for task in group]
    unit = (sum(all_seconds) or 1.0) / 1000
    count = len(program.slots)
    own = {slot + 1 for slot in alone if slot + 1 in needs.stages}
    starts = sorted({1, *own, *(t + 1 for t in own if t < count)}) if count else []
    ends = [*starts[1:], count + 1] if count else []

    def seconds(p: int) -> float:
        return cost_of(program.tasks[p], costs).seconds / unit

    reads = [program.forward_reads(task) for task in program.tasks]
    makers = [[p for p in tasks if p not in useless] for tasks in program.producers]
    x = {
        p: builder.column(seconds(p))
        for p, task in enumerate(program.tasks)
        if task.runs != "again" and p not in useless
    }
    e: list[dict[int, Expr]] = []
    for start in starts:
        mine = {}
        for p, task in enumerate(program.tasks):
            last = max((needs.last[v] for v in task.writes), default=0)
            if needs.rerun[p] and p not in useless and last >= start:
                mine[p] = builder.column(seconds(p))
        e.append(mine)
    made_first = {v: total(x[p] for p in makers[v] if p in x) for v in range(len(sizes))}
    made = [{v: total(mine[p] for p in makers[v] if p in mine) for v in range(len(sizes))} for mine in e]
    for v in {*outputs, *required}:
        builder.equal(made_first[v], ONE)
    for p in x:
        for u in reads[p]:
            builder.at_most(x[p], made_first[u])
    forward = [v for v, value in enumerate(program.values) if value.kind == "forward" and v not in outputs]
    carried: list[dict[int, Expr]] = []
    for b, start in enumerate(starts):
        held: dict[int, Expr] = {}
        for v in forward:
            source = made_first[v] if b == 0 else carried[-1].get(v, ZERO) + made[b - 1][v]
            if needs.last[v] >= start and not source.is_zero:
                held[v] = builder.column()
                builder.at_most(held[v], source)
        carried.append(held)
        parts = [held[v] * sizes[v] for v in held if sizes[v]]
        fixed = program.resident_bytes + extra_bytes + sum(sizes[v] for v in outputs) + backward.before[start - 1]
        builder.fits([*parts, Expr(float(fixed))], budget_bytes)
        for p, run in e[b].items():
            for u in set(reads[p]) - outputs:
                builder.at_most(run, held.get(u, ZERO) + made[b][u])
    ways: list[Mapping[int, Expr]] = []
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for t in range(start, end):
            chosen, extra, reading = _slot(
                program, costs, builder, t - 1, backward.possible[t - 1], unit, carried[b], made[b], outputs
            )
            ways.append(chosen)
            if t not in own:
                continue
            after = carried[b + 1] if b + 1 < len(starts) else {}
            fixed = program.resident_bytes + extra_bytes + sum(sizes[v] for v in outputs) + backward.during[t - 1]
            parts = [extra, Expr(float(fixed))]
            for v in {*after, *reading}:
                parts.append(builder.highest([after.get(v, ZERO), reading.get(v, ZERO)]) * sizes[v])
            builder.fits(parts, budget_bytes)
    kept_bytes = np.zeros(len(builder.cost))
    for v, kept in carried[0].items() if carried else ():
        kept_bytes[kept.terms[0][0]] = sizes[v]
    return BlockProgram(builder.finish(unit), tuple(carried), tuple(ways), kept_bytes)


def _slot(
    program: Program,
    costs: Mapping[str, Cost],
    builder: Builder,
    slot: int,
    possible: tuple[int, ...],
    unit: float,
    held: Mapping[int, Expr],
    made: Mapping[int, Expr],
    outputs: set[int],
) -> tuple[dict[int, Expr], Expr, dict[int, Expr]]:
    """Columns w and rows (3) and (5) of one slot; w, the bytes that its ways take, and which values they read."""
    ways = {k: program.slots[slot][k] for k in useful_ways(program, costs, slot, possible)}
    price = {k: cost_of(way, costs).seconds / unit for k, way in ways.items()}
    if len(ways) == 1:
        builder.offset += sum(price.values())
        chosen = dict.fromkeys(ways, ONE)
    else:
        chosen = {k: builder.column(price[k]) for k in ways}
        builder.equal(total(chosen.values()), ONE)
    reading: dict[int, Expr] = {}
    for u in {u for way in ways.values() for u in program.forward_reads(way)} - outputs:
        readers = [chosen[k] for k, way in ways.items() if u in way.reads]
        reading[u] = ONE if len(readers) == len(ways) else total(readers)
        builder.at_most(reading[u], held.get(u, ZERO) + made[u])
    extra = total(chosen[k] * net_workspace(program, costs, way) for k, way in ways.items())
    return chosen, extra, reading
