"""The judgement of a step: rounding passes in every net, and a fault in any single tensor does not."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from replays import record_for
from rich.console import Console
from torch import nn
from zoo import shallow_resnet

from benchmarks.worker import judge
from monet_like.capture.example_inputs import Example
from monet_like.capture.precision import autocast_as
from monet_like.compiler.request import Request, captured_for
from monet_like.models.unet import UNet
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.verify import steps as verify
from monet_like.replay.verify.comparison import MOST, Tensors, Verdict, compare, differences
from monet_like.replay.verify.steps import everything_after_a_step, judged, same_step, shaken, takes_transforms
from monet_like.replay.wrapper import ScheduleWrapper

CPU = torch.device("cpu")


class Kinds(nn.Module):
    """A parameter of every kind; the gradient of ``before.bias``, which a batch norm follows, is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 3 * 64)
        self.before, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.after, self.layer_norm = nn.Conv2d(8, 4, 3), nn.LayerNorm((4, 36))
        self.head = nn.Linear(36, 5)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.full((5,), -1e9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens).view(-1, 3, 8, 8)
        x = self.after(nn.functional.silu(self.norm(self.before(x))))
        return self.head(self.layer_norm(x.flatten(2)))


@functools.cache
def kinds() -> tuple[nn.Module, Example, Tensors, Tensors]:
    """The net, its input, what plain PyTorch leaves, and the same with other rounding."""
    torch.manual_seed(0)
    model, example = Kinds(), ((torch.randint(0, 40, (6,)),), {})
    mine = everything_after_a_step(copy.deepcopy(model), example)
    return model, example, mine, everything_after_a_step(shaken(model, 99), example)


def wrong(verdicts: tuple[Verdict, ...]) -> list[str]:
    return [verdict.name for verdict in verdicts if not verdict.right]


def fault_sizes() -> dict[str, float]:
    """Of every tensor of real numbers, its root mean square: the largest gradient's for the one that is zero."""
    _, _, mine, _ = kinds()
    sizes = {n: float(t.square().mean().sqrt()) for n, t in mine.items() if t is not None and t.is_floating_point()}
    sizes["gradient of before.bias"] = max(size for name, size in sizes.items() if name.startswith("gradient"))
    return sizes


def test_other_rounding_is_right_in_every_kind_of_tensor() -> None:
    model, example, mine, other = kinds()
    verdicts = judged(model, example, mine, other)
    assert wrong(verdicts) == []
    assert {v.name: v for v in verdicts}["gradient of before.bias"].error > 0.1  # it is rounding and nothing else
    assert "gradient of before.bias" in wrong(compare(mine, other))  # which nobody knows without a measurement


_made: dict[tuple[object, ...], Tensors] = {}


