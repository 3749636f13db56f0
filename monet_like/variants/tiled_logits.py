"""What a model computes from its logits row by row, for some of the rows at a time, so that the logits never exist at
once: log-probabilities of chosen tokens, entropies, divergences from another head, distillation losses.

Such are the losses of preference training and reinforcement learning. The forward keeps a few numbers for each row,
and the backward computes the logits of each part again, as `linear_cross_entropy` does. Which operators these are is
not listed here: `row_regions` follows the rows through whatever a program computes.

``conv`` admits it: products of fewer rows, and sums over rows part by part, agree up to rounding. 16-bit gradients of
weights are summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..ir.program import Ref, Task, refs
from . import rows as by
from .editor import Editor, root_of
from .patterns import Operators
from .row_operands import Head
from .row_parts import Parts
from .row_regions import Again, Region
from .rows import NotByRows

#: Into how many parts the rows are cut; each is a variant of its own.
PARTS = (4, 16)
#: Least size of the wide tensors of the forward, in units of the layer's input. It is the same for every batch, so that
#: smaller inputs have the same program.
WIDENING = 4


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, forward and gradients in parts; gradients become one slot, by PyTorch or in parts."""
    if "conv" not in editor.words:
        return  # apart, PyTorch's operators need less memory: something may be run again between them
    operators = Operators(editor)
    merges: list[tuple[int, int, list[Task]]] = []
    once = set[int]()
    for region in regions(editor):
        try:
            head = _bordered(editor, operators, region)
            plain = operators.in_turn(range(*head.slots), head.results) if region.backward else None
            if plain is None and region.backward:
                continue
            forward = [Parts(editor, head, parts).forward() for parts in PARTS if head.forward]
            backward = [Parts(editor, head, parts).backward() for parts in PARTS if plain]
        except NotByRows:
            continue
        for parts, calls in zip(PARTS, forward, strict=bool(forward)):
            anchor = editor.tasks[head.forward[-1]]
            before = None if head.place is None else editor.tasks[head.place]
            name = f"tiled_logits.{parts}"
            editor.add(anchor, calls, head.exits, name, before=before, word="conv", runs="first")
        once.update(head.exits)
        if plain is None:
            continue
        others = (
            editor.beside(plain, calls, f"tiled_logits.{parts}", word="conv")
            for parts, calls in zip(PARTS, backward, strict=True)
        )
        merges.append((head.slots[0], head.slots[1] - head.slots[0], [plain, *others]))
    editor.merge_all(merges)
    # They are small, and what compares them, as clipped ratios do, must not read two that round differently.
    editor.tasks = tuple(t if once.isdisjoint(t.writes) else replace(t, runs="first") for t in editor.tasks)


def _bordered(editor: Editor, operators: Operators, region: Region) -> Head:
    """The borders of a region.

    Raises:
        NotByRows: a wide tensor crosses them, or the order of tasks or slots does not allow it.
    """
    made = {v: place for place, member in region.forward.items() for v in member.task.writes}
    wide = [v for v in made if Ref(v) in region.computed and region.is_wide(Ref(v))]
    itemsize = max((editor.metas[v].dtype.itemsize for v in wide), default=1)
    if editor.bytes_of(wide) < WIDENING * region.count * region.width * itemsize:
        raise NotByRows
    members = {id(member.task) for of in (region.forward, region.backward) for member in of.values()}
    readers = {v: [(t, s) for t, s in operators.readers.get(v, ()) if id(t) not in members] for v in made}
    exits = tuple(v for v in made if readers[v] or v in operators.kept or Ref(v) not in region.computed)
    rowed = [v for v in exits if Ref(v) in region.computed]
    if any(region.is_wide(Ref(v)) for v in rowed):
        raise NotByRows
    numbers = [by.flat(region.rows[Ref(v)]) for v in rowed] or [torch.arange(region.count)]
    domain = torch.cat(numbers).unique()
    domain = domain[domain >= 0]
    forward = _ancestors(region, {*exits}, frozenset())
    read = {v for member in region.backward.values() for v in member.task.reads} & made.keys()
    kept = frozenset(exits)
    again = _ancestors(region, read - kept, kept)
    if any(editor.tasks[place].runs == "again" for place in forward) or _compares(region):
        raise NotByRows
    place = {id(task): k for k, task in enumerate(editor.tasks)}
    outside = [place[id(task)] for v in exits for task, slot in readers[v] if slot is None]
    first = min(outside, default=None)
    if first is not None and (not forward or first > forward[-1]):
        first = None
    return Head(region, exits, domain, forward, again, first, *_slots(editor, operators, region))


