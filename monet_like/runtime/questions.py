"""Questions of a step about the values of its tensors, which its forward asks again in every call.

A program holds for one series of answers, to which sizes that depend on values belong. Where a step has another answer
than its capture had, `Asking` ends the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

#: The operator of a question: number of the question, operator that is asked, tensors, options.
ASK = "monet_like.ask"
#: What `ask` is asked for the sizes of tensors.
SIZES = "monet_like.sizes"
#: The operator of a result whose size depends on values: operator, its results as recorded, its arguments.
SIZED = "monet_like.sized"

#: How a result lies: shape, strides, dtype, bytes of its storage.
Look = tuple[Sequence[int], Sequence[int], torch.dtype, int]


class OtherAnswer(Exception):
    """Ends a forward whose answer to a question is not that of its capture.

    Attributes:
        number: of the question.
        value: the answer.
    """

    def __init__(self, number: int, value: Any) -> None:
        super().__init__(f"question {number + 1} about the values of tensors has the answer {value!r}")
        self.number, self.value = number, value


def ask(number: int, op: str, *tensors: torch.Tensor, **options: Any) -> Any:
    """The answer of an operator such as ``aten.equal.default``; None of tensors without values."""
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return None
    if op == SIZES:
        return [list(tensor.shape) for tensor in tensors]
    return _operator(op)(*tensors, **options)


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def sized(op: str, looks: Sequence[Look], /, **given: Any) -> Sequence[torch.Tensor]:
    """The results of an operator such as ``aten.nonzero.default``, whose sizes `ask` is asked for next.

    Of tensors without values, such results as lie as ``looks`` say.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return made_like(looks, tensors[0])
    found = _operator(op)(**given)
    return found if isinstance(found, tuple) else (found,)


def made_like(looks: Sequence[Look], like: torch.Tensor) -> list[torch.Tensor]:
    """New tensors that lie as ``looks`` say, on the device of ``like``."""
    return [
        like.new_empty(count // dtype.itemsize, dtype=dtype).as_strided(shape, stride)
        for shape, stride, dtype, count in looks
    ]


class Asking:
    """`ask` of a step with these expected answers, as text.

    Raises:
        OtherAnswer: there is another one.
    """

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = tuple(answers)

    def __call__(self, number: int, op: str, *tensors: torch.Tensor, **options: Any) -> None:
        value = ask(number, op, *tensors, **options)
        if repr(value) != self._answers[number]:
            raise OtherAnswer(number, value)
