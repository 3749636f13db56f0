"""The rows of results: which rows of a wide product each tensor of a region has, operator by operator."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..ir.program import Call, Ref, Task, refs
from ..runtime.operators import overload
from . import rows as by
from .editor import Editor
from .rows import NotByRows


@dataclass
class RowsOfResults:
    """The tensors of a region under construction, and their rows.

    Attributes:
        seeds: names of the tasks whose products have the region's rows.
        count: rows of their input; ``width``: its extent.
        rows: of all tensors that have some; ``metas``: of all tensors, without memory.
        makers: of temporaries and of pinned operands the call that makes them.
        computed: tensors that are made in tiles; other tensors with rows come from outside.
        sums: of a sum over rows the parts: the call, and the rows of the sum that it adds to.
    """

    editor: Editor
    seeds: set[str]
    count: int
    width: int
    rows: dict[Ref, Any] = field(default_factory=dict)
    metas: dict[Ref, Any] = field(default_factory=dict)
    makers: dict[Ref, Call] = field(default_factory=dict)
    computed: set[Ref] = field(default_factory=set)
    sums: dict[Ref, list[tuple[Call, int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places: dict[Any, tuple[int | None, int | None]] = {}
        for place, task in enumerate(self.editor.tasks):
            self.places.update(dict.fromkeys(task.writes if task.variant == "aten" else (), (place, None)))
        for slot, ways in enumerate(self.editor.slots):
            self.places.update(dict.fromkeys(ways[0].writes, (None, slot)))

    def is_wide(self, key: Ref) -> bool:
        """Whether a tensor has more elements in a row than the products' input."""
        rows = self.rows[key]
        inside = (extent for extent, stride in zip(rows.shape, rows.stride(), strict=True) if not stride)
        return math.prod(inside) > self.width

    def _meta(self, value: Any) -> Tensor:
        meta = self.editor.metas[value]
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")

    def meta(self, key: Ref) -> Any:
        """A tensor without memory."""
        if key not in self.metas:
            self.metas[key] = self._meta(key.name)
        return self.metas[key]

    def _infer(self, call: Call, task: Task, hint: Tensor | None) -> Call:
        """Note the rows of a call's results; the call with the operands that come from outside pinned to rows."""
        if call.op != "operator.getitem" and not call.op.startswith("aten."):
            raise NotByRows
        given = (call.args, dict(call.kwargs))
        args, kwargs = tree_map(lambda arg: self.meta(arg) if isinstance(arg, Ref) else arg, given)
        if "device" in kwargs:
            kwargs["device"] = "meta"
        made = _function(call.op)(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"})
        several = made if call.unpack else (made,)
        for out, tensor in zip(call.outs, several, strict=True):
            if out is not None:
                self.metas[out] = tensor
        call, rows = self._rows(call, task, hint)
        for out, found in zip(call.outs, rows, strict=False):
            if out is not None:
                self.makers[out] = call
                if found is not None:
                    self.rows[out] = found
                    self.computed.add(out)
        return call

    def _rows(self, call: Call, task: Task, hint: Tensor | None) -> tuple[Call, list[Any]]:
        name, known = by.name_of(call.op) if call.op != "operator.getitem" else "getitem", self._known(call)
        out = call.outs[0]
        shape = tuple(self.metas[out].shape) if out is not None and isinstance(self.metas[out], Tensor) else ()
        if by.is_view(call.op):
            if call.args[0] not in self.rows:
                return call, [None]
            rows = self.rows[call.args[0]]
            if call.op == "aten.view.default":  # of a value, whose rows may be a part of a larger tensor's
                rows = by.compressed(rows).contiguous().expand(rows.shape)
            try:
                return call, [_function(call.op)(rows, *call.args[1:], **dict(call.kwargs))]
            except RuntimeError:
                raise NotByRows from None
        if name in by.FACTORIES:
            return call, [hint]
        if name in by.PRODUCTS:
            return self._product(call, task, hint)
        if any(arg in self.sums for arg in refs(call)):
            return self._sum_chain(call), [None]
        if not known and hint is None:
            return call, [None]
        if name == "nll_loss_forward" and call.args[3] == 0 and known:
            line = self.rows[call.args[0]].select(1, 0)
            return self._pinned(call, {1: line}), [line, None]
        if name == "nll_loss_backward" and call.args[4] == 0 and call.args[1] in self.rows:
            r = self.rows[call.args[1]]
            return self._pinned(call, {0: r.select(1, 0), 2: r.select(1, 0)}), [r]
        if name in by.PADDINGS and known:
            return self._padding(call, shape)
        if name in by.JOINS and known:
            return self._join(call, shape)
        if name in by.INDEXED:
            return self._indexed(call, name, shape, hint)
        if name in by.REDUCTIONS and len(call.args) > 1 and known:
            return self._reduction(call, name, task)
        if name in by.ALONG or by.is_pointwise(call.op):
            several = [self.rows[key] for key in known] + ([hint] if hint is not None else [])
            rows = by.combined(call.op, shape, several)
            if name in by.ALONG:
                by.inside_dims(call.args[by.ALONG[name]], len(shape), by.depth(rows))
            places = {k: rows for k, arg in enumerate(call.args) if isinstance(arg, Ref) and arg not in self.rows}
            return self._pinned(call, places), [rows] * len(call.outs)
        raise NotByRows(call.op)

    def _known(self, call: Call) -> list[Ref]:
        return [key for key in refs(call) if key in self.rows]

    def _pinned(self, call: Call, places: dict[int, Tensor]) -> Call:
        """The call with some operands as they stand beside rows, broadcast along these."""
        args = list(call.args)
        for place, rows in places.items():
            if isinstance(args[place], Ref):
                args[place] = self._pin(args[place], rows)
        return replace(call, args=tuple(args))

    def _pin(self, key: Ref, rows: Tensor) -> Ref:
        """An operand from outside, or its broadcast, that has rows; the operand itself if all rows read the same."""
        first, meta = by.depth(rows), self.meta(key)
        lead = rows.ndim - meta.ndim
        own = [1] * max(lead, 0) + [*meta.shape]
        if all(own[d] == 1 for d in range(first)) and max(rows.shape[:first], default=1) > 1 and key not in self.rows:
            return key
        shape = (*rows.shape[:first], *own[first:])
        mine = rows
        for dim in range(first, rows.ndim):
            mine = mine.narrow(dim, 0, 1)
        mine = mine.expand(shape)
        if key in self.rows:
            if not by.agree(self.rows[key].expand(shape), mine):
                raise NotByRows
            return key
        if shape == tuple(meta.shape) and math.prod(shape[first:]) > self.width and self._absorbed(key, mine):
            return key
        pinned = Ref(f"pinned_{len(self.makers)}_{len(self.rows)}")
        self.makers[pinned] = Call("aten.expand.default", (key, list(shape)), (), (pinned,))
        self.metas[pinned], self.rows[pinned] = meta.expand(shape), mine
        return pinned

    def _absorbed(self, key: Ref, rows: Tensor) -> bool:
        """Take a wide operand's maker into the region, if it is one that works row by row."""
        return False

    def _product(self, call: Call, task: Task, hint: Tensor | None) -> tuple[Call, list[Any]]:
        first = len(call.args) - 2
        a, b = call.args[first:]
        shape = tuple(self.metas[call.outs[0]].shape)  # type: ignore[index]
        if task.name in self.seeds and a not in self.rows and b not in self.rows:
            hint = torch.arange(self.count).view(-1, 1).expand(shape)
        elif a not in self.rows and b not in self.rows:
            return call, [None]
        turned = (a in self.rows and _is_turned(self.rows[a])) or b in self.rows
        if turned:
            line = self.rows[a][0] if a in self.rows else self.rows[b][:, 0]
            call = self._pinned(call, {first + 1: line.view(-1, 1).expand(tuple(self.meta(b).shape))})
            if a not in self.rows:
                call = self._turned(call, first, line)
            elif not torch.equal(line, self.rows[call.args[first + 1]][:, 0]):
                raise NotByRows
            self.sums[call.outs[0]] = [(call, 0, shape[0])]  # type: ignore[index]
            return call, [None]
        if a in self.rows and task.name not in self.seeds and self.is_wide(a) and shape[1] > self.width:
            raise NotByRows
        if a in self.rows and not self.is_gradient(task):
            raise NotByRows  # a layer behind the wide one
        rows = hint if a not in self.rows else self.rows[a][:, :1].expand(shape)
        assert rows is not None
        places = {first: rows[:, :1].expand(tuple(self.meta(a).shape))}
        if first and call.args[0] not in self.rows:
            places[0] = rows
        return self._pinned(call, places), [rows]

    def is_gradient(self, task: Task) -> bool:
        """Whether a task is a slot's."""
        return self.places.get(task.writes[0], (0, None))[0] is None

    def _turned(self, call: Call, place: int, line: Tensor) -> Call:
        """The call with a turned operand from outside pinned to rows."""
        key = call.args[place]
        turn = self.makers.get(key)
        if turn is None or turn.op != "aten.t.default":
            raise NotByRows
        source = self._pin(turn.args[0], line.view(-1, 1).expand(tuple(self.meta(turn.args[0]).shape)))
        new = Ref(f"turned_{len(self.makers)}")
        self.makers[new] = Call(turn.op, (source,), (), (new,))
        self.metas[new], self.rows[new] = self.meta(key), self.rows[source].t()
        self.computed.add(new)
        return replace(call, args=(*call.args[:place], new, *call.args[place + 1 :]))

    def _sum_chain(self, call: Call) -> Call:
        """A sum over rows that is put into its place in a larger one."""
        if by.name_of(call.op) != "slice_scatter" or call.args[2] != 0:
            raise NotByRows
        base, part, _, begin, end = (*call.args, 0, None)[:5]
        (added,) = self.sums.get(part, [None])
        total = self.meta(base).shape[0]
        end = min(total if end is None else end, total)
        if added is None or by.name_of(added[0].op) != "addmm" or not self._is_part(added[0].args[0], base, begin, end):
            raise NotByRows
        self.sums[call.outs[0]] = [*self._sums_of(base), (added[0], begin, end)]  # type: ignore[index]
        return call

    def _is_part(self, key: Ref, base: Ref, begin: int, end: int) -> bool:
        """Whether a tensor is these rows of another one."""
        total = self.meta(base).shape[0]
        if key == base:
            return (begin, end) == (0, total)
        made = self.makers.get(key)
        if made is None or made.op != "aten.slice.Tensor" or made.args[0] != base or len(made.args) != 4:
            return False
        return made.args[1:3] == (0, begin) and min(made.args[3], total) == end

    def _sums_of(self, key: Ref) -> list[tuple[Call, int, int]]:
        """The parts of a sum that exists so far; none of one that is zero."""
        if key in self.sums:
            return self.sums[key]
        place = self.places.get(key.name, (None, None))[0]
        if place is None or by.name_of(self.editor.tasks[place].calls[-1].op) not in ("zeros", "new_zeros"):
            raise NotByRows
        return []

    def _padding(self, call: Call, shape: tuple[int, ...]) -> tuple[Call, list[Any]]:
        rows, name = self.rows[call.args[0]], by.name_of(call.op)
        dim = call.args[2] % len(shape)
        if dim < by.depth(rows):
            return call, [by.padded(name, call.args, rows, shape)]
        small = rows.unsqueeze(dim) if name == "select_backward" else rows.narrow(dim, 0, 1)
        return call, [small.expand(shape)]

    def _join(self, call: Call, shape: tuple[int, ...]) -> tuple[Call, list[Any]]:
        name, parts = by.name_of(call.op), call.args[0]
        dim = (call.args[1] if len(call.args) > 1 else 0) % len(shape)
        if not all(part in self.rows for part in parts):
            raise NotByRows
        several = [self.rows[part] for part in parts]
        if dim < max(1, *map(by.depth, several)):
            small = [*map(by.compressed, several)]
            made = torch.stack(small, dim) if name == "stack" else torch.cat(small, dim)
            return call, [made.expand(shape)]
        core = [(r.unsqueeze(dim) if name == "stack" else r.narrow(dim, 0, 1)) for r in several]
        return call, [by.combined("aten.view", shape, core)]

    def _indexed(self, call: Call, name: str, shape: tuple[int, ...], hint: Tensor | None) -> tuple[Call, list[Any]]:
        dim = call.args[by.INDEXED[name]] % len(shape)
        tensors = [k for k, arg in enumerate(call.args) if isinstance(arg, Ref)]
        known = [self.rows[call.args[k]] for k in tensors if call.args[k] in self.rows]
        known += [hint] if hint is not None else []
        if name == "slice_scatter" and any(dim < by.depth(r) for r in known):
            return self._put_rows(call, shape, dim)
        core = known[0].narrow(dim, 0, 1)
        if dim < by.depth(core) or any(dim < by.depth(r) for r in known):
            raise NotByRows
        places = {}
        for k in tensors:
            own = tuple(self.meta(call.args[k]).shape)
            if any(own[d] != shape[d] for d in range(len(shape)) if d != dim):
                raise NotByRows
            places[k] = core.expand(own)
        return self._pinned(call, places), [core.expand(shape)]

    def _put_rows(self, call: Call, shape: tuple[int, ...], dim: int) -> tuple[Call, list[Any]]:
        """Some rows of a tensor anew."""
        _, part, _, begin, end = (*call.args, 0, None)[:5]
        if dim or shape[0] != self.count or part not in self.rows or by.depth(self.rows[part]) != 1:
            raise NotByRows
        whole = torch.arange(self.count).view(-1, *[1] * (len(shape) - 1)).expand(shape)
        if not by.agree(whole[begin:end], self.rows[part]):
            raise NotByRows
        return self._pinned(call, {0: whole}), [whole]

    def _reduction(self, call: Call, name: str, task: Task) -> tuple[Call, list[Any]]:
        source = call.args[0]
        rows = self.rows[source]
        dims = call.args[1]
        if name == "sum" and self.is_gradient(task) and rows.ndim == 2 and list(dims) == [0] and by.depth(rows) == 1:
            self.sums[call.outs[0]] = [(call, 0, 0)]  # type: ignore[index]
            return call, [None]
        inside = by.inside_dims(dims, rows.ndim, by.depth(rows))
        for dim in inside:
            rows = rows.narrow(dim, 0, 1)
        if not (len(call.args) > 2 and call.args[2]):
            for dim in sorted(inside, reverse=True):
                rows = rows.squeeze(dim)
        return call, [rows] * len(call.outs)


def _function(op: str) -> Any:
    return operator.getitem if op == "operator.getitem" else overload(op)


def _is_turned(rows: Tensor) -> bool:
    return rows.ndim == 2 and rows.stride(0) == 0 and rows.shape[0] > 1 and rows.stride(1) != 0
