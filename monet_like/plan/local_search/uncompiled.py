"""Policies without the compiled library: plain PyTorch's forward, the cheapest reruns, and the simulator's costs.

A wheel or an installation from source may lack the library, where there was no compiler. A plan without a solver is
then the greedy start, which nothing improves.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ScheduleError
from ...ir.schedule import Schedule, prune
from ..baseline import store_all
from ..instance import Instance
from .policy import AGAIN, FIRST, Judgement, Policy, Settings, Tables


class Uncompiled:
    """Evaluates policies of one program, each as a schedule for the simulator. `Policy.early` and ``prefer`` are not
    followed, and of the tasks that do the same, one that takes over no storage runs.
    """

    def __init__(self, instance: Instance, tables: Tables) -> None:
        self.instance, self.t = instance, tables
        tasks = instance.program.tasks
        forward = set(store_all(instance.program).forward)
        made = {v for p in forward for v in tasks[p].writes}
        inputs = {v for v, producers in enumerate(instance.program.producers) if not producers}
        for c, (reads, writes) in enumerate(zip(tables.reads, tables.writes, strict=True)):
            p = self._task(c, FIRST)
            if p >= 0 and made.isdisjoint(writes) and (made | inputs).issuperset(reads):  # such as a packed copy
                forward.add(p)
                made.update(writes)
        self.forward, self.made = tuple(sorted(forward)), made

    def judge(self, policy: Policy, budget_bytes: int) -> tuple[Judgement, Schedule] | None:
        """The cost of a policy, and its schedule; None if it cannot be carried out."""
        t = self.t
        present = [(bool(kept) and v in self.made) or t.output[v] for v, kept in enumerate(policy.keep)]
        again, ways = list[tuple[int, ...]](), list[int]()
        for slot, options in enumerate(t.options):
            for option in (options[policy.option[slot]], *options):
                runs = self._reruns(t.option_reads[option], present)
                if runs is not None:
                    break
            else:
                return None
            again.append(tuple(sorted(self._task(c, AGAIN) for c in runs)))
            ways.append(t.ways[option][0].way)
            for v in (v for c in runs for v in t.writes[c]):
                present[v] = present[v] or bool(policy.hold[v])
            present = [there and (slot < policy.cut[v] or t.output[v]) for v, there in enumerate(present)]
        schedule = prune(self.instance.program, Schedule(self.forward, tuple(again), tuple(ways)))
        try:
            report = self.instance.simulate(schedule)
        except ScheduleError:
            return None
        excess = float(max(0, report.peak_bytes - budget_bytes))
        return Judgement(report.seconds, report.peak_bytes, excess, len(schedule.runs())), schedule

    def improve(self, policy: Policy, _: Settings) -> Policy:
        """The policy as it is: only the compiled library anneals."""
        return policy

    def _reruns(self, needed: Iterable[int], present: list[bool]) -> set[int] | None:
        """The classes that make what is needed and not present; None if a value cannot be made."""
        t, chosen = self.t, set[int]()
        pending = [v for v in needed if not present[v]]
        while pending:
            able = [c for c in t.again[pending.pop()] if all(present[u] or t.again[u] for u in t.reads[c])]
            if not able:
                return None
            c = min(able, key=t.again_seconds.__getitem__)
            if c not in chosen:
                chosen.add(c)
                pending += (u for u in t.reads[c] if not present[u])
        return chosen

    def _task(self, c: int, runs: int) -> int:
        """The fastest task of a class for a run, one that takes over no storage if there is any; -1 for none."""
        able = [m for m in self.t.members[c] if m.runs & runs]
        return min(able, key=lambda m: (m.taken >= 0, m.seconds)).task if able else -1
