"""The calls of a region of rows for some of its rows at a time.

Every tensor of the region has in a part one dimension for its rows there, and those inside of a row as in the program.
What comes from outside is cut once along its rows; rows that nothing leaves from, such as those that a slice of the
logits drops, are not computed, and have gradients of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ir.program import Call, Ref
from . import rows as by
from .calls import HALF, Total
from .editor import cuts, like
from .row_operands import Operands, runs_of
from .rows import NotByRows


class Parts(Operands):
    """Writes the calls of one variant."""

    def forward(self) -> list[Call]:
        """The calls that make the exits."""
        self.hurried = self.head.place
        rowed = [v for v in self.head.exits if Ref(v) in self.region.computed]
        buffers = {v: self._buffer(v) for v in rowed}
        for part, begin, end in cuts(len(self.head.domain), self.parts):
            self._start(begin, end)
            for place in self.head.forward:
                self._member(self.region.forward[place].calls, last=part == self.parts - 1)
            for v in rowed:
                self._leave(v, buffers[v])
        for v in rowed:
            self._finish(v, buffers[v])
        return self.calls

    def backward(self) -> list[Call]:
        """The calls that make the results of all slots."""
        head, region = self.head, self.region
        made = {v for member in region.backward.values() for v in member.task.writes}
        wanted = made & {*head.results, *(v for way in (*head.before, *head.after) for v in way.reads)}
        rowed = [v for v in wanted if Ref(v) in region.computed]
        sums = [v for v in wanted if Ref(v) in region.sums]
        if len(rowed) + len(sums) < len(wanted):
            raise NotByRows
        mine = {v for way in (*head.before, *head.after) for v in way.writes} | made
        for way in [ways[0] for ways in self.editor.slots[slice(*head.slots)]]:
            for v in way.reads:  # also those that no part needs, as factories do
                if v not in mine and self.editor.values[v].kind == "backward":
                    self.known.setdefault(v, self.calls.add("aten.alias.default", Ref(v)))
        self._carry(head.before)
        buffers = {v: self._buffer(v) for v in sorted(rowed)}
        totals = {v: self._total(v) for v in sorted(sums)}
        for _, begin, end in cuts(len(head.domain), self.parts):
            self._start(begin, end)
            for place in head.again:
                self._member(region.forward[place].calls, last=False)
            for slot in sorted(region.backward):
                self._member(region.backward[slot].calls, last=False)
                for v in region.backward[slot].task.writes:
                    if v in buffers:
                        self._leave(v, buffers[v])
                    elif v in totals:
                        self._add_up(v, totals[v])
        for v, buffer in buffers.items():
            self._finish(v, buffer)
        for total in totals.values():
            total.finish()
        self._carry(head.after)
        return self.calls

    def _member(self, calls: Sequence[Call], *, last: bool) -> None:
        for call in calls:
            out = call.outs[0]
            if out is None or out in self.tile or out not in self.region.computed:
                continue
            if by.is_view(call.op):
                self._view(call, out)
                continue
            name = by.name_of(call.op)
            if name in by.JOINS and self._joined(call, out):
                continue
            if name == "slice_scatter" and call.args[2] == 0 and by.depth(self.region.rows[out]) == 1:
                self._rows_anew(call, out)
                continue
            if name in by.PADDINGS and call.args[2] % self.region.meta(out).ndim < by.depth(self.region.rows[out]):
                self.tile[out] = self._operand(call.args[0])
                continue
            args = self._adapted(call, name, out)
            args = tuple(self._with_operands(arg) for arg in args)
            op = call.op.replace(f".{call.op.split('.')[1]}.", f".{name}.")
            outs = [self.calls.name() if ref in self.region.computed else None for ref in call.outs]
            for k, ref in enumerate(call.outs):
                if ref is not None and ref not in self.region.computed and last:
                    outs[k] = ref
            self.calls.append(replace(call, op=op, args=args, outs=tuple(outs)))
            self.tile.update((ref, new) for ref, new in zip(call.outs, outs, strict=True) if ref and new)

    def _with_operands(self, arg: Any) -> Any:
        if isinstance(arg, tuple | list):
            return type(arg)(self._with_operands(part) for part in arg)
        return self._operand(arg) if isinstance(arg, Ref) else arg

    def _adapted(self, call: Call, name: str, out: Ref) -> tuple[Any, ...]:
        """Arguments with dimensions and extents of a part."""
        args, region = list(call.args), self.region
        if name in by.FACTORIES:
            low, high = self._between(self._numbers(out))
            place = 1 if name.startswith("new_") else 0
            args[place] = [high - low, *self._inner(out)]
            return tuple(args)

        def moved(dim: int, of: Ref) -> int:
            return dim % region.meta(of).ndim - by.depth(region.rows[of]) + 1

        source = next((arg for arg in args if isinstance(arg, Ref)), None)
        if name in by.REDUCTIONS and len(args) > 1 and source is not None:
            dims = args[1] if isinstance(args[1], list | tuple) else [args[1]]
            dims = [*range(by.depth(region.rows[source]), region.meta(source).ndim)] if dims in ([], [None]) else dims
            new = [moved(d, source) for d in dims]
            args[1] = new if isinstance(call.args[1], list | tuple) else new[0]
        elif name in by.ALONG:
            args[by.ALONG[name]] = moved(args[by.ALONG[name]], out)
        elif name in by.INDEXED:
            args[by.INDEXED[name]] = moved(args[by.INDEXED[name]], out)
        elif name in by.PADDINGS:
            low, high = self._between(self._numbers(out))
            args[1], args[2] = [high - low, *self._inner(out)], moved(args[2], out)
        elif name in by.JOINS:
            raise NotByRows
        return tuple(args)

    def _within(self, source: Ref, out: Ref) -> Ref:
        """The rows of a part of ``source`` that ``out`` has."""
        made = self._operand(source)
        mine, its = (numbers[slice(*self._between(numbers))] for numbers in (self._numbers(source), self._numbers(out)))
        if len(mine) == len(its):
            return made
        low = int(torch.searchsorted(mine, its[0])) if len(its) else 0
        if not torch.equal(mine[low : low + len(its)], its):
            raise NotByRows
        return self.calls.slice(made, 0, low, low + len(its))

    def _view(self, call: Call, out: Ref) -> None:
        region, source = self.region, call.args[0]
        if not isinstance(region.rows[out], Tensor):
            return  # a list of views; its elements follow
        if call.op == "operator.getitem":
            call = region.makers[source]
            source = call.args[0]
            if (call.args[-1] if call.op == "aten.unbind.int" and len(call.args) > 1 else 0) or len(call.args) > 2:
                raise NotByRows
        if call.op == "aten.t.default":
            self.tile[out] = self.calls.add(call.op, self._operand(source))
            return
        inner, mine = self._inner(out), self._inner(source)
        made = self._within(source, out)
        rank = region.meta(source).ndim
        name = by.name_of(call.op)
        dim = call.args[1] % rank if name in ("slice", "select") else 0
        own = by.depth(region.rows[source])
        if dim >= own and name in ("slice", "select"):
            made = self.calls.add(call.op, made, dim - own + 1, *call.args[2:])
        elif inner != mine:
            low, high = self._between(self._numbers(out))
            op = "aten.expand.default" if name == "expand" else "aten.view.default"
            made = self.calls.add(op, made, [high - low, *inner])
        self.tile[out] = made

    def _joined(self, call: Call, out: Ref) -> bool:
        """Parts of a concatenation along rows, one after the other."""
        dim = (call.args[1] if len(call.args) > 1 else 0) % self.region.meta(out).ndim
        if dim >= max(by.depth(self.region.rows[out]), 1):
            return False
        bounds = [(part, *self._between(self._numbers(part))) for part in call.args[0]]
        pieces = [self._operand(part) for part, low, high in bounds if low < high]
        self.tile[out] = self._concatenated(pieces, call.args[0][0])
        return True

    def _concatenated(self, pieces: Sequence[Ref], empty: Ref) -> Ref:
        if not pieces:
            return self._operand(empty)
        return pieces[0] if len(pieces) == 1 else self.calls.add("aten.cat.default", [*pieces], 0)

    def _rows_anew(self, call: Call, out: Ref) -> None:
        """Rows of a tensor and those of another in the middle."""
        base, part, _, *_ = call.args
        own, new = self._numbers(out), self._numbers(part)
        own = own[slice(*self._between(own))]
        new = new[slice(*self._between(new))]
        pieces = []
        low = int(torch.searchsorted(own, new[0])) if len(new) else len(own)
        for begin, end in ((0, low), (low + len(new), len(own))):
            if end > begin:
                pieces.append(self.calls.slice(self._operand(base), 0, begin, end))
        if len(new):
            pieces.insert(1 if low else 0, self._operand(part))
        self.tile[out] = self._concatenated(pieces, base)

    def _buffer(self, value: int) -> Ref:
        """Rows of a result; the result itself if it has all of them."""
        key, meta = Ref(value), self.editor.metas[value]
        numbers, some = by.flat(self.region.rows[key]), self._numbers(key)
        shape = (len(some), *self._inner(key))
        if len(some) < len(numbers):
            rows, own = like(meta, shape=shape), self.calls.name()
            self.calls.empty(rows, own)
            return own
        if not meta.contiguous:
            raise NotByRows
        self.calls.empty(meta, self._result(value))
        return self._reshaped(self._result(value), self.region.meta(key), shape)

    def _leave(self, value: int, buffer: Ref) -> None:
        part = self.calls.slice(buffer, 0, *self._between(self._numbers(Ref(value))))
        self.calls.put(self._operand(Ref(value)), part)

    def _finish(self, value: int, buffer: Ref) -> None:
        """Put rows of a result among rows of zeros."""
        key, meta = Ref(value), self.editor.metas[value]
        numbers = by.flat(self.region.rows[key])
        picked = torch.isin(numbers, self.head.domain)
        if bool(picked.all()):
            return
        if not meta.contiguous:
            raise NotByRows
        whole = self._result(value)
        self.calls.add("aten.zeros.default", [*meta.shape], out=whole, dtype=meta.dtype, device=meta.device)
        shape = (len(numbers), *self._inner(key))
        rows = self._reshaped(whole, self.region.meta(key), shape)
        view, extents = self._run_view(rows, torch.empty(shape, device="meta"), runs_of(picked))
        self.calls.put(self.calls.add("aten.view.default", buffer, list(extents)), view)

    def _total(self, value: int) -> Total:
        """A sum over rows: made by its first part, or zeros that parts are added to."""
        meta = self.editor.metas[value]
        total = Total(self.calls, self._result(value), meta.dtype)
        if not self._is_whole(value):
            dtype = torch.float32 if meta.dtype in HALF else meta.dtype
            self.calls.add("aten.zeros.default", [*meta.shape], out=total.tensor, dtype=dtype, device=meta.device)
        return total

    def _is_whole(self, value: int) -> bool:
        ((call, begin, end), *more) = self.region.sums[Ref(value)]
        extent = self.editor.metas[value].shape[0]
        return not more and by.name_of(call.op) != "addmm" and (begin, end) in ((0, extent), (0, 0))

    def _add_up(self, value: int, total: Total) -> None:
        for call, begin, end in self.region.sums[Ref(value)]:
            if by.name_of(call.op) == "sum":
                total.add_sum(call, self._operand(call.args[0]), *call.args[1:])
                continue
            operands = [self._operand(arg) for arg in call.args[-2:]]
            if self._is_whole(value):
                total.add_product(*operands)
            else:
                some = self.calls.slice(total.tensor, 0, begin, end)
                self.calls.into("aten.addmm.out", some, some, *operands)
