"""The lowest peak that any schedule of a small program has, found without a planner: the judge of those that plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from monet_like.ir.program import Cost, Program, Task
from monet_like.ir.simulate import cost_of


class _State(NamedTuple):
    """Between two runs: the values that exist, and in the forward what made values there (see `simulate`)."""

    alive: frozenset[int]
    made: tuple[tuple[int, bool], ...] = ()  # value, and whether what runs only first has made it


def least_peak(program: Program, costs: Mapping[str, Cost]) -> int:
    """Bytes of the lowest peak of all schedules, every task being allowed to run again before any slot.

    A schedule is a path: each task in turn is run or not, any value may be dropped at any time. For every state that a
    step may leave, the lowest peak of a path to it is kept.
    """
    kept = {*program.outputs, *program.gradients}
    states = {_State(frozenset()): program.resident_bytes}
    for p, task in enumerate(program.tasks):
        if task.runs != "again":
            states = _stepped(program, costs, {p: task}, states, kept, skip=True, forward=True)
    begun: dict[_State, int] = {}
    for state, peak in states.items():
        if set(program.outputs) <= state.alive:
            after = _State(state.alive | set(program.tangents))
            begun[after] = min(begun.get(after, peak), peak)
    states = begun
    for ways in program.slots:
        for p, task in enumerate(program.tasks):
            if task.runs != "first":
                states = _stepped(program, costs, {p: task}, states, kept, skip=True, forward=False)
        states = _stepped(program, costs, dict(enumerate(ways)), states, kept, skip=False, forward=False)
    return min(states.values())


def _stepped(
    program: Program,
    costs: Mapping[str, Cost],
    choices: Mapping[int, Task],
    states: dict[_State, int],
    kept: set[int],
    skip: bool,
    forward: bool,
) -> dict[_State, int]:
    """The states after one of the ``choices`` was run, or, with ``skip``, after none was."""
    found = dict(states) if skip else {}
    for state, peak in states.items():
        for task in choices.values():
            for after, bytes_ in _after(program, costs, task, state, kept, forward):
                found[after] = min(found.get(after, max(peak, bytes_)), max(peak, bytes_))
    return _dropping(found, kept)


def _after(
    program: Program, costs: Mapping[str, Cost], task: Task, state: _State, kept: set[int], forward: bool
) -> Iterator[tuple[_State, int]]:
    """The state after a task, and the bytes while it runs; nothing if it cannot run."""
    read = {v for v in task.reads if program.values[v].kind in ("forward", "backward")}
    writes = set(task.writes)
    if not read <= state.alive or writes & kept & state.alive:
        return
    made = dict(state.made)
    if forward and any(v in made and (made[v] or task.runs == "first") for v in writes):
        return
    size = [value.bytes for value in program.values]
    alive = state.alive - (writes - read)  # what is made anew was dropped before
    taken = 0 if task.overwrites is None else size[task.overwrites]
    held = program.resident_bytes + sum(size[v] for v in alive)
    used = held + sum(size[v] for v in writes) + cost_of(task, costs).workspace_bytes - taken
    if forward:
        made.update(dict.fromkeys(writes, task.runs == "first"))
    after = (alive - {task.overwrites}) | writes
    yield _State(frozenset(v for v in after if v is not None), tuple(sorted(made.items()))), used


def _dropping(states: dict[_State, int], kept: set[int]) -> dict[_State, int]:
    """The states and all that come of dropping values, with the lowest peak of each."""
    found = dict(states)
    todo = sorted(found, key=lambda state: -len(state.alive))
    for size in range(max((len(state.alive) for state in todo), default=0), 0, -1):
        for state in [state for state in found if len(state.alive) == size]:
            for v in state.alive - kept:
                smaller = state._replace(alive=state.alive - {v})
                found[smaller] = min(found.get(smaller, found[state]), found[state])
    return found
