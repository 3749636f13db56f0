"""Regions of a program that compute every row of their results from one row of a wide product, such as
log-probabilities, entropies and divergences from logits.

A region begins at a linear layer whose result is much wider than its input. Everything that reads a wide tensor is in
it, operators between two of those too; what leaves it is a few numbers for each row, sums over rows (gradients of
weights) and gradients of the layers' inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from ..ir.program import Call, Ref, Task
from . import rows as by
from .editor import with_names
from .row_inference import RowsOfResults
from .rows import NotByRows


class Again(Exception):
    """Another product was found to belong to the region."""


@dataclass
class Member:
    """A task or slot of a region.

    Attributes:
        task: the task, or the first way of the slot.
        calls: its calls; temporaries have names of their own in the region.
        needed: it reads or makes a wide tensor, or one that does depends on it.
    """

    task: Task
    calls: list[Call]
    needed: bool


@dataclass
class Region(RowsOfResults):
    """A region under construction.

    Attributes:
        forward, backward: the members, by number of the task or slot.
    """

    forward: dict[int, Member] = field(default_factory=dict)
    backward: dict[int, Member] = field(default_factory=dict)

    def grow(self) -> None:
        """Find all members.

        Raises:
            NotByRows: a wide tensor is read by something that does not work row by row.
        """
        count = -1
        while count != (count := len(self.forward) + len(self.backward)):
            for place, task in enumerate(self.editor.tasks):
                if task.variant == "aten" and place not in self.forward:
                    self._consider(place, None, task)
            for place, ways in enumerate(self.editor.slots):
                if place not in self.backward:
                    self._consider(None, place, ways[0])
        self._prune(self.forward)
        self._prune(self.backward)

    def _consider(self, place: int | None, slot: int | None, task: Task) -> None:
        mine = [Ref(v) for v in task.reads if Ref(v) in self.computed]
        wide = any(self.is_wide(value) for value in mine)
        if wide or task.name in self.seeds:
            self._add(place, slot, task, None, True)
        elif any(self.is_narrow(v, slot) for v in mine) and all(map(self._is_small, task.writes)):
            known = {*self.rows}, {*self.computed}
            try:
                self._add(place, slot, task, None, False)
            except NotByRows:
                self.rows = {k: v for k, v in self.rows.items() if k in known[0]}
                self.computed = known[1]

    def is_narrow(self, key: Ref, slot: int | None) -> bool:
        """Whether a tensor may stand between wide ones: in the backward a gradient."""
        return slot is None or self.editor.values[int(key.name)].kind == "backward"

    def _is_small(self, value: int) -> bool:
        """Whether a value is a few numbers for a row."""
        return self._size(value) * 8 <= self.width * self.count

    def _size(self, value: int) -> int:
        return math.prod(self.editor.metas[value].shape)

    def _prune(self, members: dict[int, Member]) -> None:
        """Leave out those that no member with a wide tensor depends on."""
        read = {v for member in members.values() if member.needed for v in member.task.reads}
        for place in sorted(members, reverse=True):
            member = members[place]
            if not member.needed and read.isdisjoint(member.task.writes):
                del members[place]
                self.computed.difference_update(Ref(v) for v in member.task.writes)
            else:
                member.needed = True
                read.update(member.task.reads)

    def _add(self, place: int | None, slot: int | None, task: Task, hint: Tensor | None, needed: bool) -> None:
        names = {out: Ref(f"{task.name}.{out.name}") for call in task.calls for out in call.outs if out is not None}
        names = {out: out if isinstance(out.name, int) else new for out, new in names.items()}
        calls = []
        for call in task.calls:
            calls.append(self._infer(with_names(call, names), task, hint if call is task.calls[-1] else None))
        if not any(Ref(v) in self.computed or Ref(v) in self.sums for v in task.writes):
            raise NotByRows
        member = Member(task, calls, needed)
        if place is not None:
            self.forward[place] = member
        elif slot is not None:
            self.backward[slot] = member

    def _absorbed(self, key: Ref, rows: Tensor) -> bool:
        """Take a wide operand's maker into the region, if it is one that works row by row."""
        views: list[Call] = []
        while not isinstance(key.name, int):
            call = self.makers.get(key)
            if call is None or not by.is_view(call.op):
                return False
            views.append(call)
            key = call.args[0]
        if key.name not in self.places:
            return False
        self._find_products(int(key.name))
        own = tuple(self.meta(key).shape)
        small = by.flat(rows)
        first = next((k for k in range(len(own) + 1) if math.prod(own[:k]) == len(small)), None)
        if first is None:
            return False
        whole = small.view(*own[:first], *[1] * (len(own) - first)).expand(own)
        place, slot = self.places[int(key.name)]
        task = self.editor.tasks[place] if place is not None else self.editor.slots[slot][0]  # type: ignore[index]
        self._add(place, slot, task, whole, True)
        for call in reversed(views):
            (self.rows[call.outs[0]],) = self._rows(call, task, None)[1]  # type: ignore[index]
            self.computed.add(call.outs[0])  # type: ignore[arg-type]
        return True

    def _find_products(self, value: int) -> None:
        """Begin again if a wide value comes from another product of as many rows."""
        waiting, seen = [value], set[int]()
        while waiting:
            value = waiting.pop()
            place = self.places.get(value, (None, None))[0]
            if value in seen or place is None or self._size(value) <= self.width * self.count:
                continue
            seen.add(value)
            task = self.editor.tasks[place]
            if by.name_of(task.calls[-1].op) in by.PRODUCTS and task.name not in self.seeds:
                if self.editor.metas[value].shape[0] == self.count:
                    self.seeds.add(task.name)
                    raise Again
                raise NotByRows
            waiting.extend(task.reads)
