"""Budgets and promises are of the memory that plain PyTorch's own step takes, not of what a captured program would."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replays import LOSS_BYTES
from torch import nn
from torch.utils.checkpoint import checkpoint

import monet_like
from monet_like.auto.rehearsal import operators
from monet_like.auto.rehearsal.memory import step_of
from monet_like.auto.rehearsal.plain import plain_peak
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import InfeasibleError
from monet_like.profile.measure import allocated_peak

MODE = "inplace_multiway_newnode"

Example = tuple[nn.Module, tuple[Any, ...]]


class Checkpointed(nn.Module):
    """Layers that plain PyTorch runs again in the backward, with dropout, whose generator is kept; None: not."""

    def __init__(self, *, reentrant: bool | None = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(4)
        )
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


class _ManyAtOnce(torch.autograd.Function):
    """Its backward changes copies of the gradients by operators on lists."""

    @staticmethod
    def forward(ctx: Any, *xs: torch.Tensor) -> Any:
        ctx.save_for_backward(*xs)
        return tuple(x.sin() for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        made = [gradient.clone() for gradient in gradients]
        torch._foreach_mul_(made, [x.cos() for x in ctx.saved_tensors])
        torch._foreach_add_(made, 1.0)
        return tuple(made)


class ManyAtOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = sum(_ManyAtOnce.apply(self.a(x), self.b(x), x * 2))
        return x


class OwnNoise(nn.Module):
    """Draws a mask in place, changes results in place, writes numbers and a buffer that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late = self.mean * 2
        for layer in self.layers:
            x = layer(x)
            x = F.relu(x * torch.empty_like(x).bernoulli_(0.8), inplace=True)
            x = x.clone()
            x[:, :2] = 0
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * late


class Asking(nn.Module):
    """Asks for a value, and selects rows where its answer is no."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 40)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).relu()
        if bool((labels >= 0).all()):
            return self.head(x).sum()
        rows = labels >= 0
        return F.cross_entropy(self.head(x[rows]), labels[rows])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0])


def _labelled(some: int) -> Example:
    return Asking(), (torch.randn(300, 16), torch.where(torch.arange(300) < some, 3, -100))


EXAMPLES: dict[str, Callable[[], Example]] = {
    "checkpoint": lambda: (Checkpointed(), (torch.randn(400, 16),)),
    "reentrant": lambda: (Checkpointed(reentrant=True), (torch.randn(400, 16),)),
    "foreach": lambda: (ManyAtOnce(), (torch.randn(400, 16),)),
    "in place": lambda: (OwnNoise(), (torch.randn(400, 16),)),
    "answers": lambda: _labelled(300),
    "lstm": lambda: (Recurrent(), (torch.randn(4, 6, 8),)),
    "layer norm in bfloat16": lambda: (
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()).bfloat16(),
        (torch.randn(300, 16, dtype=torch.bfloat16),),
    ),
}


def _measured(model: nn.Module, args: tuple[Any, ...]) -> int:
    """By how much the memory of a real step rises, without the test's own loss."""
    for tensor in model.parameters():
        tensor.grad = None
    loss = 0 if isinstance(model, Asking) else LOSS_BYTES
    return allocated_peak(lambda: step_of(model, (args, {}), None).run(*args), torch.device("cpu")) - loss


@pytest.mark.parametrize("small", [operators.SMALL_BYTES, 0], ids=["measured", "where it matters"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_peak_is_that_of_a_real_step(name: str, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, also where only operators are measured that could reach the peak; nothing has changed then."""
    monkeypatch.setattr(operators, "SMALL_BYTES", small)
    model, args = EXAMPLES[name]()
    request = Request(model, (args, {}), MODE)
    captured = captured_for(request, request.example)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    counted = plain_peak(request, captured)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert counted == captured.program.resident_bytes + _measured(model, args)


def test_where_fakes_do_not_tell_the_program_does() -> None:
    """A selection by a mask has a backward that cannot be measured without the mask."""
    model, args = _labelled(200)
    request = Request(model, (args, {}), MODE)
    assert plain_peak(request, captured_for(request, request.example)) is None
    record = monet_like.auto_schedule(model, args, memory_budget="100%", mode=MODE, effort="quick").record
    assert record.plain_peak_bytes == pytest.approx(25408 + _measured(model, args), rel=0.1)


#: What plain PyTorch takes less for than a program of it would.
LEANER = ("checkpoint", "in place", "answers", "layer norm in bfloat16")


@pytest.mark.parametrize("name", LEANER)
def test_all_of_plain_pytorchs_memory_is_enough_and_never_exceeded(name: str) -> None:
    """A share is of what plain PyTorch takes, and a step takes no more than its budget."""
    model, args = EXAMPLES[name]()
    twin = copy.deepcopy(model)
    wrapped = monet_like.auto_schedule(model, args, memory_budget="100%", mode=MODE, effort="quick")
    record = wrapped.record
    _measured(twin, args)  # libraries allocate once what they keep
    plain, scheduled = _measured(twin, args), _measured(wrapped, args)
    assert record.plain_peak_bytes - record.budget_bytes in (0, 1)
    assert record.peak_bytes <= record.budget_bytes
    assert scheduled <= plain


@pytest.mark.slow(but=["checkpoint-quick", "answers-quick", "in place-full"])
@pytest.mark.parametrize(("name", "effort"), [*((name, "quick") for name in LEANER), ("in place", "full")])
def test_a_budget_that_is_too_small_names_one_that_is_enough(name: str, effort: str) -> None:
    """Found in the same call, also where one operator alone does not fit and nothing was measured yet."""
    model, args = EXAMPLES[name]()
    options: dict[str, Any] = {"mode": MODE, "effort": effort, "time_limit_seconds": 2}
    budget: str | int = "2%"
    for _ in range(2):
        with pytest.raises(InfeasibleError) as refused:
            monet_like.auto_schedule(copy.deepcopy(model), args, memory_budget=budget, **options)
        enough = refused.value.smallest_bytes
        assert enough is not None and f"memory_budget={enough} (" in str(refused.value)
        record = monet_like.auto_schedule(copy.deepcopy(model), args, memory_budget=enough, **options).record
        assert record.peak_bytes <= enough <= record.plain_peak_bytes
        assert enough < record.plain_peak_bytes or name in ("answers", "layer norm in bfloat16")
        budget = int(0.5 * enough)


def test_models_of_one_program_have_budgets_of_their_own() -> None:
    """A checkpoint inside is not in the program, but in plain PyTorch's memory: a plan for one is not the other's."""
    shares, model = [], Checkpointed()
    args = (torch.randn(400, 16),)
    for reentrant in (False, None):
        model.reentrant = reentrant
        wrapped = monet_like.auto_schedule(copy.deepcopy(model), args, memory_budget="80%", mode=MODE, effort="quick")
        shares.append(wrapped.record.budget_bytes)
    assert 2 * shares[0] < shares[1]


def test_a_plan_above_plain_pytorchs_memory_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """And what to do; one within it does not."""
    said = {}
    for budget in ("10 MB", "100%"):
        with caplog.at_level(logging.INFO, "monet_like"):
            caplog.clear()
            monet_like.auto_schedule(
                Checkpointed(), (torch.randn(400, 16),), memory_budget=budget, mode=MODE, effort="quick"
            )
        said[budget] = caplog.messages[-1]
    assert "more than plain PyTorch takes: memory_budget='100%' plans within its memory" in said["10 MB"]
    assert "more than plain" not in said["100%"]
