"""Values beside tensors in an argument that the forward does not take need no capture; those that it takes do."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from any_schedule import assert_as_plain, step
from nets import rows
from torch import nn


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float
    name: str

    @property
    def twice(self) -> float:
        return 2 * self.scale


class Slotted:
    __slots__ = ("name", "scale", "x")

    def __init__(self, x: torch.Tensor, scale: float, name: str) -> None:
        self.x, self.scale, self.name = x, scale, name


class Stored:
    """As PyTorch Geometric's data: attributes are entries of a dict in another object."""

    def __init__(self, **content: Any) -> None:
        self.__dict__["_store"] = Batch(rows(), 0.0, "")
        self._store.content = content  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__ or name not in self.__dict__["_store"].content:
            raise AttributeError(name)
        return self.__dict__["_store"].content[name]


class Encoded(UserDict):
    """As Transformers' batches, with objects that are others in each."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.encodings = [object()]

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


def given(kind: str, x: torch.Tensor, scale: float, name: str) -> Any:
    content = {"x": x, "scale": scale, "name": name}
    made: dict[str, Callable[[], Any]] = {
        "dataclass": lambda: Batch(**content), "slots": lambda: Slotted(**content), "stored": lambda: Stored(**content),
        "dict": lambda: content, "encoded": lambda: Encoded(content), "nested": lambda: {"a": [Batch(**content)],
        "x": x},
        "list": lambda: [Batch(**content)],
    }  # fmt: skip
    return made[kind]()


def tensor_of(batch: Any) -> torch.Tensor:
    found = batch[0] if isinstance(batch, list) else batch["a"][0] if "a" in getattr(batch, "keys", list)() else batch
    return found["x"] if isinstance(found, dict) else found.x  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, takes: Callable[[Any], Any] = lambda batch: 1.0) -> None:
        super().__init__()
        self.layer, self.takes = nn.Linear(8, 8), takes

    def forward(self, batch: Any) -> Any:
        result = self.layer(tensor_of(batch)).tanh()
        taken = self.takes(batch)
        return result * taken if isinstance(taken, float) else (result, taken)


def calls(kind: str, takes: Callable[[Any], Any], values: list[tuple[float, str]], captures: int) -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for scale, name in values:
            note(step(called, given(kind, rows(), scale, name)))

    assert_as_plain(lambda: Net(takes), script, captures)


CHANGING = [(1.0, "a"), (2.0, "b"), (3.0, "b"), (1.0, "c")]


@pytest.mark.parametrize("kind", ["dataclass", "slots", "stored", "dict", "encoded", "nested", "list"])
def test_values_that_are_not_taken_need_no_capture(kind: str) -> None:
    calls(kind, lambda batch: 1.0, CHANGING, 1)
    assert not any("__getattribute__" in vars(kind) for kind in (Batch, Slotted, Stored, Encoded))


TAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "attribute": ("dataclass", lambda b: b.scale),
    "attribute of a class of its own": ("slots", lambda b: b.scale),
    "attribute of a storage": ("stored", lambda b: b.scale),
    "entry of an encoding": ("encoded", lambda b: b["scale"]),
    "property": ("dataclass", lambda b: b.twice),
    "computed name": ("dataclass", lambda b: getattr(b, "".join(["sc", "ale"]))),
    "vars": ("dataclass", lambda b: vars(b)["sc" + "ale"[:]]),
    "asdict": ("dataclass", lambda b: dataclasses.asdict(dataclasses.replace(b, x=None))["scale"]),
    "a copy": ("dataclass", lambda b: copy.copy(b).scale),
    "equality": ("dataclass", lambda b: float(Batch(b.x, 2.0, "b") == b)),
    "text": ("dict", lambda b: float(len(repr({**b, "x": None}))) + b.get("scale")),
    "entry": ("dict", lambda b: b["scale"]),
    "get": ("dict", lambda b: b.get("scale")),
    "pop": ("dict", lambda b: b.pop("scale")),
    "popitem": ("dict", lambda b: (b.popitem(), b.popitem()[1])[1]),
    "setdefault": ("dict", lambda b: b.setdefault("scale", 0.0)),
    "items": ("dict", lambda b: sum(value for _, value in b.items() if isinstance(value, float))),
    "values": ("dict", lambda b: next(value for value in b.values() if isinstance(value, float))),
    "keys": ("dict", lambda b: [b[key] for key in b][1]),
    "unpacked": ("dict", lambda b: (lambda scale, **_: scale)(**b)),
    "united": ("dict", lambda b: (b | {"y": 0})["scale"]),
    "united with": ("dict", lambda b: ({"y": 0} | b)["scale"]),
    "updated": ("dict", lambda b: (c := {"y": 0}, c.update(b), c["scale"])[-1]),
    "made anew": ("dict", lambda b: dict(b)["scale"]),
    "dict's own copy": ("dict", lambda b: b.copy()["scale"]),
    "formatted": ("dict", lambda b: float("{scale}".format(**b))),
    "as JSON": ("dict", lambda b: json.loads(json.dumps({k: v for k, v in b.items() if k != "x"}))["scale"]),
    "a map of pytree": ("dict", lambda b: pytree.tree_map(lambda leaf: leaf, b)["scale"]),
    "matched": ("dict", lambda b: matched(b)),
    "pickled": ("dataclass", lambda b: pickle.loads(pickle.dumps((b.name, b.__dict__["scale"])))[1]),
    "nested": ("nested", lambda b: b["a"][0].scale),
    "an object in a list": ("list", lambda b: b[0].scale),
    "a result": ("dict", lambda b: (b["scale"],)),
    "the batch as a result": ("dict", lambda b: [b]),
    "the object as a result": ("dataclass", lambda b: [b]),
}


def matched(batch: Any) -> Any:
    match batch:
        case {"scale": scale}:
            return scale
    return 0.0


@pytest.mark.parametrize("way", TAKES)
def test_values_that_are_taken_in_any_way_are_followed(way: str) -> None:
    kind, takes = TAKES[way]
    alike = [(1.0, "a"), (2.0, "a"), (1.0, "a")]
    calls(kind, takes, alike, 2)
    calls(kind, takes, CHANGING, captures_of(way))


def captures_of(way: str) -> int | None:
    """None: of ways that take everything, of which it does not matter how much."""
    alone = ("attribute", "property", "computed name", "entry", "get", "matched", "nested", "an object")
    return 3 if way.startswith(alone) else None


def test_what_decides_about_a_value_decides_about_the_step() -> None:
    """Calls of one mode take the scale, those of the other do not."""
    values = [(1.0, "on"), (2.0, "off"), (2.0, "on"), (3.0, "off"), (4.0, "off"), (1.0, "on"), (5.0, "off")]
    calls("dict", lambda b: b["scale"] if b["name"] == "on" else 1.0, values, 3)
    calls("dataclass", lambda b: b.scale if b.name == "on" else 1.0, values, 3)


def test_a_value_that_a_hook_takes_in_the_backward_is_followed() -> None:
    class Hooked(Net):
        def forward(self, batch: Any) -> Any:
            result = super().forward(batch)
            result.register_hook(lambda gradient: gradient * batch["scale"])
            return result.sin()

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for scale, name in CHANGING:
            note(step(called, given("dict", rows(), scale, name)), [p.grad for p in model.parameters()])

    assert_as_plain(Hooked, script, 4)


def test_a_value_that_is_taken_where_a_tensor_says_so_is_followed() -> None:
    def takes(batch: Any) -> float:
        return batch["scale"] if batch["x"].sum() > 0 else 1.0  # type: ignore[no-any-return]

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for sign, (scale, name) in zip([-1, 1, -1, 1, 1], [*CHANGING, (5.0, "d")], strict=True):
            note(step(called, given("dict", rows().abs() * sign, scale, name)))

    assert_as_plain(lambda: Net(takes), script)


def test_forwards_that_are_watched_change_nothing() -> None:
    class Counts(Net):
        def forward(self, batch: Any) -> Any:
            self.norm(batch["x"])
            self.seen = nn.functional.dropout(super().forward(batch))
            return self.seen

    def make() -> nn.Module:
        net = Counts()
        net.norm = nn.BatchNorm1d(8)
        return net

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for scale, name in CHANGING:
            batch = given("dict", rows(), scale, name)
            note(step(called, batch), model.seen, type(batch) is dict, batch["scale"])

    assert_as_plain(make, script, captures=1)


def test_an_argument_that_is_filled_keeps_its_values() -> None:
    def takes(batch: Any) -> float:
        batch["seen"] = batch["x"] + 1
        return 1.0

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for scale, name in CHANGING:
            batch = given("dict", rows(), scale, name)
            note(step(called, batch), batch["seen"], batch["scale"])

    assert_as_plain(lambda: Net(takes), script, captures=4)


@pytest.mark.slow
def test_batches_of_tokens_and_graphs() -> None:
    from transformers import BatchEncoding

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for text in ("a", "b", "c"):
            note(step(called, BatchEncoding({"x": rows(), "text": text, "id": hash(text)})))

    assert_as_plain(Net, script, captures=1)
    data = pytest.importorskip("torch_geometric.data")

    def graphs(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for number in range(3):
            note(step(called, data.Data(x=rows(), number=number, name=str(number))))

    assert_as_plain(Net, graphs, captures=1)
