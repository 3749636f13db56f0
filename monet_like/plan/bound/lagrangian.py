"""Lagrangian relaxation for deep models: a bound for all schedules from small programs, one for each part.

The forward is cut where at most one large value crosses (partition.py). One row joins the parts in the relaxation with
a single block (relaxation.py): row (6), the memory at the start of the backward. With a price of L seconds for every
byte that the forward keeps, in place of that row, there is one small integer program per part, for each case of which
of the values that cross its cuts are needed in the backward. A shortest path over the parts chooses the cases. For every L,

    bound(L) = min over paths (seconds + L * bytes kept) + L * (resident + backward values + outputs - B)

is a bound for all schedules (Everett 1963). It is concave in L. Since many parts share one row, its best value comes
within about one part's share of the optimum of the relaxation with one block. Equal parts are solved once, so eighty
equal blocks cost as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from ...ir.program import Cost, Program, Runs, Task, Value
from ...ir.simulate import cost_of
from ...solvers.pool import Pool
from ..analysis import find_backward_bytes
from .cuts import split
from .relaxation import BlockProgram, block_program

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Seconds for the program of one part.
PART_SECONDS = 5.0
#: Relative gap at which it may stop.
PART_GAP = 1e-6


@dataclass(frozen=True)
class PartSolution:
    """The best solution of one part's program at a price.

    Attributes:
        bound: lower bound of its seconds plus priced bytes, in seconds.
        seconds, bytes: of the solution: of what it runs, and of what it keeps.
        kept: values that the forward keeps.
        ways: of its slots.
    """

    bound: float
    seconds: float
    bytes: int
    kept: tuple[int, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True)
class PricedPath:
    """The shortest path over the parts at a price.

    Attributes:
        price: seconds per byte kept.
        bound: lower bound of seconds plus priced bytes of all paths.
        seconds, bytes: of this path.
        choices: the solution of every part.
        cases: the case of every part; solutions for the same case may be exchanged.
    """

    price: float
    bound: float
    seconds: float
    bytes: int
    choices: tuple[PartSolution, ...]
    cases: tuple[Case, ...]


class Case(NamedTuple):
    """Assumptions of a part's program about the backward of its neighbours.

    Attributes:
        part: the part's number.
        given: for each value that enters the part, whether it exists in the backward.
        needed: for each value that leaves it, whether it must exist in the backward.
        kept: whether the needed ones are kept, not made again.
    """

    part: int
    given: tuple[bool, ...]
    needed: tuple[bool, ...]
    kept: bool


#: Bound so far, the last part's solution and case, the path before it.
_Path = tuple[float, "PartSolution | None", "Case | None", Any]


@dataclass(frozen=True)
class _PartProgram:
    """A part in one case, as a program with indices of its own.

    Attributes:
        leaves: indices of the values that its forward must make.
        values: for each of its values, the index in the whole program.
        ways: for each of its slots, the indices of its ways in the whole program's slot.
        shape: a number; equal programs have the same.
    """

    program: Program
    leaves: tuple[int, ...]
    values: tuple[int, ...]
    ways: tuple[tuple[int, ...], ...]
    shape: int


class LagrangianRelaxation:
    """The relaxation of one program: its parts, and the shortest path over them at any price.

    Args:
        pool: solves the parts' programs.
        extra_bytes: resident memory beyond the program's.
        time_left: wall seconds left for all of them.
    """

    def __init__(
        self,
        program: Program,
        costs: Mapping[str, Cost],
        pool: Pool,
        extra_bytes: int = 0,
        time_left: Callable[[], float] = lambda: inf,
    ) -> None:
        self.program, self.costs, self.pool, self.time_left = program, costs, pool, time_left
        self.parts = split(program)
        backward = find_backward_bytes(program)
        self.outputs = frozenset(program.outputs)
        self.fixed_bytes = program.resident_bytes + extra_bytes + sum(program.values[v].bytes for v in self.outputs)
        self.fixed_bytes += backward.before[0] if backward.before else 0
        self.possible = backward.possible
        inside = {slot for part in self.parts for slot in part.slots}
        #: Of the slots that read nothing of the forward: they belong to no part.
        self.fixed_seconds = sum(
            min(cost_of(ways[k], costs).seconds for k in self.possible[slot])
            for slot, ways in enumerate(program.slots)
            if slot not in inside
        )
        self.programs: dict[Case, _PartProgram | None] = {}
        self.shapes: dict[object, int] = {}
        self.relaxations: dict[int, BlockProgram] = {}  # by shape
        self.solutions: dict[int, dict[float, PartSolution | None]] = {}  # by shape and price

    def shortest_path(self, price: float, chain: int | None = None) -> PricedPath | None:
        """The path with the least seconds and priced bytes; None if some part could not be solved in time.

        Args:
            price: seconds per byte kept.
            chain: the values that leave this many neighbouring parts may be made again in one go, those that leave the next
                part are kept; None: no limit. A limit bounds what the relaxation ignores, the memory later in the backward.
        """
        if not self._solve(price, chain is not None):
            return None
        paths: dict[tuple[tuple[bool, ...], int], _Path] = {((), 0): (0.0, None, None, None)}
        for number, part in enumerate(self.parts):
            longer: dict[tuple[tuple[bool, ...], int], _Path] = {}
            for needed, kept in product(product((True, False), repeat=len(part.leaves)), (True, False)):
                if kept and chain is None:
                    continue
                for (given, length), path in paths.items():
                    link = 0 if kept or not any(needed) or chain is None else length + 1
                    if chain is not None and link > chain:
                        continue
                    case = Case(number, given, needed, kept)
                    choice = self._choice(case, price)
                    if choice is None:
                        continue
                    bound = path[0] + choice.bound
                    if bound < longer.get((needed, link), (inf,))[0]:
                        longer[needed, link] = bound, choice, case, path
            paths = longer
        if not paths:
            return None
        best: _Path | None = min(paths.values(), key=lambda path: path[0])
        assert best is not None
        bound = best[0] + self.fixed_seconds
        choices: list[PartSolution] = []
        cases: list[Case] = []
        while best is not None and best[1] is not None and best[2] is not None:
            choices.insert(0, best[1])
            cases.insert(0, best[2])
            best = best[3]
        seconds = self.fixed_seconds + sum(choice.seconds for choice in choices)
        size = sum(choice.bytes for choice in choices)
        return PricedPath(price, bound, seconds, size, tuple(choices), tuple(cases))

    def alternatives(self, case: Case) -> list[PartSolution]:
        """The solutions of a case found so far, at any price, by bytes; none is worse than another in seconds and bytes."""
        small = self.programs[case]
        assert small is not None
        known = [choice for choice in self.solutions[small.shape].values() if choice is not None]
        best: list[PartSolution] = []
        for choice in sorted(known, key=lambda choice: (choice.bytes, choice.seconds)):
            if not best or choice.seconds < best[-1].seconds:
                best.append(choice)
        return [self._translate(small, choice) for choice in best]

    def _choice(self, case: Case, price: float) -> PartSolution | None:
        """The solution of a case at a price; None if the case is impossible."""
        small = self._program(case)
        choice = None if small is None else self.solutions[small.shape][price]
        return None if small is None or choice is None else self._translate(small, choice)

    def _program(self, case: Case) -> _PartProgram | None:
        if case not in self.programs:
            small = self.programs[case] = self._make_program(*case)
            if small is not None:
                self.solutions.setdefault(small.shape, {})
        return self.programs[case]

    def _solve(self, price: float, chained: bool) -> bool:
        """Solve all parts in all cases at a price, as far as they are not solved yet; returns whether all are then.

        A case that was left out could be on the shortest path: without it there is no bound.
        """
        todo: dict[int, _PartProgram] = {}
        for number, part in enumerate(self.parts):
            kinds = (True, False) if chained else (False,)
            sides = (product((True, False), repeat=len(values)) for values in (part.enters, part.leaves))
            for (given, needed), kept in product(product(*sides), kinds):
                small = self._program(Case(number, given, needed, kept))
                if small is not None and price not in self.solutions[small.shape]:
                    todo[small.shape] = small
        for number, small in todo.items():
            if number not in self.relaxations:
                self.relaxations[number] = block_program(small.program, self.costs, required=small.leaves)
        matrices = {number: self.relaxations[number].priced(price) for number in todo}
        hard = [number for number, matrix in matrices.items() if matrix.columns and not matrix.contradiction]
        answers = dict(
            zip(
                hard,
                self.pool.solve([matrices[k] for k in hard], PART_SECONDS, PART_GAP, self.time_left),
                strict=True,
            )
        )
        for number, small in todo.items():
            known = self.solutions[number]
            if matrices[number].contradiction:
                known[price] = None
            elif number not in answers:
                known[price] = self._read(small, matrices[number].cost, matrices[number].offset, price)
            elif (answer := answers[number]) is not None and answer["x"] is not None and answer["bound"] is not None:
                bound = answer["bound"] + matrices[number].offset
                known[price] = self._read(small, answer["x"].round(), bound, price)
        return all(price in self.solutions[number] for number in todo)

    def _read(self, small: _PartProgram, x: NDArray[Any], bound: float, price: float) -> PartSolution:
        """The solution that a point of a part's program stands for."""
        blocks = self.relaxations[small.shape]
        unit, kept = blocks.matrix.seconds_per_unit, blocks.kept(x)
        size = sum(small.program.values[v].bytes for v in kept)
        seconds = (float(blocks.matrix.cost @ x) + blocks.matrix.offset) * unit
        return PartSolution(min(bound * unit, seconds + price * size), seconds, size, kept, blocks.chosen(x))

    @staticmethod
    def _translate(small: _PartProgram, choice: PartSolution) -> PartSolution:
        """A solution in the whole program's indices."""
        values = tuple(small.values[v] for v in choice.kept)
        ways = tuple(numbers[k] for numbers, k in zip(small.ways, choice.ways[: len(small.ways)], strict=True))
        return PartSolution(choice.bound, choice.seconds, choice.bytes, values, ways)

    def _make_program(
        self, place: int, given: tuple[bool, ...], needed: tuple[bool, ...], kept: bool
    ) -> _PartProgram | None:
        """The program of a part in a case; None if the case is impossible. Arguments as in `Case`.

        Values that enter it cost nothing; those that exist in the forward alone are read by nothing that runs again. The
        needed values that leave it are read by one more slot.
        """
        whole, part = self.program, self.parts[place]
        own = sorted({v for p in part.tasks for v in whole.tasks[p].writes})
        number = {v: k for k, v in enumerate(own)}
        missing = {v for v, there in zip(part.enters, given, strict=True) if not there}
        wanted = {v for v, is_wanted in zip(part.leaves, needed, strict=True) if is_wanted}
        if wanted & missing:
            return None

        def alone(task: Task, runs: Runs = "both", last: bool = False) -> Task:
            reads = tuple(number[v] for v in whole.forward_reads(task) if v in number)
            overwrites = number.get(task.overwrites) if task.overwrites is not None and not last else None
            writes = () if last else tuple(number[v] for v in task.writes)
            return Task("", reads, writes, task.cost, overwrites=overwrites, runs=runs)

        tasks = []
        for p in part.tasks:
            task = whole.tasks[p]
            runs = task.runs
            if missing & set(task.reads) or (kept and wanted & set(task.writes)):
                if runs == "again":
                    continue
                runs = "first"
            tasks.append(alone(task, runs))
        slots, ways = [], []
        for slot in part.slots:
            able = [k for k in self.possible[slot] if not missing & set(whole.slots[slot][k].reads)]
            if not able:
                return None
            slots.append(tuple(alone(whole.slots[slot][k], last=True) for k in able))
            ways.append(tuple(able))
        if wanted:
            slots.append((Task("", tuple(sorted(number[v] for v in wanted if v in number)), ()),))
        values = tuple(Value("", whole.values[v].bytes, "forward") for v in own)
        outputs = tuple(number[v] for v in own if v in self.outputs)
        leaves = tuple(number[v] for v in part.leaves if v in number)
        program = Program(values, tuple(tasks), tuple(slots), outputs)
        shape = self.shapes.setdefault((program, leaves), len(self.shapes))
        return _PartProgram(program, leaves, tuple(own), tuple(ways), shape)
