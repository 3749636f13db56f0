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

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, TypeGuard

from ...ir.program import Cost, Program, Runs, Task, Value
from ...ir.simulate import cost_of
from ...solvers.pool import Pool
from ..analysis import find_backward_bytes
from ..local_search.policy import Policy
from ..local_search.searcher import Found, Searcher
from .relaxation import BlockProgram, block_program

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Values of at most this size cross cuts for nothing.
SMALL_BYTES = 4096
#: A part has at least this many tasks; small programs are solved exactly in any case.
LEAST_TASKS = 12
#: Seconds for the program of one part.
PART_SECONDS = 5.0
#: Relative gap at which it may stop.
PART_GAP = 1e-6
#: How often the price is improved.
TURNS = 12
#: How often the price is raised fourfold until the answer fits.
MOST_RISES = 30
#: Factor of the price where a plan takes more than what it keeps.
STEP = 1.15
#: The price at which one sees whether any answer fits, as a multiple of that of the answer that does not.
DEAREST = 1000
#: How many exchanges of parts' choices are tried, and how far along a part's menu.
MOST_EXCHANGES, REACH = 3000, 2
#: Lengths of chains that are tried; see `Parts.answer`.
CHAINS = (0, 1, 3, 7)


@dataclass(frozen=True)
class Part:
    """Neighbouring forward tasks and the slots that read their results.

    Attributes:
        tasks, slots: indices in the whole program.
        enters: what it reads of earlier parts.
        leaves: what later parts read of it, or through it.
    """

    tasks: tuple[int, ...]
    slots: tuple[int, ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]


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


def split(program: Program) -> tuple[Part, ...]:
    """The parts of a program, in order; a single one where it cannot be cut."""
    count = len(program.tasks)
    places = _places(program)
    first, last, slot_places = _spans(program, places)
    crossing, closed = [0] * (count + 1), [False] * (count + 1)
    for v, makers in enumerate(program.producers):
        for cut in range(first[v] + 1, last[v] + 1):
            crossing[cut] += program.values[v].bytes > SMALL_BYTES
            closed[cut] |= cut <= max(places[p] for p in makers)
    starts = [0]
    for cut in range(1, count):
        if crossing[cut] <= 1 and not closed[cut] and cut - starts[-1] >= LEAST_TASKS:
            starts.append(cut)
    ends = [*starts[1:], count]
    crossings = [
        tuple(
            v
            for v, value in enumerate(program.values)
            if first[v] < start <= last[v] and value.bytes > SMALL_BYTES and program.producers[v]
        )
        for start in starts
    ]
    tasks: list[list[int]] = [[] for _ in starts]
    for p, place in enumerate(places):
        tasks[bisect_right(starts, place) - 1].append(p)
    slots: list[list[int]] = [[] for _ in starts]
    for slot, place in slot_places.items():
        slots[bisect_right(starts, place) - 1].append(slot)
    return tuple(
        Part(tuple(tasks[k]), tuple(slots[k]), crossings[k], crossings[k + 1] if k + 1 < len(ends) else ())
        for k in range(len(starts))
    )


def _places(program: Program) -> list[int]:
    """For every task the index where it could stand: near its last input's producer, if only the backward uses it.

    Capture puts what the backward computes from forward values alone at the end of the forward. What runs only again may
    stand before a producer that runs only first; it belongs where it is.
    """
    outputs, read = set(program.outputs), set[int]()
    trunk = [False] * len(program.tasks)
    for p in reversed(range(len(program.tasks))):
        task = program.tasks[p]
        trunk[p] = not (outputs | read).isdisjoint(task.writes)
        if trunk[p]:
            read.update(program.forward_reads(task))
    places: list[int] = []
    for p, task in enumerate(program.tasks):
        made = [min(places[q] if q < p else p for q in program.producers[v]) for v in program.forward_reads(task)]
        places.append(p if trunk[p] or not made else max(made))
    _move_later(program, places, trunk)
    return places


