"""A lower bound of what any schedule of a block costs at given prices of its bytes.

A block of a model gives three amounts of bytes to the moments of the whole step (`monet_like.ir.step.Point`): what it
carries from its forward to its backward, the peak of its forward and the peak of its backward. With prices ``c``, ``f``
and ``r`` in seconds for a byte of each, no schedule has fewer seconds and priced bytes than the optimum of

    min  seconds + c sum_v b(v) K[v,0] + f F + r R

over the rows (2) to (5), (9) and (10) of `ilp.relaxation`, where the backward has no order within a block of slots. Its
memory rows bound the peaks F and R, which are columns here, instead of the budget::

    (a) F >= outputs + sum_v b(v) K[v,0]                                     when the forward ends        `_carry`
    (b) R >= sum_v b(v) K[v,0] - shrinkage                                   when the backward begins     row (6)
    (c) R >= during(t) + sum_v b(v) sum_{k reads v} w[k,t] + sum_k extra(k) w[k,t]      at every slot     `_slot`
    (d) rows (7) and (8): of the forward for F, of the backward for R        at slots that are blocks

The shrinkage is the most by which a run of the backward lowers memory, because it takes over more storage than it
writes: memory is counted during runs, not between them. It is mostly 0. R has it for a lower bound below 0.

All bytes are above what `menus.point_of` counts as there already: resident values, and in the backward the incoming
gradients and the results that are kept. A schedule that no other one of the block beats, with no more of all four
amounts, is a point of this program with its own amounts. So a row that limits one of them leaves out none of these
schedules within the limit (`Limit`), and other schedules are never needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ...ir.program import REFUSED, Cost, Program
from ...ir.schedule import Schedule
from ...ir.step import Point
from ...solvers.dialects import MEANING
from ...solvers.matrix import Expr, MatrixProgram, total
from ..instance import Instance
from ..subprogram import Subprogram, without_refused
from .relaxation import BIG_SHARE, BlockProgram

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: In programs of at most this many slots each slot is a block by itself, and all runs have rows.
MOST_ALONE = 12
#: Wall seconds and relative gap for one program.
PROGRAM_SECONDS, PROGRAM_GAP = 5.0, 1e-4

Amount = Literal["carried", "forward", "backward"]
#: A worker's answer to a program.
Solved = dict[str, Any] | None


class Amounts(NamedTuple):
    """Seconds and bytes of a block, those of a schedule or of a solution of the relaxation."""

    seconds: float
    carried: float
    forward: float
    backward: float


def amounts_of(point: Point) -> Amounts:
    """Those of a schedule."""
    return Amounts(point.seconds, point.carried_bytes, point.forward_peak_bytes, point.backward_peak_bytes)


class Answer(NamedTuple):
    """What a piece costs at least at given prices.

    Attributes:
        bound: seconds and priced bytes; inf: nothing is within the limits.
        amounts: of the solution.
        schedule: that the solution stands for; it may break a rule or a limit.
    """

    bound: float
    amounts: Amounts | None = None
    schedule: Schedule | None = None


class Prices(NamedTuple):
    """Seconds per byte carried, of the forward's peak and of the backward's peak; none is negative."""

    carried: float = 0.0
    forward: float = 0.0
    backward: float = 0.0

    def of(self, amounts: Amounts) -> float:
        """Seconds and priced bytes."""
        bytes_ = (amounts.carried, amounts.forward, amounts.backward)
        return amounts.seconds + sum(price * size for price, size in zip(self, bytes_, strict=True))


class Limit(NamedTuple):
    """Limits of one amount, in bytes."""

    amount: Amount
    least: float = 0.0
    most: float = inf

    def admits(self, amounts: Amounts) -> Amounts | None:
        """The amounts within the limits; None if they are not. A peak may be taken for higher than it is."""
        size: float = getattr(amounts, self.amount)
        if size > self.most or (size < self.least and self.amount == "carried"):
            return None
        return amounts if size >= self.least else amounts._replace(**{self.amount: self.least})


class Relaxation(Protocol):
    """Bounds what a piece costs at given prices, by solving small programs."""

    @property
    def shrinkage_bytes(self) -> int:
        """By how much a run of its backward may lower memory; see above."""

    def programs(self, prices: Prices, limits: Sequence[Limit]) -> list[MatrixProgram]:
        """The programs that are to be solved for these prices, for schedules within the limits."""

    def read(self, prices: Prices, programs: Sequence[MatrixProgram], answers: Sequence[Solved]) -> Answer | None:
        """What the answers to `programs` say, each as `Pool.solve` gives it; None: one that is needed is missing."""


class BlockRelaxation(BlockProgram):
    """The relaxation of one block's program, with the columns F and R instead of a budget; a `Relaxation`.

    Attributes:
        forward_peak, backward_peak: F, and R plus ``shrinkage_bytes``, as shares of ``room_bytes``.
        room_bytes: no peak of the block is larger.
        shrinkage_bytes: see above.
        part: the tasks and ways that the device does not refuse; None: all.
    """

    def __init__(self, instance: Instance, alone: Iterable[int], part: Subprogram | None) -> None:
        super().__init__(instance, alone=alone)
        program, self.part = instance.program, part
        workspaces = (instance.cost_of(task).workspace_bytes for task in program.every_task())
        again = (task for task in program.tasks if task.runs != "first")
        runs = [*again, *(way for slot in program.slots for way in slot)]
        self.shrinkage_bytes = -min([0, *map(instance.running_bytes, runs)])
        self.room_bytes = 1 + max(workspaces, default=0) + 2 * sum(self.sizes) + self.shrinkage_bytes
        self.big_bytes = BIG_SHARE * sum(self.sizes)
        self.forward_peak = self.builder.column(integral=False)
        self.backward_peak = self.builder.column(integral=False)
        #: What `point_of` takes off the memory of the backward. Results count once in the rows. Those that the backward
        #: reads may be taken off once more: `point_of` counts them as there, although they may be freed before the
        #: peak.
        self.backward_there = self.resident + self.output_bytes + sum(self.sizes[v] for v in program.tangents)
        self.backward_there += sum(self.sizes[v] for v in self.outputs if self._read_later(v))

    def programs(self, prices: Prices, limits: Sequence[Limit] = ()) -> list[MatrixProgram]:
        """As of `Relaxation`: one, whose optimum is the bound at these prices, for schedules within the limits."""
        matrix = self.priced(prices.carried)
        cost = matrix.cost.copy()
        for peak, price in ((self.forward_peak, prices.forward), (self.backward_peak, prices.backward)):
            cost[peak.terms[0][0]] = price * self.room_bytes / matrix.seconds_per_unit
        offset = matrix.offset - prices.backward * self.shrinkage_bytes / matrix.seconds_per_unit
        return [self._limited(replace(matrix, cost=cost, offset=offset), limits)]

    def read(self, prices: Prices, programs: Sequence[MatrixProgram], answers: Sequence[Solved]) -> Answer | None:
        """As of `Relaxation`."""
        (matrix,), (answer,) = programs, answers
        if matrix.contradiction or (answer is not None and MEANING.get(answer["status"]) == "infeasible"):
            return Answer(inf)
        if answer is None or answer["x"] is None or answer["bound"] is None:
            return None
        x = answer["x"]
        return Answer((answer["bound"] + matrix.offset) * matrix.seconds_per_unit, self.amounts(x), self.schedule(x))

    def amounts(self, x: NDArray[Any]) -> Amounts:
        """What a point of the program stands for."""
        matrix = self.matrix
        seconds = (float(matrix.cost @ x) + matrix.offset) * matrix.seconds_per_unit
        return Amounts(seconds, *(self._expressions[name].value(x) * self.room_bytes for name in self._expressions))

    def schedule(self, x: NDArray[Any]) -> Schedule:
        """A schedule of the block with the runs of a point, each just before the slot that needs it; it may break a
        rule.
        """
        schedule = super().schedule(x)
        return schedule if self.part is None else self.part.whole(schedule)

    @cached_property
    def _expressions(self) -> dict[Amount, Expr]:
        """Every amount as a share of ``room_bytes``."""
        carried = total(kept * (self.sizes[v] / self.room_bytes) for v, kept in self.carried().items())
        backward = self.backward_peak + Expr(-self.shrinkage_bytes / self.room_bytes)
        return {"carried": carried, "forward": self.forward_peak, "backward": backward}

    def _limited(self, matrix: MatrixProgram, limits: Sequence[Limit]) -> MatrixProgram:
        """The program with one more row for each limit."""
        import numpy as np
        import scipy.sparse as sp

        if not limits:
            return matrix
        rows = sp.lil_matrix((len(limits), matrix.columns))
        lower: list[float] = []
        upper: list[float] = []
        for row, limit in enumerate(limits):
            expression = self._expressions[limit.amount]
            for column, coefficient in expression.terms:
                rows[row, column] = coefficient
            lower.append(limit.least / self.room_bytes - expression.const)
            upper.append(limit.most / self.room_bytes - expression.const)
        return replace(
            matrix,
            matrix=sp.vstack([matrix.matrix, rows.tocsr()]).tocsr(),
            lower=np.append(matrix.lower, lower),
            upper=np.append(matrix.upper, upper),
        )

    def _read_later(self, v: int) -> bool:
        """Whether something in the backward may read a value."""
        again = any(self.program.tasks[p].runs != "first" for p in self.readers[v])
        return again or any(v in way.reads for slot in self.program.slots for way in slot)

    def _fits(self, parts: list[Expr], fixed_bytes: int, forward: bool = False) -> None:
        """The row "these bytes are at most the peak", instead of the budget."""
        there, peak = (self.resident, self.forward_peak) if forward else (self.backward_there, self.backward_peak)
        there -= 0 if forward else self.shrinkage_bytes
        above = total([*parts, Expr(float(fixed_bytes - there))])
        self.builder.at_most(above * (1 / self.room_bytes), peak)

    def _carry(self, t: int) -> None:
        self.backward_there += self.shrinkage_bytes  # for row (6)
        super()._carry(t)
        self.backward_there -= self.shrinkage_bytes
        if t == 1:  # row (a)
            kept = [held * self.sizes[v] for v, held in self.carried().items()]
            self._fits(kept, self.resident + self.output_bytes, forward=True)

    def _slot(self, slot: int) -> dict[int, Expr]:
        chosen = super()._slot(slot)
        parts = [self._extra_of_ways(slot, chosen)]  # row (c)
        parts += [reads * self.sizes[v] for v, reads in self.way_reads[slot].items()]
        self._fits(parts, self.resident + self.output_bytes + self.backward.during[slot])
        return chosen


def block_relaxation(program: Program, costs: Mapping[str, Cost]) -> BlockRelaxation:
    """Build the relaxation of a block. Copies that overlap with computing count no seconds, since they may be hidden.

    Raises:
        ProfileError: ``costs`` lacks a task, or refuses all ways of a slot.
    """
    part = without_refused(program, costs)
    if part is not None:
        program, costs = part.program, {key: cost for key, cost in costs.items() if cost != REFUSED}
    tasks = tuple(replace(task, cost="") if task.copies == "start" else task for task in program.tasks)
    program = replace(program, tasks=tasks)
    small = len(program.slots) <= MOST_ALONE
    found = BlockRelaxation(Instance(program, costs), range(len(program.slots)) if small else (), part)
    stages = [0, *(slot + 1 for slot in sorted(found.alone))] if small else []
    return found.build(runs=[(stage, group) for stage in stages for group in range(len(found.needs.groups))])
