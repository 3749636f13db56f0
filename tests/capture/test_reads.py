"""Values that a model reads beside tensors: a change between steps means another capture, never another result."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import queue
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from any_schedule import AnySchedule
from torch import nn

from monet_like import auto_schedule
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError, ScheduleFileError, UsageError
from monet_like.replay.kept_steps import KEPT_STEPS
from monet_like.replay.wrapper import ScheduleWrapper

SCALE = 0.5
TABLE = {"scale": 0.5, "other": [0.5]}
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale")
CALLS: list[Any] = []
COUNTER = 0


@dataclass
class Config:
    scale: float = 0.5
    inner: list[float] = field(default_factory=lambda: [0.5])
    kind = 0.5

    @property
    def doubled(self) -> float:
        return 2 * self.scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 0.5


@dataclass(frozen=True)
class Frozen:
    scale: float = 0.5


class Table:
    """An object that is indexed and called."""

    def __init__(self) -> None:
        self.entries = {"scale": 0.5}

    def __getitem__(self, name: str) -> float:
        return self.entries[name]

    def __call__(self) -> float:
        return self.entries["scale"]


class Reader(nn.Module):
    """A linear layer, its result changed by ``function(self, result)``."""

    kind = 0.5

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.function(self, self.layer(x), *more)


def half(scale: float = 0.5) -> float:
    return scale


def closure() -> tuple[Callable[..., Any], Callable[[float], None]]:
    scale = 0.5

    def forward(net: Reader, y: torch.Tensor) -> torch.Tensor:
        return y * scale

    def change(to: float) -> None:
        nonlocal scale
        scale = to

    return forward, change


class Reverse(torch.autograd.Function):
    """A gradient reversal whose factor is a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.factor * grad, None


def hooked(hook: Callable[[Reader], Callable[[torch.Tensor], Any]]) -> Callable[..., Any]:
    def forward(net: Reader, y: torch.Tensor) -> torch.Tensor:
        z = y * 1.0
        z.register_hook(hook(net))
        return z

    return forward


def node_hooked(net: Reader, y: torch.Tensor) -> torch.Tensor:
    z = y * 1.0
    z.grad_fn.register_hook(lambda inputs, _: (-net.scale * inputs[0], *inputs[1:]))  # type: ignore[union-attr]
    return z


def set_global(name: str) -> Callable[[Reader, float], None]:
    return lambda net, to: globals().__setitem__(name, to)


def becomes(name: str, value: Any) -> Callable[[Reader, Any], None]:
    """Sets an attribute of the module to this value."""
    return lambda net, _: setattr(net, name, value)


def into(path: str) -> Callable[[Reader, Any], None]:
    """Sets an attribute, item or entry of the module by a path such as ``config.scale`` or ``items[0]``."""
    target = compile(f"net.{path} = to", "<change>", "exec")

    def change(net: Reader, to: Any) -> None:
        exec(target, {"net": net, "to": to, "np": np})

    return change


