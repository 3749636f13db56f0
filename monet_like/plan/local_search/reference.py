"""The local search in Python: the twin of csrc/plan/local_search.cpp, for machines without the compiled library.

A wheel or an installation from source may lack the library, where there was no compiler. Planning then works all the
same, some hundred times slower: its 1,200 evaluations give 1 to 5 % shorter steps than the greedy start alone (chains
of 30 and 80 layers at 70, 50 and 35 % of their memory). It is also the oracle of the compiled search in the tests: same
order of floating-point operations and same random numbers, hence the same answer to the bit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from math import inf
from typing import Any

from .policy import AGAIN, FIRST, MOST_EARLY, NEVER, Judgement, Policy, Runs, Settings, Tables

#: Stages before a use from which a value may be made early.
MOST_AHEAD = 5


class Random:
    """The random numbers of both engines: splitmix64 (Steele, Lea, Flood 2014)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def unit(self) -> float:
        """In [0, 1)."""
        mask = 2**64 - 1
        self.state = z = (self.state + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53

    def below(self, n: int) -> int:
        """In 0 .. n - 1."""
        return int(self.unit() * n)


class PythonEngine:
    """Evaluates and anneals policies of one program."""

    name = "python"

    def __init__(self, tables: Tables) -> None:
        self.t = tables

    def judge(self, policy: Policy, budget_bytes: int) -> tuple[Judgement, Runs] | None:
        """The cost of a policy, and what its schedule runs; None if it cannot be carried out."""
        again = _derive(self.t, policy)
        return None if again is None else _Account(self.t, policy, budget_bytes).run(again)

    def improve(self, policy: Policy, settings: Settings) -> Policy:
        """Simulated annealing: the fastest policy seen that fits, or the one nearest to fitting."""
        random, current = Random(settings.seed), policy.copy()
        first = self.judge(current, settings.budget_bytes)
        if first is None:
            return policy
        now = top = first[0]
        best = current.copy()
        steps = 0
        for turn in range(settings.evaluations):
            cooled = max(turn / settings.evaluations, steps / settings.most_steps)
            if cooled >= 1.0:
                break
            undo = _change(self.t, current, settings, random)
            judged = self.judge(current, settings.budget_bytes)
            steps += judged[0].steps if judged else len(self.t.options)
            weight = settings.first_weight * (settings.last_weight / settings.first_weight) ** cooled
            temperature = (
                settings.first_temperature * (settings.last_temperature / settings.first_temperature) ** cooled
            )
            slack = -temperature * now.seconds * math.log(1.0 - random.unit())
            if judged is None or penalised(judged[0], settings, weight) > penalised(now, settings, weight) + slack:
                for field, index, old in reversed(undo):
                    field[index] = old
                continue
            now = judged[0]
            if better(now, top, settings.budget_bytes):
                top, best = now, current.copy()
        return best


def penalised(judged: Judgement, settings: Settings, weight: float) -> float:
    """Seconds with a penalty for bytes over the budget: those of the peak, and the average of all runs."""
    budget = float(settings.budget_bytes)
    over = (
        float(judged.peak_bytes - settings.budget_bytes) / budget if judged.peak_bytes > settings.budget_bytes else 0.0
    )
    return judged.seconds * (1.0 + weight * (over + judged.excess / (budget * float(judged.steps + 1))))


def better(one: Judgement, other: Judgement, budget_bytes: int) -> bool:
    """Whether one has fewer bytes over the budget than the other, or as many and fewer seconds."""
    left, right = max(0, one.peak_bytes - budget_bytes), max(0, other.peak_bytes - budget_bytes)
    return left < right if left != right else one.seconds < other.seconds


def _change(t: Tables, policy: Policy, s: Settings, random: Random) -> list[tuple[Any, int, int]]:
    """Make one to four random changes; returns what undoes them, as (field, index, old value).

    They are often near each other, since neighbours replace each other; else apart, where one gives the memory that
    another takes.
    """
    undo: list[tuple[Any, int, int]] = []

    def put(field: Any, index: int, to: int) -> None:
        undo.append((field, index, field[index]))
        field[index] = to

    if s.candidates and random.unit() < 0.1:
        _repeat(t, policy, s, random, put)
        return undo
    centre = 0
    for turn in range(1 + random.below(4)):
        if s.candidates and (not turn or random.unit() < 0.4):
            centre = random.below(len(s.candidates))
        kind = random.unit()
        if s.choices and (kind < 0.1 or not s.candidates):
            slot = s.choices[random.below(len(s.choices))]
            put(policy.option, slot, random.below(len(t.options[slot])))
        elif s.preferring and kind < 0.15:
            v = s.preferring[random.below(len(s.preferring))]
            makers = (*t.first[v], -1)
            put(policy.prefer, v, makers[random.below(len(makers))])
        elif s.candidates:
            near = centre + random.below(13) - 6
            v = s.candidates[min(len(s.candidates) - 1, max(0, near))]
            if kind < 0.35 and t.uses[v]:
                slot = t.uses[v][random.below(len(t.uses[v]))]
                put(policy.option, slot, random.below(len(t.options[slot])))
            elif kind < 0.75:
                put(policy.keep, v, 1 - policy.keep[v])
            elif kind < 0.95:
                put(policy.hold, v, 1 - policy.hold[v])
            elif kind < 0.975:
                ends = (*t.uses[v], NEVER)
                put(policy.cut, v, ends[random.below(len(ends))])
            else:
                end = t.ends[v]
                if t.uses[v] and random.unit() < 0.7:
                    end = bisect_left(t.stages, t.uses[v][random.below(len(t.uses[v]))])
                place = end - random.below(MOST_AHEAD + 1)
                put(
                    policy.early,
                    MOST_EARLY * v + random.below(MOST_EARLY),
                    t.stages[place] if 0 <= place < end else NEVER,
                )
    return undo


def _repeat(t: Tables, policy: Policy, s: Settings, random: Random, put: Any) -> None:
    """Copy the decisions of one stretch of values to another: models are made of blocks that repeat."""
    length = 1 + random.below(12)
    to, source = random.below(len(s.candidates)), random.below(len(s.candidates))
    for v, like in zip(s.candidates[to : to + length], s.candidates[source : source + length], strict=False):
        if len(t.uses[v]) != len(t.uses[like]):
            return
        for field in (policy.keep, policy.hold):
            if field[v] != field[like]:
                put(field, v, field[like])
        for slot, other in zip(t.uses[v], t.uses[like], strict=True):
            if policy.option[other] < len(t.options[slot]):
                put(policy.option, slot, policy.option[other])


def _derive(t: Tables, policy: Policy) -> list[list[int]] | None:
    """For every slot, the classes that run again just before it; None if a value cannot be made."""
    present = [bool(kept) or output for kept, output in zip(policy.keep, t.output, strict=True)]
    ends: dict[int, list[int]] = {}
    for v, slot in enumerate(policy.cut):
        if slot != NEVER and not t.output[v]:
            ends.setdefault(slot, []).append(v)
    early: dict[int, list[int]] = {}
    for place in reversed(range(len(policy.early))):
        if policy.early[place] != NEVER and not t.output[place // MOST_EARLY]:
            early.setdefault(policy.early[place], []).append(place // MOST_EARLY)
    again: list[list[int]] = []
    for slot, options in enumerate(t.options):
        runs = _make(t, (*t.option_reads[options[policy.option[slot]]], *early.get(slot, ())), present)
        if runs is None:
            return None
        again.append(runs)
        for c in runs:
            for v in t.writes[c]:
                if policy.hold[v] and slot < policy.cut[v]:
                    present[v] = True
        for v in ends.get(slot, ()):
            present[v] = False
        for v in early.get(slot, ()):
            present[v] = True
    return again


def _make(t: Tables, needed: Iterable[int], present: list[bool]) -> list[int] | None:
    """The classes that make what is needed and not present, by the fewest seconds, in order."""
    price: dict[int, tuple[float, int]] = {}
    pending = []
    for v in needed:
        if not present[v]:
            _estimate(t, v, present, price)
            if price[v][0] == inf:
                return None
            pending.append(v)
    chosen: set[int] = set()
    while pending:
        c = price[pending.pop()][1]
        if c not in chosen:
            chosen.add(c)
            pending += (u for u in t.reads[c] if not present[u])
    return sorted(chosen)


def _estimate(t: Tables, wanted: int, present: list[bool], price: dict[int, tuple[float, int]]) -> None:
    """Seconds to make a value again, each ancestor counted as often as it is read; without recursion."""
    order = [wanted]
    while order:
        v = order[-1]
        if v in price:
            order.pop()
            continue
        open_ = [u for c in t.again[v] for u in t.reads[c] if not present[u] and u not in price]
        if open_:
            order += open_
            continue
        order.pop()
        best = (inf, -1)
        for c in t.again[v]:
            cost = t.again_seconds[c]
            for u in t.reads[c]:
                if not present[u]:
                    cost += price[u][0]
            if cost < best[0]:
                best = (cost, c)
        price[v] = best


class _Account:
    """The memory and seconds of a policy, by one pass from the last run back to the first; see policy.py."""

    def __init__(self, tables: Tables, policy: Policy, budget_bytes: int) -> None:
        self.t, self.policy, self.budget = tables, policy, budget_bytes
        self.wanted = [False] * len(tables.bytes)
        self.written = [0] * len(tables.bytes)  # in the forward: 1, or 2 by what runs only once
        self.alive = 0
        self.seconds, self.peak, self.excess, self.steps = 0.0, 0, 0.0, 0

    def run(self, again: list[list[int]]) -> tuple[Judgement, Runs] | None:
        t, wanted = self.t, self.wanted
        fixed = t.resident_bytes + t.output_bytes
        runs = Runs([], [[] for _ in again], [0] * len(again))
        for slot in reversed(range(len(again))):
            option = t.options[slot][self.policy.option[slot]]
            for v in t.option_reads[option]:
                if not wanted[v] and not t.output[v]:
                    wanted[v] = True
                    self.alive += t.bytes[v]
            runs.ways[slot] = self._way(option, fixed + t.during[slot] + self.alive)
            for c in reversed(again[slot]):
                task = self._settle(c, AGAIN, fixed + t.before[slot])
                if task >= 0:
                    runs.again[slot].append(task)
        for v, is_output in enumerate(t.output):
            if is_output:
                wanted[v] = True
                self.alive += t.bytes[v]
        for c in reversed(range(len(t.writes))):
            verdict = self._forward_runs(c)
            if verdict is None:
                return None
            if verdict:
                task = self._settle(c, FIRST, t.resident_bytes)
                if task < 0:
                    return None
                runs.forward.append(task)
                for v in t.writes[c]:
                    self.written[v] = 1 + t.once[c]
        if any(wanted):
            return None
        return Judgement(self.seconds, self.peak, self.excess, self.steps), runs

    def _count(self, memory: int, seconds: float) -> None:
        self.seconds += seconds
        self.peak = max(self.peak, memory)
        if memory > self.budget:
            self.excess += float(memory - self.budget)
        self.steps += 1

    def _way(self, option: int, memory: int) -> int:
        ways = self.t.ways[option]
        best = next((w for w in ways if memory + w.extra <= self.budget), None) or min(ways, key=lambda w: w.extra)
        self._count(memory + best.extra, best.seconds)
        return best.way

    def _settle(self, c: int, runs: int, fixed: int) -> int:
        """Run a class: its results are no longer wanted before it, its reads are. The task; -1 if it is of no use."""
        t, wanted = self.t, self.wanted
        made = [v for v in t.writes[c] if wanted[v]]
        if not made:
            return -1
        for v in made:
            wanted[v] = False
            self.alive -= t.bytes[v]
        fresh = [u for u in t.reads[c] if not wanted[u] and not t.output[u]]
        for u in fresh:
            wanted[u] = True
            self.alive += t.bytes[u]
        memory = fixed + self.alive + t.written_bytes[c]
        able = [m for m in t.members[c] if m.runs & runs and (m.taken < 0 or m.taken in fresh)]
        best = next((m for m in able if memory + m.extra <= self.budget), None) or min(
            able, key=lambda m: m.extra, default=None
        )
        if best is None:
            return -1
        self._count(memory + best.extra, best.seconds)
        return best.task

    def _forward_runs(self, c: int) -> bool | None:
        """Whether the forward runs a class, all later ones being settled; None if the policy cannot be carried out."""
        t, prefer = self.t, self.policy.prefer
        made = [v for v in t.writes[c] if self.wanted[v]]
        if not made or t.first_seconds[c] == inf:
            return False
        alone = any(t.first[v][0] == c for v in made)
        if any(self.written[v] + t.once[c] > 1 for v in t.writes[c]) or (t.shared[c] and self._conflicts(c)):
            return None if alone else False
        if alone:
            return True
        if self._covered(c, made):
            return False
        if any(prefer[v] == c for v in made):
            return True
        if any(0 <= prefer[v] < c for v in made):
            return False
        mine = self._effort(c)
        cheaper = (d for v in made for d in t.first[v] if d < c and self._effort(d) < mine)
        return all(t.shared[d] and self._conflicts(d) for d in cheaper)  # what is blocked is no alternative

    def _share(self, c: int, d: int) -> bool:
        return any(self.t.output[v] and v in self.t.writes[d] for v in self.t.writes[c])

    def _conflicts(self, c: int) -> bool:
        """Whether c would write an output a second time, or keep the only maker of another wanted value from running."""
        t = self.t
        for o in t.writes[c]:
            if not t.output[o]:
                continue
            if not self.wanted[o]:
                return True
            for d in t.first[o]:
                for v in t.writes[d] if d != c else ():
                    others = any(e < c and not self._share(e, c) for e in t.first[v])
                    if self.wanted[v] and v not in t.writes[c] and not others:
                        return True
        return False

    def _covered(self, c: int, made: list[int]) -> bool:
        """Whether an earlier class that must run for another value makes all values that c would be run for."""
        t = self.t
        for d in t.first[made[0]]:
            if d >= c:
                break
            others = [u for u in t.writes[d] if self.wanted[u] and u not in t.writes[c]]
            must = any(t.first[u][0] == d and (len(t.first[u]) == 1 or t.first[u][1] > c) for u in others)
            if must and all(u in t.writes[d] for u in made):
                return True
        return False

    def _effort(self, c: int) -> float:
        """Seconds of a class and of the cheapest makers of what it reads and nothing else wants."""
        t = self.t
        cost = t.first_seconds[c]
        for u in t.reads[c]:
            if not self.wanted[u]:
                least = min((t.first_seconds[d] for d in t.first[u]), default=inf)
                if least < inf:
                    cost += least
        return cost
