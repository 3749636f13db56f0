"""The relaxation of a deep program by its parts: small programs, one for each part, and a shortest path over them.

The forward is cut where at most one large value crosses (cuts.py). One row joins the parts in the relaxation with a
single block (relaxation.py): row (6), the memory at the start of the backward. So a deep program is a piece of a step
with that one moment, and `prices.step_bound` finds the best price of a byte that the forward keeps. At a price there is
one small integer program per part, for each case of which of the values that cross its cuts are needed in the backward;
a shortest path over the parts chooses the cases. Since many parts share one row, the best bound comes within about one
part's share of the optimum of the relaxation with one block. Equal parts are solved once, so eighty equal blocks cost
as much as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from ...ir.program import Program, Runs, Task, Value
from ...ir.schedule import Schedule
from ...ir.step import Moment, Piece, Point, Step
from ...solvers.matrix import MatrixProgram
from ...solvers.pool import Pool
from ..instance import Instance
from .cuts import split
from .pieces import PROGRAM_GAP, PROGRAM_SECONDS, Amounts, Answer, Limit, Prices, Solved
from .relaxation import BlockProgram

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


#: Bound so far, solutions and cases of the parts so far.
_Path = tuple[float, tuple[PartSolution, ...], tuple[Case, ...]]


@dataclass(frozen=True, eq=False)
class _Shape:
    """The program of all parts and cases that are equal: its relaxation, and the solutions found so far, by price."""

    relaxation: BlockProgram
    solutions: dict[float, PartSolution | None] = field(default_factory=dict)

    def learn(self, price: float, x: NDArray[Any], bound: float) -> None:
        """Note the solution that a point of the program stands for; ``bound``: in the program's units."""
        program, matrix, kept = self.relaxation.program, self.relaxation.matrix, self.relaxation.kept(x)
        size = sum(program.values[v].bytes for v in kept)
        seconds = (float(matrix.cost @ x) + matrix.offset) * matrix.seconds_per_unit
        bound = min((bound + matrix.offset) * matrix.seconds_per_unit, seconds + price * size)
        self.solutions[price] = PartSolution(bound, seconds, size, kept, self.relaxation.chosen(x))


@dataclass(frozen=True)
class _PartProgram:
    """A part in one case, as a program with indices of its own.

    Attributes:
        values: for each of its values, the index in the whole program.
        ways: for each of its slots, the indices of its ways in the whole program's slot.
    """

    shape: _Shape
    values: tuple[int, ...]
    ways: tuple[tuple[int, ...], ...]

    def whole(self, choice: PartSolution) -> PartSolution:
        """A solution in the whole program's indices."""
        values = tuple(self.values[v] for v in choice.kept)
        ways = tuple(numbers[k] for numbers, k in zip(self.ways, choice.ways[: len(self.ways)], strict=True))
        return replace(choice, kept=values, ways=ways)


