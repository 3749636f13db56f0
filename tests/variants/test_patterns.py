"""Patterns: what is recorded from a function and its gradients, and that a program has it exactly there."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.variants import admitted
from monet_like.variants.editor import Editor
from monet_like.variants.patterns import ANY, Match, Operators, record

FLOAT = torch.float32


def scaled(x: Tensor, y: Tensor, *, by: float) -> Tensor:
    """What the models below compute."""
    return (x * by).tanh() * y


class Net(nn.Module):
    """A function between layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self.one(x), self.other(x)))
        return y


def found(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = FLOAT) -> tuple[Captured, Match | None]:
    """The program of such a model of square inputs, and where its tanh is the pattern's."""
    captured = capture(Net(function).to(dtype), (torch.randn(6, 6, dtype=dtype),))
    pattern = record(scaled, (("x", (6, 6), FLOAT), ("y", (6, 6), FLOAT)), "tanh", of=("x", "y"), by=ANY)
    (root,) = (task for task in captured.program.tasks if task.calls[-1].op == "aten.tanh.default")
    return captured, Operators(Editor(captured, frozenset())).match(pattern, root)


SAME: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": lambda x, y: (x * 0.5).tanh() * y,
    "factors in the other order": lambda x, y: y * (0.5 * x).tanh(),
    "reshaped in between and back": lambda x, y: (x * 0.5).view(36).view(6, 6).tanh() * y,
    "other readers": lambda x, y: (x * 0.5).tanh() * y + x + y,
    "an input is a slice": lambda x, y: F.pad((x * 0.5).tanh() * F.pad(y, (1, 0))[:, 1:], (0, 0)),
}


@pytest.mark.parametrize("kind", list(SAME))
def test_the_same_computation_is_found_however_it_is_written(kind: str) -> None:
    captured, match = found(SAME[kind])
    assert match is not None
    assert match.values[ANY] == 0.5
    ops = Counter(task.calls[-1].op for task in match.tasks)
    assert ops["aten.tanh.default"] == ops["aten.tanh_backward.default"] == 1
    of_x, of_y = match.gradients
    written = {value for slot in match.slots for value in captured.program.slots[slot][0].writes}
    assert {of_x, of_y} <= written and len(match.slots) == len(match.tasks) - 3


OTHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a transposed factor of the same shape": lambda x, y: (x * 0.5).tanh().t() * y,
    "a transposed argument": lambda x, y: (x * 0.5).t().tanh() * y,
    "another operator": lambda x, y: (x * 0.5).tanh() + y,
    "a broadcast factor": lambda x, y: (x * 0.5).tanh() * y[:1],
    "an integer where a float is": lambda x, y: (x * 2).tanh() * y,
    "a constant input": lambda x, y: (x * 0.5).tanh() * y.detach(),
    "a constant result": lambda x, y: (x * 0.5).tanh().detach() * y + x,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(OTHER))
def test_what_differs_is_not_found(kind: str) -> None:
    assert found(OTHER[kind])[1] is None


def test_what_others_read_escapes() -> None:
    captured, match = found(SAME["as it is"])
    operators = Operators(Editor(captured, frozenset()))
    assert match is not None and len(match.slots) > 2
    assert not operators.escapes(match.slots, match.gradients)
    assert operators.escapes(match.slots, match.gradients[:1])  # the layers before read both
    inner = next(s for s in match.slots if match.gradients[0] not in captured.program.slots[s][0].writes)
    assert operators.escapes([inner], ()) and operators.in_turn([inner], ()) is None


def test_another_dtype_is_not_found() -> None:
    assert found(SAME["as it is"], torch.float64)[1] is None


def test_literals_are_those_of_the_shapes() -> None:
    """A sum over the other dimension of a square input has the same operators."""

    def normal(x: Tensor, y: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * y

    def columns(x: Tensor, y: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * y

    def turned(x: Tensor, y: Tensor) -> Tensor:
        return x.t() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * y

    def names(function: Callable[[Tensor, Tensor], Tensor]) -> set[str]:
        captured = admitted(capture(Net(function), (torch.randn(6, 6),)), "inplace_conv_multiway_newnode")
        return {task.variant for task in captured.program.every_task() if task.variant.startswith("rms_norm")}

    assert names(normal) == {"rms_norm.train", "rms_norm.apply", "rms_norm.backward"}
    assert names(columns) == names(turned) == set()


class Chosen(nn.Module):
    """Rows of SwiGLU's product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        y: Tensor = self.down((F.silu(self.gate(x)) * self.up(x))[rows])
        return y


def test_indices_are_no_dimensions() -> None:
    captured = capture(Chosen(), (torch.randn(4, 8), torch.tensor([0, 2])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a variant that is left out
        assert any(task.variant == "swiglu" for task in admitted(captured, "inplace_multiway_newnode").program.tasks)
