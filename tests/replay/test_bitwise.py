"""Where a trace easily rounds otherwise than plain PyTorch: autocast, noise in the backward, shared weights, layouts.

Each row trains two steps by schedules that keep everything and that keep next to nothing, in two modes, and is compared
with plain PyTorch bit by bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from replays import record_for
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from training import tensors, twin

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

MODES = ("normal", "inplace_multiway_newnode")
Case = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Net(nn.Module):
    """Layers and what to do with them."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.layers, *inputs)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (6, 16))).requires_grad_()


def linear() -> nn.Linear:
    return nn.Linear(16, 16)


def under(autocast: str, *, cache: bool = True) -> contextlib.AbstractContextManager[Any]:
    if not autocast:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, autocast), cache_enabled=cache)


def trained(model: nn.Module, args: tuple[torch.Tensor, ...], autocast: str = "") -> dict[str, Any]:
    """What two steps of momentum leave, the generator's state too; every result has a gradient of its own."""
    found: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    for step in range(2):
        optimizer.zero_grad()
        for tensor in args:
            tensor.grad = None
        with under(autocast):
            results = tensors(model(*args))
        weights = torch.Generator().manual_seed(9)
        trained_ones = [t for t in results if t.requires_grad]
        sum((t.float() * torch.randn(t.shape, generator=weights)).sum() for t in trained_ones).backward()  # type: ignore
        found |= {f"{step} result {i}": t.detach().clone() for i, t in enumerate(results)}
        found |= {f"{step} gradient of input {i}": t.grad for i, t in enumerate(args)}
        found |= {f"{step} gradient of {n}": p.grad for n, p in model.named_parameters()}
        found |= {f"{step} {n}": b.clone() for n, b in model.named_buffers()}
        found |= {f"{step} generator": torch.get_rng_state()}
        optimizer.step()
    return found


def scheduled(model: nn.Module, args: tuple[torch.Tensor, ...], captured: Captured, mode: str, **options: Any) -> Any:
    autocast = options.pop("autocast", "")
    schedule = random_schedule(captured.program, options.pop("seed", 1), **options)
    record = replace(record_for(captured, schedule, mode, (model, args, {})), autocast=autocast)
    return ScheduleWrapper(twin(model), record, example=(args, {}), captured=captured)


def differing(case: Case, autocast: str = "", modes: tuple[str, ...] = MODES) -> list[str]:
    """What is not plain PyTorch's to the bit, by any of the schedules."""
    model, args = case
    plain = trained(twin(model), args, autocast)
    with under(autocast):
        raw = capture(model, args)
    found: list[str] = []
    for mode in modes:
        captured = admitted(raw, mode)
        for drop, others in ((0.0, 0.0), (0.9, 0.7)):
            wrapped = scheduled(model, args, captured, mode, autocast=autocast, drop=drop, others=others)
            found += [f"{mode} {drop} {name}" for name in _unequal(plain, trained(wrapped, args, autocast))]
    return found


