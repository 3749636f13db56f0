"""Training loops that change from call to call, or in which a model is a part of a larger computation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import monet_like
from monet_like.errors import CaptureError, UsageError
from monet_like.replay import stepping
from monet_like.replay.stepping import Stepping


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.sigmoid(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


#: Trains a model, of which the second is called, and returns what a user sees.
Loop = Callable[[nn.Module, nn.Module], Sequence[torch.Tensor | None]]
LOOPS: dict[str, tuple[type[nn.Module], Loop]] = {}


def a_loop(model: type[nn.Module]) -> Callable[[Loop], Loop]:
    def noted(loop: Loop) -> Loop:
        LOOPS[loop.__name__.replace("_", " ")] = model, loop
        return loop

    return noted


class OfOthers(Net):
    """Multiplies by a tensor that is trained, and that no module holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * SCALES[0])


SCALES: list[torch.Tensor] = []


@a_loop(OfOthers)
def tensors_that_no_module_holds(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    SCALES[:] = [torch.full((), 1.5, requires_grad=True)]
    called(torch.randn(64, 16)).square().sum().backward()
    return [SCALES[0].grad]


@a_loop(Net)
def calls_that_pytorch_records(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    """Before a plan and after, in training mode: they run nothing, so they are not planned for, and no warning says
    that later calls are without a plan because of them.
    """
    x, found = torch.randn(64, 16), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for rows in (64, 96):
            found.append(torch.export.export(called, (x,)).module()(x))
            found.append(torch.jit.trace(called, (x,), check_trace=False)(x))
            found.append(make_fx(called)(x)(x))
            with FakeTensorMode(allow_non_fake_inputs=True):
                called(torch.empty(rows, 16))
            copy.deepcopy(called).to("meta")(x.to("meta")).sum().backward()
            called(x).square().sum().backward()
    return found


class Conditioned(Net):
    """Adds to each layer's result what it is given, which plain PyTorch does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AddsTo(layer) for layer in self.layers)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, condition)
        return x


class AddsTo(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + condition
        return y.tanh()


def a_condition_made_in_inference_mode(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    for _ in range(2):
        with torch.inference_mode():
            condition = torch.randn(64, 16)
        called(torch.randn(64, 16), condition).square().sum().backward()
    return []


class Checkpointed(Net):
    """Has checkpointing around its layers where that is switched on."""

    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.on else layer(x)
        return x


@a_loop(Checkpointed)
def checkpointing_that_is_switched_on(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    assert isinstance(model, Checkpointed)
    for model.on in (False, True, False):
        called(torch.randn(64, 16)).square().sum().backward()
    return []


class Codebook(Net):
    """Writes as many rows as a mask has places into a buffer."""

    codes: torch.Tensor
    used: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(12, 16))
        self.register_buffer("used", torch.arange(12) % 3 + 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dead = self.used < 6
        self.codes[dead] = torch.randn(int(dead.sum()), 16)
        self.used.sub_(4).remainder_(5).add_(5)
        return super().forward(x + self.codes.sum(0))


@a_loop(Codebook)
def rows_written_by_masks(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    for _ in range(3):
        called(torch.randn(64, 16)).square().sum().backward()
    return []


class Adaptive(Net):
    """Picks words of a part by their number less that of the part's first."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(16, 40, [8, 20])

    def forward(self, x: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
        loss: torch.Tensor = self.loss(super().forward(x), words).loss
        return loss


@a_loop(Adaptive)
def words_of_parts(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    called(torch.randn(64, 16), torch.arange(64) % 40).backward()
    return []


class Adversarial(Net):
    """A generator, a discriminator and its loss of generated rows that are detached, or the generator's loss."""

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        generate, judge = self.layers
        made = generate(noise)
        if real is None:
            generated: torch.Tensor = judge(made).sum()
            return generated
        told: torch.Tensor = judge(made.detach()).sum() - judge(real).square().sum()
        return told


@a_loop(Adversarial)
def a_generator_without_a_backward(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    for real in (torch.randn(64, 16), None):
        called(torch.randn(64, 16), real).backward()
    return []


class Padded(Net):
    """Pads nested tensors, and returns them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_nested:
            return super().forward(x)
        padded = super().forward(x.to_padded_tensor(0.0))
        return torch.nested.as_nested_tensor([*padded], layout=torch.jagged)


def in_parts(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(20, 16), torch.randn(30, 16)], layout=layout)


@a_loop(Padded)
def nested_tensors(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    called(torch.randn(2, 40, 16)).square().sum().backward()
    for layout in (torch.strided, torch.jagged):
        called(in_parts(layout)).values().square().sum().backward()
    return []


class Headed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(super().forward(x))
        return result


@a_loop(Headed)
def a_lazy_head_that_comes_later(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
    for model.head in (nn.Identity(), nn.LazyLinear(4)):
        for _ in range(2):
            called(torch.randn(64, 16)).square().sum().backward()
    return []


def trained(
    make: Callable[[], nn.Module], loop: Loop, blocks: str | None, budget: str = ""
) -> list[torch.Tensor | None]:
    """What a loop shows, and then the model's parameters, gradients and buffers, and the generator's state."""
    torch.manual_seed(0)
    model = make()
    called: nn.Module = model
    if budget:
        called = monet_like.auto_schedule(model, memory_budget=budget, exact=True, effort="quick", blocks=blocks)
    shown = [tensor if tensor is None else tensor.detach() for tensor in loop(model, called)]
    parameters = [*model.parameters()]
    state = [*(p.detach() for p in parameters), *(p.grad for p in parameters), *model.buffers()]
    return copy.deepcopy([*shown, *state, torch.get_rng_state()])


@pytest.mark.filterwarnings("ignore:.*runs as plain PyTorch .*(nested tensor, whose parts|uninitialized):UserWarning")
@pytest.mark.parametrize("blocks", [None, "layers.*"], ids=["whole", "blocks"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_in_plain_pytorch(name: str, blocks: str | None) -> None:
    """To the bit, and nothing of a rehearsal is left on what the user holds."""
    make, loop = LOOPS[name]
    plain = trained(make, loop, None)
    ours = trained(make, loop, blocks, "100%")
    assert all(type(a) is type(b) for a, b in zip(ours, plain, strict=True))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("blocks", [None, "layers.*"], ids=["whole", "blocks"])
def test_what_was_made_in_inference_mode_follows_the_schedule(
    blocks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(Conditioned, a_condition_made_in_inference_mode, None)
    monkeypatch.setattr(Stepping, "_run_model", lambda *_: pytest.fail("it runs as plain PyTorch"))
    ours = trained(Conditioned, a_condition_made_in_inference_mode, blocks, "100%")
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("blocks", [None, "layers.*"], ids=["whole", "blocks"])
def test_a_step_that_fails_where_plain_pytorch_does_not_is_told_of(
    blocks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: later calls of its form are plain PyTorch's from the start."""
    torch.manual_seed(0)
    model, x, calls = Net(), torch.randn(64, 16), []
    plain = copy.deepcopy(model)
    called: Any = monet_like.auto_schedule(
        model, x, memory_budget="100%", exact=True, effort="quick", blocks=blocks, on_new_input="plan"
    )

    def broken(*given: Any) -> None:
        calls.append(given)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(stepping, "run_step", broken)
    with pytest.warns(UserWarning, match="runs as plain PyTorch .*RuntimeError: a fault of ours"):
        called(x).square().sum().backward()
    count = len(calls)
    called(x).square().sum().backward()
    assert count == len(calls) == (2 if blocks else 1)
    for _ in range(2):
        plain(x).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_blocks_under_checkpointing_are_refused_in_words() -> None:
    """Before the first step."""
    model = Checkpointed()
    model.on = True
    with pytest.raises(UsageError, match="checkpointing around them; take that off"):
        trained(lambda: model, lambda model, called: [called(torch.randn(64, 16))], "layers.*", "100%")


@pytest.mark.parametrize("blocks", [None, "layers.*"], ids=["whole", "blocks"])
def test_lazy_modules_are_refused_in_words(blocks: str | None) -> None:
    """Also where they are no blocks."""
    model = Headed()
    model.head = nn.LazyLinear(4)
    with pytest.raises(UsageError, match=r"head is a lazy module .* call the model once on an example first"):
        trained(lambda: model, lambda model, called: [], blocks, "100%")


@pytest.mark.parametrize("blocks", [None, "layers.*"], ids=["whole", "blocks"])
def test_nested_tensors_are_refused_in_words(blocks: str | None) -> None:
    """Where a part that is to have a schedule gets them in the first call."""
    with pytest.raises(CaptureError, match="is a nested tensor, whose parts differ in length"):
        trained(Net, lambda model, called: [called(in_parts(torch.jagged))], blocks, "100%")


def test_many_nested_tensors_are_one_warning(recwarn: pytest.WarningsRecorder) -> None:
    """However their lengths differ."""
    called = monet_like.auto_schedule(Padded(), torch.randn(2, 40, 16), memory_budget="100%", effort="quick")
    for length in range(2, 5):
        parts = [torch.randn(length, 16), torch.randn(7, 16)]
        called(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum().backward()
    assert sum("is a nested tensor" in str(warning.message) for warning in recwarn) == 1


@pytest.mark.parametrize("blocks", [None, "layers.*"], ids=["whole", "blocks"])
def test_transforms_are_refused_in_words(blocks: str | None) -> None:
    """In the first call."""
    with pytest.raises(UsageError, match=r"under a transform of torch\.func"):
        trained(Net, lambda _, called: [grad(lambda x: called(x).sum())(torch.randn(64, 16))], blocks, "100%")


def test_compiled_code_around_two_models() -> None:
    """What was compiled around the first does not run for the second."""

    def around(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
        whole = torch.compile(called, backend="eager")
        for rows in (64, 32):
            whole(torch.randn(rows, 16)).square().sum().backward()
        return [whole.eval()(torch.randn(64, 16))]

    def outside(model: nn.Module, called: nn.Module) -> Sequence[torch.Tensor | None]:
        step = torch.compile(lambda x: called(2 * x).square().sum(), backend="eager")
        step(torch.randn(64, 16)).backward()
        return []

    for loop in (around, outside):
        plain = trained(Net, loop, None)
        torch.testing.assert_close(trained(Net, loop, None, "100%"), plain, rtol=0, atol=0)
