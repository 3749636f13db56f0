"""Tensors that a forward reads and that are no parameters, buffers or arguments: of numbers, or held by objects."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import Net, linear, rows
from replays import record_for
from torch import nn
from training import run

from monet_like import ScheduleWrapper, auto_schedule
from monet_like.capture.captured import fake_mode
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted

_GLOBAL = torch.linspace(0.5, 1.5, 8)


class Scaled(torch.autograd.Function):
    """Multiplies by a tensor, and its gradient by one that it reads in the backward alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, by)
        return x * by

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, by = ctx.saved_tensors
        return gradients[0] * by * _GLOBAL, (gradients[0] * x).sum(0)


def literals(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mean, deviation = torch.tensor([0.485] * 8), torch.tensor([[0.229] * 8])
    order = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])
    return layer((x - mean) / deviation)[:, order] * torch.tensor(2.0)


def returned(_: Net, layer: nn.Module, x: torch.Tensor) -> Any:
    anchors = torch.tensor([1.0, 2.0, 3.0])
    return layer(x), anchors, anchors[:2]


def written(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    weights[2] = 0.5
    weights *= 2
    return layer(x) * weights


def attributes(net: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x).masked_fill(net.mask, 0.0) * net.scale + net.several[1]
    return y[:, net.named["order"]] * net.settings.weight.view(2, 4).reshape(8) * _GLOBAL


def custom(net: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Scaled.apply(layer(x), net.several[1])


def unregistered(net: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Scaled.apply(net.hidden[0](layer(x)).relu(), net.free) + net.alias[0].sum(0)


def checkpointed(net: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def part(y: torch.Tensor) -> torch.Tensor:
        return (net.hidden[0](y) * net.free * net.several[1] + net.alias[0][0]).relu() * torch.tensor([2.0] * 8)

    return torch.utils.checkpoint.checkpoint(part, layer(x), use_reentrant=False)


def through_views(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    with torch.no_grad():
        net.free.clamp_(max=2.5)
    return layer(x) * net.free, net.free[:4], net.hidden[0].weight


def counts(net: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    net.several[0].mul_(0.5).add_(x.detach().mean(0))
    return layer(x) * net.count + net.several[0]


def build(function: Callable[..., Any]) -> Any:
    torch.manual_seed(3)
    net: Any = Net(function, linear())
    net.mask = torch.arange(8) % 3 == 0
    net.scale = torch.tensor(1.5)
    net.count = torch.zeros(())
    net.several = [torch.ones(8), torch.linspace(-1, 1, 8)]
    net.named = {"order": torch.arange(7, -1, -1)}
    net.settings = SimpleNamespace(weight=torch.linspace(1, 2, 8))
    net.hidden = (linear(),)
    net.free = torch.linspace(1, 3, 8, requires_grad=True)
    net.alias = (net.layers[0].weight,)
    return net


def leaves(net: Any) -> list[torch.Tensor]:
    return [*net.hidden[0].parameters(), net.free]


def everything(model: Any, net: Any, x: torch.Tensor) -> dict[str, Any]:
    net.zero_grad()
    for leaf in leaves(net):
        leaf.grad = None
    outcome = run(model, (x,), {})
    found = {f"output {i}": t for i, t in enumerate(outcome.outputs)}
    found |= {n: None if g is None else g.clone() for n, g in outcome.gradients.items()}
    found |= {f"leaf {i}": None if t.grad is None else t.grad.clone() for i, t in enumerate(leaves(net))}
    found |= {"input": x.grad.clone(), "count": net.count.clone(), "several": net.several[0].clone()}
    return found


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (mine[name] is None) == (tensor is None), name
        assert tensor is None or torch.equal(mine[name], tensor), name


CASES = [literals, returned, written, attributes, custom, unregistered, checkpointed, through_views, counts]


@pytest.mark.parametrize("function", CASES)
def test_constants_are_as_in_plain_pytorch(function: Callable[..., Any]) -> None:
    net, x = build(function), rows().requires_grad_()
    plain = copy.deepcopy(net)
    raw = capture(net, (x,))
    for seed, mode in enumerate(("normal", "inplace_multiway_newnode")):
        captured = admitted(raw, mode)
        schedule = random_schedule(captured.program, seed, drop=0.9)
        record = record_for(captured, schedule, mode, (net, (x,), {}))
        wrapped = ScheduleWrapper(net, record, example=((x,), {}), captured=captured)
        for _ in range(3):
            assert_same(everything(wrapped, net, x), everything(plain, plain, x))


def wrap(net: Any, x: torch.Tensor, autocast: str = "") -> ScheduleWrapper:
    captured = admitted(capture(net, (x,)), "multiway_newnode")
    schedule = random_schedule(captured.program, 1, drop=0.5)
    record = record_for(captured, schedule, "multiway_newnode", (net, (x,), {}))
    return ScheduleWrapper(net, replace(record, autocast=autocast), example=((x,), {}), captured=captured)


def write_into(net: Any) -> None:
    net.mask.logical_not_()
    net.several[1].mul_(3)
    net.settings.weight.sub_(1)
    _GLOBAL.mul_(2)


def write_as_numpy(net: Any) -> None:
    net.several[1].numpy()[3] = 5.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda net: setattr(net, "mask", ~net.mask),
    "in a list": lambda net: operator.setitem(net.several, 1, net.several[1] + 1),
    "list": lambda net: setattr(net, "several", [net.several[0], net.several[1] * 2]),
    "in a dict": lambda net: net.named.update(order=net.named["order"].flip(0)),
    "in an object": lambda net: setattr(net.settings, "weight", net.settings.weight * 2),
    "written": write_into,
    "written as numpy": write_as_numpy,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_constants_are_followed(name: str) -> None:
    net, x = build(attributes), rows().requires_grad_()
    wrapped = wrap(net, x)
    before = everything(wrapped, net, x)
    assert_same(before, everything(net, net, x))
    try:
        CHANGES[name](net)
        now = everything(wrapped, net, x)
        assert_same(now, everything(net, net, x))
        assert not torch.equal(now["output 0"], before["output 0"])
        assert len(wrapped._kept) == (1 if name.startswith("written") else 2)
    finally:
        _GLOBAL.copy_(torch.linspace(0.5, 1.5, 8))


def test_unregistered_parameters_that_change_are_followed() -> None:
    net, x = build(unregistered), rows().requires_grad_()
    wrapped = wrap(net, x)
    optimizer = torch.optim.SGD([*net.parameters(), *leaves(net)], 0.1)
    for _ in range(2):
        assert_same(everything(wrapped, net, x), everything(net, net, x))
        optimizer.step()
    net.hidden[0].weight = nn.Parameter(torch.ones(8, 8))
    assert_same(everything(wrapped, net, x), everything(net, net, x))
    net.free.requires_grad_(False)  # as of a parameter that is frozen
    with pytest.warns(UserWarning, match="runs as plain PyTorch.*frozen parameters"):
        assert_same(everything(wrapped, net, x), everything(net, net, x))


def test_tensors_of_a_graph_of_their_own_pass_gradients_on() -> None:
    """Such as weights that another net makes before the call."""
    net, x, maker = build(custom), rows(), linear()
    seed = torch.ones(1, 8)
    net.several[1] = maker(seed)[0]
    wrapped = wrap(net, x)
    found = []
    for model in (net, wrapped):
        maker.zero_grad()
        net.several[1] = maker(seed)[0]
        model(x).square().sum().backward()
        found.append(maker.weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_have_constants_of_their_own(copied: Callable[[Any], Any]) -> None:
    net, x = build(attributes), rows().requires_grad_()
    net.function = attributes
    other = copied(wrap(net, x))
    net.several[1].mul_(2)
    assert_same(everything(other, other._model, x), everything(other._model, other._model, x))
    other._model.several[1].add_(1)
    assert_same(everything(other, other._model, x), everything(other._model, other._model, x))


def test_a_program_of_the_original_is_not_used_for_a_copy() -> None:
    net, x = build(attributes), rows().requires_grad_()
    captured = admitted(capture(net, (x,)), "normal")
    record = record_for(captured, random_schedule(captured.program, 0, drop=0.0), "normal", (net, (x,), {}))
    other = copy.deepcopy(net)
    wrapped = ScheduleWrapper(other, record, example=((x,), {}), captured=captured)
    other.several[1].mul_(2)
    assert_same(everything(wrapped, other, x), everything(other, other, x))


@pytest.mark.parametrize("function", [literals, unregistered])
def test_smaller_batches_and_autocast(function: Callable[..., Any]) -> None:
    net, x = build(function), rows().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        wrapped = wrap(net, x, "bfloat16")
        for count in (6, 4):
            part = x.detach()[:count].clone().requires_grad_()
            assert_same(everything(wrapped, net, part), everything(net, net, part))


def test_constants_count_as_resident() -> None:
    net, x = build(attributes), rows()
    captured = capture(net, (x,))
    counted = sum(v.bytes for v in captured.program.values if v.name.startswith("<constant"))
    held = (net.mask, net.scale, net.several[1], net.named["order"], net.settings.weight, _GLOBAL)
    assert counted == sum(t.untyped_storage().nbytes() for t in held)
    assert {id(t) for t in captured.constants.tensors.values()} == {id(t) for t in held}


@pytest.mark.parametrize("function", [literals, unregistered])
def test_a_schedule_for_a_device_that_is_not_here(function: Callable[..., Any]) -> None:
    captured = capture(build(function), (rows(),), target=torch.device("cuda", 0))
    assert {meta.device.type for meta in captured.metas} == {"cuda"}


def test_a_planned_step_fits_with_constants() -> None:
    net, x = build(attributes), rows().requires_grad_()
    wrapped = auto_schedule(net, x, memory_budget="1 MB", mode="multiway_newnode", time_limit_seconds=5)
    assert_same(everything(wrapped, net, x), everything(net, net, x))
    net.mask = ~net.mask
    assert_same(everything(wrapped, net, x), everything(net, net, x))


@pytest.mark.parametrize("taken", [torch.from_numpy, torch.from_dlpack, torch.as_tensor])
def test_memory_that_is_not_pytorchs(taken: Callable[[Any], torch.Tensor]) -> None:
    array = torch.linspace(0, 1, 8).numpy()

    def forward(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x) * taken(array)

    net, x = build(forward), rows().requires_grad_()
    wrapped = wrap(net, x)
    array *= 2
    assert_same(everything(wrapped, net, x), everything(net, net, x))

    def writing(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x) * taken(array).mul_(2)

    with pytest.raises(CaptureError, match="memory that is not PyTorch's"):
        capture(build(writing), (x,))
    assert array[7] == 2


def test_constants_of_a_model_without_storage() -> None:
    with fake_mode():
        for function in (literals, unregistered, counts):
            captured = capture(build(function), (torch.empty(6, 8),))
            assert captured.constants.tensors
