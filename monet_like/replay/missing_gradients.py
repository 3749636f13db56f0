"""Shortens the backward of a schedule where the loss uses only some of the model's results.

Autograd computes nothing from a gradient that does not exist. Zeros in its place would not do: ``0 * inf`` is NaN, so
an entropy that is only logged could ruin the gradients of the loss. So what depends on missing gradients alone is left
out, a sum of two gradients of which one is missing is the other, and only an operator that needs both gets zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.captured import Captured, TensorMeta, shape_mode
from ..ir.program import Call, Program, Ref, Task, refs
from ..runtime.codegen import Block, needed_at_end
from ..runtime.operators import results_of
from ..variants.editor import renamed

_SUMS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})
_OF_THE_GENERATOR = frozenset({"monet_like.get_rng_state", "monet_like.set_rng_state"})


def without_missing(captured: Captured, blocks: Sequence[Block], missing: Set[int]) -> list[Block]:
    """Remove the calls of a backward that depend on missing gradients only.

    Args:
        blocks: the backward's, the first of which takes the saved values and the incoming gradients.
        missing: incoming gradients (values) that do not exist.

    Returns:
        As many blocks, whose results are None where no gradient arrives. The first takes what it took, without
        ``missing``.
    """
    pruner = _Pruner(captured, missing, _last_reads(blocks))
    pruned = []
    place = 0
    for block in blocks:
        tasks = []
        for task in block.tasks:
            tasks += pruner.task(task, place)
            place += 1
        pruned.append(replace(block, tasks=tuple(tasks), results=tuple(map(pruner.result, block.results))))
    takes = tuple(v for v in blocks[0].takes if v not in missing) if blocks else ()
    return _without_unused(captured.program, pruned, takes)


def _last_reads(blocks: Sequence[Block]) -> dict[int, int]:
    """For every value, the last task that touches it; one past the last task for results."""
    tasks = [task for block in blocks for task in block.tasks]
    last = {value: place for place, task in enumerate(tasks) for value in (*task.reads, *task.writes)}
    for block in blocks:
        last.update(dict.fromkeys(needed_at_end(replace(block, carries=())), len(tasks)))
    return last


#: Stands among the incoming gradients that something is made from for one that exists.
_EXISTS = -1


def _zero_gradients(program: Program) -> frozenset[int]:
    """Zeros that a backward makes by itself, as ``torch.normal``'s does for its mean, and what it makes of them alone.

    They are added to gradients, as gradients that exist.
    """
    zeros: set[int] = set()
    incoming = set(program.tangents)
    for task in program.every_task():
        if not incoming.isdisjoint(task.reads):
            incoming.update(task.writes)
        elif task.calls[-1].op == "aten.zeros.default" or not zeros.isdisjoint(task.reads):
            zeros.update(task.writes)
    return frozenset(zeros)


def _dependencies(program: Program) -> dict[int, frozenset[int]]:
    """For every gradient of plain PyTorch's backward, the incoming gradients that it depends on."""
    found = {value: frozenset({value}) for value in program.tangents}
    zeros = _zero_gradients(program)
    for first, *_ in program.slots:
        made_from = frozenset[int]().union(*(found.get(value, frozenset()) for value in first.reads))
        if first.calls[-1].op in _SUMS and not zeros.isdisjoint(first.reads):
            made_from |= {_EXISTS}
        found.update(dict.fromkeys(first.writes, made_from))
    return found


def gradients_met_by_others(program: Program) -> frozenset[int]:
    """Incoming gradients of results that other results are made from: gradients of those are added to them."""
    made_from = _dependencies(program)
    met: set[int] = set()
    for first, *_ in program.slots:
        if first.calls[-1].op in _SUMS:
            for value in program.tangents:
                others = (made_from.get(read, frozenset()) - {_EXISTS} for read in first.reads if read != value)
                if value in first.reads and any(others):
                    met.add(value)
    return frozenset(met)


