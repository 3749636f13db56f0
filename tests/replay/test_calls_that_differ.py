"""Calls of one model that differ in more than shapes: its modules, classes of inputs, which are one, surroundings."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from any_schedule import AnySchedule, assert_as_plain, step
from nets import Net, linear, rows
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from monet_like.errors import CaptureError, UsageError

# The modules of a model --------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Modules in every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(linear(), nn.Tanh())
        self.branches = nn.ModuleList([nn.Sequential(nn.Sigmoid()), nn.Sequential()])
        self.table = nn.ModuleDict({"first": nn.Softplus(), "second": nn.SiLU()})
        self.before: nn.Module | None = nn.Tanh()
        self.after: nn.Module | None = None
        self.again = self.before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.chain(x if self.before is None else self.before(x))
        x = self.branches[0](x) - 2 * self.branches[1](x)
        x = self.table["second"](self.table["first"](x))
        return self.again(x if self.after is None else self.after(x) + 1)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def move(model: Parts) -> None:
    """All modules are there in the same order."""
    (layer,) = model.branches[0]
    del model.branches[0][0]
    model.branches[1].append(layer)


def rename(model: Parts) -> None:
    first, second = model.table.values()
    model.table.clear()
    model.table.update({"second": first, "first": second})


CHANGES: dict[str, Callable[[Parts], Any]] = {
    "a layer that is there runs once more": lambda m: m.chain.append(m.chain[0]),
    "a layer is in another branch": move,
    "two layers have each other's name": rename,
    "a layer has the place that was empty": lambda m: (setattr(m, "after", m.before), setattr(m, "before", None)),
    "another layer that is there has a second name": lambda m: setattr(m, "again", m.chain[0]),
    "a layer has another class": lambda m: setattr(m.chain[0], "__class__", Doubled),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_modules_in_other_places_are_another_program(change: str) -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        note(step(called, rows()))
        CHANGES[change](model)  # type: ignore[arg-type]
        note(step(called, rows()))

    assert_as_plain(Parts, script, captures=2)


# Arguments -----------------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention computes its projections at once where query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.attention(*inputs)[0] * (1 if inputs[0] is inputs[1] else 3)


def test_inputs_that_are_one_tensor() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        x, y, z = (rows(3, 2, 8).mul(k).requires_grad_() for k in (1, 2, 3))
        for inputs in ((x, x, x), (x, y, y), (z, z, z)):
            note(step(called, *inputs))
        note(x.grad, y.grad, z.grad)

    assert_as_plain(Attends, script, captures=2)


class Remembers(nn.Module):
    """Computes otherwise where it is given the tensor of the last call again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.last: torch.Tensor | None = None

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        again, self.last = self.last is inputs[-1], inputs[-1]
        return self.layer(self.last if again else 2 * inputs[0]) * inputs[0]


def test_an_input_that_the_model_holds_is_one_with_it() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        x, y, z = (rows().mul(k).requires_grad_() for k in (1, 2, 3))
        for inputs in ((x, x, y), (y, y, x), (z, z, x), (y, y, x), (x, x, z), (x, x, z)):
            note(step(called, *inputs), model.last is inputs[-1])
        note(x.grad, y.grad, z.grad)

    assert_as_plain(Remembers, script, captures=3)


WEAKLY: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()
OF_THREAD = threading.local()


