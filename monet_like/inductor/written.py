"""Operators that return their input or a copy, and decide whether Inductor writes it to memory, and where, or not."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def _copy(x: torch.Tensor) -> torch.Tensor:
    """An operator may not return what it was given."""
    return x.clone()


#: PyTorch forgets an operator whose definition nobody holds.
_OPERATORS = [
    torch.library.custom_op(f"monet_like_inductor::{name}", _copy, mutates_args=())
    for name in ("written", "apart", "inlined", "copied")
]
for _operator in _OPERATORS:
    _operator.register_fake(torch.empty_like)


@cache
def written_operator() -> Any:
    """The operator whose result is in memory, once Inductor knows what to do with it: no copy is made."""
    from torch._inductor.lowering import register_lowering

    overload = torch.ops.monet_like_inductor.written.default

    @register_lowering(overload, type_promotion_kind=None)
    def lowered(x: Any) -> Any:
        x.realize()
        return x

    return overload


@cache
def apart_operator() -> Any:
    """The operator whose result is in memory of its own, also if a concatenation reads it: that copies it.

    Without it Inductor may have the result written to its place in the concatenation, which is then there as a whole.
    """
    from torch._inductor.lowering import register_lowering

    overload = torch.ops.monet_like_inductor.apart.default

    @register_lowering(overload, type_promotion_kind=None)
    def lowered(x: Any) -> Any:
        x.realize()
        x.freeze_layout()
        return x

    return overload


@cache
def inlined_operator() -> Any:
    """The operator whose result is part of the kernels that read it, however many of their operators do.

    Without it Inductor writes a result that has several readers, if it is made from more than four tensors or, on the
    CPU, by ``exp``, ``log``, ``sigmoid`` or ``tanh``, and random numbers always: then nothing reads what it has
    written, and it leaves that out. A kernel still can have the result written, as a product needs it.
    """
    from torch._inductor.ir import ComputedBuffer, Pointwise, StorageBox, TensorBox
    from torch._inductor.lowering import register_lowering

    class Inlined(StorageBox):
        """An expression that is not written because of its readers."""

        def should_realize_on_reuse(self, users: int, *, graph_reuse: bool = True) -> bool:
            return False

    overload = torch.ops.monet_like_inductor.inlined.default

    @register_lowering(overload, type_promotion_kind=None)
    def lowered(x: Any) -> Any:
        made = x.data.data if isinstance(x.data, StorageBox) else None
        if isinstance(made, ComputedBuffer):
            made = made.data
        return TensorBox(Inlined(made)) if isinstance(made, Pointwise) else x

    return overload


@cache
def copied_operator() -> Any:
    """The operator that copies. Inductor leaves out a ``clone``, also of an input that is overwritten later."""
    from torch._inductor.lowering import clone, register_lowering

    overload = torch.ops.monet_like_inductor.copied.default
    register_lowering(overload, type_promotion_kind=None)(clone)
    return overload
