"""Functions of ``torch.linalg`` that look for errors in their results: captured with a check, which runs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_schedule import AnySchedule, assert_as_plain
from nets import Net
from torch import nn

from monet_like.capture.lower.step import capture

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inv": torch.linalg.inv,
    "solve": lambda w: torch.linalg.solve(w, w.square()),
    "unread": lambda w: (torch.linalg.inv(w), w * 2)[1],
    "lu_factor": lambda w: torch.linalg.lu_solve(*torch.linalg.lu_factor(w), w.square()),
    "eigvals": lambda w: torch.linalg.eigvals(w).abs(),
}


class Matrix(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight * x).sin()


def loss(result: torch.Tensor) -> torch.Tensor:
    return (result * torch.arange(16.0).view(4, 4)).sum()


@pytest.mark.parametrize("name", WAYS)
def test_matrices_and_the_errors_of_singular_ones_are_plain_pytorchs(name: str) -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for factor in (1.0, 2.0, 0.0, 3.0):
            try:
                loss(called(torch.tensor(factor))).backward()
            except RuntimeError as error:
                note(torch.tensor([ord(letter) for letter in f"{type(error)} {error}"]))
            note(model.get_parameter("weight").grad)

    assert_as_plain(lambda: Matrix(WAYS[name]), script, captures=1, seed=1)


def test_the_forward_raises() -> None:
    called = AnySchedule(Matrix(torch.linalg.inv))
    called(torch.tensor(1.0))
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.inv: The diagonal element 1 is zero"):
        called(torch.tensor(0.0))


def test_a_check_runs_once_and_nothing_of_it_is_kept() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(x.cos(), x).exp()

    captured = capture(Net(forward), (torch.randn(4, 4, requires_grad=True),))
    (check,) = (task for task in captured.program.tasks if "check_errors" in task.calls[-1].op)
    assert (check.runs, check.cost) == ("first", "")
    assert sum(captured.program.values[v].bytes for v in check.writes) == 0


def test_checks_are_kept_where_pytorchs_tracer_drops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    effect = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    monkeypatch.setattr(effect, "_effect", None)  # as in PyTorch 2.11
    captured = capture(Matrix(torch.linalg.inv), (torch.tensor(1.0),))
    assert sum("check_errors" in task.calls[-1].op for task in captured.program.tasks) == 1
    assert effect.effect is None  # the tracer's own way is as before