def step_once(model: nn.Module, example: Example, *, seed: int = 1) -> Tensors:
    """A step of `Kinds`, which is made once for the same weights and seed: every fault is judged by the same steps."""
    key = (seed, *(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    if key not in _made:
        _made[key] = everything_after_a_step(model, example, seed=seed)
    return _made[key]


@pytest.mark.parametrize("factor", [1e-3, 0.9, 1e6])
@pytest.mark.parametrize("shape", ["scaled", "noise", "one"])
def test_a_fault_in_any_tensor_is_found(factor: float, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousandth of its size and more, in all elements or in the largest one, beside rounding in all others."""
    monkeypatch.setattr(verify, "everything_after_a_step", step_once)
    model, example, mine, other = kinds()
    sizes = fault_sizes()
    torch.manual_seed(3)

    def faulty(name: str) -> torch.Tensor:
        good, size = other[name], sizes[name] * factor
        assert good is not None
        if shape == "scaled" and name != "gradient of before.bias":
            return good * (1 - factor)
        if shape == "one":
            made = good.clone()
            largest = good.abs().max()
            made.view(-1)[good.abs().argmax()] += size if name == "gradient of before.bias" else factor * largest
            return made
        return good + size * torch.randn_like(good)

    names = [name for name in mine if name in sizes and name != "buffer mask"]
    for planted in (names[::2], names[1::2]):
        assert wrong(judged(model, example, mine, {**other, **{name: faulty(name) for name in planted}})) == planted


@pytest.mark.parametrize(
    ("name", "made", "reason"),
    [
        ("gradient of head.weight", None, "is missing"),
        ("gradient of unused", torch.zeros(2), "exists, and plain PyTorch makes none"),
        ("gradient of head.bias", torch.full((5,), math.nan), "has NaN or infinity"),
        ("output 0", torch.full((6, 4, 5), math.inf), "has NaN or infinity"),
        ("gradient of head.bias", torch.zeros(4), "has shape [4], not [5]"),
        ("gradient of head.bias", torch.zeros(5, dtype=torch.float64), "has dtype torch.float64, not torch.float32"),
        ("buffer norm.num_batches_tracked", torch.tensor(2), "is of whole numbers and differs"),
        ("buffer mask", torch.full((5,), -1.001e9), "differs by 1.00e-03"),
    ],
)
def test_what_no_number_says_is_wrong(name: str, made: torch.Tensor | None, reason: str) -> None:
    model, example, mine, other = kinds()
    (verdict,) = (v for v in judged(model, example, mine, {**other, name: made}) if not v.right)
    assert verdict.name == name
    assert reason in verdict.reason


def test_a_name_that_only_one_step_leaves_is_wrong() -> None:
    one = {"output 0": torch.ones(2)}
    (verdict,) = compare(one, {})
    assert (verdict.right, verdict.reason) == (False, "this step leaves no output 0")
    (verdict,) = compare({}, one)
    assert (verdict.right, verdict.reason) == (False, "plain PyTorch leaves no output 0")


def test_nan_and_infinity_at_the_same_places_are_equal_bits() -> None:
    both = torch.tensor([math.nan, math.inf, 1.0])
    assert compare({"output 0": both}, {"output 0": both.clone()})[0].error == 0.0
    minus = torch.tensor([math.nan, -math.inf, 1.0])
    assert (
        compare({"output 0": both}, {"output 0": minus})[0].reason == "has another infinity or NaN than plain PyTorch"
    )
    near = torch.tensor([math.nan, math.inf, 1.0 + 1e-6])
    assert 0 < compare({"output 0": both}, {"output 0": near})[0].error < 1e-5


@pytest.mark.parametrize("rounding", [0.5, 1e9, math.inf])
def test_no_rounding_excuses_a_plainly_wrong_gradient(rounding: float) -> None:
    torch.manual_seed(0)
    plain = {"gradient of a": torch.randn(50), "gradient of b": torch.randn(50)}
    moved = {name: tensor * (1 + rounding * torch.randn(50)) for name, tensor in plain.items()}
    found = {**plain, "gradient of a": 0.1 * plain["gradient of a"]}
    (verdict,) = (v for v in compare(plain, found, differences(plain, moved)) if not v.right)
    assert verdict.name == "gradient of a"
    assert verdict.allowed <= MOST


@pytest.mark.parametrize(
    ("variant", "error", "right"),
    [("winograd_nonfused", 3e-4, True), ("fft_tiling", 3e-4, True), ("fft", 3e-3, False), ("implicit_gemm", 3e-4,
    False)],
)  # fmt: skip
def test_convolutions_by_transforms_may_lose_a_digit_more(variant: str, error: float, right: bool) -> None:
    model, example, mine, _ = kinds()
    captured = captured_for(Request(model, example, "normal"), example)
    record = record_for(captured, random_schedule(captured.program, 0), "normal", (model, *example))
    record = replace(record, counts={f"variant conv.cudnn_{variant}": 1})
    gradient = mine["gradient of head.weight"]
    assert gradient is not None
    theirs = {**mine, "gradient of head.weight": (1 + error) * gradient}
    found = wrong(judged(model, example, mine, theirs, transforms=takes_transforms(record)))
    assert found == ([] if right else ["gradient of head.weight"])


def test_small_gradients_are_judged_by_themselves() -> None:
    """Gradients that vanish from layer to layer are gradients, however large the last one is."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(8)]
    torch.manual_seed(0)
    model, example = nn.Sequential(*layers), ((torch.randn(4, 16),), {})
    mine = everything_after_a_step(copy.deepcopy(model), example)
    first = mine["gradient of 0.0.weight"]
    last = mine["gradient of 7.0.weight"]
    assert first is not None
    assert last is not None
    assert first.norm() < 1e-4 * last.norm()
    assert wrong(judged(model, example, mine, {**mine, "gradient of 0.0.weight": 1.001 * first})) == [
        "gradient of 0.0.weight"
    ]


def test_the_gradient_of_an_input_is_compared() -> None:
    torch.manual_seed(0)
    model, example = nn.Linear(4, 4), ((torch.randn(3, 4, requires_grad=True),), {})
    mine = everything_after_a_step(model, example)
    again = everything_after_a_step(model, example)
    assert mine["gradient of input 0"] is not None
    again.update({name: t for name, t in mine.items() if name != "gradient of input 0"})
    assert wrong(compare(mine, again)) == []  # and it is that of one step, not of two
    assert wrong(compare(mine, {**mine, "gradient of input 0": 2 * mine["gradient of input 0"]})) == [
        "gradient of input 0"
    ]


# Whole nets -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    mode: str
    autocast: str = ""
    dtype: torch.dtype = torch.float32


class NearZero(nn.Module):
    """ReLUs of differences of all but equal numbers: rounding decides the signs of some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 4)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight * (1 + 1e-5 * torch.randn(64, 32)))
            self.second.bias.copy_(self.first.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(1e5 * (self.first(x) - self.second(x)).relu())


class BiasedUNet(nn.Module):
    """Two levels; every convolution has a bias and a batch norm after it."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
            )

        self.down, self.bottom, self.up = block(3, 8), block(8, 16), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.after, self.head = block(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.down(x)
        x = self.bottom(nn.functional.max_pool2d(kept, 2))
        return self.head(self.after(torch.cat((kept, self.up(x)), dim=1)))


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def resnet() -> nn.Module:
    """One block as wide as its input, and one with a stride and a shortcut of its own."""
    model = shallow_resnet(10)
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 10)
    return model


ALL = "inplace_conv_multiway_newnode"
NETS = {
    "unet": Net(lambda: UNet(width=8, depth=2), (1, 3, 64, 64), ALL),
    "unet with biases": Net(BiasedUNet, (2, 3, 32, 32), ALL),
    "relu near zero": Net(NearZero, (16, 32), ALL),
    "resnet": Net(resnet, (4, 3, 64, 64), ALL),
    "resnet conv": Net(resnet, (4, 3, 64, 64), "conv_normal"),
    "resnet autocast": Net(resnet, (4, 3, 64, 64), ALL, "bfloat16"),
    "resnet bfloat16": Net(resnet, (4, 3, 64, 64), ALL, dtype=torch.bfloat16),
    "resnet float64": Net(resnet, (4, 3, 64, 64), ALL, dtype=torch.float64),
    "dropout": Net(dropped, (4, 3, 8, 8), ALL),
}


@functools.cache
def steps(name: str) -> tuple[nn.Module, Example, Tensors, Tensors]:
    """A net, its input, and what plain PyTorch and a schedule that runs half of it again leave."""
    net = NETS[name]
    torch.manual_seed(0)
    model, example = net.make().train().to(net.dtype), ((torch.randn(net.shape, dtype=net.dtype),), {})
    captured = captured_for(Request(model, example, net.mode, autocast=net.autocast), example)
    schedule = random_schedule(captured.program, 2, drop=0.5)
    record = replace(record_for(captured, schedule, net.mode, (model, *example)), autocast=net.autocast)
    with autocast_as(net.autocast, CPU):
        wrapped = ScheduleWrapper(copy.deepcopy(model), record, example=example, captured=captured)
        mine, theirs = everything_after_a_step(copy.deepcopy(model), example), everything_after_a_step(wrapped, example)
    return model, example, mine, theirs


@pytest.mark.slow(but=["unet with biases"])
@pytest.mark.parametrize("name", NETS)
def test_a_schedule_with_other_rounding_is_right(name: str) -> None:
    model, example, mine, theirs = steps(name)
    with autocast_as(NETS[name].autocast, CPU):
        verdicts = judged(model, example, mine, theirs)
    assert wrong(verdicts) == []


def test_a_bias_before_a_batch_norm_has_a_gradient_of_rounding() -> None:
    model, example, mine, theirs = steps("unet with biases")
    errors = {v.name: v.error for v in judged(model, example, mine, theirs)}
    assert max(errors["gradient of down.0.bias"], errors["gradient of after.0.bias"]) > 0.1


def test_rounding_that_changes_signs_of_relus_is_right() -> None:
    model, example, mine, _ = steps("relu near zero")
    other = everything_after_a_step(shaken(model, 99), example)
    found = judged(model, example, mine, other)
    assert max(v.error for v in found) > 1e-3
    assert wrong(found) == []
    assert wrong(
        judged(model, example, mine, {**other, "gradient of first.weight": 0.1 * mine["gradient of first.weight"]})
    )


# The commands ---------------------------------------------------------------------------------------------------


def faulty(model: nn.Module, record: object) -> nn.Module:
    """In the place of ScheduleWrapper: one gradient is not right."""
    made = copy.deepcopy(model)
    parameter = dict(made.named_parameters())["before.weight"]
    parameter.register_hook(lambda grad: 0.1 * grad)
    return made


@pytest.mark.parametrize("mode", ["normal", "dropit0.9_normal"])
def test_check_diff_fails_for_one_gradient_made_90_percent_wrong(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, _, _ = kinds()
    captured = captured_for(Request(model, example, "normal"), example)
    record = record_for(captured, random_schedule(captured.program, 2), mode, (model, *example))
    if mode == "normal":
        assert same_step(Console(quiet=True).print, model, record, example)
    monkeypatch.setattr(verify, "ScheduleWrapper", faulty)
    console = Console(record=True, width=200, quiet=False, file=io.StringIO())
    assert same_step(console.print, model, record, example) is (mode != "normal")
    text = console.export_text()
    if mode == "normal":
        assert "differs: gradient of before.weight differs by 9.00e-01" in text
        assert "check_diff: failed, 1 tensors differ" in text
    else:
        assert "1 gradients are inexact, as dropit0.9_normal admits; they are not judged" in text


def test_benchmarks_judge_tensor_by_tensor() -> None:
    model, example, _, _ = kinds()
    assert judge(copy.deepcopy(model), shaken(model, 99), example, 0.0).correct
    assert not judge(copy.deepcopy(model), faulty(model, None), example, 0.0).correct


@pytest.mark.parametrize(("share", "rounding", "right"), [(5e-6, 1.5, True), (5e-6, 0.5, False), (1e-3, 1.5, False)])
def test_a_small_tensor_of_nothing_but_rounding_may_be_other_rounding(
    share: float, rounding: float, right: bool
) -> None:
    """Only where it is small beside the largest gradient and rounding alone changes all of it."""
    torch.manual_seed(0)
    small = share * torch.randn(500)
    plain = {"gradient of a": torch.randn(500), "gradient of b": small}
    moved = {**plain, "gradient of b": small + rounding * share * torch.randn(500)}
    found = {**plain, "gradient of b": small + 1.1 * share * torch.randn(500)}
    verdicts = {v.name: v.right for v in compare(plain, found, differences(plain, moved))}
    assert verdicts == {"gradient of a": True, "gradient of b": right}