class PartsRelaxation:
    """The relaxation of one program: its parts, and the shortest path over them at any price; a `Relaxation`.

    Args:
        pool: solves the parts' programs.
        time_left: wall seconds left for all of them.
    """

    def __init__(self, instance: Instance, pool: Pool, time_left: Callable[[], float] = lambda: inf) -> None:
        self.instance, self.pool, self.time_left = instance, pool, time_left
        self.program = program = instance.program
        self.parts = split(program)
        self.outputs, self.possible = frozenset(program.outputs), instance.backward.possible
        self.fixed_bytes = instance.resident_bytes + instance.output_bytes + sum(instance.backward.before[:1])
        inside = {slot for part in self.parts for slot in part.slots}
        #: Of the slots that read nothing of the forward: they belong to no part.
        self.fixed_seconds = sum(
            min(instance.cost_of(ways[k]).seconds for k in self.possible[slot])
            for slot, ways in enumerate(program.slots)
            if slot not in inside
        )
        self.cases: dict[Case, _PartProgram | None] = {}
        self.shapes: dict[object, _Shape] = {}
        self.paths: list[PricedPath] = []  # that bounds were read from
        self.shrinkage_bytes = 0

    def step(self) -> Step | None:
        """The program as a step with one moment, at which the backward begins; None if some part could not be solved in
        time.
        """
        free = self.shortest_path(0.0)
        if free is None:
            return None
        point = Point(Schedule((), (), ()), free.seconds, free.bytes, 0, 0, 0)
        return Step((Piece("program", menu=(point,)),), (Moment("the backward begins", self.fixed_bytes, ((0, 1),)),))

    def programs(self, prices: Prices, limits: Sequence[Limit] = (), chained: bool = False) -> list[MatrixProgram]:
        """As of `Relaxation`: of the parts in all cases, as far as they are not solved at this price yet.

        Args:
            limits: none.
            chained: also of cases in which what is needed is kept.
        """
        price, self._todo = prices.carried, dict[_Shape, MatrixProgram]()
        for number, part in enumerate(self.parts):
            sides = (product((True, False), repeat=len(values)) for values in (part.enters, part.leaves))
            for (given, needed), kept in product(product(*sides), (True, False) if chained else (False,)):
                small = self._program(Case(number, given, needed, kept))
                if small is None or price in small.shape.solutions or small.shape in self._todo:
                    continue
                matrix = small.shape.relaxation.priced(price)
                if matrix.contradiction:
                    small.shape.solutions[price] = None
                elif not matrix.columns:
                    small.shape.learn(price, matrix.cost, 0.0)
                else:
                    self._todo[small.shape] = matrix
        return list(self._todo.values())

    def read(self, prices: Prices, programs: Sequence[MatrixProgram], answers: Sequence[Solved]) -> Answer | None:
        """As of `Relaxation`."""
        path = self._path(prices.carried, None) if self._learn(prices.carried, answers) else None
        if path is None:
            return None
        self.paths.append(path)
        return Answer(path.bound, Amounts(path.seconds, path.bytes, 0.0, 0.0))

    def shortest_path(self, price: float, chain: int | None = None) -> PricedPath | None:
        """The path with the least seconds and priced bytes; None if some part could not be solved in time.

        Args:
            price: seconds per byte kept.
            chain: the values that leave this many neighbouring parts may be made again in one go, those that leave the
                next part are kept; None: no limit. A limit bounds what the relaxation ignores, the memory later in the
                backward.
        """
        prices = Prices(carried=price)
        programs = self.programs(prices, chained=chain is not None)
        answers = self.pool.solve(programs, PROGRAM_SECONDS, PROGRAM_GAP, self.time_left)
        return self._path(price, chain) if self._learn(price, answers) else None

    def _path(self, price: float, chain: int | None) -> PricedPath | None:
        """As `shortest_path`, of parts that are solved."""
        paths: dict[tuple[tuple[bool, ...], int], _Path] = {((), 0): (self.fixed_seconds, (), ())}
        for number, part in enumerate(self.parts):
            longer: dict[tuple[tuple[bool, ...], int], _Path] = {}
            for needed, kept in product(product((True, False), repeat=len(part.leaves)), (True, False)):
                if kept and chain is None:
                    continue
                for (given, length), (before, choices, cases) in paths.items():
                    link = 0 if kept or not any(needed) or chain is None else length + 1
                    case = Case(number, given, needed, kept)
                    choice = None if chain is not None and link > chain else self._choice(case, price)
                    if choice is None:
                        continue
                    bound = before + choice.bound
                    if bound < longer.get((needed, link), (inf,))[0]:
                        longer[needed, link] = bound, (*choices, choice), (*cases, case)
            paths = longer
        if not paths:
            return None
        bound, choices, cases = min(paths.values(), key=lambda path: path[0])
        seconds = self.fixed_seconds + sum(choice.seconds for choice in choices)
        return PricedPath(price, bound, seconds, sum(choice.bytes for choice in choices), choices, cases)

    def alternatives(self, case: Case) -> list[PartSolution]:
        """The solutions of a case found so far, at any price, by bytes; none is worse than another in seconds and
        bytes.
        """
        small = self.cases[case]
        assert small is not None
        known = [choice for choice in small.shape.solutions.values() if choice is not None]
        best: list[PartSolution] = []
        for choice in sorted(known, key=lambda choice: (choice.bytes, choice.seconds)):
            if not best or choice.seconds < best[-1].seconds:
                best.append(choice)
        return [small.whole(choice) for choice in best]

    def _choice(self, case: Case, price: float) -> PartSolution | None:
        """The solution of a case at a price; None if the case is impossible."""
        small = self._program(case)
        choice = None if small is None else small.shape.solutions[price]
        return None if small is None or choice is None else small.whole(choice)

    def _program(self, case: Case) -> _PartProgram | None:
        if case not in self.cases:
            self.cases[case] = self._make_program(*case)
        return self.cases[case]

    def _learn(self, price: float, answers: Sequence[Solved]) -> bool:
        """Note the answers to `programs`; returns whether none is missing: a case without one could be on the shortest
        path.
        """
        for shape, answer in zip(self._todo, answers, strict=True):
            if answer is not None and answer["x"] is not None and answer["bound"] is not None:
                shape.learn(price, answer["x"].round(), answer["bound"])
        return all(price in shape.solutions for shape in self._todo)

    def _make_program(
        self, place: int, given: tuple[bool, ...], needed: tuple[bool, ...], kept: bool
    ) -> _PartProgram | None:
        """The program of a part in a case; None if the case is impossible. Arguments as in `Case`.

        Values that enter it cost nothing; those that exist in the forward alone are read by nothing that runs again.
        The needed values that leave it are read by one more slot.
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
        if (program, leaves) not in self.shapes:
            small = Instance(program, self.instance.costs)
            self.shapes[program, leaves] = _Shape(BlockProgram(small).build(leaves))
        return _PartProgram(self.shapes[program, leaves], tuple(own), tuple(ways))
