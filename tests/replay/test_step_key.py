"""Every part of a step's key: two calls that differ in nothing else are two programs."""

from __future__ import annotations

import copy
import enum
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from any_schedule import AnySchedule, assert_as_plain, step
from nets import Net, linear, rows
from torch import nn
from torch.autograd import forward_ad

from monet_like.errors import UsageError
from monet_like.replay import stepping
from monet_like.replay.checks.call_keys import arguments, structure

# The model -----------------------------------------------------------------------------------------------------------


def chained(net: Net, *given: Any) -> torch.Tensor:
    *layers, x = given
    for layer in layers:
        x = layer(x)
    return x


def flattened(net: Net, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(x) * layer.weight.view(-1)[:8] if layer.weight.is_contiguous() else layer(x) * layer.weight.sum()


def shifted(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x) * net.ema.shape[0] + net.ema.sum()


def in_double(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x) * (2 if net.ema.dtype == torch.float64 else 3)


def set_parameter(layer: nn.Module, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    setattr(layer, name, nn.Parameter(make(getattr(layer, name).detach())))


class Affine(nn.Module):
    """Scales or shifts, by the one parameter that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: nn.Parameter | None = nn.Parameter(torch.full((8,), 0.5))
        self.register_parameter("shift", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale if self.scale is not None else x + self.shift


class Difference(nn.Module):
    """Of two parts, or of a part and its input."""

    def __init__(self, one: nn.Module, other: nn.Module | None = None) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) - 2 * (x if self.other is None else self.other(x))


def swapped(one: Any, name: str, other: Any, its: str) -> None:
    first, second = getattr(one, name), getattr(other, its)
    setattr(one, name, second)
    setattr(other, its, first)


def branches() -> Net:
    tanh = nn.Tanh()
    return Net(chained, linear(), tanh, Difference(tanh), Difference(nn.Sigmoid()))


def second_name() -> Net:
    tanh = nn.Tanh()
    return Net(chained, linear(), tanh, nn.Sigmoid(), Difference(tanh))


def two_names() -> Net:
    tanh = nn.Tanh()
    return Net(chained, linear(), tanh, Difference(tanh, nn.Sigmoid()))


def shift(layer: Any) -> None:
    layer.scale, layer.shift = None, layer.scale


def tied() -> Net:
    first, second = linear(), linear()
    second.weight = first.weight
    return Net(chained, first, second)


#: A net, and what changes about it between two calls.
MODELS: dict[str, tuple[Callable[[], Net], Callable[[Any], Any]]] = {
    "a dropout is in eval mode": (lambda: Net(chained, linear(), nn.Dropout(0.5)), lambda net: net.layers[1].eval()),
    "a layer was replaced by an equal one": (
        lambda: Net(chained, linear(), linear()),
        lambda net: net.layers.__setitem__(1, linear()),
    ),
    "two branches have each other's layer": (branches, lambda net: swapped(net.layers[2], "one", net.layers[3], "one")),
    "a second name is of another layer": (second_name, lambda net: setattr(net.layers[3], "one", net.layers[2])),
    "two names have each other's layer": (two_names, lambda net: swapped(net.layers[2], "one", net.layers[2], "other")),
    "another parameter is there": (lambda: Net(chained, linear(), Affine()), lambda net: shift(net.layers[1])),
    "two layers are no longer tied": (tied, lambda net: set_parameter(net.layers[1], "weight", lambda w: 2 * w)),
    "a weight lies otherwise": (
        lambda: Net(flattened, linear()),
        lambda net: set_parameter(net.layers[0], "weight", lambda w: w.t().contiguous().t()),
    ),
    "a layer is wider": (
        lambda: Net(lambda net, layer, x: layer(x).mean(1), linear()),
        lambda net: [set_parameter(net.layers[0], name, lambda t: torch.cat([t, t, t])) for name in ("weight", "bias")],
    ),
    "a buffer is longer": (lambda: Net(shifted, linear()), lambda net: setattr(net, "ema", torch.ones(9))),
    "a buffer has another dtype": (lambda: Net(in_double, linear()), lambda net: setattr(net, "ema", net.ema.double())),
    "a parameter is frozen": (
        lambda: Net(chained, linear(), linear()),
        lambda net: net.layers[0].weight.requires_grad_(False),
    ),
}


@pytest.mark.parametrize("change", MODELS)
def test_a_model_that_changes_between_calls(change: str) -> None:
    make, changes = MODELS[change]

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for number in range(4):
            if number == 2:
                changes(model)
            model.zero_grad()
            note(step(called, rows()), [p.grad for p in model.parameters()])

    assert_as_plain(make, script, captures=2)


# Arguments -----------------------------------------------------------------------------------------------------------


class Reduction(enum.IntEnum):
    SUM = 1


class Activation(enum.IntEnum):
    TANH = 1


class Word:
    """An argument that is known by its hash."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and self.text == other.text


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def written(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    return y * 2 if x.requires_grad else y


#: What a net computes, and two lists of arguments.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], Callable[[], tuple[Any, ...]]]] = {
    "shape": (lambda net, layer, x: layer(x).mean(0), lambda: (rows(),), lambda: (rows(3, 8),)),
    "dtype": (lambda net, layer, x: layer(x.float()), lambda: (rows(),), lambda: (rows().double(),)),
    "strides": (
        lambda net, layer, x: layer(x) if x.is_contiguous() else 2 * layer(x),
        lambda: (rows(8, 8),),
        lambda: (rows(8, 8).t(),),
    ),
    "gradient": (written, lambda: (rows(),), lambda: (leaf(rows()),)),
    "class of a number": (
        lambda net, layer, x, word: layer(x) * len(type(word).__name__),
        lambda: (rows(), Reduction.SUM),
        lambda: (rows(), Activation.TANH),
    ),
    "start of a slice": (
        lambda net, layer, x, part: layer(x)[part],
        lambda: (rows(), slice(0, 4)),
        lambda: (rows(), slice(1, 4)),
    ),
    "end of a slice": (
        lambda net, layer, x, part: layer(x)[part],
        lambda: (rows(), slice(0, 4)),
        lambda: (rows(), slice(0, 5)),
    ),
    "step of a slice": (
        lambda net, layer, x, part: layer(x)[part],
        lambda: (rows(), slice(0, 4)),
        lambda: (rows(), slice(0, 4, 2)),
    ),
    "nesting": (
        lambda net, layer, pair: layer(pair[0]) - (pair[1] if isinstance(pair, tuple) else 2 * pair[1]),
        lambda: ((rows(), rows()),),
        lambda: ([rows(), rows()],),
    ),
    "a word": (lambda net, layer, x, word: layer(x) * len(word), lambda: (rows(), "sum"), lambda: (rows(), "mean")),
    "an object with a hash": (
        lambda net, layer, x, word: layer(x) * len(word.text),
        lambda: (rows(), Word("sum")),
        lambda: (rows(), Word("mean")),
    ),
    "shape of an array": (
        lambda net, layer, x, array: layer(x) * len(array),
        lambda: (rows(), np.zeros((2, 1))),
        lambda: (rows(), np.lib.stride_tricks.as_strided(np.zeros(2), (1, 2), (8, 8))),
    ),
    "strides of an array": (
        lambda net, layer, x, array: layer(x) * (2 if array.flags.c_contiguous else 3),
        lambda: (rows(), np.zeros((2, 2))),
        lambda: (rows(), np.zeros((2, 2)).T),
    ),
    "dtype of an array": (
        lambda net, layer, x, array: layer(x) * (2 if array.dtype == np.float32 else 3),
        lambda: (rows(), np.zeros(2, np.float32)),
        lambda: (rows(), np.zeros(2, np.int32)),
    ),
    "numbers in an array": (
        lambda net, layer, x, array: layer(x) * float(array[0]),
        lambda: (rows(), np.full(2, 0.5)),
        lambda: (rows(), np.full(2, 0.25)),
    ),
    "a device": (
        lambda net, layer, x, device: layer(x) * len(str(device)),
        lambda: (rows(), torch.device("cpu")),
        lambda: (rows(), torch.device("meta")),
    ),
}


@pytest.mark.parametrize("difference", CALLS)
def test_arguments_that_differ_between_calls(difference: str) -> None:
    function, first, second = CALLS[difference]

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for given in (first, second, first, second):
            model.zero_grad()
            note(step(called, *given()), [p.grad for p in model.parameters()])

    assert_as_plain(lambda: Net(function, linear()), script, captures=2)


def test_an_input_that_is_a_leaf_is_cast_once_under_autocast() -> None:
    """So that its gradients are added in 16 bits. PyTorch keeps no cast of another."""

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for made in (leaf, lambda x: leaf(x) * 1):
            x = made(rows())
            x.retain_grad()
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                result = called(x)
            result.float().square().sum().backward()
            note(result, x.grad)

    assert_as_plain(lambda: Net(lambda net, one, two, x: one(x) * two(x), linear(), linear()), script, captures=2)


def test_each_kind_of_autocast_is_another_program() -> None:
    """Its dtype, and its cache: with it a weight is cast once, so that its gradients are added in 16 bits."""

    def twice(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x).tanh())

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for dtype, cached in ((None, True), (torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)) * 2:
            model.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=cached):
                result = called(rows())
            result.float().square().sum().backward()
            note(result, [p.grad for p in model.parameters()])

    assert_as_plain(lambda: Net(twice, linear()), script, captures=4)


