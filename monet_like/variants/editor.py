"""The editor through which variants add tasks, values and ways to a captured program."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..capture.absent_gpu.choices import convolutions
from ..capture.captured import Captured, TensorMeta, make_task, shape_mode
from ..ir.program import Call, Ref, Task, Value, refs
from ..runtime.operators import resolve


class Editor:
    """A captured program under construction, to which variants add values, tasks and ways.

    Attributes:
        values, metas: as in `Captured`, with those that were added.
        tasks: the forward tasks without additions, which `finish` puts in their places.
        slots: the ways of every slot.
        words: the words of the mode that the program is for.
        liger: whether Liger's kernels may be offered.
    """

    def __init__(self, captured: Captured, words: frozenset[str], *, liger: bool = False) -> None:
        self.captured = captured
        self.words = words
        self.liger = liger
        self.values = list(captured.program.values)
        self.metas = list(captured.metas)
        self.tasks = captured.program.tasks
        self.slots = [list(slot) for slot in captured.program.slots]
        #: Of every value the slot that reads it last: the list of its ways.
        self._last = {value: ways for ways in self.slots for value in ways[0].reads}
        self._readers: dict[int, list[Task]] = {}
        self._makers: dict[int, list[Task]] = {}
        for task in self.tasks:
            for value in task.reads:
                self._readers.setdefault(value, []).append(task)
            for value in task.writes:
                self._makers.setdefault(value, []).append(task)
        self._after: dict[str, list[Task]] = {}
        self._before: dict[str, list[Task]] = {}
        self._of_parameters: set[int] | None = None

    def copy(self) -> Editor:
        """An editor of the same state; what either adds later, the other does not have."""
        other = copy.copy(self)
        other.values, other.metas, other.slots = [*self.values], [*self.metas], [[*ways] for ways in self.slots]
        other._last = {value: ways for ways in other.slots for value in ways[0].reads}
        other._after, other._before = ({name: [*new] for name, new in of.items()} for of in (self._after, self._before))
        return other

    @property
    def device(self) -> torch.device:
        """The device that the program runs on."""
        return self.captured.device

    def every_task(self) -> Iterator[Task]:
        """All forward tasks and ways so far, in no particular order."""
        yield from self.tasks
        for group in (*self.slots, *self._after.values(), *self._before.values()):
            yield from group

    def added(self) -> Iterator[tuple[Task, Task]]:
        """The forward tasks that were added so far, each with the task that it stands after."""
        for anchor in self.tasks:
            for task in tuple(self._after.get(anchor.name, ())):
                yield anchor, task

    def find(self, *ops: str) -> Iterator[tuple[Task, Call]]:
        """Find PyTorch's own forward tasks that consist of a single call, to one of ``ops``."""
        for task in self.tasks:
            if task.variant == "aten" and len(task.calls) == 1 and task.calls[0].op in ops:
                yield task, task.calls[0]

    def find_last(self, *ops: str) -> Iterator[tuple[Task, Call]]:
        """Find PyTorch's own forward tasks that end in a call to one of ``ops``; calls before it make views."""
        for task in self.tasks:
            if task.variant == "aten" and task.calls and task.calls[-1].op in ops:
                yield task, task.calls[-1]

    def find_slots(self, *ops: str) -> Iterator[tuple[int, Task, Call]]:
        """Find slots whose first way ends in a call to one of ``ops``; calls before it make views of its arguments."""
        for index, ways in enumerate(self.slots):
            if ways[0].calls[-1].op in ops:
                yield index, ways[0], ways[0].calls[-1]

    def value(self, name: str, kind: Any, meta: TensorMeta, *, on_host: bool = False) -> int:
        """Add a value with a storage of its own; memory ``on_host`` is counted by no budget."""
        host = meta.storage_bytes
        if self.device.type == "cuda":  # PyTorch's cache of pinned memory has blocks of powers of two
            host = 1 << max(0, host - 1).bit_length()
        on_device, host = (0, host) if on_host else (meta.allocated_bytes, 0)
        self.values.append(Value(name, on_device, kind, str(meta), host))
        self.metas.append(meta)
        return len(self.values) - 1

    def withdraw(self, value: int) -> None:
        """Remove the value that was added last; nothing may refer to it."""
        assert value == len(self.values) - 1
        self.values.pop()
        self.metas.pop()

    def add(
        self,
        anchor: Task,
        calls: Sequence[Call],
        writes: Sequence[int],
        variant: str,
        *,
        before: Task | None = None,
        **options: Any,
    ) -> None:
        """Add a forward task, named after ``anchor``, right after it or, if given, right ``before`` another task.

        Tasks added at one place keep their order, except that tasks which make the anchor's results come before tasks
        which read them.
        """
        task = make_task(f"{anchor.name}.{variant}", calls, writes, self.metas, variant=variant, **options)
        place, name = (self._after, anchor.name) if before is None else (self._before, before.name)
        place.setdefault(name, []).append(task)

    def add_way(self, slot: int, calls: Sequence[Call], variant: str, **options: Any) -> None:
        """Add a way to do a slot; it writes the values that the first way writes."""
        self.slots[slot].append(self.beside(self.slots[slot][0], calls, variant, **options))

    def beside(self, way: Task, calls: Sequence[Call], variant: str, **options: Any) -> Task:
        """Make another way that writes the same values; ``options`` are further fields of `Task`."""
        return make_task(f"{way.name}.{variant}", calls, way.writes, self.metas, variant=variant, **options)

    def in_turn(self, ways: Sequence[Task], between: Iterable[int], **options: Any) -> Task:
        """Make one way that does several slots in turn; values ``between``, which only they read, are temporary.

        It is named after the last of them; ``options`` are further fields of `Task`.
        """
        return in_turn(ways, between, self.metas, **options)

    def merge(self, slot: int, ways: Sequence[Task], count: int = 2) -> None:
        """Merge ``count`` slots from this one on into one slot with these ways."""
        merged = list(ways)
        for former in self.slots[slot : slot + count]:
            self._last.update((value, merged) for value in former[0].reads if self._last[value] is former)
        self.slots[slot : slot + count] = [merged]

    def merge_all(self, merges: Iterable[tuple[int, int, Sequence[Task]]]) -> None:
        """Merge slots that do not overlap: of each merge the first slot, their number, and the ways of the one."""
        for first, count, ways in sorted(merges, reverse=True, key=lambda merge: merge[0]):
            self.merge(first, ways, count)

    def read_later(self) -> Iterator[tuple[int, Task]]:
        """The dense forward values that slots read, each with PyTorch's own task that makes it as its first result; no
        outputs and nothing that is made of parameters alone.
        """
        for value in sorted({value for ways in self.slots for way in ways for value in way.reads}):
            maker = self.maker(value)
            if maker is None or maker.writes[0] != value or value in self.captured.program.outputs:
                continue
            if self.dense(value) and not self.of_parameters(value):
                yield value, maker

    def bits(self, name: str, value: int) -> int:
        """Add a value with one bit for each element of another one."""
        meta = self.metas[value]
        elements = meta.storage_bytes // meta.dtype.itemsize
        return self.value(f"{name}.bits", "forward", like(meta, dtype=torch.uint8, shape=(-(-elements // 8),)))

    def forward_readers(self, value: int) -> list[Task]:
        """PyTorch's own forward tasks that read a value."""
        return self._readers.get(value, [])

    def only_reader(self, value: int) -> Task | None:
        """The only forward task that reads ``value``, if it is one call of PyTorch's with one result; else None."""
        readers = self.forward_readers(value)
        if len(readers) != 1 or len(readers[0].calls) != 1 or len(readers[0].writes) != 1:
            return None
        return None if value in self.captured.program.outputs else readers[0]

    def maker(self, value: int) -> Task | None:
        """The last of PyTorch's own tasks that write a forward value; None if all of them run in the backward only."""
        makers = self._makers.get(value, [])
        return makers[-1] if any(task.runs != "again" for task in makers) else None

    def of_parameters(self, value: int) -> bool:
        """Whether a forward value is made from parameters and buffers alone, as autocast's casts of weights are."""
        if self._of_parameters is None:
            self._of_parameters = {v for v, found in enumerate(self.values) if found.kind in ("parameter", "buffer")}
            for task in self.tasks:
                if self._of_parameters.issuperset(task.reads):
                    self._of_parameters.update(task.writes)
        return value in self._of_parameters

    def unavoidable(self) -> set[int]:
        """The values that all ways of some slot read."""
        return {value for ways in self.slots for value in set.intersection(*(set(way.reads) for way in ways))}

    def replaceable(self, grad: Any, slot: int, result: Any) -> bool:
        """Whether a slot may overwrite ``grad`` with its result: it has the same layout and no later slot reads it."""
        meta = self.meta_of(grad)
        return meta is not None and meta == self.meta_of(result) and self.dies_in(grad.name, slot)

    def dies_in(self, value: int, slot: int) -> bool:
        """Whether ``value`` is a gradient between two slots that no slot after this one reads."""
        program = self.captured.program
        return (
            self.values[value].kind == "backward"
            and value not in (*program.gradients, *program.tangents)
            and self._last[value] is self.slots[slot]
        )

    def meta_of(self, arg: Any) -> TensorMeta | None:
        """Shape, dtype and layout of an argument that is a value's own tensor; None for literals and for views."""
        return self.metas[arg.name] if isinstance(arg, Ref) and isinstance(arg.name, int) else None

    def bytes_of(self, values: Iterable[int]) -> int:
        """Bytes of the memory of these values."""
        return sum(self.metas[value].storage_bytes for value in values)

    def is_own(self, arg: Any) -> bool:
        """Whether an argument is a forward value's own tensor."""
        return isinstance(arg, Ref) and isinstance(arg.name, int) and self.values[arg.name].kind == "forward"

    def dense(self, value: int) -> bool:
        """Whether a value's own tensor covers its storage without gaps or overlap."""
        return self.metas[value].covers_storage

    def rewrite(self, slot: int, ways: Sequence[Task]) -> None:
        """Replace all ways of a slot by ``ways``, which may read and write other gradients."""
        self.slots[slot][:] = ways
        self._last = {value: others for others in self.slots for value in others[0].reads}

    def seen(self, calls: Sequence[Call], ref: Ref) -> TensorMeta:
        """Shape, dtype and layout of a value's own tensor or of a temporary that ``calls`` make."""
        return self.meta_of(ref) or self.results(calls)[ref]

    def result(self, calls: Sequence[Call]) -> TensorMeta:
        """Shape, dtype and layout of the result of the last of ``calls``, which must have one result."""
        return list(self.results(calls).values())[-1]

    def results(self, calls: Sequence[Call]) -> dict[Ref, TensorMeta]:
        """Shapes, dtypes and layouts of the tensors that ``calls`` make."""
        with shape_mode(), convolutions(self.device), torch.no_grad(), torch._C._DisableAutocast():
            known: dict[Ref, torch.Tensor] = {}
            found: dict[Ref, TensorMeta] = {}

            def tensor(leaf: Any) -> Any:
                if not isinstance(leaf, Ref):
                    return leaf
                if leaf not in known:
                    assert isinstance(leaf.name, int)
                    known[leaf] = self.metas[leaf.name].empty()
                return known[leaf]

            for call in calls:
                made = resolve(call.op)(*tree_map(tensor, call.args), **tree_map(tensor, dict(call.kwargs)))
                several = made if call.unpack else (made,)
                for out, tensor_made in zip(call.outs, several, strict=True):
                    if out is not None:
                        known[out] = tensor_made
                        if isinstance(tensor_made, torch.Tensor):  # not a list of views
                            found[out] = TensorMeta.of(tensor_made)
            return found

    def finish(self) -> Captured:
        """Return the captured program with everything that was added.

        Raises:
            MonetError: something was added that makes the program malformed.
        """
        tasks: list[Task] = []
        for task in self.tasks:
            # Other writers of the task's results stand before what reads them (stable, so otherwise as added).
            added = sorted(self._after.get(task.name, ()), key=lambda new: not set(task.writes).isdisjoint(new.reads))
            tasks += [*self._before.get(task.name, ()), task, *added]
        program = replace(
            self.captured.program, values=tuple(self.values), tasks=tuple(tasks), slots=tuple(map(tuple, self.slots))
        )
        program.check()
        return replace(self.captured, program=program, metas=tuple(self.metas), as_called=self.captured.plain)


def in_turn(tasks: Sequence[Task], between: Iterable[int], metas: Sequence[TensorMeta], **options: Any) -> Task:
    """Make one task that does several tasks one after the other; see `Editor.in_turn`."""
    names = {Ref(value): Ref(f"between_{number}") for number, value in enumerate(sorted(between))}
    calls: list[Call] = []
    made: dict[Ref, Call] = {}  # of temporaries, while neither they nor what they are made from have become another
    for task in tasks:
        for call in task.calls:
            inner = with_names(call, names)
            outs = {out for out in inner.outs if out is not None}
            if outs and all(made.get(out) == inner for out in outs):
                continue  # views that several tasks make of the same tensor are made once
            calls.append(inner)
            own = {out for out in outs if isinstance(out.name, str)}
            made = {out: other for out, other in made.items() if own.isdisjoint((out, *refs(other)))}
            made |= dict.fromkeys(own, inner)
    writes = [value for task in tasks for value in task.writes if Ref(value) not in names]
    return make_task(options.pop("name", tasks[-1].name), calls, writes, metas, **options)


def views_of(ways: Iterable[Task], *wanted: Ref | None) -> list[Call]:
    """The view calls of tasks by which these arguments are made from values, views of views included, each once, in
    their order.
    """
    made = {out: call for way in ways for call in way.calls[:-1] for out in call.outs}
    needed: list[Call] = []
    for ref in wanted:
        while ref is not None and not isinstance(ref.name, int):
            needed.append(made[ref])
            ref = made[ref].args[0]
    return [call for call in dict.fromkeys(made.values()) if call in needed]


def with_names(call: Call, names: Mapping[Ref, Ref]) -> Call:
    """A call with other operands and results in the place of some."""
    args, kwargs, outs = (renamed(part, names) for part in (call.args, call.kwargs, call.outs))
    return replace(call, args=args, kwargs=kwargs, outs=outs)


def renamed(leaf: Any, names: Mapping[Ref, Ref]) -> Any:
    """Replace the names in the arguments or results of a call."""
    if isinstance(leaf, tuple | list):
        return type(leaf)(renamed(part, names) for part in leaf)
    return names.get(leaf, leaf) if isinstance(leaf, Ref) else leaf


Offer = Callable[[Editor], None]


def like(
    meta: TensorMeta,
    *,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> TensorMeta:
    """Describe a dense tensor like ``meta`` with another dtype or device, or in rows with another shape."""
    dtype = dtype or meta.dtype
    if shape is None:
        shape, stride = meta.shape, meta.stride
        count = meta.storage_bytes // meta.dtype.itemsize
    else:
        shape = tuple(shape)
        stride, count = torch.empty(shape, device="meta").stride(), math.prod(shape)
    return TensorMeta(dtype, device or meta.device, tuple(shape), tuple(stride), 0, count * dtype.itemsize)


def cuts(rows: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """Number, first row and end of each of ``parts`` parts; where there are fewer rows, some have none.

    There are as many parts for every number of rows, so that smaller inputs have the same program.
    """
    return ((k, k * rows // parts, (k + 1) * rows // parts) for k in range(parts))


def root_of(calls: Sequence[Call], operand: Any) -> int | None:
    """The value that an operand of ``calls`` is, or is a view of; None for a literal."""
    makers = {out: call for call in calls for out in call.outs if out is not None}
    while isinstance(operand, Ref) and not isinstance(operand.name, int):
        operand = makers[operand].args[0]
    return int(operand.name) if isinstance(operand, Ref) else None