@dataclass
class _Pruner:
    """Follows, call by call, which tensors are gradients, and which of these are missing.

    Args:
        absent: incoming gradients that do not exist.
        last: for every value, the place of the last task that touches it.

    Attributes:
        missing: all values that do not exist because no gradient arrives at them, so far.
        made_from: for every gradient, the incoming gradients that it is made from.
        zeros: see `_zero_gradients`.
    """

    captured: Captured
    absent: Set[int]
    last: Mapping[int, int]

    def __post_init__(self) -> None:
        self.missing = set(self.absent)
        self.made_from = _dependencies(self.captured.plain)
        self.zeros = _zero_gradients(self.captured.program)

    def is_missing(self, value: int) -> bool:
        """Whether plain PyTorch would make this gradient from missing ones alone."""
        made_from = self.made_from.get(value, frozenset())
        return bool(made_from) and made_from <= self.absent

    def task(self, task: Task, place: int) -> list[Task]:
        """The part of a task that still runs: all of it, some calls, or none."""
        self.missing.difference_update(task.writes)
        if self.missing.isdisjoint(task.reads):
            return [task]
        calls = self._calls(task, place)
        self.missing.update(filter(self.is_missing, task.writes))
        reads = tuple(v for v in task.reads if v not in self.missing)
        writes = tuple(v for v in task.writes if v not in self.missing)
        if not writes:
            return []
        overwrites = None if task.overwrites in self.missing else task.overwrites
        return [replace(task, calls=tuple(calls), reads=reads, writes=writes, overwrites=overwrites)]

    def _calls(self, task: Task, place: int) -> list[Call]:
        """The calls of a task that still run; values that it no longer writes are added to ``missing``."""
        values = self.captured.program.values
        missing: set[Ref] = {Ref(v) for v in task.reads if v in self.missing}
        there: set[Ref] = {Ref(v) for v in task.reads if v not in self.missing and values[v].kind == "backward"}
        if task.calls[-1].op in _SUMS:
            there |= {Ref(v) for v in task.reads if v in self.zeros}
        zeros: dict[Ref, Ref] = {}
        made: list[Call] = []
        for call in task.calls:
            mentioned = set(refs(call))
            outs = {out for out in call.outs if out is not None}
            if mentioned.isdisjoint(missing):
                made.append(call)
                there |= outs if not mentioned.isdisjoint(there) else set()
            elif mentioned.isdisjoint(there):  # without results, a call writes into its first argument
                missing |= outs or {ref for ref in call.args[:1] if isinstance(ref, Ref)}
            else:
                made += self._other_summand(call, task, place, missing) or self._with_zeros(call, task, missing, zeros)
                there |= outs
        self.missing.update(out.name for out in missing if isinstance(out.name, int) and out.name in task.writes)
        return made

    def _other_summand(self, call: Call, task: Task, place: int, missing: Set[Ref]) -> list[Call]:
        """A sum of a gradient and a missing one: the gradient itself, or a copy of it where it is still needed."""
        if call.op not in _SUMS or call.kwargs or len(call.args) != 2:
            return []
        (one,), (out,) = (arg for arg in call.args if arg not in missing), call.outs
        if out is None or not isinstance(one, Ref) or not isinstance(one.name, int) or not isinstance(out.name, int):
            return []
        if self.captured.metas[one.name] != self.captured.metas[out.name]:
            return []
        ends = self.last[one.name] == place and sum(one == ref for c in task.calls for ref in refs(c)) == 1
        return [Call("aten.alias.default" if ends else "aten.clone.default", (one,), (), call.outs)]

    def _with_zeros(self, call: Call, task: Task, missing: Set[Ref], zeros: dict[Ref, Ref]) -> list[Call]:
        """A call that takes missing gradients and others, with zeros for those that are missing."""
        found: list[Call] = []
        for ref in dict.fromkeys(ref for ref in refs(call) if ref in missing and ref not in zeros):
            zeros[ref] = Ref(f"zeros_{len(zeros)}")
            meta = self.captured.metas[ref.name] if isinstance(ref.name, int) else _meta_of(ref, task, self.captured)
            options = (("dtype", meta.dtype), ("device", meta.device))
            found.append(Call("aten.empty_strided.default", (meta.shape, meta.stride), options, (zeros[ref],)))
            found.append(Call("aten.zero_.default", (zeros[ref],), (), ()))
        kwargs = tuple((name, renamed(leaf, zeros)) for name, leaf in call.kwargs)
        return [*found, replace(call, args=renamed(call.args, zeros), kwargs=kwargs)]

    def result(self, result: tuple[tuple[Call, ...], Ref | None]) -> tuple[tuple[Call, ...], Ref | None]:
        """A result of a block, or None in its place where no gradient arrives."""
        calls, ref = result
        mentioned = {r.name for call in calls for r in refs(call)} | ({ref.name} if ref is not None else set())
        return result if self.missing.isdisjoint(mentioned) else ((), None)


def _meta_of(wanted: Ref, task: Task, captured: Captured) -> TensorMeta:
    """Shape, dtype and layout of a temporary of a task."""
    with shape_mode(), torch.no_grad(), torch._C._DisableAutocast():
        known: dict[Ref, Any] = {Ref(value): captured.metas[value].empty() for value in task.reads}
        for call in task.calls:
            if call.op in _OF_THE_GENERATOR:
                continue
            known.update((out, made) for out, made in zip(call.outs, results_of(call, known), strict=False) if out)
            if wanted in known:
                return TensorMeta.of(known[wanted])
    raise AssertionError(f"{task.name} does not make {wanted}")


def _without_unused(program: Program, blocks: Sequence[Block], takes: tuple[int, ...]) -> list[Block]:
    """Remove forward tasks whose results are no longer read, and update the values that blocks hand on."""
    found: list[Block] = []
    alive: dict[int, None] = {}
    for block in reversed(blocks):
        carries = tuple(alive)
        alive.update(dict.fromkeys(needed_at_end(replace(block, carries=()))))
        tasks: list[Task] = []
        for task in reversed(block.tasks):
            again = all(program.values[value].kind == "forward" for value in task.writes)
            if again and alive.keys().isdisjoint(task.writes):
                continue
            for value in task.writes:
                alive.pop(value, None)
            alive.update(dict.fromkeys(task.reads))
            tasks.insert(0, task)
        found.insert(0, replace(block, takes=tuple(alive), tasks=tuple(tasks), carries=carries))
    if found:
        found[0] = replace(found[0], takes=takes)
    return found
