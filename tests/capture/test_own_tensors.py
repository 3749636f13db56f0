"""A forward may ask its own tensors for their class, attributes and identity: it gets plain PyTorch's answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_schedule import AnySchedule, assert_as_plain, step
from nets import Net, linear, rows
from torch import nn

from monet_like.capture import held_tensors
from monet_like.errors import CaptureError


class Scaled(nn.Parameter):
    """A parameter that knows how it is used."""

    factor = 3.0
    tag: float

    def scaled(self) -> torch.Tensor:
        return self * self.factor

    @property
    def halved(self) -> torch.Tensor:
        return self.detach() / 2


class Doubling(nn.Parameter):
    """Its class decides what a function computes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is F.linear else result


def by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight)


def scripted(*given: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.script(by_rows)(*given)


class Same(torch.Tensor):
    """What is computed of it has its class."""


def of(kind: Any) -> Callable[[], Any]:
    """A net whose first weight is of another class."""

    def make() -> Net:
        net = Net(lambda net, layer, x: layer(x), linear())
        layer: Any = net.layers[0]
        layer.weight = kind(layer.weight.data)
        layer.weight.tag = 5.0
        return net

    return make


def held(make: Callable[[], Any]) -> Callable[[], Any]:
    """A net that keeps its weight elsewhere, too."""

    def made() -> Any:
        net = make()
        weight = net.layers[0].weight
        net.__dict__.update(ids={id(weight)}, factors={weight: 2.0}, other=weight, skipped={weight})
        return net

    return made


def doing(make: Callable[[], Any], forward: Callable[..., Any], *, trained: bool = True) -> Callable[[], Any]:
    """A net with another forward.

    Args:
        trained: whether its first weight is.
    """

    def made() -> Any:
        net = make()
        net.layers[0].weight.requires_grad_(trained)
        net.function = forward
        return net

    return made


def times(factor: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda net, layer, x: F.linear(x, layer.weight * factor(net, layer.weight), layer.bias)


PLAIN, SCALED = of(nn.Parameter), of(Scaled)
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "name of the class": (SCALED, times(lambda net, w: 2 if w.__class__.__name__ == "Scaled" else 1)),
    "isinstance": (SCALED, times(lambda net, w: 2 if isinstance(w, Scaled) else 1)),
    "type": (SCALED, times(lambda net, w: 2 if type(w) is Scaled else 1)),
    "class attribute": (SCALED, times(lambda net, w: 2 if hasattr(w, "factor") else 1)),
    "attribute": (SCALED, times(lambda net, w: w.tag)),
    "method": (SCALED, lambda net, layer, x: F.linear(x, layer.weight.scaled(), layer.bias)),
    "property": (SCALED, lambda net, layer, x: F.linear(x, layer.weight + layer.weight.halved, layer.bias)),
    "function of a class": (of(Doubling), lambda net, layer, x: layer(x).tanh()),
    "is a parameter": (PLAIN, times(lambda net, w: 2 if isinstance(w, nn.Parameter) else 1)),
    "type is a parameter": (PLAIN, times(lambda net, w: 2 if type(w) is nn.Parameter else 1)),
    "all parameters": (PLAIN, times(lambda net, w: sum(type(p) is nn.Parameter for p in net.parameters()))),
    "identity": (held(PLAIN), times(lambda net, w: 2 if id(w) in net.ids else 1)),
    "key": (held(PLAIN), times(lambda net, w: net.factors.get(w, 1.0))),
    "the same": (held(PLAIN), times(lambda net, w: 2 if w is net.other else 1)),
    "member": (held(PLAIN), times(lambda net, w: 2 if w in net.skipped else 1)),
    "vmap": (PLAIN, lambda net, layer, x: torch.vmap(lambda w, b: (x * w).sum(-1) + b)(layer.weight, layer.bias)),
    "grad": (PLAIN, times(lambda net, w: torch.func.grad(lambda w: w.sin().sum())(w))),
    "TorchScript": (PLAIN, lambda net, layer, x: scripted(x, layer.weight) + layer.bias),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_are_what_they_are_in_plain_pytorch(name: str) -> None:
    script = lambda called, model, note: [note(step(called, rows())) for _ in range(2)]  # noqa: E731
    assert_as_plain(doing(*PROGRAMS[name]), script, captures=1)


def test_one_parameter_with_two_names_is_one() -> None:
    def make() -> Net:
        def forward(net: Net, first: Any, second: Any, x: torch.Tensor) -> torch.Tensor:
            return second(first(x).relu()) * (2 if first.weight is second.weight else 1)

        net = Net(forward, linear(), linear())
        net.layers[1].weight = net.layers[0].weight
        return net

    assert_as_plain(make, lambda called, model, note: note(step(called, rows())), captures=1)


@pytest.mark.parametrize("where", ["attribute", "class"])
def test_attributes_that_change_are_followed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        net = SCALED()
        net.function = lambda net, layer, x: F.linear(x, layer.weight.scaled() * layer.weight.tag, layer.bias)
        monkeypatch.setattr(Scaled, "factor", 3.0)
        return net

    def script(called: Any, model: Any, note: Any) -> None:
        note(step(called, rows()))
        if where == "class":
            monkeypatch.setattr(Scaled, "factor", 4.0)
        else:
            model.layers[0].weight.tag = 6.0
        note(step(called, rows()))

    assert_as_plain(make, script, captures=2)


def test_a_frozen_parameter_in_another_object_is_no_other_parameter() -> None:
    """As PEFT makes one of bitsandbytes' weights in each forward with DoRA."""

    def forward(net: Net, layer: Any, x: torch.Tensor) -> torch.Tensor:
        own = layer.weight
        layer.weight = torch.Tensor._make_subclass(Scaled, own.to("cpu"), False)
        layer.weight.tag = own.tag
        return layer(x) * own.tag

    def script(called: Any, model: Any, note: Any) -> None:
        for _ in range(2):
            note(step(called, rows()), model.layers[0].weight.tag)

    assert_as_plain(doing(SCALED, forward, trained=False), script, captures=1)


def test_attributes_of_another_object_in_the_place_of_a_parameter_are_set() -> None:
    def forward(net: Net, layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.weight = torch.Tensor._make_subclass(Scaled, layer.weight, False)
        layer.weight.last = len(x)
        return layer(x)

    def script(called: Any, model: Any, note: Any) -> None:
        note(step(called, rows()), model.layers[0].weight.last, hasattr(model.layers[0].weight, "tag"))

    assert_as_plain(doing(SCALED, forward, trained=False), script, captures=1)


def test_a_class_that_results_would_have_is_refused() -> None:
    net = Net(lambda net, layer, x: layer(x) * net.layers[0].factor, linear())
    net.layers[0].register_buffer("factor", torch.ones(8).as_subclass(Same))
    with pytest.raises(CaptureError, match="of a Same makes tensors of that class, which a schedule does not"):
        AnySchedule(net)(rows())


@pytest.mark.parametrize("trained", [False, True])
def test_another_parameter_is_refused(trained: bool) -> None:
    def forward(net: Net, layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.weight = Scaled(layer.weight.data) if trained else Scaled(layer.weight.data * 2, requires_grad=False)
        return layer(x)

    with pytest.raises(CaptureError, match=r"forward assigns layers\.0\.weight, and a schedule cannot"):
        AnySchedule(doing(SCALED, forward, trained=trained)())(rows())


def test_a_parameter_that_a_trace_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_tensors, "_UNSEEN", ())
    net = doing(PLAIN, lambda net, layer, x: scripted(x, layer.weight))()
    with pytest.raises(CaptureError, match=r"tensor that requires a gradient, .* given to code that a trace does not"):
        AnySchedule(net)(rows())
