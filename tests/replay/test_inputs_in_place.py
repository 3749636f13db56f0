"""Inputs that a forward changes in place: the caller's tensor changes, and gradients are as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_schedule import assert_as_plain
from any_schedule import step as trained
from nets import Net, linear, rows
from replays import record_for
from torch import nn

from monet_like import ScheduleWrapper
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError, ScheduleFileError, UsageError
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted


def relu(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x.relu_())


def masked(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x[x > 0.5] = 0
    return layer(x)


def scaled(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return layer(x) * x


def late(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x.clone()).relu()
    x[:2].add_(1)
    x.t().sub_(0.5)
    return y


def by_weight(_: Net, layer: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(layer.weight[0])
    return layer(x).relu()


def without_gradient(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.clamp_(-0.5, 0.5)
    return layer(x).relu()


def returned(_: Net, layer: nn.Module, x: torch.Tensor) -> Any:
    x += 1
    return layer(x), x


def noisy(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    kept = torch.nn.functional.dropout(x.detach().sigmoid(), 0.5)
    drawn = torch.bernoulli(x.detach().sigmoid())
    x.neg_()
    return layer(kept * drawn).relu() * kept


def weights(_: Net, layer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.weight.clamp_(-0.2, 0.2)
    return layer(x).relu()


CASES = [relu, masked, scaled, late, by_weight, without_gradient, returned, noisy, weights]


def net_of(function: Callable[..., Any]) -> Net:
    torch.manual_seed(3)
    return Net(function, linear())


def step(model: Any, net: nn.Module, x: torch.Tensor, *, used: bool) -> list[Any]:
    """A step on ``x`` as it is given: what it leaves. ``used``: the caller goes on with the changed input."""
    net.zero_grad()
    torch.manual_seed(1)
    result = model(x)
    results = result if isinstance(result, tuple) else (result,)
    loss = sum((r * torch.linspace(1, 2, r.numel()).view(r.shape)).sum() for r in results if r.requires_grad)
    if used:
        loss = loss + (x * 0.3).sum()
    changed = x._version > 0
    loss.backward()
    return [
        *(r.detach() for r in results),
        x.detach().clone(),
        changed,
        x.requires_grad,
        *(p.grad for p in net.parameters()),
    ]


def assert_same(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def wrap(net: nn.Module, x: torch.Tensor, mode: str = "inplace_multiway_newnode") -> ScheduleWrapper:
    captured = admitted(capture(net, (x,)), mode)
    record = record_for(captured, random_schedule(captured.program, 1, drop=0.9, others=0.5), mode, (net, (x,), {}))
    return ScheduleWrapper(net, record, example=((x,), {}), captured=captured)


@pytest.mark.parametrize("kind", ["data", "made", "leaf"])
@pytest.mark.parametrize("function", CASES)
def test_inputs_change_as_in_plain_pytorch(function: Callable[..., Any], kind: str) -> None:
    """Data, the result of another operator, and a leaf, of which PyTorch says that it must not change."""
    net = net_of(function)
    plain = copy.deepcopy(net)

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = rows().requires_grad_(kind != "data")
        return leaf, leaf * 1 if kind == "made" else leaf

    wrapped = wrap(net, made()[1])
    for used in (False, True):
        (leaf, x), (other, y) = made(), made()
        if kind == "leaf" and function not in (without_gradient, weights):
            for model, owner, given in ((plain, plain, y), (wrapped, net, x)):
                with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                    step(model, owner, given, used=used)
            return
        expected = [*step(plain, plain, y, used=used), other.grad if kind != "data" else None]
        assert_same([*step(wrapped, net, x, used=used), leaf.grad if kind != "data" else None], expected)


def test_memory_that_two_inputs_share_is_not_changed() -> None:
    def forward(_: Net, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return layer(x.relu_()) + y

    net = net_of(forward)
    captured = admitted(capture(net, (rows(), rows())), "normal")
    record = record_for(captured, random_schedule(captured.program, 0, drop=0.0), "normal", (net, (rows(), rows()), {}))
    wrapped = ScheduleWrapper(net, record, captured=captured)
    x = rows()
    with pytest.raises(UsageError, match=r"input0 in place.*shares its memory; give a clone"):
        wrapped(x, x.view_as(x))
    with pytest.raises(ScheduleFileError, match="inputs that are one tensor"):
        wrapped(x, x)  # another program, in which the second one changes, too
    assert torch.equal(x, rows())
    assert wrapped(x, rows()).requires_grad


def labelled(_: Net, layer: nn.Module, x: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """As FSMT, which makes its decoder's input of the labels; further results have gradients."""
    labels.masked_fill_(labels == -100, 3)
    y = layer(x)
    return y[labels].sum() + y[ids.clamp(0)].square().sum(), y, y.tanh(), ids


