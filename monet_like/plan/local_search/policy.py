"""Policies: the few decisions that the local search changes, and the tables by which it evaluates them.

A `Policy` decides which values the backward may take from the forward (``keep``), which stay once they were made again
(``hold``), how long either lasts (``cut``), which are made before an earlier slot than the one that reads them
(``early``), what each slot reads (``option``) and, where several tasks could make a value in the forward, which one
does (``prefer``). A whole schedule follows from these:

1. From the first slot to the last: values that a slot lacks, or that are to be made early there, are made just before
   it, by the tasks with the fewest seconds, the seconds for values that these lack included.
2. From the last run back to the first: it is known which values are still needed, hence the memory of the run. Of tasks
   that do the same (algorithms, in place or not) the fastest one that fits into the budget is taken. A task whose
   results nothing needs does not run. The forward, last in this order, runs what is needed at its end.

Tasks that read and write the same values form a *class*, ways that read the same values an *option*. The search
evaluates tens of thousands of policies a second in C++ (csrc/plan/local_search.cpp). Without the compiled library,
uncompiled.py evaluates those of the greedy start.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from ...ir.program import Program
from ...ir.schedule import Schedule
from ..analysis import pinned_values
from ..instance import Instance

#: No cut: the value stays as long as it is needed.
NEVER = 2**31 - 1
#: At how many slots a value may be made ahead of its use.
MOST_EARLY = 2
#: When a task may run, as bits: in the forward, during the backward.
FIRST, AGAIN = 1, 2


@dataclass
class Policy:
    """The decisions of a schedule; the module's docstring says what each means.

    By value: ``keep`` and ``hold`` are 0 or 1, ``cut`` is a slot or `NEVER`, ``early`` has `MOST_EARLY` of these for
    each value, ``prefer`` is a class or -1. By slot: ``option``, an index into the slot's options.
    """

    keep: array[int]
    hold: array[int]
    cut: array[int]
    early: array[int]
    option: array[int]
    prefer: array[int]

    def copy(self) -> Policy:
        """Another policy with the same decisions."""
        return Policy(self.keep[:], self.hold[:], self.cut[:], self.early[:], self.option[:], self.prefer[:])


@dataclass(frozen=True)
class Judgement:
    """The cost of a policy's schedule.

    Attributes:
        seconds: of the step.
        peak_bytes: of all its runs.
        excess: bytes over the budget, summed over its runs.
        steps: how many runs it has.
    """

    seconds: float
    peak_bytes: int
    excess: float
    steps: int


@dataclass(frozen=True)
class Settings:
    """Settings of one simulated annealing.

    Attributes:
        budget_bytes: limit of the peak.
        evaluations, most_steps: it ends after this many policies, or this many runs of tasks in all of them.
        seed: of the random changes.
        first_weight, last_weight: the penalty for exceeding the budget by once the budget, as a multiple of the
            schedule's seconds, at the beginning and at the end.
        first_temperature, last_temperature: how much slower a policy may be on average to be accepted, as a share of
            the schedule's seconds.
    """

    budget_bytes: int
    evaluations: int
    most_steps: int
    seed: int
    first_weight: float = 0.3
    last_weight: float = 20.0
    first_temperature: float = 3e-3
    last_temperature: float = 1e-5


@dataclass(frozen=True, slots=True)
class Member:
    """A task of a class.

    Attributes:
        task: its index in the program.
        seconds: of one run.
        extra: bytes of its workspace, less the storage that it takes over.
        taken: the value whose storage it takes over, or -1.
        runs: `FIRST`, `AGAIN` or both.
    """

    task: int
    seconds: float
    extra: int
    taken: int
    runs: int


@dataclass(frozen=True, slots=True)
class Way:
    """A way of an option.

    Attributes:
        way: its index within the slot.
        seconds: of one run.
        extra: bytes of its workspace, less the storage that it takes over.
    """

    way: int
    seconds: float
    extra: int


Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tables:
    """An instance in the form that the local search reads.

    Lists of lists are by value, class, slot or option.

    Attributes:
        bytes: of every value; 0 for pinned ones, which ``resident_bytes`` counts.
        output: which values are outputs.
        resident_bytes: throughout the step, outputs apart.
        output_bytes: of all outputs.
        reads, writes, written_bytes: of every class; forward values only.
        shared: whether a class writes an output that another one writes too.
        once: whether a task of a class runs only first: no other class may write its values in the forward.
        members: the tasks of every class, the fastest first.
        first_seconds, again_seconds: of the fastest member that may run in the forward, or again; inf if none.
        first, again: for every value, the classes that may make it in the forward, or again.
        options: for every slot, its options as numbers into ``option_reads`` and ``ways``.
        option_reads, ways: the values that every option reads, and the ways that read exactly these, the fastest first.
        before, during: bytes of backward values when a slot's tasks run again, and during the slot.
        uses: for every value, the slots that may read it.
        stages: the slots before which it can be of use to run a task again, ascending.
        ends: for every value, how many of these come up to the last that can use it.
        changeable: values that the search may keep or drop: values that can be recomputed, and values that only serve
            to recompute others.
    """

    bytes: tuple[int, ...]
    output: tuple[bool, ...]
    resident_bytes: int
    output_bytes: int
    reads: Lists
    writes: Lists
    written_bytes: tuple[int, ...]
    shared: tuple[bool, ...]
    once: tuple[bool, ...]
    members: tuple[tuple[Member, ...], ...]
    first_seconds: tuple[float, ...]
    again_seconds: tuple[float, ...]
    first: Lists
    again: Lists
    options: Lists
    option_reads: Lists
    ways: tuple[tuple[Way, ...], ...]
    before: tuple[int, ...]
    during: tuple[int, ...]
    uses: Lists
    stages: tuple[int, ...]
    ends: tuple[int, ...]
    changeable: tuple[int, ...]

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Slots with several options."""
        return tuple(slot for slot, options in enumerate(self.options) if len(options) > 1)

    @cached_property
    def preferring(self) -> tuple[int, ...]:
        """Values with several makers in the forward."""
        return tuple(v for v, makers in enumerate(self.first) if len(makers) > 1)

    def policy(self, keep: Sequence[bool], hold: bool, smallest: bool) -> Policy:
        """A policy that keeps what may be kept of ``keep`` and takes the fastest or smallest option everywhere."""

        def price(option: int) -> tuple[float, float]:
            least = float(sum(self.bytes[v] for v in self.option_reads[option]))
            seconds = self.ways[option][0].seconds
            return (least, seconds) if smallest else (seconds, least)

        count = len(self.bytes)
        chosen = [min(range(len(options)), key=lambda k, o=options: price(o[k])) for options in self.options]  # type: ignore[misc]
        return Policy(
            keep=array("B", (int(keep[v] and bool(self.first[v])) for v in range(count))),
            hold=array("B", [int(hold)]) * count,
            cut=array("i", [NEVER]) * count,
            early=array("i", [NEVER]) * (MOST_EARLY * count),
            option=array("i", chosen),
            prefer=array("i", [-1]) * count,
        )


