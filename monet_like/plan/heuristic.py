"""A fast start without a solver: decide what to keep, derive everything else on demand, and try changes.

A `Policy` says which values the backward may read from the forward (``keep``), which it may read again after
making them once more (``hold``) and which way each slot takes. The schedule follows: what a slot lacks is made
just before it, by the cheapest producers; the forward makes what is read. Every policy is judged by `simulate`.
The search is counted in evaluations and seeded, so that the same program always gives the same plan.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import ScheduleError
from ..program import Cost, Program
from ..schedule import Schedule
from ..simulate import Report, cost_of, simulate
from .needs import dominated_tasks, find_backward_bytes, find_needs, prune, useful_ways

#: Values below this fraction of the budget are not worth a decision.
SMALL = 5000
#: Simulated steps that one search may take in all: bounds its time on programs of thousands of tasks.
MOST_STEPS = 800_000
#: What a whole budget of bytes too many costs, in seconds per second of the schedule, at first and in the end.
FIRST_WEIGHT, LAST_WEIGHT = 0.3, 20.0


@dataclass(frozen=True)
class Policy:
    """The decisions; everything else follows."""

    keep: frozenset[int]
    hold: frozenset[int]
    ways: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A judged schedule."""

    policy: Policy
    schedule: Schedule
    report: Report

    def score(self, budget_bytes: int) -> tuple[float, float]:
        """Bytes over the budget, then seconds: smaller is better."""
        return (float(max(0, self.report.peak_bytes - budget_bytes)), self.report.seconds)

    def penalised(self, budget_bytes: int, weight: float) -> float:
        """Seconds, and more for bytes over the budget."""
        excess = max(0, self.report.peak_bytes - budget_bytes) / max(1, budget_bytes)
        return self.report.seconds * (1 + weight * excess)