def counted(net: Net, layer: nn.Module, x: torch.Tensor, seen: torch.Tensor, shift: torch.Tensor) -> Any:
    seen.add_(1)
    return layer(x) * net.ema + shift, x.mean()


@pytest.mark.parametrize("one_first", [True, False])
@pytest.mark.parametrize("function", [labelled, counted])
def test_what_is_given_twice_and_changes_is_one_tensor(function: Any, one_first: bool) -> None:
    """Or lives in the model, too; each case has a program of its own."""

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for one in (one_first, not one_first, one_first):
            given = torch.tensor([1, -100, 2]) if function is labelled else model.ema
            other = given.clone()
            first = other if function is counted and not one else given
            note(trained(called, rows(), first, first if one else other), given, other)

    assert_as_plain(lambda: net_of(function), script, captures=2)


def test_what_is_given_twice_and_does_not_change_needs_no_program_of_its_own() -> None:
    def forward(_: Net, layer: nn.Module, x: torch.Tensor, ids: torch.Tensor, rest: torch.Tensor, n: Any) -> Any:
        n.add_(1)
        return layer(x)[ids] * layer(x)[rest]

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for one in (True, False, True):
            ids, n = torch.tensor([1, 0, 2]), torch.zeros(1, dtype=torch.long)
            note(trained(called, rows(), ids, ids if one else ids.clone(), n), n)

    assert_as_plain(lambda: net_of(forward), script, captures=1)


def counts(net: Net, layer: nn.Module, x: torch.Tensor) -> Any:
    net.ema.add_(1).add_(2)
    x.mul_(2)
    before = net.ema.clone()
    net.ema[0] = 7
    net.aux = net.ema
    return layer(x), net.ema, net.ema[1:3], before, x, x[0]


def test_changed_buffers_and_inputs_are_returned_themselves() -> None:
    """Without a gradient, as in plain PyTorch: they change with the buffer, and the buffer with them."""

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        kept = []
        for number in range(3):
            result = trained(called, x := rows())
            result[2 * number].add_(1) if number else result[-1].zero_()
            kept.append(result)
            note(kept, model.ema, model.aux, x)

    assert_as_plain(lambda: net_of(counts), script, captures=1)


def test_what_the_backward_needs_as_it_was_is_pytorchs_error() -> None:
    def forward(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        x.mul_(2)
        return y

    with pytest.raises(CaptureError, match="overwrites in place what the gradient"):
        capture(net_of(forward), (rows(),))


def test_inputs_that_overlap_and_change_are_refused() -> None:
    def forward(_: Net, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return layer(x.mul_(2)) + y

    whole = torch.randn(8, 8)
    with pytest.raises(CaptureError, match="shares its memory with another input"):
        capture(net_of(forward), (whole[:6], whole[2:]))


def test_strides_over_an_input_with_gaps_that_changes_are_refused() -> None:
    """A trace has the changed input without gaps: there are other elements."""

    def forward(_: Net, layer: nn.Module, x: torch.Tensor) -> Any:
        x += 1
        return layer(x), x.as_strided([2], [1]) * 2

    gaps = rows().repeat_interleave(2, 1)[:, ::2]
    with pytest.raises(
        CaptureError, match=r"changes input0 in place, whose elements do not lie next.*calls as_strided"
    ):
        capture(net_of(forward), (gaps,))
    net = net_of(forward)
    plain = copy.deepcopy(net)
    assert_same(step(wrap(net, rows()), net, rows(), used=False), step(plain, plain, rows(), used=False))


def test_gradients_through_a_buffer_that_changes_are_refused() -> None:
    def forward(net: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.ema.mul_(0.5).add_(layer(x).mean(0))
        return layer(x) * net.ema

    with pytest.raises(CaptureError, match="changes ema in place, and gradients flow through"):
        capture(net_of(forward), (rows(),))
