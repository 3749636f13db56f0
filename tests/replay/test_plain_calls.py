"""No call ends a training that has begun: what no schedule serves runs as the plain model, with one warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_schedule import OrPlain, Script, assert_as_plain
from nets import rows
from torch import nn

from monet_like.errors import CaptureError, UsageError


class Branches(nn.Module):
    """Draws, looks at a value and changes a buffer, and cannot be captured with a number below zero."""

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


def training(*calls: tuple[Any, ...], before: Callable[[nn.Module, int], None] = lambda *_: None) -> Script:
    """A loop of SGD; ``before`` is told of each call."""

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        torch.manual_seed(3)
        random.seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number, call in enumerate(calls):
            before(called, number)
            loss = called(*call)
            loss.backward()
            optimizer.step()
            note(loss)
        note(hash(random.getstate()))

    return script


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


def test_a_form_that_cannot_be_captured_runs_as_the_plain_model_with_one_warning() -> None:
    """And the step of the other form goes on; a failed capture leaves no trace."""
    script = training((rows(),), (rows(), -1), (rows(4, 8),), (rows(), -1), (rows(),))
    (said,) = assert_as_plain(Branches, script, captures=2, wrap=OrPlain)
    assert said.startswith(
        "Branches runs as plain PyTorch when it is called with float32[6, 8], in plain PyTorch's memory: "
    )
    assert "random" in said


def test_before_the_first_step_it_is_an_error(model: nn.Module) -> None:
    called = OrPlain(model)
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
def test_errors_of_our_own_code_end_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(called: nn.Module, number: int) -> None:
        if number == 1 and isinstance(called, OrPlain):
            monkeypatch.setattr(OrPlain, "_planned", broken(error))

    script = training((rows(),), (rows(5, 8),), (rows(),), before=breaks)
    (said,) = assert_as_plain(Branches, script, captures=1, wrap=OrPlain)
    assert "runs as plain PyTorch when it is called with float32[5, 8]" in said


def test_an_interrupt_is_one(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    called = OrPlain(model)
    called(rows())
    monkeypatch.setattr(OrPlain, "_planned", broken(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        called(rows(5, 8))
    assert not called._kept.plain


def test_an_error_of_the_models_own_is_the_models(model: nn.Module) -> None:
    called = OrPlain(model)
    called(rows())
    with (
        pytest.warns(UserWarning, match="runs as plain PyTorch"),
        pytest.raises(RuntimeError, match="running_mean should contain 9 elements"),
    ):
        called(torch.randn(6, 9))


def test_an_argument_that_cannot_be_followed() -> None:
    script = training((rows(),), (rows(), SetOfOne({1})), (rows(), SetOfOne({1})))
    (said,) = assert_as_plain(Branches, script, captures=1, wrap=OrPlain)
    assert "an argument of type SetOfOne was given" in said


class SetOfOne(set):  # type: ignore[type-arg]
    """Neither hashable nor a number."""

    def __lt__(self, other: Any) -> bool:
        return False


def test_warnings_are_of_the_callers_line(model: nn.Module) -> None:
    called = OrPlain(model)
    called(rows())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        called(rows(), -1)
    assert [w.filename for w in caught if "runs as plain" in str(w.message)] == [__file__]


SCALE = [1.0]


class Scaled(torch.autograd.Function):
    """Its backward reads what its forward reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: Any) -> torch.Tensor:
        ctx.of = of
        return x * of.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.of.scale, None