class Searcher:
    """Derives schedules from policies and improves them."""

    def __init__(self, program: Program, costs: Mapping[str, Cost], extra_bytes: int = 0, seed: int = 0) -> None:
        self.program, self.costs, self.extra_bytes = program, costs, extra_bytes
        self.random = random.Random(seed)
        self.needs = find_needs(program)
        self.outputs = frozenset(program.outputs)
        self.seconds = [cost_of(task, costs).seconds for task in program.tasks]
        self.reads = [program.forward_reads(task) for task in program.tasks]
        useless = dominated_tasks(program, costs, self.needs.groups)
        makers_of = [[p for p in makers if p not in useless] for makers in program.producers]
        self.makers_again = [[p for p in makers if self._again(p)] for makers in makers_of]
        self.makers_first = [[p for p in makers if program.tasks[p].runs != "again"] for makers in makers_of]
        self.useless = useless
        possible = find_backward_bytes(program).possible
        self.ways = [useful_ways(program, costs, slot, possible[slot]) for slot in range(len(program.slots))]
        self.siblings = {p: group for group in self.needs.groups for p in group}
        self.evaluations = 0
        self.work = 0

    def _again(self, p: int) -> bool:
        return self.needs.rerun[p] and self.program.tasks[p].overwrites is None

    # ---- from a policy to a schedule ----------------------------------------------------------------------

    def derive(self, policy: Policy) -> Schedule | None:
        """The schedule of a policy, or None if something it needs cannot be made."""
        present = set(policy.keep) | self.outputs
        carried: set[int] = set()
        made_again: set[int] = set()
        again: list[tuple[int, ...]] = []
        for slot, way in enumerate(policy.ways):
            needed = self.program.forward_reads(self.program.slots[slot][way])
            runs = self._make(needed, present)
            if runs is None:
                return None
            results = {v for p in runs for v in self.program.tasks[p].writes}
            read = {v for p in runs for v in self.reads[p]} | set(needed)
            carried |= (read - results) - made_again
            made_again |= results & policy.hold
            present |= results & policy.hold
            again.append(tuple(sorted(runs)))
        forward = self._forward(carried | self.outputs)
        if forward is None:
            return None
        return prune(self.program, Schedule(forward, tuple(again), policy.ways))

    def _make(self, wanted: Iterable[int], present: set[int]) -> set[int] | None:
        """The tasks that make again what is wanted and not present, each by its cheapest producer."""
        makers = self.makers_again
        price: dict[int, tuple[float, int]] = {}

        def estimate(v: int) -> float:
            if v in present:
                return 0.0
            if v not in price:
                price[v] = (math.inf, -1)  # while open: a value cannot need itself
                options = [(self.seconds[p] + sum(map(estimate, self.reads[p])), p) for p in makers[v]]
                price[v] = min(options, default=(math.inf, -1))
            return price[v][0]

        runs: set[int] = set()
        pending = [v for v in wanted if v not in present]
        done: set[int] = set()
        while pending:
            v = pending.pop()
            if v in done:
                continue
            done.add(v)
            if estimate(v) == math.inf:
                return None
            p = price[v][1]
            if p not in runs:
                runs.add(p)
                pending += [u for u in self.reads[p] if u not in present]
        return runs

    def _forward(self, wanted: set[int]) -> tuple[int, ...] | None:
        """What the forward runs so that ``wanted`` exists at its end: last values first."""
        producers = self.makers_first
        queue = [(-producers[v][-1] if producers[v] else 1, v) for v in wanted]
        heapq.heapify(queue)
        needed, runs, made = set(wanted), set[int](), set[int]()
        while queue:
            _, v = heapq.heappop(queue)
            if v in made:
                continue
            options = [p for p in producers[v] if not self._conflicts(p, runs, needed)]
            if not options:
                return None
            best = min(options, key=lambda p: (self.seconds[p] + self._missing(p, needed), self._is_in_place(p), p))
            runs.add(best)
            made.update(self.program.tasks[best].writes)
            for u in self.reads[best]:
                if u not in needed:
                    needed.add(u)
                    heapq.heappush(queue, (-producers[u][-1] if producers[u] else 1, u))
        return self._in_place(runs, wanted)

    def _is_in_place(self, p: int) -> bool:
        return self.program.tasks[p].overwrites is not None

    def _missing(self, p: int, needed: set[int]) -> float:
        """Seconds of the cheapest direct producers of what p reads and nothing else wants."""
        return sum(
            min((self.seconds[q] for q in self.makers_first[u]), default=0.0) for u in self.reads[p] if u not in needed
        )

    def _conflicts(self, p: int, runs: set[int], needed: set[int]) -> bool:
        """Whether p would write an output a second time, or take it from the only maker of something needed."""
        results = self.program.tasks[p].writes
        for output in self.outputs.intersection(results):
            for q in self.program.producers[output]:
                if q == p:
                    continue
                if q in runs:
                    return True
                for x in self.program.tasks[q].writes:
                    if x in needed and x not in results and all(self._share(p, r) for r in self.makers_first[x]):
                        return True
        return False

    def _share(self, p: int, q: int) -> bool:
        """Both write the same output."""
        return not self.outputs.isdisjoint(set(self.program.tasks[p].writes) & set(self.program.tasks[q].writes))

    def _in_place(self, runs: set[int], wanted: set[int]) -> tuple[int, ...]:
        """Replace tasks by their in-place variants where nobody reads the overwritten value afterwards."""
        chosen: list[int] = []
        read_later = set(wanted)
        for p in sorted(runs, reverse=True):
            task = self.program.tasks[p]
            best, free = p, {task.overwrites} if task.overwrites is not None else set()
            for q in self.siblings[p]:
                other, taken = self.program.tasks[q], self.program.tasks[q].overwrites
                alike = other.writes == task.writes and set(other.reads) == set(task.reads) and other.runs != "again"
                if taken is None or taken in (read_later - free) | self.outputs or q in self.useless or not alike:
                    continue
                if self.seconds[q] <= self.seconds[best]:
                    best = q
            chosen.append(best)
            read_later |= set(self.reads[best])
        return tuple(reversed(chosen))

    # ---- search -------------------------------------------------------------------------------------------

    def judge(self, policy: Policy) -> Found | None:
        """Derive and simulate."""
        self.evaluations += 1
        schedule = self.derive(policy)
        if schedule is None:
            return None
        try:
            report = simulate(self.program, schedule, self.costs, extra_bytes=self.extra_bytes)
        except ScheduleError:  # a derived schedule may overwrite what is read later: not a plan
            return None
        self.work += len(report.steps)
        return Found(policy, schedule, report)

    def starts(self, budget_bytes: int) -> list[Found]:
        """Keep everything, or only what must be kept, with the fastest and with the smallest ways."""
        everything = frozenset(v for v, value in enumerate(self.program.values) if value.kind == "forward")
        fastest = tuple(min(ways, key=lambda k, s=s: self._way_seconds(s, k)) for s, ways in enumerate(self.ways))  # type: ignore[misc]
        smallest = tuple(min(ways, key=lambda k, s=s: self._way_bytes(s, k)) for s, ways in enumerate(self.ways))  # type: ignore[misc]
        small = {v for v in everything if self.program.values[v].bytes * SMALL <= budget_bytes}
        single = frozenset(v for v in everything if not self.makers_again[v] or v in small)
        found = [
            self.judge(Policy(keep, hold, ways))
            for ways in (fastest, smallest)
            for keep, hold in ((everything, everything), (single, everything), (single, frozenset[int]()))
        ]
        return [f for f in found if f is not None]

    def _way_seconds(self, slot: int, k: int) -> tuple[float, float]:
        return cost_of(self.program.slots[slot][k], self.costs).seconds, self._way_bytes(slot, k)

    def _way_bytes(self, slot: int, k: int) -> float:
        way = self.program.slots[slot][k]
        return float(sum(self.program.values[v].bytes for v in self.program.forward_reads(way)))

    def greedy(self, found: Found, budget_bytes: int) -> Found:
        """Stop keeping values, cheapest to make per byte first, until the peak fits."""
        values = self.program.values

        def price(v: int) -> float:
            makers = self.makers_again[v]
            return min(self.seconds[p] for p in makers) / max(1, values[v].bytes) if makers else math.inf

        best = found
        droppable = [v for v in found.policy.keep if price(v) < math.inf and values[v].bytes * SMALL > budget_bytes]
        order = sorted(droppable, key=lambda v: (price(v), v))
        chunk = 1 + len(order) // 100
        for begin in range(0, len(order), chunk):
            if best.report.peak_bytes <= budget_bytes:
                break
            dropped = best.policy.keep.difference(order[begin : begin + chunk])
            tried = self.judge(Policy(dropped, best.policy.hold, best.policy.ways))
            if tried is not None and tried.report.peak_bytes <= best.report.peak_bytes:
                best = tried
        return best

    def improve(self, found: Found, budget_bytes: int, evaluations: int) -> Found:
        """Simulated annealing: bytes over the budget cost seconds, little at first and much in the end.

        Returns the fastest schedule seen that fits, or the one with the lowest peak.
        """
        candidates = [
            v
            for v, value in enumerate(self.program.values)
            if value.kind == "forward"
            and self.makers_again[v]
            and self.needs.last[v] > 0
            and value.bytes * SMALL > budget_bytes
        ]
        slots = [slot for slot, ways in enumerate(self.ways) if len(ways) > 1]
        if not candidates and not slots:
            return found
        best = current = found
        work = self.work
        for turn in range(evaluations):
            cooled = max(turn / evaluations, (self.work - work) / MOST_STEPS)
            if cooled > 1:
                break
            tried = self.judge(self._change(current.policy, candidates, slots))
            if tried is None:
                continue
            weight = FIRST_WEIGHT * (LAST_WEIGHT / FIRST_WEIGHT) ** cooled
            slack = 0.001 * (1 - cooled) * current.report.seconds * self.random.random()
            if tried.penalised(budget_bytes, weight) <= current.penalised(budget_bytes, weight) + slack:
                current = tried
            if tried.score(budget_bytes) < best.score(budget_bytes):
                best = tried
        return best

    def _change(self, policy: Policy, candidates: list[int], slots: list[int]) -> Policy:
        """One to three random changes, near each other, since neighbours replace each other."""
        keep, hold, ways = set(policy.keep), set(policy.hold), list(policy.ways)
        centre = self.random.randrange(len(candidates)) if candidates else 0
        for _ in range(self.random.choice((1, 2, 3))):
            kind = self.random.random()
            if slots and (kind < 0.2 or not candidates):
                slot = self.random.choice(slots)
                ways[slot] = self.random.choice(self.ways[slot])
                continue
            index = min(len(candidates) - 1, max(0, centre + self.random.randint(-6, 6)))
            (keep if kind < 0.75 else hold).symmetric_difference_update({candidates[index]})
        return Policy(frozenset(keep), frozenset(hold), tuple(ways))


