"""What a forward sets beside its results is set again by each replayed forward, as in plain PyTorch."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from any_schedule import MODE, AnySchedule, assert_as_plain, step
from nets import Net, linear, rows
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.checkpoint import checkpoint

from monet_like import auto_schedule
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError, UsageError
from monet_like.replay.kept_steps import OWN_STEPS

SEEN: list[Any] = []
LATEST: Any = None
SETTING = contextvars.ContextVar("SETTING", default=0)


@dataclasses.dataclass
class State:
    """Objects of the user's own."""

    count: int = 0
    last: Any = None
    all: list[Any] = dataclasses.field(default_factory=list)


class Slotted:
    """Attributes without a dict."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = None


Forward = Callable[[Any, nn.Module, torch.Tensor], Any]


def last_hidden(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    h = layer(x)
    net.last, net.detached, net.given, net.own = h, h.detach(), x, [layer.weight]
    return h.tanh()


def one_object(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.last = h = layer(x)
    net.pair = (h, {"h": h, "count": [1]})
    net.again = net.pair
    return h


def set_then_read(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.hidden = layer(x)
    return net.hidden * 2


def counts(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.calls += 1
    return layer(x) * min(1.0, net.calls / 3)


def queue(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    h = layer(x)
    net.queue.append(h.detach().mean(0))
    return h + sum(net.queue)


def entry(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.table["h"] = h = layer(x)
    net.table["shape"] = tuple(x.shape)
    return h


def objects(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.state.last = h = layer(x)
    net.state.count += net.state.count < 2
    net.slotted.last = h.detach()
    net.made = State(3, h)
    net.made.all.append(x)
    return h * net.state.count


def only_set(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.state.last = h = layer(x)
    return h.tanh()


def variables(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    global LATEST
    h = layer(x)
    LATEST = h.detach().sum()
    SEEN[:] = [h.detach().mean()]
    type(net).of_class = h.detach().amax()
    SETTING.set(4)
    return h


def numbers(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.array[0] = 7
    net.members.add("x")
    net.names = [name for name, _ in layer.named_parameters()]
    net.nothing = None
    if hasattr(net, "gone"):
        del net.gone
    return layer(x) * float(net.array[0])


def module(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    if not net.switched:
        new = nn.Sequential(nn.Dropout(0.5), net.layers[0])
        net.layers[0] = new
        net.switched = True
    return net.layers[0](x)


def on_tensors(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    layer.weight.seen = min(getattr(layer.weight, "seen", 0) + 1, 2)
    h = layer(x)
    y = h * layer.weight.seen
    y.hidden, net.last = h, y
    return y


def views(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    h = layer(x)
    net.last, net.detached, net.given = h[0], h.detach(), x[1:]
    return h * 1


def build(forward: Forward) -> Any:
    net: Any = Net(forward, linear())
    net.losses, net.table, net.calls, net.array, net.members = [], {}, 0, np.zeros(2), set()
    net.queue, net.state, net.slotted = collections.deque(maxlen=2), State(), Slotted()
    net.gone, net.switched = 1, False
    return net


def seen(net: Any) -> list[Any]:
    """Everything that one of these forwards may set."""
    state = [net.state.count, net.state.last, net.state.all, net.slotted.last]
    names = ("last", "detached", "given", "hidden", "calls", "names", "nothing", "gone")
    named = [vars(net).get(name) for name in names]
    made = vars(net).get("made")
    rest = [LATEST, SEEN, vars(type(net)).get("of_class"), SETTING.get(), net.array.tolist(), sorted(net.members)]
    pair = *vars(net).get("pair", ()), getattr(vars(net).get("last"), "hidden", None)
    in_made = made and (made.count, made.last, made.all)
    found = [state, named, net.losses, list(net.queue), net.table, in_made, rest, pair]
    return pytree.tree_map(
        lambda leaf: -1 if leaf is None else sum(leaf.encode()) if isinstance(leaf, str) else leaf, found
    )


#: Forwards, and how often four calls of each are captured.
FORWARDS: dict[str, tuple[Forward, int]] = {
    "last": (last_hidden, 1),
    "one object": (one_object, 1),
    "set then read": (set_then_read, 1),
    "counts": (counts, 4),
    "queue": (queue, 4),
    "entry": (entry, 2),
    "objects": (objects, 3),
    "only set": (only_set, 1),
    "variables": (variables, 2),
    "numbers": (numbers, 2),
    "module": (module, 2),
    "on tensors": (on_tensors, 3),
    "views": (views, 1),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_forward_sets_is_set_again(name: str) -> None:
    forward, captures = FORWARDS[name]

    def script(model: nn.Module, net: nn.Module, note: Callable[..., None]) -> None:
        global LATEST
        LATEST, SEEN[:] = None, []
        SETTING.set(0)
        type(net).of_class = None  # type: ignore[attr-defined]
        for _ in range(4):
            note(step(model, rows()))
            for each in seen(net):
                note(each)

    assert_as_plain(lambda: build(forward), script, captures)


class Drawing(Net):
    @functools.cached_property
    def noise(self) -> torch.Tensor:
        return torch.randn(8)


def by_property(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x * net.noise)


def by_dict(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    if "drawn" not in net.__dict__:
        net.__dict__["drawn"] = torch.randn(8)
    return layer(x * vars(net)["drawn"])


@pytest.mark.parametrize("forward", [by_property, by_dict])
def test_noise_that_the_first_call_keeps_is_drawn_once(forward: Forward) -> None:
    def script(model: nn.Module, net: nn.Module, note: Callable[..., None]) -> None:
        for _ in range(3):
            note(step(model, rows()), [vars(net).get("noise"), vars(net).get("drawn")])

    assert_as_plain(lambda: Drawing(forward, linear()), script, captures=2)


# What the loss uses, and containers among the arguments ---------------------------------------------------------


def gathers(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    h = layer(x)
    net.losses.append(h.square().mean())
    net.table["h"] = h
    return h.tanh()


def test_gradients_flow_through_what_a_forward_has_set() -> None:
    """As the balancing losses of a mixture of experts do: two calls of a step, and one backward."""

    def script(model: nn.Module, net: nn.Module, note: Callable[..., None]) -> None:
        own: Any = net
        for _ in range(3):
            own.losses.clear()
            own.table.clear()
            results = model(rows()), model(rows() + 1)
            loss = sum(result.sum() for result in results) + sum(own.losses) + own.table["h"].abs().sum()
            loss.backward()
            note(*results, *own.losses, own.table["h"])

    assert_as_plain(lambda: build(gathers), script, 2)


class Cache:
    """Keys and values of a layer."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.last: Any = None


