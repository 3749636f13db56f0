"""Deep models: a bound and a plan from parts that are solved one by one, equal parts only once.

The forward is cut where at most one value crosses. With a price L per byte for what the backward finds kept, the
question of bound.py, "what does the forward keep", falls apart into one small program per part, joined by whether the
values that cross are needed in the backward: a shortest path over the parts. For every L,

    bound(L) = min over paths (seconds + L * bytes kept) + L * (resident + backward values + outputs - B)

is a bound for all schedules (Lagrangian relaxation of row (6) of bound.py; Everett 1963). It is concave in L, and
since many parts share one row its best value comes within about one part's share of the optimum of bound.py. Eighty
equal blocks cost as much as one.

The two paths at the best L, one over the budget and one within it, are mixed part by part into a plan, in which single
parts' choices are then exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any

from ...ir.program import Cost, Program, Runs, Task, Value
from ...ir.simulate import cost_of
from ...solvers.pool import Pool
from ..analysis import find_backward_bytes
from .partition import split
from .relaxation import BlockProgram, block_program

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Seconds for the program of one part.
PART_SECONDS = 5.0
#: Relative gap at which it may stop.
PART_GAP = 1e-6


@dataclass(frozen=True)
class Choice:
    """One part's best answer to a price: a bound of its seconds and priced bytes, both of them, values kept, ways."""

    bound: float
    seconds: float
    bytes: int
    kept: tuple[int, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The best path at a price: the bound of its priced seconds, its seconds, its bytes, the choice in every part.

    ``cases`` says of every part what enters its backward and what leaves it; choices for one case may be exchanged.
    """

    price: float
    bound: float
    seconds: float
    bytes: int
    choices: tuple[Choice, ...]
    cases: tuple[_Case, ...]


#: A part's number, which values enter its backward, which leave it, and whether those are kept.
_Case = tuple[int, tuple[bool, ...], tuple[bool, ...], bool]
#: Bound so far, the last choice and its case, the path before it.
_Path = tuple[float, "Choice | None", "_Case | None", Any]


@dataclass(frozen=True)
class _Small:
    """A part as a program by itself, in numbers of its own.

    Attributes:
        leaves: its numbers of what the forward must make.
        values: the whole program's numbers of its values.
        ways: the whole program's numbers of its slots' ways.
        number: the same for equal programs.
    """

    program: Program
    leaves: tuple[int, ...]
    values: tuple[int, ...]
    ways: tuple[tuple[int, ...], ...]
    number: int


class Parts:
    """The parts of one program and their answers to prices.

    Args:
        pool: solves the parts.
        extra_bytes: resident memory beyond the program's.
        time_left: seconds for all answers.
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
        #: Slots that read nothing of the forward.
        self.fixed_seconds = sum(
            min(cost_of(ways[k], costs).seconds for k in self.possible[slot])
            for slot, ways in enumerate(program.slots)
            if slot not in inside
        )
        self.made: dict[_Case, _Small | None] = {}
        self.shapes: dict[object, int] = {}
        self.blocks: dict[int, BlockProgram] = {}
        #: For every shape and price.
        self.known: dict[int, dict[float, Choice | None]] = {}

    def answer(self, price: float, chain: int | None = None) -> Answer | None:
        """The best path at a price in seconds per byte; None if some part could not be solved.

        With ``chain``, of that many neighbouring parts what leaves them may be made again in one go; what leaves the
        next one is kept. That bounds what the answer leaves out, the memory in the course of the backward.
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
                    case = number, given, needed, kept
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
        choices: list[Choice] = []
        cases: list[_Case] = []
        while best is not None and best[1] is not None and best[2] is not None:
            choices.insert(0, best[1])
            cases.insert(0, best[2])
            best = best[3]
        seconds = self.fixed_seconds + sum(choice.seconds for choice in choices)
        size = sum(choice.bytes for choice in choices)
        return Answer(price, bound, seconds, size, tuple(choices), tuple(cases))

    def menu(self, case: _Case) -> list[Choice]:
        """The answers that are known for a case, at any price; none is worse than another in seconds and in bytes."""
        small = self.made[case]
        assert small is not None
        known = [choice for choice in self.known[small.number].values() if choice is not None]
        best: list[Choice] = []
        for choice in sorted(known, key=lambda choice: (choice.bytes, choice.seconds)):
            if not best or choice.seconds < best[-1].seconds:
                best.append(choice)
        return [self._in_whole(small, choice) for choice in best]

    def _choice(self, case: _Case, price: float) -> Choice | None:
        """A part's best answer in a case; None if that cannot be."""
        small = self._made(case)
        choice = None if small is None else self.known[small.number][price]
        return None if small is None or choice is None else self._in_whole(small, choice)

    def _made(self, case: _Case) -> _Small | None:
        if case not in self.made:
            small = self.made[case] = self._small(*case)
            if small is not None:
                self.known.setdefault(small.number, {})
        return self.made[case]

    def _solve(self, price: float, chained: bool) -> bool:
        """Solve what is not known yet, of all parts in all cases, at a price; whether all is known then.

        A case that was left out could have been on the best path: without it there is no bound.
        """
        todo: dict[int, _Small] = {}
        for number, part in enumerate(self.parts):
            kinds = (True, False) if chained else (False,)
            sides = (product((True, False), repeat=len(values)) for values in (part.enters, part.leaves))
            for (given, needed), kept in product(product(*sides), kinds):
                small = self._made((number, given, needed, kept))
                if small is not None and price not in self.known[small.number]:
                    todo[small.number] = small
        for number, small in todo.items():
            if number not in self.blocks:
                self.blocks[number] = block_program(small.program, self.costs, required=small.leaves)
        matrices = {number: self.blocks[number].priced(price) for number in todo}
        hard = [number for number, matrix in matrices.items() if matrix.columns and not matrix.contradiction]
        answers = dict(
            zip(
                hard,
                self.pool.solve([matrices[k] for k in hard], PART_SECONDS, PART_GAP, self.time_left),
                strict=True,
            )
        )
        for number, small in todo.items():
            known = self.known[number]
            if matrices[number].contradiction:
                known[price] = None
            elif number not in answers:
                known[price] = self._read(small, matrices[number].cost, matrices[number].offset, price)
            elif (answer := answers[number]) is not None and answer["x"] is not None and answer["bound"] is not None:
                bound = answer["bound"] + matrices[number].offset
                known[price] = self._read(small, answer["x"].round(), bound, price)
        return all(price in self.known[number] for number in todo)

    def _read(self, small: _Small, x: NDArray[Any], bound: float, price: float) -> Choice:
        """A point of a part's program as a choice."""
        blocks = self.blocks[small.number]
        unit, kept = blocks.matrix.seconds_per_unit, blocks.kept(x)
        size = sum(small.program.values[v].bytes for v in kept)
        seconds = (float(blocks.matrix.cost @ x) + blocks.matrix.offset) * unit
        return Choice(min(bound * unit, seconds + price * size), seconds, size, kept, blocks.chosen(x))

    @staticmethod
    def _in_whole(small: _Small, choice: Choice) -> Choice:
        """A small program's answer in the whole program's numbers."""
        values = tuple(small.values[v] for v in choice.kept)
        ways = tuple(numbers[k] for numbers, k in zip(small.ways, choice.ways[: len(small.ways)], strict=True))
        return Choice(choice.bound, choice.seconds, choice.bytes, values, ways)

    def _small(self, place: int, given: tuple[bool, ...], needed: tuple[bool, ...], kept: bool) -> _Small | None:
        """The part as a program by itself.

        What enters it exists for nothing; what enters for the forward only is read by nothing that runs again. What
        leaves it is read by one more slot; ``kept``: and is not made again.
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
        return _Small(program, leaves, tuple(own), tuple(ways), shape)
