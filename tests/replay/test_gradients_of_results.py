"""Results that others are made from: a schedule knows only the part of their gradient that comes from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_schedule import AnySchedule, OrPlain, assert_as_plain
from nets import Net, linear, rows
from torch import nn

from monet_like.capture.captured import TensorMeta
from monet_like.errors import UsageError
from monet_like.replay.training_step import as_captured


def features(net: Net, first: nn.Module, second: nn.Module, x: torch.Tensor) -> Any:
    inner = first(x).tanh()
    return {"features": inner, "result": second(inner)}


def beside(net: Net, first: nn.Module, second: nn.Module, x: torch.Tensor) -> Any:
    inner = first(x).tanh()
    return {"features": inner * 2, "result": second(inner) + second(inner.detach())}


def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return given["result"].square().sum() + given["features"].sum()


def keep(given: dict[str, torch.Tensor]) -> None:
    given["features"].retain_grad()
    given["result"].square().sum().backward()


def change(given: dict[str, torch.Tensor]) -> None:
    given.pop("features").register_hook(lambda gradient: gradient * 3)
    given["result"].square().sum().backward()


def ask(given: dict[str, torch.Tensor]) -> None:
    torch.autograd.grad(loss(given), given["features"])


@pytest.mark.parametrize(
    ("use", "said"), [(keep, r"has retain_grad\(\)"), (change, "has a hook"), (ask, "is in a loss")]
)
def test_the_whole_gradient_of_an_inner_result_is_refused(use: Callable[..., None], said: str) -> None:
    called = AnySchedule(Net(features, linear(), linear()))
    with pytest.raises(
        UsageError, match=f"result 0 of the model {said}.*, and other results are made from it.* blocks="
    ):
        use(called(rows()))
    loss(called(rows())).backward()
    assert called.captures == 1


def normed(net: Net, first: nn.Module, norm: nn.Module, second: nn.Module, x: torch.Tensor) -> Any:
    inner = F.dropout(norm(first(x)).tanh(), net.factor)
    net.aux = inner.detach()
    further = second(inner).tanh()
    return {"features": inner, "further": further, "result": second(further)}


def hooks(given: dict[str, torch.Tensor], note: Callable[..., None]) -> None:
    given["features"].register_hook(lambda gradient: gradient * 3)
    given["features"].register_hook(note)
    given["features"].retain_grad()
    given["further"].register_hook(lambda gradient: gradient + 1)
    loss(given).backward(retain_graph=True)
    note(given["features"].grad)
    given["result"].sum().backward()
    note(given["features"].grad)


def penalty(given: dict[str, torch.Tensor], note: Callable[..., None], x: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(given["result"].sum(), x, create_graph=True)
    note(gradient)
    (gradient.norm(dim=1) - 1).square().mean().backward()


def many(given: dict[str, torch.Tensor], note: Callable[..., None], x: torch.Tensor) -> None:
    result = given["result"][0]
    note(torch.autograd.grad(result, x, torch.eye(8), is_grads_batched=True))


@pytest.mark.parametrize("use", [hooks, penalty, many])
def test_a_run_that_asks_for_more_than_a_schedule_computes_goes_on(use: Callable[..., None]) -> None:
    """Beginning with that call, to the bit; a hook of a parameter still runs once."""

    def made() -> Net:
        model = Net(normed, linear(), nn.BatchNorm1d(8), linear())
        model.factor = 0.3 if use is not many else 0.0
        model.layers[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[union-attr]
        return model

    def script(called: nn.Module, model: Any, note: Callable[..., None]) -> None:
        loss(called(rows())).backward()
        for _ in range(3):
            x = rows().requires_grad_()
            use(called(x), note, *([] if use is hooks else [x]))
            note(x.grad, model.aux, *model.parameters(), *model.buffers(), [p.grad for p in model.parameters()])

    assert len(assert_as_plain(made, script, wrap=OrPlain)) == 1


def test_what_cannot_be_repeated_is_still_refused() -> None:
    called = OrPlain(Net(features, linear(), linear()))
    given = called(rows())
    called.layers[1].bias.data.fill_(0)  # type: ignore[index]
    called.function = beside
    with pytest.raises(UsageError, match="has retain_grad"):
        keep(given)


class Engine:
    """As DeepSpeed's: its hooks on all results prepare something at the first, and may scale gradients."""

    def __init__(self, scale: float | None) -> None:
        self.scale, self.prepared = scale, 0

    def watch(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
            self.prepared += 1
            return gradient if self.scale is None or gradient is None else gradient * self.scale

        hook.__module__ = "deepspeed.runtime.utils"
        for result in given.values():
            result.register_hook(hook)
        return given


@pytest.mark.parametrize("used", ["result", "result,features", "features"])
def test_hooks_that_are_told_of_a_backward_may_be_on_inner_results(used: str) -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        engine = Engine(None)
        given = engine.watch(called(rows()))
        sum(given[name].square().sum() for name in used.split(",")).backward()  # type: ignore[union-attr]
        assert engine.prepared

    assert_as_plain(lambda: Net(features, linear(), linear()), script, captures=1)


@pytest.mark.parametrize("used", ["result", "result,features"])
def test_an_engine_that_scales_gradients_of_inner_results_is_refused(used: str) -> None:
    called = AnySchedule(Net(features, linear(), linear()))
    given = Engine(0.5).watch(called(rows()))
    with pytest.raises(
        UsageError, match=r"scales the gradient of each result .* Call engine.backward\(loss\), .* blocks="
    ):
        sum(given[name].square().sum() for name in used.split(",")).backward()  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in called.parameters())