def fills(net: Any, layer: nn.Module, x: torch.Tensor, table: Any, cache: Any, out: Any) -> Any:
    h = layer(x)
    before = sum(cache.keys) if cache.keys else 0
    cache.keys.append(h)
    cache.last = h.detach()
    table["k"] = h
    table.setdefault("all", []).append(x)
    out.append((h, len(out)))
    return (h + before).tanh()


def test_containers_among_the_arguments_are_filled() -> None:
    def script(model: nn.Module, net: nn.Module, note: Callable[..., None]) -> None:
        for _ in range(2):
            table, cache, out = {}, Cache(), []  # type: ignore[var-annotated]
            results = [model(rows() + i, table, cache, out) for i in range(2)]
            (sum(r.sum() for r in results) + table["k"].square().sum() + out[0][0].abs().sum()).backward()
            note(*results, table["k"], *table["all"], *cache.keys, cache.last, *out)

    assert_as_plain(lambda: build(fills), script)


def test_a_tensor_that_is_set_is_the_callers_own_or_the_result_itself() -> None:
    model = build(last_hidden)
    wrapped, x = AnySchedule(model), rows()
    wrapped(x)
    assert model.given is x and model.own[0] is model.layers[0].weight
    other = build(one_object)
    result = AnySchedule(other)(x)
    assert all(each is result for each in (other.last, other.pair[0], other.pair[1]["h"]))
    assert other.again is other.pair