def _move_later(program: Program, places: list[int], trunk: Sequence[bool]) -> None:
    """Put what only the backward uses where it is first read, if all that it reads crosses as far anyhow.

    Twice a block's input, of which the backward of its norm makes use, would else cross the cut behind that input.
    """
    _, last, slot_places = _spans(program, places)
    reach = [len(places)] * len(places)  # how far a task may move
    for p, task in enumerate(program.tasks):
        for v in program.forward_reads(task):
            makers = [q for q in program.producers[v] if q < p and not trunk[q]]
            reach[p] = min(reach[p], min((reach[q] for q in makers), default=last[v]))
    read_at = [len(places)] * len(program.values)
    for slot, place in slot_places.items():
        for way in program.slots[slot]:
            for v in program.forward_reads(way):
                read_at[v] = min(read_at[v], place)
    for p in reversed(range(len(places))):
        task = program.tasks[p]
        until = min((read_at[v] for v in task.writes), default=0)
        if not trunk[p] and places[p] < until <= reach[p]:
            places[p] = until
        for v in program.forward_reads(task):
            read_at[v] = min(read_at[v], places[p])


def _spans(program: Program, places: Sequence[int]) -> tuple[list[int], list[int], dict[int, int]]:
    """For every value the places of its first producer and last reader; the places of slots that read any."""
    first = [min((places[p] for p in makers), default=0) for makers in program.producers]
    last = [max((places[p] for p in makers), default=0) for makers in program.producers]
    for p, task in enumerate(program.tasks):
        for v in program.forward_reads(task):
            last[v] = max(last[v], places[p])
    slot_places: dict[int, int] = {}
    for slot, ways in enumerate(program.slots):
        read = {v for way in ways for v in program.forward_reads(way)}
        if read:
            slot_places[slot] = max(first[v] for v in read)
            for v in read:
                last[v] = max(last[v], slot_places[slot])
    return first, last, slot_places


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


@dataclass(frozen=True)
class Composed:
    """What the parts give.

    Attributes:
        bound_seconds: no schedule within the budget is faster.
        found: a policy that keeps what the best answers keep, and does not always fit; None if there is none.
    """

    bound_seconds: float
    found: Found | None


def compose(parts: Parts, searcher: Searcher, budget_bytes: int) -> Composed | None:
    """A bound and a plan for a budget; None if some part cannot be solved in time.

    Args:
        parts: of the searcher's program.
        searcher: judges the plans.
    """
    room = budget_bytes - parts.fixed_bytes
    rich = parts.answer(0.0)
    if rich is None:
        return None
    best, lean, price = rich.bound, rich, rich.seconds / max(1, rich.bytes)
    for _ in range(MOST_RISES):  # dearer and dearer, until it fits
        if lean.bytes <= room:
            break
        answer = parts.answer(price) if parts.time_left() > 0 else None
        if answer is None:
            return Composed(best, None)
        rich, lean = (answer, answer) if answer.bytes > room else (rich, answer)
        price *= 4
    else:  # not even the least that can be kept fits, says the bound of one block; others will say so too
        return Composed(best, None)
    for _ in range(TURNS):  # the price at which both are equally good, until nothing better is found there
        best = max(best, rich.bound - rich.price * room, lean.bound - lean.price * room)
        if rich.bytes <= lean.bytes:
            break
        price = (lean.seconds - rich.seconds) / (rich.bytes - lean.bytes)
        answer = parts.answer(price) if parts.time_left() > 0 else None
        if answer is None or answer.bytes in (rich.bytes, lean.bytes):
            best = best if answer is None else max(best, answer.bound - price * room)
            break
        rich, lean = (answer, lean) if answer.bytes > room else (rich, answer)
    found = [_mixed(parts, searcher, budget_bytes, rich.price, lean.price, chain) for chain in CHAINS]
    return Composed(best, min(filter(None, found), key=lambda f: f.score(budget_bytes), default=None))


