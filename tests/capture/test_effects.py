"""What a forward sets beside its results is set again by each replayed forward, as in plain PyTorch."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from any_schedule import assert_as_plain, step
from nets import Net, linear, rows
from torch import nn

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


def in_a_hook(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x) * net.act.mean() if hasattr(net, "act") else layer(x)


def collects(net: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    h = layer(x)
    net.losses.append(h.square().mean())
    net.losses.append(h.abs().mean())
    return h.tanh()


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


def build(forward: Forward) -> Any:
    net: Any = Net(forward, linear())
    net.losses, net.table, net.calls, net.array, net.members = [], {}, 0, np.zeros(2), set()
    net.queue, net.state, net.slotted, net.gone, net.switched = (
        collections.deque(maxlen=2),
        State(),
        Slotted(),
        1,
        False,
    )
    return net


def seen(net: Any) -> list[Any]:
    """Everything that one of these forwards may set."""
    state = [net.state.count, net.state.last, net.state.all, net.slotted.last]
    named = [
        vars(net).get(n) for n in ("last", "detached", "given", "hidden", "act", "calls", "names", "nothing", "gone")
    ]
    made = vars(net).get("made")
    rest = [LATEST, SEEN, vars(type(net)).get("of_class"), SETTING.get(), net.array.tolist(), sorted(net.members)]
    pair = vars(net).get("pair", ())
    found = [
        state,
        named,
        net.losses,
        list(net.queue),
        net.table,
        made and (made.count, made.last, made.all),
        rest,
        pair,
    ]
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
    "variables": (variables, 2),
    "numbers": (numbers, 2),
    "module": (module, 2),
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
