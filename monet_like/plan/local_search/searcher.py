"""The local search: a fast plan without a solver, by greedy cuts, crossover and simulated annealing of policies.

`find_start` finds a schedule within a budget, `smallest_known` one with a low peak. The search is counted in
evaluations and seeded, so the same program gives the same plan every time, unless the caller's clock ends it first.
Policies are explained in policy.py; the simulator judges the schedules that come of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf, isqrt

from ...errors import ScheduleError
from ...ir.schedule import Schedule, prune
from ...ir.simulate import Report
from ..instance import Instance
from ..result import Smallest
from .native import engine
from .policy import MOST_EARLY, Judgement, Policy, Settings, make_tables, to_policy
from .uncompiled import Uncompiled

#: Policies evaluated by one annealing by default, and the most runs of tasks in all of them: a second or two.
EVALUATIONS = 120_000
#: A quick plan has this share of them (ResNet-50 at 60 and 40 % of plain PyTorch's peak: 0.3 % longer steps).
QUICK_SHARE = 0.25
MOST_STEPS = 60_000_000
#: Later annealings start at a lower temperature and a higher weight of the budget (measured: ResNet-50 at 5 GB on
#: MONeT's costs, 10 s: 0.4 % better than with the first one's).
LATER_TEMPERATURE, LATER_WEIGHT = 1e-3, 3.0
#: A policy slower than this multiple of keeping everything is crossed over with one that began fast and gave up memory
#: little by little, at most this often (measured: ResNet-50 at 25 % of plain PyTorch's peak: from 6 steps' time to
#: 1.28).
SLOW, MOST_CROSSOVERS = 1.5, 3
#: Places at which the stretches of values begin and end in a crossover.
CROSSINGS = 40


@dataclass(frozen=True)
class Found:
    """A policy and its cost."""

    policy: Policy
    judgement: Judgement

    def score(self, budget_bytes: int) -> tuple[int, float]:
        """Bytes over the budget, then seconds: smaller is better."""
        return max(0, self.judgement.peak_bytes - budget_bytes), self.judgement.seconds


class Searcher:
    """Policies of one instance: starts, greedy cuts, crossover, annealing."""

    def __init__(self, instance: Instance, pin_bytes: int = 0) -> None:
        self.instance, self.tables = instance, make_tables(instance, pin_bytes)
        self.engine = engine(instance, self.tables)

    def judge(self, policy: Policy, budget_bytes: int) -> Found | None:
        """Evaluate a policy; None if it cannot be carried out."""
        judged = self.engine.judge(policy, budget_bytes)
        return None if judged is None else Found(policy, judged[0])

    def plan(self, policy: Policy, budget_bytes: int) -> tuple[Schedule, Report] | None:
        """A policy's schedule and the simulator's report on it; None if it cannot be carried out."""
        judged = self.engine.judge(policy, budget_bytes)
        if judged is None:
            return None
        schedule = prune(self.instance.program, judged[1])
        try:
            return schedule, self.instance.simulate(schedule)
        except ScheduleError:  # the tasks of two classes interleave in one stage: not a plan
            return None

    def fitting(self, policy: Policy, budget_bytes: int) -> Schedule | None:
        """A policy's schedule if it fits."""
        planned = self.plan(policy, budget_bytes)
        return planned[0] if planned is not None and planned[1].peak_bytes <= budget_bytes else None

    def keeping(self, keep: Iterable[int]) -> Policy:
        """The policy that keeps these forward values and those that cannot be made again, and makes all others again
        once.
        """
        kept = {*keep, *self._single()}
        return self.tables.policy([v in kept for v in range(len(self.tables.bytes))], True, False)

    def _single(self) -> set[int]:
        """Values that cannot be made again and that something needs."""
        return {v for v, makers in enumerate(self.tables.again) if not makers}.difference(self.tables.changeable)

    def starts(self, budget_bytes: int) -> list[Found]:
        """Simple policies: keep everything, or only what must be kept, with the fastest and with the smallest ways.

        Where values can be made again from copies, also: keep what must be kept and the copies.
        """
        count, once = range(len(self.tables.bytes)), self._single()
        everything, single = [True] * len(count), [v in once for v in count]
        copies = [not makers for makers in self.tables.again]
        keeps = [(everything, True), (single, True), (single, False)]
        policies = [self.tables.policy(*keep, smallest) for smallest in (False, True) for keep in keeps]
        if copies != single:
            policies += [self.tables.policy(copies, True, smallest) for smallest in (False, True)]
        return [found for policy in policies if (found := self.judge(policy, budget_bytes)) is not None]

    def cut_starts(self, budget_bytes: int) -> list[Found]:
        """`starts`, and two of them after greedy cuts; the best first."""
        starts = self.starts(budget_bytes)
        starts += [self.greedy(found, budget_bytes) for found in starts[:4:3]]
        return sorted(starts, key=lambda f: f.score(budget_bytes))

    def greedy(self, found: Found, budget_bytes: int) -> Found:
        """Stop keeping values, cheapest to make per byte first, until the peak fits."""
        tables = self.tables

        def price(v: int) -> float:
            return min((tables.again_seconds[c] for c in tables.again[v]), default=inf) / max(1, tables.bytes[v])

        order = sorted(self.tables.changeable, key=lambda v: (price(v), v))
        chunk = 1 + len(order) // 100
        for begin in range(0, len(order), chunk):
            if found.judgement.peak_bytes <= budget_bytes:
                break
            policy = found.policy.copy()
            for v in order[begin : begin + chunk]:
                policy.keep[v] = 0
            tried = self.judge(policy, budget_bytes)
            if tried is not None and tried.judgement.peak_bytes <= found.judgement.peak_bytes:
                found = tried
        return found

    def crossover(self, one: Found, other: Found, budget_bytes: int, crossings: int = CROSSINGS) -> Found:
        """Crossover: the best of both and of all policies that decide as ``other`` in one stretch of values, else as
        ``one``.

        A stretch may wrap around the end, so either policy may have the smaller part. Near the lowest peak a few places
        need many reruns, and a search that has found them seldom finds its way back everywhere else.
        """
        values = self.tables.changeable
        places = sorted({round(i * len(values) / crossings) for i in range(crossings)})  # of a circle
        found = [one, other]
        for begin in places:
            for end in places:
                if begin != end:
                    stretch = values[begin:end] if begin < end else (*values[begin:], *values[:end])
                    mixed = self.judge(self._mixed(one.policy, other.policy, stretch), budget_bytes)
                    found += [] if mixed is None else [mixed]
        return min(found, key=lambda f: f.score(budget_bytes))

    def _mixed(self, one: Policy, other: Policy, values: Iterable[int]) -> Policy:
        """``one`` with the decisions of ``other`` about ``values`` and the slots that may read them."""
        mixed = one.copy()
        for v in values:
            mixed.keep[v], mixed.hold[v] = other.keep[v], other.hold[v]
            mixed.cut[v], mixed.prefer[v] = other.cut[v], other.prefer[v]
            mixed.early[MOST_EARLY * v : MOST_EARLY * (v + 1)] = other.early[MOST_EARLY * v : MOST_EARLY * (v + 1)]
            for slot in self.tables.uses[v]:
                mixed.option[slot] = other.option[slot]
        return mixed

    def improve(
        self,
        starts: Sequence[Found],
        budget_bytes: int,
        evaluations: int,
        seed: int,
        *,
        later: bool = False,
        effort: int = 1,
    ) -> Found:
        """Anneal from every start, several at once; the best of what came and of the starts.

        Args:
            later: start at a lower temperature.
            effort: multiplies the evaluations and the most runs of tasks.
        """
        cooler = {"first_temperature": LATER_TEMPERATURE, "first_weight": LATER_WEIGHT} if later else {}
        settings = [
            Settings(
                budget_bytes=max(1, budget_bytes),
                evaluations=effort * evaluations,
                most_steps=effort * MOST_STEPS,
                seed=seed + number,
                **cooler,
            )
            for number in range(len(starts))
        ]
        with ThreadPoolExecutor(2) as pool:
            policies = list(pool.map(lambda f, s: self.engine.improve(f.policy, s), starts, settings))
        found = [*starts, *(self.judge(policy, budget_bytes) for policy in policies)]
        return min((f for f in found if f is not None), key=lambda f: f.score(budget_bytes))