def test_what_a_step_sets_counts_in_its_memory() -> None:
    model, without = build(last_hidden), build(lambda net, layer, x: layer(x).tanh())
    held, free = (len(capture(net, (rows(),)).program.outputs) for net in (model, without))
    assert held == free + 1


def test_equal_blocks_set_their_own() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.layer(x)
            return self.seen.relu()

    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)))
        if planned:
            auto_schedule(model, rows(), memory_budget="200%", mode=MODE, blocks="*", effort="quick", verbose=False)
        for _ in range(2):
            out = model(rows())
        (out.square().sum() + sum(block.seen.square().sum() for block in model)).backward()
        results.append([out, *(block.seen for block in model), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


# What cannot be set again, and what a capture leaves --------------------------------------------------------------


def grads(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    layer.weight.grad = None
    return layer(x)


def late_layer(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.late = nn.Linear(8, 8)
    return net.late(layer(x))


def registered(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.mine = layer.weight
    return layer(x)


def of_samples(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    h = layer(x)
    h.register_hook(lambda g: setattr(layer.weight, "grad_sample", g[:, :, None] * x[:, None]))
    return h


def grad_in_the_backward(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    h = layer(x)
    h.register_hook(lambda g: setattr(layer.bias, "grad", g.sum(0)))
    return h


@functools.lru_cache
def directions(width: int) -> torch.Tensor:
    return torch.randn(width).sign()


def cached_noise(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x * directions(8))


REFUSED: dict[str, tuple[Forward, str]] = {
    "cached noise": (cached_noise, "calls directions, whose functools.lru_cache keeps random numbers of the first"),
    "grad": (grads, r"sets \.grad of a parameter"),
    "late layer": (late_layer, r"sets self\._modules to a parameter that it makes, which a schedule cannot set again"),
    "registered": (registered, r"forward registers mine, and a schedule cannot; register it in __init__"),
    "grad_sample": (of_samples, r"sets self\.layers\.0\.weight\.grad_sample in the backward"),
    "grad in the backward": (grad_in_the_backward, r"sets self\.layers\.0\.bias\.grad in the backward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_set_again_is_named(name: str) -> None:
    forward, said = REFUSED[name]
    net = build(forward)
    with pytest.raises(CaptureError, match=said):
        capture(net, (rows(),))
    assert traced_in(net) == []


@pytest.mark.parametrize("name", FORWARDS)
def test_a_capture_leaves_no_tensor_of_the_tracer(name: str) -> None:
    net, x = build(FORWARDS[name][0]), rows()
    before = {key: vars(net)[key] for key in vars(net)}
    capture(net, (x,))
    assert traced_in(net, x, LATEST, SEEN, vars(type(net))) == []
    assert all(vars(net)[key] is value for key, value in before.items()) and vars(net).keys() == before.keys()


def traced_in(*things: Any) -> list[Any]:
    """Tensors of a tracer that can be reached from some objects."""
    found, waiting, known = [], list(things), set()
    while waiting:
        value = waiting.pop()
        if id(value) in known or isinstance(value, type | types.ModuleType | types.FrameType):
            continue
        known.add(id(value))
        if isinstance(value, FakeTensor | FunctionalTensor):
            found.append(value)
        elif isinstance(value, torch.Tensor):
            waiting += [vars(value), value.grad if value.is_leaf else None]
        elif isinstance(value, types.FunctionType):
            waiting += [cell.cell_contents for cell in value.__closure__ or ()]
        else:
            waiting += [*value] if isinstance(value, dict | list | tuple | set | collections.deque) else []
            waiting += [*value.values()] if isinstance(value, dict) else []
            waiting.append(getattr(value, "__dict__", None))
    return found


# requires_grad and random numbers ---------------------------------------------------------------------------------


def test_an_input_that_the_forward_has_require_a_gradient() -> None:
    """As force fields do it."""

    def energy(net: Any, layer: nn.Module, x: torch.Tensor, setter: bool) -> Any:
        if setter:
            x.requires_grad = True
        else:
            x.requires_grad_()
        return layer(x).tanh().sum()

    def script(model: nn.Module, net: nn.Module, note: Callable[..., None]) -> None:
        for setter in (False, True, True):
            x = rows()
            value = model(x, setter)
            (forces,) = torch.autograd.grad(value, x, retain_graph=True)
            (value + forces.sum()).backward()
            note(value, forces, x.grad, x.requires_grad)
            note(model(x, setter), x.requires_grad)

    assert_as_plain(lambda: build(energy), script, 4)


def freezes(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    layer.bias.requires_grad_(False)
    return layer(x)


def thaws(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.frozen.requires_grad_()
    return layer(x) * net.frozen


@pytest.mark.parametrize(("forward", "wanted"), [(freezes, False), (thaws, True)])
def test_parameters_that_a_forward_freezes_or_thaws_are_refused(forward: Forward, wanted: bool) -> None:
    net = build(forward)
    net.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
    with pytest.raises(CaptureError, match=f"sets requires_grad of a parameter or buffer to {wanted}"):
        capture(net, (rows(),))
    assert (net.layers[0].bias.requires_grad, net.frozen.requires_grad) == (True, False)


@pytest.mark.parametrize(("share", "keeps"), [(0.5, False), (0.5, True), (0.0, False)])
def test_a_checkpoint_that_draws_other_numbers_again_is_refused(share: float, keeps: bool) -> None:
    def forward(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
        part = lambda y: F.dropout(layer(y), share) if share else layer(y).tanh()  # noqa: E731
        return checkpoint(part, x, use_reentrant=False, preserve_rng_state=keeps).sin()

    if share and not keeps:
        with pytest.raises(CaptureError, match=r"checkpoint\(preserve_rng_state=False\) draws random numbers"):
            capture(build(forward), (rows(),))
    else:
        assert_as_plain(lambda: build(forward), lambda model, net, note: note(step(model, rows())), 1)


def test_a_reentrant_checkpoint_of_inputs_without_gradients_has_pytorchs_error() -> None:
    net = build(lambda net, layer, x: checkpoint(lambda y: layer(y).relu(), x, use_reentrant=True))
    for model in (net, AnySchedule(net)):
        result = model(rows())
        assert not result.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            result.sum().backward()


def test_many_gradients_at_once_are_refused() -> None:
    wrapped, x = AnySchedule(build(lambda net, layer, x: layer(x).tanh())), rows().requires_grad_()
    result, many = wrapped(x), torch.eye(48).view(48, 6, 8)
    with pytest.raises(UsageError, match="many gradients at once"):
        torch.autograd.grad(result, x, many, is_grads_batched=True)


def alternates(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.turn = (net.turn + 1) % 4
    return layer(x) * (net.turn + 1)


def counts_elsewhere(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    net.table["n"] = net.table.get("n", 0) + 1
    return layer(x) / net.table["n"]


@pytest.mark.parametrize(
    ("forward", "path"),
    [
        (counts, "self.calls"),
        (queue, "self.queue"),
        (counts_elsewhere, "self.table"),
        (alternates, ""),
        (last_hidden, ""),
    ],
)
def test_a_form_whose_forward_changes_what_it_reads_soon_runs_plainly(forward: Forward, path: str) -> None:
    """With one warning that names it. Values that come again need no further captures."""
    net = build(forward)
    net.queue, net.turn, net.table = [], 0, {}
    plain, wrapped = copy.deepcopy(net), AnySchedule(net)
    wrapped._on_new_input = "plan"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(10):
            assert torch.equal(step(wrapped, rows()), step(plain, rows()))
    named = [str(each.message) for each in said if "in each call" in str(each.message)]
    assert len(named) == bool(path) and all(f"its forward reads {path}" in message for message in named)
    assert wrapped.captures == (1 if forward is last_hidden else OWN_STEPS)
    for mine, own in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, own.grad)
    assert (net.calls, net.turn, net.table.get("n")) == (plain.calls, plain.turn, plain.table.get("n"))