def _compares(region: Region) -> bool:
    """Whether floats are asked for equality: parts may round differently from what was kept."""
    calls = [call for members in (region.forward, region.backward) for m in members.values() for call in m.calls]
    return any(
        by.name_of(call.op) in ("eq", "ne") and region.meta(ref).is_floating_point()
        for call in calls
        if call.op.startswith("aten.")
        for ref in refs(call)
    )


def _ancestors(region: Region, wanted: set[int], known: frozenset[int]) -> tuple[int, ...]:
    """The members of the forward that make some values, from those that are known and from outside."""
    places, wanted = list[int](), {*wanted}
    for place in sorted(region.forward, reverse=True):
        task = region.forward[place].task
        if not wanted.isdisjoint(task.writes):
            places.insert(0, place)
            wanted |= {*task.reads} - known
    return tuple(places)


def _slots(
    editor: Editor, operators: Operators, region: Region
) -> tuple[tuple[int, int], tuple[Task, ...], tuple[Task, ...], tuple[int, ...]]:
    """The range of the slots, those before and after the region's, and the results of all."""
    if not region.backward:
        return (0, 0), (), (), ()
    first, end = min(region.backward), max(region.backward) + 1
    made = {v for member in region.backward.values() for v in member.task.writes}
    later, before, after = {*made}, list[Task](), list[Task]()
    for slot in range(first, end):
        way = editor.slots[slot][0]
        if slot in region.backward:
            if not {*way.reads}.isdisjoint(later - made):
                raise NotByRows
        elif later.isdisjoint(way.reads):
            before.append(way)
        else:
            after.append(way)
            later.update(way.writes)
    inside = range(first, end)
    results = tuple(
        v
        for slot in inside
        for v in editor.slots[slot][0].writes
        if v in operators.kept or any(s not in inside for _, s in operators.readers.get(v, ()))
    )
    read = {*results, *(v for way in (*before, *after) for v in way.reads)}
    if any(Ref(v) in region.computed and region.is_wide(Ref(v)) for v in made & read):
        raise NotByRows
    return (first, end), tuple(before), tuple(after), results


def regions(editor: Editor) -> Iterator[Region]:
    """The regions of a program, as far as their operators are known.

    Products of one tensor belong together, as those with parts of a vocabulary do; each may also be a region alone.
    """
    begin = [task for task in editor.tasks if task.variant == "aten" and _begins(editor, task)]
    groups: dict[Any, set[str]] = {}
    for task in begin:
        of = root_of(task.calls, task.calls[-1].args[-2]), task.runs, editor.metas[task.writes[0]].shape[0]
        groups.setdefault(of, set()).add(task.name)
    alone = [{task.name} for task in begin if not any(group == {task.name} for group in groups.values())]
    done = set[str]()
    for seeds in (*groups.values(), *alone):
        region = _region(editor, seeds) if done.isdisjoint(seeds) else None
        if region is not None:
            done |= region.seeds
            yield region


def _region(editor: Editor, seeds: set[str]) -> Region | None:
    """The region that begins at some products, and at those that belong to them."""
    (count,) = {editor.metas[task.writes[0]].shape[0] for task in editor.tasks if task.name in seeds}
    while True:
        region = Region(editor, {*seeds}, count, _width(editor, seeds))
        try:
            region.grow()
        except Again:
            seeds = region.seeds
            continue
        except NotByRows:
            return None
        return region


def _width(editor: Editor, seeds: set[str]) -> int:
    """The widest input of some products."""
    found = 0
    for task in editor.tasks:
        if task.name in seeds:
            *views, call = task.calls
            found = max(found, editor.seen(views, call.args[-2]).shape[-1])
    return found


def _begins(editor: Editor, task: Task) -> bool:
    """Whether a task is a linear layer whose result is wider than its input."""
    call = task.calls[-1]
    if call.op not in ("aten.mm.default", "aten.addmm.default") or len(task.writes) != 1:
        return False
    count, wide = editor.metas[task.writes[0]].shape
    weights = [v for v in task.reads if editor.values[v].kind in ("parameter", "buffer") or editor.of_parameters(v)]
    return count > 1 and 0 < len(weights) < len(task.reads) and wide > _width(editor, {task.name})