def quick_evaluations() -> int:
    """`evaluations` of `find_start` for less than a second's search."""
    return int(QUICK_SHARE * EVALUATIONS)


def find_start(
    instance: Instance,
    budget_bytes: int,
    *,
    pin_bytes: int = 0,
    seed: int = 0,
    evaluations: int | None = None,
    rounds: int = 1,
    start: Schedule | None = None,
    effort: int = 1,
    enough: Callable[[bool], bool] = lambda fits: False,
) -> Schedule | None:
    """A schedule within ``budget_bytes`` (bytes), as fast as the search finds; None if it finds none.

    Args:
        pin_bytes: values up to this size are always kept, and counted throughout.
        seed: of the random changes.
        evaluations: policies judged by each of the two annealings of a round; None: a second or two's worth.
        rounds: each but the first anneals the best policy of the one before.
        start: a schedule to begin with, instead of what is made here.
        effort: multiplies the length of the annealing in every later round.
        enough: called with whether a schedule that fits is found; returns whether time is up. Called before every
            annealing but that of the starts.
    """
    searcher = Searcher(instance, pin_bytes)
    given = None if start is None else searcher.judge(to_policy(instance.program, searcher.tables, start), budget_bytes)
    found = _search(searcher, budget_bytes, seed, evaluations, rounds, given, effort, enough)
    if found is None:
        return None
    fitting = searcher.fitting(found.policy, budget_bytes)
    if (
        fitting is None and found.judgement.peak_bytes <= budget_bytes
    ):  # the policy is not a plan: one of the starts may be
        begun = searcher.cut_starts(budget_bytes)
        fitting = next(filter(None, (searcher.fitting(f.policy, budget_bytes) for f in begun)), None)
    return fitting