def make_tables(instance: Instance, pin_bytes: int = 0) -> Tables:
    """`Tables` of an instance, without the tasks and ways that others replace at no more seconds and bytes.

    Values of at most ``pin_bytes`` are always kept and always counted.
    """
    program, needs, backward = instance.program, instance.needs, instance.backward
    pinned, outputs, useless = pinned_values(program, pin_bytes), frozenset(program.outputs), instance.dominated_tasks
    classes: list[list[int]] = []
    for group in needs.groups:
        alike: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
        for p in group:
            if p not in useless:
                task = program.tasks[p]
                alike.setdefault((frozenset(task.writes), frozenset(program.forward_reads(task))), []).append(p)
        classes += sorted(alike.values(), key=lambda tasks: len(program.tasks[tasks[0]].writes))
    members = tuple(
        tuple(sorted((_member(instance, p) for p in tasks), key=lambda m: (m.seconds, m.extra))) for tasks in classes
    )
    writes = tuple(tuple(sorted(set(program.tasks[tasks[0]].writes))) for tasks in classes)
    first_seconds, again_seconds = (
        tuple(min((m.seconds for m in ms if m.runs & when), default=inf) for ms in members) for when in (FIRST, AGAIN)
    )
    makers: list[list[int]] = [[] for _ in program.values]
    for c, written in enumerate(writes):
        for v in written:
            makers[v].append(c)
    first = tuple(tuple(c for c in cs if first_seconds[c] < inf) for cs in makers)
    again = tuple(tuple(c for c in cs if again_seconds[c] < inf and v not in pinned) for v, cs in enumerate(makers))
    options, option_reads, ways, uses = _options(instance)
    sizes = tuple(0 if v in pinned else size for v, size in enumerate(instance.sizes))
    return Tables(
        bytes=sizes,
        output=tuple(v in outputs for v in range(len(sizes))),
        resident_bytes=instance.resident_bytes + sum(instance.sizes[v] for v in pinned),
        output_bytes=instance.output_bytes,
        reads=tuple(tuple(sorted(set(program.forward_reads(program.tasks[tasks[0]])))) for tasks in classes),
        writes=writes,
        written_bytes=tuple(sum(sizes[v] for v in program.tasks[tasks[0]].writes) for tasks in classes),
        shared=tuple(any(v in outputs and len(first[v]) > 1 for v in written) for written in writes),
        once=tuple(any(program.tasks[p].runs == "first" for p in tasks) for tasks in classes),
        members=members,
        first_seconds=first_seconds,
        again_seconds=again_seconds,
        first=first,
        again=again,
        options=options,
        option_reads=option_reads,
        ways=ways,
        before=backward.before,
        during=backward.during,
        uses=uses,
        stages=tuple(stage - 1 for stage in needs.stages[1:]),
        ends=tuple(bisect_right(needs.stages, last, 1) - 1 for last in needs.last),
        changeable=_changeable(program, needs.last, first, again, uses),
    )