def test_what_weak_dicts_and_threads_hold_is_followed() -> None:
    def forward(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if layer not in WEAKLY:
            WEAKLY[layer] = torch.arange(8.0)
        OF_THREAD.last = layer(x * WEAKLY[layer] * OF_THREAD.scale).detach()
        return layer(x) * OF_THREAD.last

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        WEAKLY.clear()
        OF_THREAD.scale = 1.0
        model.eval()(rows())
        model.train()
        for scale in (1.0, 1.0, 2.0, 1.0):
            OF_THREAD.scale = scale
            WEAKLY.update({layer: weight * scale for layer, weight in WEAKLY.items()})
            note(step(called, rows() * scale), *WEAKLY.values(), OF_THREAD.last)

    assert_as_plain(lambda: Net(forward, linear()), script, captures=4)


def test_zeros_of_both_signs_are_two_arguments() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for sign in (0.0, -0.0, float("nan"), float("nan")):
            note(step(called, rows(), sign))

    def forward(net: Net, layer: nn.Module, x: torch.Tensor, sign: float) -> torch.Tensor:
        return layer(x).abs().copysign(torch.tensor(sign).nan_to_num(2.0))

    assert_as_plain(lambda: Net(forward, linear()), script, captures=3)


class Halved(torch.Tensor):
    """Layers compute other numbers of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result / 2 if func is nn.functional.linear else result


class Labelled(torch.Tensor):
    """Computes as any tensor."""


def test_an_input_whose_class_computes_otherwise_is_refused() -> None:
    called = AnySchedule(linear())
    plain = step(called, rows())
    with pytest.raises(CaptureError, match=r"an input of Linear is a Halved, which decides itself .*as_subclass"):
        called(rows().as_subclass(Halved))
    assert torch.equal(called(rows().as_subclass(Labelled)).as_subclass(torch.Tensor), plain)
    assert called.captures == 1


def test_attributes_of_an_input_that_the_forward_reads_are_refused() -> None:
    called = AnySchedule(Net(lambda net, layer, x: layer(x) * getattr(x, "scale", 1.0), linear()))
    step(called, rows())
    x = rows()
    x.note = "of no interest"  # type: ignore[attr-defined]
    step(called, x)
    x.scale = 3.0  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="an input of Net has the attribute scale, which its forward reads"):
        called(x)


def test_what_a_forward_reads_of_parameters() -> None:
    """An attribute of a parameter is followed, its gradient is refused."""

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        weight: Any = next(model.parameters())
        for scale in (2.0, 3.0, 2.0):
            weight.scale = scale
            note(step(called, rows()))

    assert_as_plain(lambda: Net(lambda net, layer, x: layer(x) * layer.weight.scale, linear()), script, captures=2)
    for layer in (linear(), nn.Linear(8, 8).requires_grad_(False)):
        called = AnySchedule(Net(lambda net, layer, x: layer(x) if layer.weight.grad is None else x, layer))
        with pytest.raises(CaptureError, match=r"the forward reads \.grad of a parameter or an input"):
            called(rows().requires_grad_())


# Surroundings --------------------------------------------------------------------------------------------------------


def twice(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(layer(x).tanh())


class Scaled(TorchFunctionMode):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.scale if func is nn.functional.linear else result


def test_modes_of_functions_are_followed() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        note(step(called, rows()))
        for scale in (2.0, 3.0, 2.0):
            with Scaled(scale):
                note(step(called, rows()))
        note(step(called, rows()))

    assert_as_plain(lambda: Net(twice, linear()), script, captures=3)


def double(factor: int, module: nn.Module, args: Any, result: Any) -> Any:
    return factor * result if isinstance(module, nn.Linear) else None


@pytest.mark.parametrize("first", [True, False])
def test_hooks_on_all_modules_are_refused(first: bool) -> None:
    called = AnySchedule(Net(twice, linear()))
    if not first:
        step(called, rows())
    handle = register_module_forward_hook(functools.partial(double, 2))
    try:
        with pytest.raises(
            CaptureError, match=r"a hook on all modules is registered .*register it on the modules of Net"
        ):
            called(rows())
    finally:
        handle.remove()
    step(called, rows())
    assert called.captures == 1


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


@pytest.mark.parametrize("first", [True, False])
def test_cached_parametrizations_are_refused(first: bool) -> None:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    called = AnySchedule(Net(twice, layer))
    if not first:
        step(called, rows())
    with parametrize.cached(), pytest.raises(CaptureError, match=r"was called inside parametrize\.cached\(\)"):
        called(rows())
    step(called, rows())
    assert called.captures == 1


def with_writes(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        model(x)


def with_tangent(model: nn.Module, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model, x: torch.func.jvp(model, (x,), (x,)), "under a transform of torch.func"),
        (lambda model, x: torch.func.vmap(model)(x[None]), "under a transform of torch.func"),
        (lambda model, x: torch.func.grad(lambda x: model(x).sum())(x), "under a transform of torch.func"),
        (with_writes, r"inside torch\.autograd\.graph\.allow_mutation_on_saved_tensors\(\)"),
        (with_tangent, "with tangents of forward-mode derivatives"),
    ],
)
def test_more_than_a_backward_is_refused(call: Callable[..., Any], said: str) -> None:
    called = AnySchedule(linear())
    plain = step(called, rows())
    with forward_ad.dual_level():
        assert torch.equal(called(rows()), plain)  # no tangents
    with pytest.raises(UsageError, match=f"Linear was called {said}.* call the model that the schedule wraps"):
        call(called, rows())


def test_a_backward_where_saved_tensors_may_be_changed() -> None:
    """PyTorch then looks at every write, also at those of operators whose ``out`` has another name."""
    layer = nn.Sequential(*(part for _ in range(6) for part in (linear(), nn.ReLU())))
    called = AnySchedule(copy.deepcopy(layer))
    counter = FlopCounterMode(display=False)
    for model, counted in ((layer, nullcontext()), (called, counter)):
        result = model(rows()).sum()
        with torch.autograd.graph.allow_mutation_on_saved_tensors(), counted:
            result.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(layer.parameters(), called.parameters(), strict=True))
    assert counter.get_total_flops() and not torch._C._len_torch_dispatch_stack()
