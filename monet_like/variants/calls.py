"""Calls of a task, written one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..capture.captured import TensorMeta
from ..ir.program import Call, Ref

HALF = (torch.float16, torch.bfloat16)


class Calls(list[Call]):
    """The calls so far. Their results are temporaries, unless they are told where to go (``out``).

    Args:
        calls: the first ones.
        prefix: of the temporaries' names.
    """

    def __init__(self, calls: Iterable[Call] = (), *, prefix: str = "made") -> None:
        super().__init__(calls)
        self._prefix, self._named = prefix, 0

    def name(self) -> Ref:
        """A new temporary."""
        self._named += 1
        return Ref(f"{self._prefix}_{self._named}")

    def add(self, op: str, *args: Any, out: Ref | None = None, **kwargs: Any) -> Ref:
        """Call an operator of one result; the result."""
        out = out or self.name()
        self.append(Call(op, args, tuple(kwargs.items()), (out,)))
        return out

    def again(self, call: Call, *args: Any, out: Ref | None = None) -> Ref:
        """Call the operator of ``call``, which has one result, with other arguments."""
        out = out or self.name()
        self.append(replace(call, args=args, outs=(out,)))
        return out

    def into(self, op: str, target: Ref, *args: Any) -> None:
        """Call an operator's form that writes into a given tensor."""
        self.append(Call(op, args, (("out", target),), (target,)))

    def put(self, made: Ref, target: Ref) -> None:
        """Copy a tensor into another one."""
        self.add("aten.copy_.default", target, made, out=target)

    def slice(self, x: Any, dim: int, begin: int, end: int) -> Ref:
        """A part of a tensor along a dimension."""
        return self.add("aten.slice.Tensor", x, dim, begin, end)

    def cast(self, x: Ref, dtype: torch.dtype, *, out: Ref | None = None) -> Ref:
        """A copy of another dtype."""
        return self.add("aten._to_copy.default", x, out=out, dtype=dtype)

    def empty(self, meta: TensorMeta, out: Ref) -> None:
        """A tensor laid out as ``meta`` says."""
        self.add("aten.empty_strided.default", meta.shape, meta.stride, out=out, dtype=meta.dtype, device=meta.device)

    def one_number(self, meta: TensorMeta) -> Ref:
        """A number, expanded to the shape of ``meta``, for operators that read no more of an operand than its shape."""
        number = self.add("aten.empty.memory_format", (1,), dtype=meta.dtype, device=meta.device)
        return self.add("aten.expand.default", number, meta.shape)


class Total:
    """A sum that is added up part by part.

    Args:
        calls: where it is written.
        result: the sum.
        dtype: of the result.
        apart: add up in a float32 tensor of its own, of which the result is a copy; default: where the result has
            16 bits.
    """

    def __init__(self, calls: Calls, result: Ref, dtype: torch.dtype, *, apart: bool | None = None) -> None:
        self._calls, self._result, self._dtype = calls, result, dtype
        self._apart = dtype in HALF if apart is None else apart
        self.tensor = calls.name() if self._apart else result
        self._begun = False

    def place(self) -> Ref:
        """Where the next part is to be made: the total itself, if it can be."""
        return self._calls.name() if self._apart or self._begun else self.tensor

    def add(self, made: Ref) -> None:
        """Add a part, which was made at `place`."""
        if self._begun:
            self._calls.add("aten.add_.Tensor", self.tensor, made, out=self.tensor)
        elif self._apart:
            self._calls.cast(made, torch.float32, out=self.tensor)
        self._begun = True

    def add_product(self, left: Ref, right: Ref) -> None:
        """Add the product of two matrices."""
        if self._begun and not self._apart:
            self._calls.into("aten.addmm.out", self.tensor, self.tensor, left, right)
        else:
            self.add(self._calls.add("aten.mm.default", left, right, out=self.place()))

    def add_sum(self, call: Call, *args: Any) -> None:
        """Add what ``call``, a sum, makes of other arguments."""
        kwargs = {"dtype": torch.float32} if self._apart else dict(call.kwargs)
        made = self._calls.add(call.op, *args, out=None if self._begun else self.tensor, **kwargs)
        if self._begun:
            self.add(made)
        self._begun = True

    def finish(self) -> None:
        """Write the result."""
        if self._apart:
            self._calls.cast(self.tensor, self._dtype, out=self._result)
