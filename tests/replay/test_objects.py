"""Objects as arguments and results: their tensors are inputs and results of a step, whatever their class."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from any_schedule import assert_as_plain, step
from torch import nn

from monet_like import auto_schedule
from monet_like.capture.example_inputs import with_batch
from monet_like.capture.lower.step import capture
from monet_like.capture.trees import flattened, tensors_of
from monet_like.errors import CaptureError


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    scale: float


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor
    scale: float


class Plain:
    def __init__(self, image: torch.Tensor, scale: float) -> None:
        self.image, self.scale = image, scale


class Slots:
    __slots__ = ("image", "scale", "unset")

    def __init__(self, image: torch.Tensor, scale: float) -> None:
        self.image, self.scale = image, scale


class Named(NamedTuple):
    image: torch.Tensor
    scale: float


class Keys(dict):
    __getattr__ = dict.__getitem__


class User(collections.UserDict):
    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Items(list):
    image = property(lambda self: self[0])
    scale = property(lambda self: self[1])


class Fixed(tuple):
    image = property(lambda self: self[0])
    scale = property(lambda self: self[1])


class Tree:
    """Objects within objects, which know each other."""

    def __init__(self, image: torch.Tensor, scale: float) -> None:
        self.parts, self.itself = {"a": [Plain(image, scale)]}, self
        self.parts["a"][0].parent = weakref.ref(self)
        self.again = self.parts["a"][0]

    image = property(lambda self: self.again.parent().parts["a"][0].image)
    scale = property(lambda self: self.again.scale)


MAKERS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "dataclass": Batch,
    "frozen": Frozen,
    "plain": Plain,
    "slots": Slots,
    "namedtuple": Named,
    "namespace": lambda image, scale: types.SimpleNamespace(image=image, scale=scale),
    "dict": lambda image, scale: Keys(image=image, scale=scale),
    "UserDict": lambda image, scale: User(image=image, scale=scale),
    "list": lambda image, scale: Items([image, scale]),
    "tuple": lambda image, scale: Fixed((image, scale)),
    "tree": Tree,
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch.image * batch.scale)


@pytest.mark.parametrize("kind", MAKERS)
def test_tensors_of_an_argument_are_inputs(kind: str) -> None:
    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        for scale in (2.0, 2.0, 3.0):
            image = torch.randn(4, 3, requires_grad=True)
            batch = MAKERS[kind](image, scale)
            note(step(called, batch), image.grad)
            assert batch.image is image  # nothing of ours is left there

    assert_as_plain(Scaled, script, captures=2)
    assert all(made not in pytree.SUPPORTED_NODES for made in (Batch, Plain, types.SimpleNamespace))


def test_another_value_in_the_class_is_seen() -> None:
    class Local:
        scale = 2.0

        def __init__(self) -> None:
            self.image = torch.randn(4, 3)

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        for Local.scale in (2.0, 3.0):
            note(step(called, Local()))

    assert_as_plain(Scaled, script, captures=2)


def test_one_object_given_twice_is_another_call_than_two() -> None:
    class Both(Scaled):
        def forward(self, one: Any, other: Any) -> torch.Tensor:
            return self.layers(one.image * other.scale) + self.layers(other.image)

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        one, other = Batch(torch.randn(4, 3), 2.0), Batch(torch.randn(4, 3), 2.0)
        for pair in ((one, other), (one, one), (other, one)):
            note(step(called, *pair))

    assert_as_plain(Both, script, captures=2)


def test_an_array_beside_the_tensors_is_read_anew() -> None:
    class Shifted(Scaled):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + float(batch.shift.sum())

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        for shift in (1.0, 1.0, 2.0):
            batch = Plain(torch.randn(4, 3), 1.0)
            batch.shift = np.full(2, shift)
            note(step(called, batch))

    assert_as_plain(Shifted, script, captures=2)


def test_it_is_planned_with_objects() -> None:
    image = torch.randn(4, 3)
    model = auto_schedule(
        Scaled(), Tree(image, 2.0), memory_budget="100%", mode="inplace_multiway_newnode", effort="quick"
    )
    model(Tree(image, 2.0)).sum().backward()
    (args, _) = with_batch(((Tree(image, 2.0),), {}), 7)
    assert [tuple(t.shape) for t in tensors_of(args)] == [(7, 3)]
    assert args[0].image.shape == (7, 3)
    assert args[0].scale == 2.0


@pytest.mark.parametrize("kind", ["dataclass", "namespace", "slots", "dict", "tree"])
def test_what_the_forward_sets_of_an_argument_is_set(kind: str) -> None:
    class Setting(Scaled):
        def forward(self, batch: Any) -> torch.Tensor:
            made = super().forward(batch)
            inner = batch.again if isinstance(batch, Tree) else batch
            if isinstance(inner, dict):
                inner["image"], inner["found"] = inner["image"].relu(), made * 2
            else:
                inner.image, inner.scale = inner.image.relu(), inner.scale * 2
            return made

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        for _ in range(2):
            batch = MAKERS[kind](torch.randn(4, 3), 2.0)
            note(called(batch))
            note(batch.image, batch.scale, batch["found"] if kind == "dict" else None)
            step(called, batch)

    assert_as_plain(Setting, script)


def test_a_branch_on_values_leaves_nothing_on_arguments() -> None:
    class Branching(Scaled):
        def forward(self, batch: Any, seen: list[torch.Tensor]) -> torch.Tensor:
            if batch.image.sum() > 0:
                batch.scale = batch.scale + 1
            seen.append(batch.image)
            return super().forward(batch)

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        for sign in (1, -1, 1):
            batch, seen = Batch(sign * torch.rand(4, 3), 2.0), []  # type: ignore[var-annotated]
            note(step(called, batch, seen), batch.scale, seen)

    assert_as_plain(Branching, script, captures=2)


def test_results_may_be_objects() -> None:
    class Pairs(Scaled):
        def forward(self, batch: Any) -> Any:
            made = super().forward(batch)
            return types.SimpleNamespace(first=made, rest=[Slots(made.exp(), 2.0)], of=torch.float32), Keys(y=made * 2)

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        for _ in range(2):
            one, other = called(Batch(torch.randn(4, 3), 2.0))
            assert type(one.rest[0]) is Slots
            assert type(other) is Keys
            note(one.first, one.rest[0].image, one.rest[0].scale, other.y)
            (one.first.sum() + one.rest[0].image.sum() + other["y"].sum()).backward()

    assert_as_plain(Pairs, script, captures=1)


def test_a_distribution_is_a_result() -> None:
    class Policy(Scaled):
        def forward(self, batch: Any) -> Any:
            return torch.distributions.Normal(super().forward(batch), torch.ones(()), validate_args=False)

    def script(called: nn.Module, model: nn.Module, note: Any) -> None:
        for _ in range(2):
            found = called(Batch(torch.randn(4, 3), 2.0))
            loss = -found.log_prob(torch.zeros(())).mean()
            note(loss, found.entropy(), found.batch_shape)
            loss.backward()

    assert_as_plain(Policy, script, captures=1)


def test_a_result_that_cannot_be_made_anew_is_refused() -> None:
    class Dated(datetime.date):
        """Only its own ``__new__`` makes one."""

    class Returns(Scaled):
        def forward(self, batch: Any) -> Any:
            found: Any = Dated(2026, 1, 1)
            found.image = super().forward(batch)
            return found

    with pytest.raises(CaptureError, match=r"Returns returned what a schedule cannot make anew \(TypeError: .*'year'"):
        capture(Returns(), (Batch(torch.randn(4, 3), 2.0),))


def test_other_objects_are_leaves() -> None:
    for leaf in (nn.Linear(1, 1), torch.nn.functional.relu, types.SimpleNamespace(a=1), object(), np.ones(3)):
        assert flattened((leaf, {}))[0] == [leaf]