def _mixed(
    parts: Parts,
    searcher: Searcher,
    budget_bytes: int,
    rich_price: float,
    lean_price: float,
    chain: int,
) -> Found | None:
    """The first parts as at the lean price, the others as at the rich one: as many of the latter as fit.

    Where not even the lean answer fits, leaner ones are asked for.
    """
    rich, lean = parts.answer(rich_price, chain), parts.answer(lean_price, chain)
    if rich is None or lean is None:
        return None

    def judged(first: Answer, second: Answer, cut: int) -> Found | None:
        choices = (*first.choices[:cut], *second.choices[cut:])
        return searcher.judge(_policy(parts, searcher, choices), budget_bytes)

    def fits(found: Found | None) -> TypeGuard[Found]:
        return found is not None and found.judgement.peak_bytes <= budget_bytes

    count, price = len(parts.parts), max(lean.price, lean.seconds / 2**50)
    found = judged(lean, lean, count)
    if not fits(found):
        leanest = parts.answer(DEAREST * price, chain) if parts.time_left() > 0 else None
        least = None if leanest is None else judged(leanest, leanest, count)
        if leanest is None or not fits(least):
            return found
        while not fits(found):
            price *= STEP
            leaner = parts.answer(price, chain) if price < leanest.price else leanest
            if leaner is None or parts.time_left() <= 0:
                return least
            rich, lean = (lean, leaner) if leaner.bytes < lean.bytes else (rich, leaner)
            found = judged(lean, lean, count)
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        tried = judged(lean, rich, middle)
        if fits(tried):
            found, high = tried, middle
        else:
            low = middle + 1
    choices = (*lean.choices[:high], *rich.choices[high:])
    cases = (*lean.cases[:high], *rich.cases[high:])
    return _exchanged(parts, searcher, budget_bytes, found, choices, cases)


def _exchanged(
    parts: Parts,
    searcher: Searcher,
    budget_bytes: int,
    found: Found,
    choices: Sequence[Choice],
    cases: Sequence[_Case],
) -> Found:
    """Exchange the choices of single parts, then of two at once, one giving memory that the other takes."""
    menus = [parts.menu(case) for case in cases]
    chosen, left = list(choices), MOST_EXCHANGES

    def better(changes: Mapping[int, Choice]) -> bool:
        nonlocal found, left
        left -= 1
        changed = [changes.get(place, choice) for place, choice in enumerate(chosen)]
        tried = searcher.judge(_policy(parts, searcher, changed), budget_bytes)
        if tried is None or tried.score(budget_bytes) >= found.score(budget_bytes):
            return False
        chosen[:] = changed
        found = tried
        return True

    def around(place: int, reach: int) -> tuple[list[Choice], list[Choice]]:
        menu, size = menus[place], chosen[place].bytes
        leaner = [choice for choice in menu if choice.bytes < size]
        richer = [choice for choice in menu if choice.bytes > size]
        return leaner[-reach:], richer[:reach]

    def moves() -> Iterator[Mapping[int, Choice]]:
        for place in range(len(menus)):
            yield from ({place: choice} for choice in reversed(around(place, REACH)[1]))
        for taker, giver in product(range(len(menus)), repeat=2):
            if taker != giver:
                pairs = product(around(taker, REACH)[1], around(giver, REACH)[0])
                yield from ({taker: more, giver: less} for more, less in pairs)

    improved = True
    while improved:
        improved = False
        for move in moves():
            if left <= 0 or parts.time_left() <= 0:
                return found
            improved |= better(move)
    return found


def _policy(parts: Parts, searcher: Searcher, choices: Sequence[Choice]) -> Policy:
    """Keep what the choices keep and read what they read; what is made again stays until it is not needed."""
    tables = searcher.tables
    kept = {v for choice in choices for v in choice.kept}
    policy = searcher.keeping(kept)
    for part, choice in zip(parts.parts, choices, strict=True):
        for slot, way in zip(part.slots, choice.ways, strict=True):
            for k, option in enumerate(tables.options[slot]):
                if any(w.way == way for w in tables.ways[option]):
                    policy.option[slot] = k
    return policy
