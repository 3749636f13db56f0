"""Questions of a step about the values of its tensors, which its forward asks again in every call.

A program holds for one series of answers. Where a step has another answer than its capture had, `Asking` ends the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

#: The operator of a question: number of the question, operator that is asked, tensors, options.
ASK = "monet_like.ask"


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
    namespace, packet, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)(*tensors, **options)


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