def test_an_empty_batch_runs_as_the_plain_model() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for count in (6, 0):
            model.zero_grad()
            note(step(called, rows(count, 8)), [p.grad for p in model.parameters()])

    assert_as_plain(lambda: Net(chained, linear(), linear()), script, captures=1)


# Parts of a key that a test without a second device, or without other processes, cannot train by --------------------


def test_a_key_knows_the_device_of_a_tensor() -> None:
    here, there = torch.empty(2), torch.empty(2, device="meta")
    assert arguments([here]) == arguments([torch.empty(2)]) != arguments([there])


def key_of(called: AnySchedule) -> Any:
    return called._key(*pytree.tree_flatten(((rows(),), {})))


def test_a_key_knows_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    called = AnySchedule(linear())
    before = key_of(called)
    monkeypatch.setattr(stepping, "device_of", lambda *_: torch.device("cuda", 0))
    assert key_of(called) != before


def test_a_key_knows_the_processes_that_share_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    called = AnySchedule(nn.SyncBatchNorm(8))
    before = key_of(called)
    monkeypatch.setattr(stepping, "world", lambda: ("group", 2))
    assert key_of(called) != before


def test_a_key_keeps_no_module_alive() -> None:
    net = Net(chained, linear())
    alive, key = weakref.ref(net), structure(net)
    del net
    assert alive() is None and key[0][0]() is None