def find_start(
    program: Program,
    costs: Mapping[str, Cost],
    budget_bytes: int,
    *,
    extra_bytes: int = 0,
    seed: int = 0,
    evaluations: int = 1200,
) -> Schedule | None:
    """A schedule within ``budget_bytes`` (bytes), as fast as a short search finds; None if it finds none.

    Args:
        program, costs: what to plan.
        budget_bytes: the limit on the peak.
        extra_bytes: resident memory beyond the program's.
        seed: of the random changes.
        evaluations: how many schedules to judge in the search.
    """
    found = _search(program, costs, budget_bytes, extra_bytes, seed, evaluations)
    return found.schedule if found is not None and found.report.peak_bytes <= budget_bytes else None


def smallest_known(
    program: Program, costs: Mapping[str, Cost], *, extra_bytes: int = 0, seed: int = 0, evaluations: int = 300
) -> tuple[Schedule, Report] | None:
    """The schedule with the lowest peak that a short search finds, and its report. Not proven to be the lowest."""
    found = _search(program, costs, 0, extra_bytes, seed, evaluations)
    return (found.schedule, found.report) if found is not None else None


def _search(
    program: Program, costs: Mapping[str, Cost], budget_bytes: int, extra_bytes: int, seed: int, evaluations: int
) -> Found | None:
    searcher = Searcher(program, costs, extra_bytes, seed)
    starts = searcher.starts(budget_bytes)
    starts += [searcher.greedy(found, budget_bytes) for found in starts[:2]]
    if not starts:
        return None
    # A budget of 0 asks for the lowest peak: there only bytes count.
    first = min(starts, key=lambda f: f.penalised(budget_bytes, 0.5) if budget_bytes else f.score(0))
    best = searcher.improve(first, budget_bytes, evaluations)
    for _ in range(2 if budget_bytes else 0):  # often it ends a hair above the budget
        if best.report.peak_bytes <= budget_bytes:
            break
        best = searcher.improve(best, budget_bytes, evaluations)
    return min([best, *starts], key=lambda found: found.score(budget_bytes))
