"""No call ends a training that has begun: what no schedule serves runs as the plain model, with one warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from any_schedule import AnySchedule
from torch import nn
from training import twin

from monet_like.errors import CaptureError, UsageError


class Branches(nn.Module):
    """A forward that cannot be captured with a number below zero: it draws from generators, looks at a value, and
    changes a buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, sign: int = 1) -> torch.Tensor:
        x = self.drop(self.norm(x)).tanh()
        self.seen.add_(1)
        if sign < 0 and (random.random() < 2) and (x.sum() > -1e9):
            x = x + torch.randn(8)
        return self.layer(x).square().sum()


class Planned(AnySchedule):
    """As `AnySchedule`, with the rule that is the default."""

    _on_new_input = "plan"


def rows(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


def trained(model: nn.Module, called: nn.Module, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Losses of a loop of SGD, and everything that it leaves behind."""
    torch.manual_seed(3)
    random.seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for call in calls:
        loss = called(*call)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters()]
    return [losses, list(model.state_dict().values()), gradients, torch.get_rng_state(), random.getstate()]


def assert_equal(ours: list[Any], plain: list[Any]) -> None:
    torch.testing.assert_close(ours[:4], plain[:4], rtol=0, atol=0)
    assert ours[4:] == plain[4:]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


def test_a_form_that_cannot_be_captured_runs_as_the_plain_model_with_one_warning(model: nn.Module) -> None:
    """And the step of the other form goes on; a failed capture leaves no trace."""
    plain = twin(model)
    called = Planned(model)
    calls = [(rows(),), (rows(), -1), (rows(4),), (rows(), -1), (rows(),)]
    with pytest.warns(UserWarning, match="runs as plain PyTorch") as caught:
        ours = trained(model, called, calls)
    told = [str(w.message) for w in caught if "runs as plain PyTorch" in str(w.message)]
    assert len(told) == 1
    assert told[0].startswith(
        "Branches runs as plain PyTorch when it is called with float32[6, 8], in plain PyTorch's memory: "
    )
    assert "random" in told[0]
    assert called.captures == 2
    assert_equal(ours, trained(plain, plain, calls))


def test_before_the_first_step_it_is_an_error(model: nn.Module) -> None:
    called = Planned(model)
    with pytest.raises(CaptureError):
        called(rows(), -1)
    called(rows())


def broken(error: BaseException) -> Callable[..., Any]:
    def planned(*_: Any) -> Any:
        torch.rand(3)
        random.random()
        raise error

    return planned


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division by zero"), KeyError(0), AssertionError(), UsageError("no")]
)
def test_errors_of_our_own_code_end_nothing(
    model: nn.Module, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = twin(model)
    called = Planned(model)
    calls = [(rows(),), (rows(5),), (rows(),)]

    def stepped() -> Iterator[tuple[Any, ...]]:
        yield calls[0]
        monkeypatch.setattr(Planned, "_planned", broken(error))
        yield from calls[1:]

    with pytest.warns(UserWarning, match=r"runs as plain PyTorch when it is called with float32\[5, 8\]"):
        ours = trained(model, called, stepped())  # type: ignore[arg-type]
    assert_equal(ours, trained(plain, plain, calls))


def test_an_interrupt_is_one(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    called = Planned(model)
    called(rows())
    monkeypatch.setattr(Planned, "_planned", broken(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        called(rows(5))
    assert not called._kept.plain


def test_an_error_of_the_models_own_is_the_models(model: nn.Module) -> None:
    called = Planned(model)
    called(rows())
    with (
        pytest.warns(UserWarning, match="runs as plain PyTorch"),
        pytest.raises(RuntimeError, match="running_mean should contain 9 elements"),
    ):
        called(torch.randn(6, 9))


def test_an_argument_that_cannot_be_followed(model: nn.Module) -> None:
    plain = twin(model)
    called = Planned(model)
    calls = [(rows(),), (rows(), SetOfOne({1})), (rows(), SetOfOne({1}))]
    with pytest.warns(UserWarning, match="an argument of type SetOfOne was given") as caught:
        ours = trained(model, called, calls)
    assert len([w for w in caught if "runs as plain" in str(w.message)]) == 1
    assert_equal(ours, trained(plain, plain, calls))


class SetOfOne(set):  # type: ignore[type-arg]
    """Neither hashable nor a number."""

    def __lt__(self, other: Any) -> bool:
        return False


def test_warnings_are_of_the_callers_line(model: nn.Module) -> None:
    called = Planned(model)
    called(rows())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        called(rows(), -1)
    assert [w.filename for w in caught if "runs as plain" in str(w.message)] == [__file__]