def _unequal(plain: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert plain.keys() == other.keys()
    return [
        name
        for name, value in plain.items()
        if (value is None) != (other[name] is None) or (value is not None and not _same(value, other[name]))
    ]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


# Autocast -------------------------------------------------------------------------------------------------------


def island(a: nn.Module, b: nn.Module, c: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = a(x).relu()
    with torch.autocast("cpu", enabled=False):
        y = b(y.float()).tanh()
    return c(y)


def regions(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):  # the cache of casts is emptied between them
        with torch.autocast("cpu", torch.bfloat16):
            x = a(a(x))
    return x


def shared_with_island(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = a(x)
    with torch.autocast("cpu", enabled=False):
        y = a(y.float())
    return a(y)


def first_without_gradient(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean = a(x).mean()
    return a(x) * mean + x


def no_cache(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with under("bfloat16", cache=False):
        return a(a(a(x)))


def cast_by_hand(a: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return a(a(x)) + x.bfloat16() @ a.weight.bfloat16() + x.bfloat16() @ a.weight.bfloat16()


class Product(torch.autograd.Function):
    """Runs its backward under the forward's autocast."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def product(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Product.apply(Product.apply(a(x), b.weight).tanh(), b.weight)


def two_names(other: nn.Module | None = None) -> Case:
    a, b = linear(), other or linear()
    b.weight = a.weight
    return Net(lambda a, b, x: b(a(b(a(x).tanh()))), a, b), (rows(),)


AUTOCAST: dict[str, Callable[[], Case]] = {
    "off in a region": lambda: (Net(island, linear(), linear(), linear()), (rows(),)),
    "a weight used three times": lambda: (Net(lambda a, x: a(a(a(x).tanh())), linear()), (rows(),)),
    "a weight with two names": two_names,
    "a shared convolution": lambda: (Net(lambda a, x: a(a(a(x))), nn.Conv2d(4, 4, 3, 1, 1)), (rows(2, 4, 5, 5),)),
    "a weight shared with a region": lambda: (Net(shared_with_island, linear()), (rows(),)),
    "an input used twice": lambda: (Net(lambda a, b, x: a(x) + b(x), linear(), linear()), (rows(),)),
    "first used without gradients": lambda: (Net(first_without_gradient, linear()), (rows(),)),
    "without the cache": lambda: (Net(no_cache, linear()), (rows(),)),
    "cast by hand": lambda: (Net(cast_by_hand, linear()), (rows(),)),
    "a custom function that restores it": lambda: (Net(product, linear(), linear()), (rows(),)),
    "GRU cell": lambda: (Net(lambda cell, x: cell(x, cell(x)), nn.GRUCell(16, 16)), (rows(),)),
}


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_plain_pytorchs(name: str) -> None:
    assert not differing(AUTOCAST[name](), "bfloat16")


def test_autocast_inside_the_model_alone() -> None:
    assert not differing((Net(regions, linear()), (rows(),)))


def test_the_callers_cache_is_as_it_was() -> None:
    model, args = Net(regions, linear()), (rows(),)
    own, depth = torch.clear_autocast_cache, torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    capture(model, args)
    assert torch.clear_autocast_cache is own and torch.is_autocast_cache_enabled()
    assert torch.autocast_increment_nesting() == depth
    torch.autocast_decrement_nesting()
    assert torch.ops.aten.to.dtype.py_kernels == {}


# Noise in the backward ------------------------------------------------------------------------------------------


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()


class OfGradients(_Noisy):
    """Noise of the gradient's shape, drawn before anything depends on the gradient."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        noise = torch.rand(grad.shape)
        return (grad * noise * noise.sin()) @ weight, grad.t() @ x


class OfSaved(_Noisy):
    """Noise of what the forward saved, used twice, and again noise of both."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        noise = torch.randn_like(weight) * weight
        kept = torch.bernoulli(grad.sigmoid())
        return (grad * kept) @ (weight + noise), grad.t() @ x + noise.exp() + torch.rand_like(weight)


class Dropped(_Noisy):
    """Dropout of a gradient, and of what the forward saved."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        mask = nn.functional.dropout(weight, 0.3)
        return nn.functional.dropout(grad, 0.5) @ (mask * mask), grad.t() @ nn.functional.dropout(x, 1.0)


@pytest.mark.parametrize("function", [OfGradients, OfSaved, Dropped])
def test_noise_of_the_backward_is_drawn_once(function: Any) -> None:
    def forward(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(function.apply(a(x), b.weight).tanh(), 0.5)
        return function.apply(y, a.weight)

    assert not differing((Net(forward, linear(), linear()), (rows(),)))


# Sums of gradients ----------------------------------------------------------------------------------------------


def returned_often(a: nn.Module, b: nn.Module, x: torch.Tensor) -> Any:
    y = a(x)
    return {"y": y, "z": b(y), "again": y, "and again": [y, y[1:], x, x, a.weight, a.weight]}


def shared_buffer() -> Case:
    first, second = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    second.running_mean = first.running_mean
    return Net(lambda a, n, m, x: m(n(a(x)).relu()) * n.running_mean, linear(), first, second), (rows(),)


SUMS: dict[str, Callable[[], Case]] = {
    "a parameter with two names": two_names,
    "one of three": lambda: two_names(nn.Linear(16, 16, bias=False)),
    "a result returned often": lambda: (Net(returned_often, linear(), linear()), (rows(),)),
    "a buffer with two names": shared_buffer,
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_added_in_the_same_order(name: str) -> None:
    assert not differing(SUMS[name]())


def test_a_result_returned_twice_is_one_tensor() -> None:
    model, args = Net(returned_often, linear(), linear()), (rows(),)
    wrapped = scheduled(model, args, admitted(capture(model, args), "normal"), "normal")
    result = wrapped(*args)
    assert result["y"] is result["again"] is result["and again"][0]
    assert result["and again"][2] is result["and again"][3]


# Layouts --------------------------------------------------------------------------------------------------------

IMAGES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, 2, 1),
    "convolution of points": lambda: nn.Conv2d(8, 8, 1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "transposed": lambda: nn.ConvTranspose2d(8, 8, 3, padding=1),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU6(True)),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(True)),
    "group norm, then noise": lambda: nn.Sequential(
        nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.4), nn.Conv2d(8, 8, 3, padding=1)
    ),
    "activations": lambda: nn.Sequential(nn.GELU(), nn.Mish(), nn.Softplus()),
    "dropout": lambda: nn.Sequential(
        nn.Dropout(0.4), nn.Dropout2d(0.4), nn.AlphaDropout(0.4), nn.FeatureAlphaDropout(0.4)
    ),
    "noise": lambda: Net(lambda x: x * torch.empty_like(x).bernoulli_(0.5) + torch.empty_like(x).uniform_() * x),
    "drawn": lambda: Net(lambda x: x * torch.bernoulli(x.detach(), 0.5) + torch.rand_like(x)),
    "pools": lambda: nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)),
    "mean": lambda: Net(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    "upsampled": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "channels last": lambda: Net(lambda n, x: n(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.RMSNorm(8)),
    "attention": lambda: Net(
        lambda a, x: a(*[x.flatten(2).transpose(1, 2)] * 3)[0], nn.MultiheadAttention(8, 2, batch_first=True)
    ),
}


SIZES = [(5, 5), (1, 1), (1, 4)]
#: Attention sees rows, whatever the size.
REPEATED = [("attention", size) for size in SIZES[1:]]
#: Those with filters of more than one element, of which the weights' layout is another one.
FILTERED = ["convolution", "depthwise", "transposed", "group norm, then noise"]


def layouts(name: str, size: tuple[int, int]) -> list[str]:
    """Which tensors are channels-last: none, the input, or the weights too."""
    if name in FILTERED:
        return ["", "input", "all"]
    return ["", "all" if size == (1, 4) else "input"]


@pytest.mark.slow(every=16)
@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [(n, s, layout) for n in IMAGES for s in SIZES for layout in layouts(n, s) if (n, s) not in REPEATED],
)
def test_layouts_are_plain_pytorchs(name: str, size: tuple[int, int], layout: str) -> None:
    """In the second mode, which admits whatever the first does."""
    if name == "instance norm" and size == (1, 1):
        pytest.skip("plain PyTorch refuses one element for each channel")
    if name in ("dropout", "noise") and size == (1, 4) and layout:
        pytest.skip(
            "agrees to rounding, as the manual says: strides of an extent of one, in row-major gradients that meet"
        )
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), IMAGES[name]()), torch.randn(4, 3, *size)
    if layout:
        x = x.to(memory_format=torch.channels_last)
    if layout == "all":
        model.to(memory_format=torch.channels_last)
    assert not differing((model, (x.requires_grad_(),)), modes=MODES[1:])


def test_squeeze_and_excite_is_bit_equal() -> None:
    """Widths and batch with which a transposed convolution, by oneDNN, is no more the gradient's bits."""
    excite = nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(1044, 87, 1),
        nn.BatchNorm2d(87),
        nn.ReLU(),
        nn.Conv2d(87, 1044, 1),
        nn.Sigmoid(),
    )
    model = Net(lambda first, excite, x: (lambda y: y * excite(y))(first(x)), nn.Conv2d(4, 1044, 1), excite)
    assert not differing((model, (rows(8, 4, 2, 2),)))


RECURRENT: dict[str, Callable[[], Case]] = {
    "GRU": lambda: (nn.GRU(11, 13, bidirectional=True, batch_first=True), (rows(4, 2, 11),)),
    "GRU cell": lambda: (Net(lambda cell, x: cell(x, cell(x)), nn.GRUCell(13, 13)), (rows(5, 13),)),
    "LSTM cell": lambda: (Net(lambda cell, x: cell(x, cell(x)), nn.LSTMCell(13, 13)), (rows(5, 13),)),
    "RNN": lambda: (nn.RNN(11, 13, 2), (rows(4, 3, 11),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_bit_equal(name: str) -> None:
    """In the second mode, which admits whatever the first does."""
    assert not differing(RECURRENT[name](), modes=MODES[1:])