def test_everything_else_is_as_in_plain_pytorch() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        given = called(rows())
        note(torch.autograd.grad(given["result"].square().sum(), given["result"], retain_graph=True))
        note(torch.autograd.grad(loss(given), list(model.parameters())[:2]))
        given = called(rows())
        given["result"].retain_grad()
        given["result"].register_hook(lambda gradient: gradient * 2)
        given["features"] = after = given["features"] * 1
        after.register_hook(lambda gradient: gradient * 3)
        loss(given).backward()
        note(given["result"].grad)

    assert_as_plain(lambda: Net(features, linear(), linear()), script, captures=1)


def test_results_that_stand_side_by_side_have_their_own_gradients() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        given = called(rows())
        given["features"].retain_grad()
        given["features"].register_hook(lambda gradient: gradient * 3)
        loss(given).backward()
        note(given["features"].grad)

    assert_as_plain(lambda: Net(beside, linear(), linear()), script, captures=1)


def test_a_gradient_is_copied_only_where_its_elements_lie_otherwise() -> None:
    """The stride of an extent of 1 says nothing, and an operator may give it another one than its trace."""
    meta = TensorMeta.of(torch.empty_strided((2, 3, 1, 4), (12, 1, 12, 3)))
    alike = torch.empty_strided((2, 3, 1, 4), (12, 1, 3, 3)).normal_()
    taken = as_captured(alike, meta)
    assert taken.data_ptr() == alike.data_ptr() and taken.stride() == meta.stride
    in_rows = alike.contiguous()
    assert as_captured(in_rows, meta).data_ptr() != in_rows.data_ptr()
    for gradient in (alike, in_rows, alike.double()):
        taken = as_captured(gradient, meta)
        assert (taken.stride(), taken.dtype) == (meta.stride, meta.dtype) and torch.equal(taken, alike)


def test_a_sparse_gradient_of_a_result_is_taken() -> None:
    """As an embedding sends it back to a table that the model makes."""
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        net = Net(lambda net, x: net.weight * x)
        net.weight = nn.Parameter(torch.randn(6, 8))
        model = AnySchedule(net) if wrapped else net
        table = model(rows())
        torch.nn.functional.embedding(torch.tensor([0, 2, 2]), table, sparse=True).square().sum().backward()
        grads.append(net.weight.grad.to_dense())  # type: ignore[union-attr]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