def _options(instance: Instance) -> tuple[Lists, Lists, tuple[tuple[Way, ...], ...], Lists]:
    """`Tables.options`, ``option_reads``, ``ways`` and ``uses``."""
    program = instance.program
    options: list[tuple[int, ...]] = []
    option_reads: list[tuple[int, ...]] = []
    ways: list[tuple[Way, ...]] = []
    uses: list[list[int]] = [[] for _ in program.values]
    for slot, tasks in enumerate(program.slots):
        found: dict[tuple[int, ...], list[Way]] = {}
        for k in instance.useful_ways(slot):
            key = tuple(sorted(set(program.forward_reads(tasks[k]))))
            way = Way(k, instance.cost_of(tasks[k]).seconds, instance.net_workspace(tasks[k]))
            found.setdefault(key, []).append(way)
        options.append(tuple(range(len(ways), len(ways) + len(found))))
        option_reads += found
        ways += (tuple(sorted(w, key=lambda way: (way.seconds, way.extra))) for w in found.values())
        for v in {v for key in found for v in key}:
            uses[v].append(slot)
    return tuple(options), tuple(option_reads), tuple(ways), tuple(map(tuple, uses))


def _changeable(program: Program, last: Sequence[int], first: Lists, again: Lists, uses: Lists) -> tuple[int, ...]:
    """`Tables.changeable`; a value that only serves to make another one again stands beside that one."""
    beside: dict[int, int] = {}
    for v, value in enumerate(program.values):
        if value.kind == "forward" and v not in program.outputs and first[v] and last[v] > 0:
            if again[v]:
                beside[v] = v
            elif not uses[v]:
                readers = (task for task in program.tasks if v in task.reads and task.runs != "first")
                beside[v] = min((w for task in readers for w in task.writes), default=v)
    return tuple(sorted(beside, key=lambda v: (beside[v], v)))


def _member(instance: Instance, p: int) -> Member:
    task = instance.program.tasks[p]
    runs = (FIRST if task.runs != "again" else 0) | (AGAIN if instance.needs.rerun[p] else 0)
    taken = -1 if task.overwrites is None else task.overwrites
    return Member(p, instance.cost_of(task).seconds, instance.net_workspace(task), taken, runs)


def to_policy(program: Program, tables: Tables, schedule: Schedule) -> Policy:
    """The policy that comes nearest to a schedule."""
    policy = tables.policy([False] * len(tables.bytes), hold=False, smallest=False)
    class_of = {member.task: c for c, members in enumerate(tables.members) for member in members}
    for v in {v for p in schedule.forward for v in program.tasks[p].writes}:
        makers = [class_of.get(p, -1) for p in schedule.forward if v in program.tasks[p].writes]
        if len(tables.first[v]) > 1 and makers[-1] in tables.first[v]:
            policy.prefer[v] = makers[-1]
    made: dict[int, int] = {}  # value -> slot in which it was last made again
    for slot, (runs, way) in enumerate(zip(schedule.again, schedule.ways, strict=True)):
        task = program.slots[slot][way]
        for k, option in enumerate(tables.options[slot]):
            if any(w.way == way for w in tables.ways[option]) or (
                tables.option_reads[option] == tuple(sorted(set(program.forward_reads(task))))
            ):
                policy.option[slot] = k
        new = {v for p in runs for v in program.tasks[p].writes}
        read = {v for reader in (*(program.tasks[p] for p in runs), task) for v in program.forward_reads(reader)}
        for v in new - read:
            place = MOST_EARLY * v
            while policy.early[place] != NEVER and place < MOST_EARLY * v + MOST_EARLY - 1:
                place += 1
            policy.early[place] = slot
        for v in read - new:
            if v in made:
                policy.hold[v] = 1
            elif tables.first[v]:
                policy.keep[v] = 1
        for v in new:
            if policy.keep[v] and v not in made:  # from the forward up to here, then made again
                earlier = [s for s in tables.uses[v] if s < slot]
                policy.cut[v] = earlier[-1] if earlier else policy.cut[v]
        made.update(dict.fromkeys(new, slot))
    return policy