class Late(Branches):
    """The backward reads an attribute, the length of a list, a global variable and one of a function around it."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read, self.scale, self.items = read, 1.0, list[int]()
        shared = 1.0

        def share(value: float) -> None:
            nonlocal shared
            shared = value

        self.share = share
        self.now: dict[str, Callable[[], float]] = {
            "attribute": lambda: self.scale, "list": lambda: 1.0 + len(self.items), "global": lambda: SCALE[0],
            "closure": lambda: shared,
        }  # fmt: skip

    def forward(self, x: torch.Tensor, sign: int = 1) -> torch.Tensor:
        y = self.drop(self.norm(x))
        if self.read == "function":
            return self.layer(Scaled.apply(y, self)).square().sum()
        y = y * self.now[self.read]()
        y.register_hook(lambda gradient: gradient * self.now[self.read]())
        return self.layer(y).square().sum()

    def change(self) -> None:
        self.scale += 0.5
        self.items.append(1)
        SCALE[0] += 0.5
        self.share(self.scale)


@pytest.mark.parametrize("read", ["function", "attribute", "list", "global", "closure"])
def test_a_backward_reads_what_was_set_since_the_forward(read: str) -> None:
    """Nobody holds the inputs and the results, and another forward has changed the buffers."""

    def script(called: nn.Module, model: Any, note: Callable[..., None]) -> None:
        SCALE[0] = 1.0
        torch.manual_seed(3)
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = None
            result = (called(rows(6, 8)) + called(rows(5, 8))) * 2
            if step in (1, 3):
                model.change()
            result.backward()
            note(result, [p.grad for p in model.parameters()])

    said = assert_as_plain(lambda: Late(read), script, wrap=OrPlain)
    assert len(said) == 2  # one of each form
    assert all("set between a forward and its backward" in one for one in said)


class Chained(nn.Module):
    """Its result may be its next input; the backward reads ``scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x).tanh()
        y.register_hook(lambda gradient: gradient * self.scale)
        return y


def test_a_plain_backward_leaves_that_of_the_call_before_alone() -> None:
    """Whose result is the input, and whose parameters are the same."""

    def script(called: nn.Module, model: Any, note: Callable[..., None]) -> None:
        loss = called(called(rows())).square().sum()
        model.scale += 0.5
        loss.backward()

    said = assert_as_plain(Chained, script, wrap=OrPlain)
    assert said and all("set between a forward and its backward" in one for one in said)


class Recurrent(nn.Module):
    """A GRU, weights that are computed from others, and a layer that is there twice."""

    def __init__(self, *, hidden: bool = False) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRU(8, 8), nn.LayerNorm(8)
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.second, self.hidden = self.first, [self.norm.weight] if hidden else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.norm(self.first(x)).tanh()) + self.gru(x[None])[0][0]
        return x * self.hidden[0] if self.hidden else x


def test_second_derivatives_of_chained_calls_are_plain_pytorchs() -> None:
    """Inputs of calls are computed from the model's own parameters, of which each call has a gradient of its own."""
    torch.manual_seed(0)
    model, before = Recurrent().double(), nn.Linear(8, 8).double()
    wanted = [*before.parameters(), *model.parameters()]

    def gradients(call: Any) -> list[torch.Tensor]:
        result = call(call(call(before(rows().double())))).square().sum()
        first = torch.autograd.grad(result, wanted, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), wanted)
        return [result, *first, *second]

    plain, called = gradients(model), OrPlain(model)
    with pytest.warns(UserWarning, match="second derivatives"):
        torch.testing.assert_close(gradients(called), plain)
    torch.testing.assert_close(gradients(called), plain)  # plain PyTorch's from now on


def test_second_derivatives_of_chained_calls_are_refused_where_parameters_are_no_modules() -> None:
    """Their gradients would be wrong in silence."""
    called = OrPlain(model := Recurrent(hidden=True))
    result = called(called(rows())).square().sum()
    with pytest.raises(UsageError, match="create_graph=True"):
        torch.autograd.grad(result, [*model.parameters()], create_graph=True)


def test_an_operator_that_fails_leaves_what_it_leaves_in_plain_pytorch() -> None:
    """Numbers drawn and buffers changed before it; then the training goes on."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.words, self.layer = nn.Dropout(), nn.Embedding(9, 8), nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            self.seen += 1  # type: ignore[has-type]
            return self.layer(self.drop(x) + self.words(words)).square().sum()

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        torch.manual_seed(3)
        for index in (1, 9, 2, -4, 3):
            try:
                result = called(rows(), torch.tensor([0, 1, 2, 3, 4, index]))
                result.backward()
                note(result)
            except IndexError as error:
                note(torch.tensor([*str(error).encode()]))
            note(torch.get_rng_state(), model.seen)

    assert_as_plain(Looks, script, wrap=OrPlain)