#: What the forward computes, attributes, and how the value is changed.
HOLDERS: dict[str, tuple[Callable[..., Any], dict[str, Callable[[], Any]], Callable[[Reader, float], None]]] = {
    "attribute": (lambda net, y: y * net.scale, {"scale": lambda: 0.5}, into("scale")),
    "dataclass": (lambda net, y: y * net.config.scale, {"config": Config}, into("config.scale")),
    "property": (lambda net, y: y * net.config.doubled, {"config": Config}, into("config.scale")),
    "list in a dataclass": (lambda net, y: y * net.config.inner[0], {"config": Config}, into("config.inner[0]")),
    "frozen dataclass": (lambda net, y: y * net.config.scale, {"config": Frozen}, becomes("config", Frozen(0.25))),
    "slots": (lambda net, y: y * net.config.scale, {"config": Slotted}, into("config.scale")),
    "class attribute by an instance": (lambda net, y: y * net.config.kind, {"config": Config}, into("config.kind")),
    "namespace": (
        lambda net, y: y * net.config.scale,
        {"config": lambda: types.SimpleNamespace(scale=0.5)},
        into("config.scale"),
    ),
    "vars": (lambda net, y: y * vars(net.config)["".join(("sc", "ale"))], {"config": Config}, into("config.scale")),
    "getattr": (lambda net, y: y * getattr(net.config, "scale"), {"config": Config}, into("config.scale")),  # noqa: B009
    "list": (lambda net, y: y * net.items[0], {"items": lambda: [0.5]}, into("items[0]")),
    "longer list": (lambda net, y: y * len(net.items), {"items": lambda: [1]}, lambda net, to: net.items.append(to)),
    "list in a tuple": (lambda net, y: y * net.items[0][0], {"items": lambda: ([0.5],)}, into("items[0][0]")),
    "deque": (lambda net, y: y * net.items[0], {"items": lambda: collections.deque([0.5])}, into("items[0]")),
    "dict": (lambda net, y: y * net.items["a"], {"items": lambda: {"a": 0.5}}, into("items['a']")),
    "ordered dict": (
        lambda net, y: y * next(iter(net.items.values())),
        {"items": lambda: collections.OrderedDict(a=0.5, b=2.0)},
        lambda net, to: net.items.move_to_end("a"),
    ),
    "user dict": (lambda net, y: y * net.items["a"], {"items": lambda: collections.UserDict(a=0.5)},
    into("items['a']")),
    "mapping proxy": (
        lambda net, y: y * net.view["a"],
        {"items": lambda: {"a": 0.5}, "view": lambda: None},
        lambda net, to: net.items.update(a=to),
    ),
    "set": (lambda net, y: y * len(net.items), {"items": lambda: {1.0}}, lambda net, to: net.items.add(to)),
    "object with []": (lambda net, y: y * net.table["scale"], {"table": Table}, into("table.entries['scale']")),
    "numpy scalar": (lambda net, y: y * float(net.scale), {"scale": lambda: np.float64(0.5)}, into("scale")),
    "numpy array": (lambda net, y: y * float(net.scale[1]), {"scale": lambda: np.full(2, 0.5)}, into("scale[1]")),
    "int, then bool": (lambda net, y: y * (3 - (net.scale is True)), {"scale": lambda: 1}, becomes("scale", True)),
    "-0.0": (lambda net, y: y * (2.0 if str(net.scale) == "0.0" else 3.0), {"scale": lambda: 0.0},
    becomes("scale", -0.0)),
    "size": (lambda net, y: y * net.size.numel(), {"size": lambda: torch.Size([2])}, becomes("size", torch.Size([3]))),
    "range": (lambda net, y: y * len(net.times), {"times": lambda: range(2)}, becomes("times", range(3))),
    "function": (lambda net, y: net.act(y), {"act": lambda: torch.tanh}, becomes("act", torch.sigmoid)),
    "lambda": (lambda net, y: net.act(y), {"act": lambda: (lambda y: y * 2)}, becomes("act", lambda y: y * 3)),
    "partial": (
        lambda net, y: net.act(y),
        {"act": lambda: functools.partial(torch.mul, other=0.5)},
        lambda net, to: setattr(net, "act", functools.partial(torch.mul, other=to)),
    ),
    "bound method": (lambda net, y: y * net.act("scale"), {"act": lambda: Table().__getitem__},
    into("act.__self__.entries['scale']")),
    "default of getattr": (lambda net, y: y * getattr(net, "later", 0.5), {}, into("later")),
    "default of getattr, object": (lambda net, y: y * getattr(net.config, "later", 0.5), {"config": Config},
    into("config.later")),
    "class attribute of the module": (lambda net, y: y * net.kind, {}, into("kind")),
    "class attribute": (lambda net, y: y * net.kind, {}, lambda net, to: setattr(type(net), "kind", to)),
    "class attribute of an object": (lambda net, y: y * net.config.kind, {"config": Config}, lambda net,
    to: setattr(Config, "kind", to)),
    "type(self)": (lambda net, y: y * type(net).kind, {}, lambda net, to: setattr(type(net), "kind", to)),
    "global": (lambda net, y: y * SCALE, {}, set_global("SCALE")),
    "global dict": (lambda net, y: y * TABLE["scale"], {}, lambda net, to: TABLE.update(scale=to)),
    "global class": (lambda net, y: y * Config.kind, {}, lambda net, to: setattr(Config, "kind", to)),
    "default": (lambda net, y: y * half(), {}, lambda net, to: setattr(half, "__defaults__", (to,))),
    "function attribute": (lambda net, y: y * half.scale, {}, lambda net, to: setattr(half, "scale", to)),
    "context variable": (lambda net, y: y * CONTEXT.get(0.5), {}, lambda net, to: CONTEXT.set(to) and None),
    "unregistered module": (
        lambda net, y: net.parts[0](y), {"parts": lambda: [nn.LeakyReLU(0.5)]}, into("parts[0].negative_slope"),
    ),
    "unregistered module in eval mode": (
        lambda net, y: net.parts[0](y), {"parts": lambda: [nn.Dropout(1.0)]}, lambda net,
        to: net.parts[0].eval() and None,
    ),
    "replaced forward": (lambda net, y: y, {}, lambda net, to: setattr(net, "forward", lambda x: net.layer(x) * to)),
    "forward hook": (lambda net, y: y, {}, lambda net, to: net.layer.register_forward_hook(lambda m, x,
    y: y * to) and None),
    "reversal": (lambda net, y: Reverse.apply(y, net.scale), {"scale": lambda: 0.5}, into("scale")),
    "hook, attribute": (hooked(lambda net: lambda g: -net.scale * g), {"scale": lambda: 0.5}, into("scale")),
    "hook, object": (hooked(lambda net: lambda g: -net.config.scale * g), {"config": Config}, into("config.scale")),
    "node's hook": (node_hooked, {"scale": lambda: 0.5}, into("scale")),
    "hook, global": (hooked(lambda net: lambda g: -SCALE * g), {}, set_global("SCALE")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _globals_as_before() -> Iterator[None]:
    kinds = Reader.kind, Config.kind
    yield
    globals().update(SCALE=0.5, COUNTER=0)
    TABLE.update(scale=0.5)
    Reader.kind, Config.kind = kinds
    half.__defaults__ = (0.5,)
    half.scale = 0.5  # type: ignore[attr-defined]
    CALLS.clear()


half.scale = 0.5  # type: ignore[attr-defined]


def rows(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def scheduled(model: nn.Module, *example: Any) -> ScheduleWrapper:
    return auto_schedule(model, example or (rows(),), memory_budget="300%", time_limit_seconds=1)


def step(model: nn.Module, *args: Any) -> list[torch.Tensor]:
    model.zero_grad()
    result = model(*(args or (rows(),)))
    result.square().sum().backward()
    return [result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def captures(wrapper: ScheduleWrapper) -> int:
    return len(wrapper._kept)


def follows(model: nn.Module, change: Callable[[], None]) -> None:
    """Two steps, a change, and two more: all as the model's own, and captured twice."""
    wrapped, counts = AnySchedule(model), []
    for number in range(4):
        if number == 2:
            before = step(model)
            change()
            assert not all(map(torch.equal, before, step(model)))  # it does change something
        assert all(map(torch.equal, step(model), step(wrapped))), number
        counts.append(captures(wrapped))
    assert counts == [1, 1, 2, 2]


@pytest.mark.slow(every=5)
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_value_that_changes_is_followed(kind: str) -> None:
    function, attributes, change = HOLDERS[kind]
    model = Reader(function, **{name: make() for name, make in attributes.items()})
    if "view" in attributes:
        model.view = types.MappingProxyType(model.items)
    follows(model, lambda: change(model, 0.25))


def test_a_variable_of_the_function_around_is_followed() -> None:
    forward, change = closure()
    follows(Reader(forward), lambda: change(0.25))


def test_a_variable_that_a_hook_reads_is_followed() -> None:
    box, scale = types.SimpleNamespace(scale=0.5), 0.5

    def change() -> None:
        nonlocal scale
        scale = box.scale = 0.25

    follows(Reader(hooked(lambda net: lambda g: -scale * box.scale * g)), change)


def test_a_list_that_was_empty_is_followed() -> None:
    model = Reader(lambda net, y: y * (2 if net.items else 3), items=[])
    follows(model, lambda: model.items.append(1))


def test_another_module_in_an_attribute_is_followed() -> None:
    """Which is no part of the model."""
    model = Reader(lambda net, y: y if net.box.mode is net.layer else 2 * y, box=types.SimpleNamespace())
    model.box.mode = model.layer
    follows(model, lambda: setattr(model.box, "mode", nn.Identity()))


def test_a_key_that_changes_is_followed() -> None:
    value = [0.5]
    model = Reader(lambda net, y: y * len(next(iter(net.items))), items={"a": value})
    follows(model, lambda: (model.items.pop("a"), model.items.update(bb=value))[1])


def plus(y: torch.Tensor) -> torch.Tensor:
    return y + 1


def minus(y: torch.Tensor) -> torch.Tensor:
    return y - 1


def test_other_code_of_a_function_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's autoreload gives it."""
    follows(Reader(lambda net, y: plus(y)), lambda: monkeypatch.setattr(plus, "__code__", minus.__code__))


def test_an_object_that_is_an_argument_is_followed() -> None:
    config = Table()
    model = Reader(lambda net, y, config: y * config())
    wrapped = scheduled(model, rows(), config)
    for scale in (0.5, 0.5, 0.25):
        config.entries["scale"] = scale
        assert all(map(torch.equal, step(model, rows(), config), step(wrapped, rows(), config)))
    assert captures(wrapped) == 2


def test_equal_values_and_values_that_are_not_read_need_no_capture() -> None:
    config = Config()
    model = Reader(
        lambda net, y: y * net.config.scale * net.items[0] * net.nan, config=config, items=[0.5], nan=float("nan")
    )
    wrapped = scheduled(model)
    for number in range(3):
        model.config = config = Config(scale=float("0.5"))
        model.items, model.nan = [float("0.5")], float("nan")
        config.steps = number  # type: ignore[attr-defined]
        config.inner.append(number)
        model.eval()(rows()), model.train()
        model.unread = number
        TABLE["scale"] = float(number)
        wrapped(rows())
    assert captures(wrapped) == 1


def scale_through(wrapped: ScheduleWrapper, scales: list[int]) -> None:
    for scale in scales:
        wrapped._model.scale = float(scale)
        wrapped(rows())


@pytest.mark.slow
def test_values_that_come_again_are_captured_once_and_the_oldest_are_dropped() -> None:
    model = Reader(lambda net, y: y * net.scale, scale=0.0)
    wrapped = scheduled(model)
    with pytest.warns(UserWarning, match=r"16 different calls \(the last time, self.scale was 14.0, is 15.0\)"):
        scale_through(wrapped, [*range(KEPT_STEPS + 4), *range(KEPT_STEPS, KEPT_STEPS + 4)])
    assert captures(wrapped) == KEPT_STEPS


def test_a_captured_model_that_was_changed_since_is_captured_anew() -> None:
    model = Reader(lambda net, y: y * net.config.scale, config=Config())
    record, captured = scheduled(model).record, capture(model, (rows(),))
    model.config.scale = 0.25
    wrapped = ScheduleWrapper(model, record, captured=captured)
    assert all(map(torch.equal, step(model), step(wrapped)))


def test_a_change_that_needs_another_plan_is_named() -> None:
    model = Reader(lambda net, y: net.config.act(y), config=types.SimpleNamespace(act=torch.tanh))
    wrapped = scheduled(model)
    record = wrapped.record
    fixed = ScheduleWrapper(model, record)
    model.config.act = torch.sigmoid
    with pytest.warns(UserWarning, match=r"planning Reader anew: self\.config\.act was a builtin.*, is a builtin"):
        wrapped(rows())
    with pytest.raises(ScheduleFileError, match=r"does not match .*; since the last step, self\.config\.act was"):
        fixed(rows())


# What the backward reads, sets and draws ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hook, attribute", "hook, object"])
def test_what_a_hook_reads_may_change_before_the_backward(kind: str) -> None:
    """That backward is plain PyTorch's, and so are later calls."""
    function, attributes, change = HOLDERS[kind]
    gradients = []
    for schedule in (False, True):
        torch.manual_seed(0)
        model = Reader(function, **{name: make() for name, make in attributes.items()})
        change(model, 0.5)
        called = scheduled(model) if schedule else model
        result = called(rows())
        change(model, 0.25)
        late = r"(scale|SCALE) was 0.5, is 0.25: this was set between a forward and its backward"
        with pytest.warns(UserWarning, match=late) if schedule else contextlib.nullcontext():
            result.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        gradients[-1] += step(called)
    assert all(map(torch.equal, *gradients))


def test_how_long_a_list_is_that_a_hook_reads_may_not_change_before_the_backward() -> None:
    model = Reader(hooked(lambda net: lambda g: g * len(net.items)), items=[1])
    result = AnySchedule(model)(rows())
    model.items.append(2)
    with pytest.raises(UsageError, match=r"len\(self\.items\) was 1, is 2: this was set between a forward and"):
        result.sum().backward()


def test_what_only_the_forward_reads_may_change_before_the_backward() -> None:
    model = Reader(lambda net, y: Reverse.apply(y, net.scale), scale=0.5)
    wrapped, results = scheduled(model), []
    for module in (model, wrapped):
        model.scale = 0.5
        module.zero_grad()
        result = module(rows())
        model.scale = 0.25
        result.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *results))


def saves(net: Reader, save: Callable[[torch.Tensor], Any], y: torch.Tensor) -> torch.Tensor:
    z = y * 2
    z.register_hook(lambda g: save(g) and None)  # type: ignore[func-returns-value]
    return z


def nonlocally() -> Callable[..., Any]:
    kept = None

    def save(g: torch.Tensor) -> None:
        nonlocal kept
        kept = g

    return lambda net, y: saves(net, save, y)


class Noisy(torch.autograd.Function):
    """Draws in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, draw: Callable[[], float]) -> torch.Tensor:
        ctx.draw = draw
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.draw(), None


IN_BACKWARD: dict[str, tuple[Callable[..., Any], str]] = {
    "attribute": (lambda net, y: saves(net, lambda g: setattr(net, "kept", g), y), "sets self.kept in the backward"),
    "list": (lambda net, y: saves(net, net.calls.append, y), "sets self.calls in the backward"),
    "dict": (lambda net, y: saves(net, lambda g: net.items.update(g=g), y), "sets self.items in the backward"),
    "global": (lambda net, y: saves(net, CALLS.append, y), r"sets test_reads.CALLS in the backward"),
    "variable": (nonlocally(), r"sets test_reads.*variable kept\) in the backward"),
    "python": (lambda net, y: Noisy.apply(y, random.random), "in the backward, draws Python's random numbers"),
    "numpy": (lambda net, y: Noisy.apply(y, np.random.rand), "in the backward, draws NumPy's random numbers"),
    "seed": (lambda net, y: Noisy.apply(y, lambda: torch.manual_seed(0) and 1.0), "in the backward, seeds PyTorch's"),
    "own generator": (lambda net, y: Noisy.apply(y, net.rng.random), "sets self.rng in the backward"),
}


@pytest.mark.parametrize("kind", IN_BACKWARD)
def test_what_a_backward_sets_or_draws_is_refused(kind: str) -> None:
    function, said = IN_BACKWARD[kind]
    model = Reader(function, calls=[], items={}, rng=np.random.default_rng(0))
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(CaptureError, match=said):
        capture(model, (rows(),))
    assert (model.calls, model.items, CALLS, hasattr(model, "kept")) == ([], {}, [], False)
    torch.set_rng_state(states[0])
    random.setstate(states[1])


# What the forward sets ------------------------------------------------------------------------------------------


def counts(net: Reader, y: torch.Tensor) -> torch.Tensor:
    global COUNTER
    COUNTER += 1
    net.config.scale += 1
    net.items["y"] = y
    net.calls.append(y)
    net.members.add(1)
    net.queue.append(y)
    net.array[0] = 7
    CALLS.append(y)
    type(net).kind = 3.0
    net.layer.register_forward_hook(lambda *_: None)
    return y * net.config.scale * COUNTER * len(net.calls) * float(net.array[0])


def test_what_a_forward_sets_is_put_back_after_the_capture() -> None:
    attributes: dict[str, Any] = {
        "config": Config(), "items": {"a": 1}, "calls": [], "members": set(), "queue": collections.deque(),
        "array": np.zeros(2),
    }  # fmt: skip
    model = Reader(counts, **attributes)
    captured = capture(model, (rows(),))
    assert (COUNTER, CALLS, Reader.kind, model.config.scale, model.items) == (0, [], 0.5, 0.5, {"a": 1})
    assert (model.calls, model.members, len(model.queue), model.array.tolist()) == ([], set(), 0, [0.0, 0.0])
    assert not model.layer._forward_hooks
    assert captured.effects is not None
    assert sorted(captured.effects.paths) == [
        "self.array", "self.calls", "self.config.scale", "self.items", "self.layer._forward_hooks", "self.members",
        "self.queue", "test_reads.CALLS", "test_reads.COUNTER", "test_reads.Reader.kind",
    ]  # fmt: skip


def test_a_function_with_a_cache_keeps_no_tensor_of_the_trace() -> None:
    @functools.lru_cache
    def positions(count: int) -> torch.Tensor:
        return torch.arange(count)

    model = Reader(lambda net, y: y * positions(4))
    capture(model, (rows(),))
    assert type(positions(4)) is torch.Tensor


@pytest.mark.parametrize(
    "source",
    [
        lambda: itertools.count(),
        lambda: iter([1.0, 2.0, 3.0, 4.0]),
        lambda: (number / 2 for number in range(9)),
    ],
)
def test_what_a_forward_draws_is_refused(source: Callable[[], Iterator[float]]) -> None:
    model = Reader(lambda net, y: y * next(net.source), source=source())
    with pytest.raises(CaptureError, match=r"draws from self.source, .*pass the number as an argument"):
        capture(model, (rows(),))


def test_a_queue_that_a_forward_fills_is_refused() -> None:
    waiting: queue.Queue[torch.Tensor] = queue.Queue()

    def forward(net: nn.Module, y: torch.Tensor) -> torch.Tensor:
        waiting.put(y)
        return y

    with pytest.raises(CaptureError, match=r"draws from .*variable waiting.* or adds to it"):
        capture(Reader(forward), (rows(),))
    assert waiting.empty()


@pytest.mark.parametrize("source", [random.Random, np.random.default_rng, np.random.RandomState])
def test_random_generators_of_the_model_are_refused(source: Callable[[int], Any]) -> None:
    model = Reader(lambda net, y: y * net.source.uniform(0, 1), source=source(0))
    with pytest.raises(CaptureError, match=r"draws from self\.source"):
        capture(model, (rows(),))