# Checks between a call and its program -------------------------------------------------------------------------------


def test_without_gradients_nothing_is_captured() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        with torch.no_grad():
            note(called(rows()))
        called.eval()
        note(called(rows()))

    assert_as_plain(lambda: Net(chained, linear(), nn.Dropout(0.5)), script, captures=0)


def test_a_leaf_that_would_change_in_place_is_refused_before_anything_changes() -> None:
    def in_place(net: Net, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return norm(x.mul_(2))

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        note(step(called, leaf(rows()) * 1))
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            called(leaf(rows()))
        note(list(model.buffers()))

    assert_as_plain(lambda: Net(in_place, nn.BatchNorm1d(8)), script)


@torch.no_grad()
def doubled(weight: torch.Tensor) -> None:
    weight.mul_(2)


def test_a_weight_that_a_hook_changes_in_the_backward_is_pytorchs_error() -> None:
    for scheduled in (False, True):
        net = Net(chained, linear(), linear(), linear())
        _, second, third = net.layers
        third.weight.register_hook(lambda _, weight=second.weight: doubled(weight))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(AnySchedule(net) if scheduled else net, rows())


def test_a_result_without_gradient_has_none() -> None:
    def detached(net: Net, layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = layer(x)
        return y, y.detach() * 2, y.argmax(1)

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        result = step(called, rows())
        note(result, [[tensor.requires_grad for tensor in result]])

    assert_as_plain(lambda: Net(detached, linear()), script, captures=1)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_tangents_of_parameters_and_buffers_are_refused(kind: str) -> None:
    net = Net(shifted, linear())
    called = AnySchedule(net)
    step(called, rows())
    with forward_ad.dual_level():
        tensor = net.layers[0].bias if kind == "parameter" else net.ema
        with torch.no_grad():
            tensor.copy_(forward_ad.make_dual(torch.ones(8), torch.ones(8)))
        assert forward_ad.unpack_dual(tensor).tangent is not None
        with pytest.raises(UsageError, match="with tangents of forward-mode derivatives"):
            called(rows())


def test_a_wrapper_that_has_trained_can_be_copied_and_pickled() -> None:
    called = AnySchedule(nn.Sequential(linear(), nn.Dropout(0.5)))
    step(called, rows())
    for again in (copy.deepcopy(called), pickle.loads(pickle.dumps(called))):
        assert len(again._kept) == 0 and step(again, rows()).shape == (6, 8)
        assert again._model[0] is not called._model[0]


def test_a_model_without_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="is on the meta device"):
        AnySchedule(nn.Linear(2, 2, device="meta"))
