"""Gradients of ``prod`` and ``index_fill``, whose formulas look at values, by schedules: those of plain PyTorch to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from any_schedule import AnySchedule
from torch import Tensor, nn

from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError

ROWS = torch.tensor([1, 1, 0])
#: Products and fills of a matrix.
FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.prod(),
    "rows": lambda x: x.prod(1),
    "kept": lambda x: x.prod(-1, keepdim=True),
    "wider": lambda x: x.prod(0, dtype=torch.float64),
    "turned": lambda x: x.t().prod(),
    "turned rows": lambda x: x.t().prod(0),
    "expanded": lambda x: x[:, :1].expand(4, 6).prod(1),
    "one each": lambda x: x[:, :1].prod(1),
    "a number": lambda x: x.sum().prod(),
    "filled": lambda x: torch.index_fill(x, 0, ROWS, x.sum()),
    "filled in place": lambda x: x.clone().index_fill_(0, ROWS, x.mean()),
}


class Applied(nn.Module):
    """A function of the input times a parameter; some of its numbers are zero."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function((x * self.scale.to(x.dtype)).cos().sub(1)).sin()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the input and the parameter; each element of the result has another incoming one."""
    x = x.clone().requires_grad_()
    result = model(x)
    slope = torch.arange(1, result.numel() + 1, dtype=result.dtype).view(result.shape).cos()
    return [result.detach(), *torch.autograd.grad((result * slope).sum(), [x, *model.parameters()])]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FORWARDS), *((n, torch.bfloat16) for n in ("all", "rows", "filled"))],
    ids=str,
)
def test_gradients_are_plain_pytorchs_however_many_factors_are_zero(name: str, dtype: torch.dtype) -> None:
    """One schedule for all: of how many are zero no capture knows."""
    model = Applied(FORWARDS[name])
    scheduled: AnySchedule | None = None
    for zeros in (0, 1, 2, 9):
        x = torch.randn(4, 6).to(dtype)
        x.view(-1)[:zeros] = 0
        scheduled = scheduled or AnySchedule(model, 3)
        for one, other in zip(gradients(model, x), gradients(scheduled, x), strict=True):
            assert torch.equal(one, other)


def test_a_forward_calls_the_same_operators_as_before() -> None:
    """And the trace leaves PyTorch's registrations as they were."""
    before = dict(torch.ops.aten.prod.dim_int.py_kernels)
    captured = capture(Applied(FORWARDS["rows"]), (torch.randn(4, 6, requires_grad=True),))
    called = [call.op for task in captured.every_task() for call in task.calls]
    assert called.count("aten.prod.dim_int") == called.count("monet_like.prod_backward.default") == 1
    assert torch.ops.aten.prod.dim_int.py_kernels == before


class Forces(nn.Module):
    """A gradient that the forward makes, and through which it is trained."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.function(self.layer(x).cos()).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("name", ["all", "rows"])
def test_a_gradient_of_prod_that_has_a_gradient_is_refused(name: str) -> None:
    """In a forward plain PyTorch asks where its formula looks, and takes the gradient of what follows."""
    x = torch.randn(4, 6)
    Forces(FORWARDS[name])(x).square().sum().backward()
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        AnySchedule(Forces(FORWARDS[name]), 3)(x)


@pytest.mark.parametrize("name", ["filled", "filled in place"])
def test_a_gradient_of_index_fill_that_has_a_gradient_is_plain_pytorchs(name: str) -> None:
    model, x = Forces(lambda x: FORWARDS[name](x).tanh()), torch.randn(4, 6)
    found = []
    for each in (model, AnySchedule(model, 3)):
        forces = each(x)
        found.append([forces.detach(), *torch.autograd.grad(forces.square().sum(), [*model.parameters()])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
