"""Operands of a part of a region's rows: what comes from outside is cut once along its rows, and named once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ir.program import Ref, Task, refs
from . import rows as by
from .calls import Calls
from .editor import Editor, renamed, with_names
from .row_regions import Region
from .rows import NotByRows


@dataclass(frozen=True)
class Head:
    """A region with its borders.

    Attributes:
        exits: values of the forward that others read; the region's backward too, if they are few numbers for a row.
        domain: numbers of the rows that they come from.
        forward: places of the tasks that make them.
        again: places of the tasks whose results the gradients read.
        place: of the task before which the forward in parts stands; None: behind all of them.
        slots: numbers of the first slot and the one after the last.
        before, after: slots among these that have nothing to do with the region.
        results: gradients that others read.
    """

    region: Region
    exits: tuple[int, ...]
    domain: Tensor
    forward: tuple[int, ...]
    again: tuple[int, ...]
    place: int | None
    slots: tuple[int, int]
    before: tuple[Task, ...]
    after: tuple[Task, ...]
    results: tuple[int, ...]


@dataclass
class Operands:
    """Writes calls, and finds their operands in one part after the other.

    Attributes:
        calls: so far.
        known: what was made of operands that are the same for all parts.
        flats: of operands from outside that have rows, by `_flat`.
        tile: the operands of the present part; ``bounds``: its rows.
        hurried: the task before which the calls stand; None: behind all of them.
    """

    editor: Editor
    head: Head
    parts: int
    calls: Calls = field(default_factory=Calls)
    known: dict[Any, Ref] = field(default_factory=dict)
    flats: dict[Ref, tuple[Ref, Tensor, tuple[int, ...]]] = field(default_factory=dict)
    tile: dict[Ref, Ref] = field(default_factory=dict)
    bounds: tuple[int, int] = (0, 0)
    hurried: int | None = None

    @property
    def region(self) -> Region:
        """The region."""
        return self.head.region

    def _result(self, value: int) -> Ref:
        """A value that the task writes; a temporary in the place of one that only its own calls read."""
        if value in (*self.head.results, *self.head.exits):
            return Ref(value)
        return self.known.setdefault(Ref(value), Ref(f"inner_{value}"))

    def _carry(self, ways: Sequence[Task]) -> None:
        """Slots that stand among the region's, as they are."""
        for way in ways:
            names = {Ref(v): self._result(v) for v in way.writes}
            for call in way.calls:
                for ref in (*refs(call), *filter(None, call.outs)):
                    if ref not in names:
                        names[ref] = self.known.get(ref, ref) if isinstance(ref.name, int) else self.calls.name()
                self.calls.append(with_names(call, names))

    def _start(self, begin: int, end: int) -> None:
        self.tile, self.bounds = {}, (begin, end)

    def _outside(self, key: Ref) -> Ref:
        """An operand that is the same for all parts."""
        if isinstance(key.name, int):
            place = self.region.places.get(key.name, (None, None))[0]
            if key in self.known:
                return self.known[key]
            if self.hurried is None or place is None or place < self.hurried:
                return key
            task = self.editor.tasks[place]  # its maker comes too late
            if key in self.region.computed:
                raise NotByRows
            names: dict[Ref, Ref] = {}
            for call in task.calls:
                for ref in refs(call):
                    if ref not in names:
                        names[ref] = self._outside(ref) if isinstance(ref.name, int) else ref
                names.update((out, self.calls.name()) for out in call.outs if out is not None)
                self.calls.append(with_names(call, names))
            self.known.update((out, names[out]) for out in map(Ref, task.writes) if out in names)
            return self.known[key]
        if key not in self.known:
            call = self.region.makers[key]
            if len(call.outs) != 1:
                raise NotByRows
            args = renamed(call.args, {ref: self._outside(ref) for ref in refs(call)})
            same = (call.op, repr(args), call.kwargs)
            if same not in self.known:
                self.known[same] = self.calls.add(call.op, *args, **dict(call.kwargs))
            self.known[key] = self.known[same]
        return self.known[key]

    def _flat(self, key: Ref) -> tuple[Ref, Tensor, tuple[int, ...]]:
        """An operand from outside with one dimension for the rows of the domain, their numbers, and what is inside of
        a row.
        """
        if key not in self.flats:
            meta, rows = self.region.meta(key), self.region.rows[key]
            first, source = by.depth(rows), self._outside(key)
            numbers = by.flat(rows)
            inner = tuple(meta.shape[first:])
            for dim in range(first, meta.ndim):
                if not meta.stride(dim) and meta.shape[dim] > 1:
                    source, meta = self.calls.slice(source, dim, 0, 1), meta.narrow(dim, 0, 1)
            source = self._reshaped(source, meta, (len(numbers), *meta.shape[first:]))
            small = torch.empty((len(numbers), *meta.shape[first:]), device="meta")
            picked = torch.isin(numbers, self.head.domain)
            if not bool(picked.all()):
                source = self._picked(source, small, runs_of(picked))
            self.flats[key] = source, numbers[picked], inner
        return self.flats[key]

    def _reshaped(self, source: Ref, meta: Tensor, shape: tuple[int, ...]) -> Ref:
        if tuple(meta.shape) == shape:
            return source
        try:
            meta.view(shape)
        except RuntimeError:
            source = self._in_rows(source)
        return self.calls.add("aten.view.default", source, list(shape))

    def _in_rows(self, source: Ref) -> Ref:
        return self.calls.add("aten.clone.default", source, memory_format=torch.contiguous_format)

    def _picked(self, source: Ref, meta: Tensor, runs: tuple[int, int, int, int]) -> Ref:
        """The rows of the domain alone."""
        view, _ = self._run_view(source, meta, runs)
        if runs[0] == 1:
            return view
        return self.calls.add("aten.view.default", self._in_rows(view), [runs[0] * runs[3], *meta.shape[1:]])

    def _run_view(self, source: Ref, meta: Tensor, runs: tuple[int, int, int, int]) -> tuple[Ref, tuple[int, ...]]:
        """The runs of rows of the domain: their number, distance, first row and length."""
        count, distance, begin, length = runs
        if count == 1:
            return self.calls.slice(source, 0, begin, begin + length), (length, *meta.shape[1:])
        base, rest = begin - begin % distance, begin % distance
        if rest + length > distance or base + count * distance > meta.shape[0]:
            raise NotByRows
        part = self.calls.slice(source, 0, base, base + count * distance)
        part = self.calls.add("aten.view.default", part, [count, distance, *meta.shape[1:]])
        return self.calls.slice(part, 1, rest, rest + length), (count, length, *meta.shape[1:])

    def _between(self, numbers: Tensor) -> tuple[int, int]:
        """Which of ascending row numbers are this part's."""
        begin, end = self.bounds
        domain = self.head.domain
        if begin == end:
            low = int(torch.searchsorted(numbers, domain[begin])) if begin < len(domain) else len(numbers)
            return low, low
        low = int(torch.searchsorted(numbers, domain[begin]))
        return low, int(torch.searchsorted(numbers, domain[end - 1], right=True))

    def _numbers(self, key: Ref) -> Tensor:
        numbers = by.flat(self.region.rows[key])
        return numbers[torch.isin(numbers, self.head.domain)]

    def _operand(self, key: Ref) -> Ref:
        """An operand in this part."""
        if key in self.tile:
            return self.tile[key]
        if key not in self.region.rows:
            return self._outside(key)
        source, numbers, inner = self._flat(key)
        low, high = self._between(numbers)
        made = self.calls.slice(source, 0, low, high)
        meta = self.region.meta(key)
        first = meta.ndim - len(inner)
        if any(not meta.stride(d) and meta.shape[d] > 1 for d in range(first, meta.ndim)):
            made = self.calls.add("aten.expand.default", made, [high - low, *inner])
        self.tile[key] = made
        return made

    def _inner(self, key: Ref) -> tuple[int, ...]:
        """The extents inside of a row."""
        return tuple(self.region.meta(key).shape[by.depth(self.region.rows[key]) :])


def runs_of(picked: Tensor) -> tuple[int, int, int, int]:
    """Number, distance, first and length of equal runs of true elements.

    Raises:
        NotByRows: they are not equal.
    """
    places = picked.nonzero().flatten()
    if not len(places):
        raise NotByRows
    starts = places[torch.cat([torch.tensor([True]), places.diff() > 1])]
    length = len(places) // len(starts)
    distance = int(starts[1] - starts[0]) if len(starts) > 1 else 0
    expected = (starts.view(-1, 1) + torch.arange(length)).flatten()
    if not torch.equal(expected, places) or bool((starts.diff() != distance).any()):
        raise NotByRows
    return len(starts), distance, int(starts[0]), length