def smallest_known(
    instance: Instance, *, evaluations: int | None = None, enough: Callable[[], bool] = lambda: False
) -> Smallest | None:
    """The schedule with the lowest peak that a search finds. Not proven to be the lowest.

    Args:
        enough: returns whether time is up; asked before every annealing.
    """
    searcher = Searcher(instance)
    starts = searcher.starts(0)
    if not starts:
        return None
    count = evaluations if evaluations is not None else EVALUATIONS // 10
    starts.sort(key=lambda f: f.judgement.peak_bytes)
    best = _lower_peak(searcher, starts[0], 0, count, 0, enough)
    planned = (searcher.plan(f.policy, f.judgement.peak_bytes) for f in (best, *starts))
    found = next(filter(None, planned), None)
    return found and Smallest(*found, instance.floor[0])


def _lower_peak(
    searcher: Searcher,
    found: Found,
    enough_bytes: int,
    evaluations: int,
    seed: int,
    enough: Callable[[], bool],
) -> Found:
    """Lower the peak step by step, down to ``enough_bytes`` or until time is up; the step is halved where nothing is
    found.

    Two annealings at a time, at the lower temperature, each time with other random numbers: ResNet-50's smallest peak
    fell from 20 to 18 % of plain PyTorch's by that, U-Net's from 35 to 30 %.
    """
    step = 0.2
    while step > 0.002 and found.judgement.peak_bytes > enough_bytes and not enough():
        target = max(enough_bytes, int(found.judgement.peak_bytes * (1 - step)))
        tried = searcher.improve([found, found], target, evaluations, seed, later=True)
        seed += 2
        step = step if tried.judgement.peak_bytes <= target else step / 2
        found = min(found, tried, key=lambda f: f.judgement.peak_bytes)
    return found


def _search(
    searcher: Searcher,
    budget_bytes: int,
    seed: int,
    evaluations: int | None,
    rounds: int,
    given: Found | None,
    effort: int,
    enough: Callable[[bool], bool],
) -> Found | None:
    best: Found

    def over() -> bool:
        return enough(best.judgement.peak_bytes <= budget_bytes)

    count = evaluations if evaluations is not None else EVALUATIONS
    if given is not None:
        best = given
    else:
        starts = searcher.cut_starts(budget_bytes)
        if not starts:
            return None
        if not count or isinstance(searcher.engine, Uncompiled):
            return starts[0]
        best = searcher.improve(starts[:2], budget_bytes, count, seed)
        rounds -= 1
        for turn in range(1, 3):  # often it ends a hair above the budget
            if best.judgement.peak_bytes <= budget_bytes or over():
                break
            best = searcher.improve([best, best], budget_bytes, count, seed + 1000 * turn)
        fastest = min(starts, key=lambda f: f.judgement.seconds)
        for turn in range(MOST_CROSSOVERS):
            before = best.score(budget_bytes)
            if before <= (0, SLOW * fastest.judgement.seconds) or over():
                break
            other = _lower_peak(searcher, fastest, budget_bytes, count // 10, seed + 7000 + 100 * turn, over)
            best = searcher.crossover(best, other, budget_bytes, min(CROSSINGS, isqrt(count // 8)))
            if not over():
                best = searcher.improve([best, best], budget_bytes, count // 2, seed + 8000 + 100 * turn, later=True)
            if best.score(budget_bytes) == before:
                break
        best = _lower_peak(searcher, best, budget_bytes, count // 10, seed + 5000, over)
    for turn in range(rounds):
        if isinstance(searcher.engine, Uncompiled) or over():
            break
        best = searcher.improve([best, best], budget_bytes, count, seed + 2 * turn + 2, later=True, effort=effort)
    return best
