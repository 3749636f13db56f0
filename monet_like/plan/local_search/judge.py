"""What a policy's schedule costs, in Python: the greedy start's judge on machines without the compiled library.

A wheel or an installation from source may lack the library, where there was no compiler. A plan without a solver is
then the greedy start, which nothing improves: 1 to 5 % longer steps (chains of 30 and 80 layers at 70, 50 and 35 % of
their memory). In the tests, the compiled judge gives the same answers to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ...ir.schedule import Schedule
from .policy import AGAIN, FIRST, MOST_EARLY, NEVER, Judgement, Policy, Settings, Tables


class Judge:
    """Evaluates policies of one program."""

    def __init__(self, tables: Tables) -> None:
        self.t = tables

    def judge(self, policy: Policy, budget_bytes: int) -> tuple[Judgement, Schedule] | None:
        """The cost of a policy, and its schedule before `prune`; None if it cannot be carried out."""
        again = _derive(self.t, policy)
        return None if again is None else _Account(self.t, policy, budget_bytes).run(again)

    def improve(self, policy: Policy, _: Settings) -> Policy:
        """The policy as it is: only the compiled library anneals."""
        return policy


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

    def run(self, again: list[list[int]]) -> tuple[Judgement, Schedule] | None:
        t, wanted = self.t, self.wanted
        fixed = t.resident_bytes + t.output_bytes
        forward, ways = list[int](), [0] * len(again)
        rerun: list[list[int]] = [[] for _ in again]
        for slot in reversed(range(len(again))):
            option = t.options[slot][self.policy.option[slot]]
            for v in t.option_reads[option]:
                if not wanted[v] and not t.output[v]:
                    wanted[v] = True
                    self.alive += t.bytes[v]
            ways[slot] = self._way(option, fixed + t.during[slot] + self.alive)
            for c in reversed(again[slot]):
                task = self._settle(c, AGAIN, fixed + t.before[slot])
                if task >= 0:
                    rerun[slot].append(task)
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
                forward.append(task)
                for v in t.writes[c]:
                    self.written[v] = 1 + t.once[c]
        if any(wanted):
            return None
        schedule = Schedule(tuple(forward), tuple(map(tuple, rerun)), tuple(ways))
        return Judgement(self.seconds, self.peak, self.excess, self.steps), schedule

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
        """Whether c would write an output a second time, or keep the only maker of another wanted value
        from running.
        """
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
