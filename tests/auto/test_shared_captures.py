"""Equal blocks share one capture; blocks that differ in anything that a capture fixes have their own.

Both train exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, Short, assert_same_step, loss_of, tokens
from torch import nn

import monet_like
from monet_like.auto import block as block_wrapper
from monet_like.auto.block import blocks_of
from monet_like.auto.shared_captures import outline_of
from monet_like.replay import stepping


class Scaled(Short):
    """A block with a number, a list and a buffer, and a parameter that may be frozen."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale, self.powers = 0.5, [1, 2]
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bent = sum(torch.tanh(self.up(x)) ** power for power in self.powers)
        return x + self.scale * self.dropout(self.down(bent)) + self.shift


class Halved(Scaled):
    """Another class with the same parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an element for every capture of a block; planning is short."""
    made: list[int] = []
    for module, name in ((block_wrapper, "captured_for"), (stepping, "capture")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=own, **kwargs: made.append(1) or own(*args, **kwargs))
    return made


def planned(plain: nn.Module, x: torch.Tensor, changes: Sequence[Callable[[Any], Any]] = ()) -> Any:
    """A copy of the model with schedules; one change is made to the second block of both, one to the
    third, and so on.
    """
    mine: Any = copy.deepcopy(plain)
    for model in (plain, mine):
        for layer, change in zip(model.layers[1:], changes, strict=False):
            change(layer)
    return monet_like.auto_schedule(
        mine, x, memory_budget="90%", blocks="layers.*", mode=EXACT, loss=loss_of, effort="quick"
    )


def test_equal_blocks_are_captured_once(captures: list[int]) -> None:
    plain, x = Decoder(blocks=4), tokens(8, 16)
    mine = planned(plain, x)
    for seed in range(2):
        assert_same_step(plain, mine, x, seed)
    assert len(captures) == 1
    kept = [next(iter(block._kept)) for block in blocks_of(mine)]
    steps = [each.step for each in kept]
    assert len({id(step) for step in steps}) == 4 and len({id(each.captured) for each in kept}) == 1
    assert len({id(step.forward) for step in steps}) == len({block.record.schedule for block in blocks_of(mine)})
    for batch in (x[:, :9], x[:5]):  # as few for other shapes
        assert_same_step(plain, mine, batch)
    assert len(captures) == 3
    mine.layers[2].dropout.p = 0.3  # a change after planning concerns that block alone
    plain.layers[2].dropout.p = 0.3
    assert_same_step(plain, mine, x)
    assert len(captures) == 4


def _replace_forward(layer: Any) -> None:
    own = layer.down.forward
    layer.down.forward = lambda x: own(x) + 1


def _set(name: str, value: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        setattr(layer, name, value)

    return change


#: A name, a change of a block, and whether it still shares its capture with the first block.
DIFFERENCES: list[tuple[str, Callable[[Any], Any], bool]] = [
    ("nothing", lambda layer: None, True),
    ("number", _set("scale", 0.25), False),
    ("list", lambda layer: layer.powers.append(3), False),
    ("outline", lambda layer: layer.up.weight.requires_grad_(False), False),  # others: `PARTS`
    ("content of a buffer", lambda layer: layer.shift.fill_(0.75), True),
    ("content of a parameter", lambda layer: layer.up.weight.data.mul_(2.0), True),
    ("rate of a dropout", lambda layer: setattr(layer.dropout, "p", 0.4), False),
    ("function in the place of forward", _replace_forward, False),
    ("attribute of a parameter", lambda layer: setattr(layer.up.weight, "note", object()), False),
]


@pytest.mark.slow
def test_blocks_that_differ(captures: list[int]) -> None:
    names, changes, shared = zip(*DIFFERENCES, strict=True)
    plain, x = Decoder(Scaled, len(changes) + 2), tokens(8, 16)
    mine = planned(plain, x, changes)
    for seed in range(2):
        assert_same_step(plain, mine, x, seed)
    of_first, *others, of_last = (next(iter(block._kept)).captured for block in blocks_of(mine))
    assert of_last is of_first
    assert {name: captured is of_first for name, captured in zip(names, others, strict=True)} == dict(
        zip(names, shared, strict=True)
    )
    assert len(captures) == 1 + shared.count(False)


class Held(Scaled):
    """A block whose tensor attribute is not registered."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.factor = torch.full((width,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


@pytest.mark.slow
def test_blocks_with_tensors_that_are_not_registered_share_nothing(captures: list[int]) -> None:
    plain, x = Decoder(Held, 3), tokens(8, 16)
    plain.layers[1].factor.fill_(2.0)
    mine = planned(plain, x)
    assert_same_step(plain, mine, x)
    assert len(captures) == 3


@pytest.mark.slow
def test_a_copy_of_the_model_captures_for_itself(captures: list[int]) -> None:
    plain, x = Decoder(Scaled, 3), tokens(8, 16)
    mine = planned(plain, x)
    assert_same_step(plain, mine, x)
    other = copy.deepcopy(mine)
    with torch.no_grad():
        other.layers[0].up.weight.mul_(2.0)
    reference = copy.deepcopy(plain)
    reference.layers[0].up.weight.data.mul_(2.0)
    assert_same_step(reference, other, x)
    assert_same_step(plain, mine, x)


def test_blocks_with_sparse_tensors_have_no_outline() -> None:
    layer = Scaled(8)
    layer.register_buffer("table", torch.eye(8).to_sparse())
    assert outline_of(layer) is None


def _again(layer: Any) -> None:
    layer.again = layer.dropout


def _renamed(layer: Any) -> None:
    name, part = layer._modules.popitem()  # the last one
    layer.add_module(f"other_{name}", part)


def _buffer(make: Callable[[], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda layer: layer.register_buffer("other", make())


def _ones() -> torch.Tensor:
    return torch.ones(4, dtype=torch.complex64)


#: Two changes of a block, whose outlines differ in one part.
PARTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "name": (lambda layer: None, _renamed),
    "module": (_again, lambda layer: setattr(layer, "again", copy.deepcopy(layer.dropout))),
    "class": (lambda layer: None, _set("__class__", Halved)),
    "training": (lambda layer: None, lambda layer: layer.dropout.eval()),
    "hook of a module": (lambda layer: None, lambda layer: layer.up.register_forward_hook(print)),
    "note on hooks": (
        lambda layer: layer.up.register_forward_hook(print),
        lambda layer: layer.up.register_forward_hook(print, with_kwargs=True),
    ),
    "no_dropit": (lambda layer: None, _set("no_dropit", True)),
    "absent part": (lambda layer: None, lambda layer: layer.register_module("none", None)),
    "absent parameter": (lambda layer: None, lambda layer: layer.register_parameter("none", None)),
    "name of a tensor": (_buffer(_ones), lambda layer: layer.register_buffer("another", _ones())),
    "tied": (
        lambda layer: layer.register_buffer("other", layer.shift),
        lambda layer: layer.register_buffer("other", layer.shift.view_as(layer.shift)),
    ),
    "memory": (
        lambda layer: layer.register_buffer("other", layer.shift.view_as(layer.shift)),
        lambda layer: layer.register_buffer("other", layer.shift.clone()),
    ),
    "class of a tensor": (_buffer(_ones), _buffer(lambda: nn.Parameter(_ones(), requires_grad=False))),
    "dtype": (_buffer(lambda: torch.ones(4)), _buffer(lambda: torch.ones(4, dtype=torch.int32))),
    "device": (_buffer(lambda: torch.ones(4)), _buffer(lambda: torch.ones(4, device="meta"))),
    "shape": (
        _buffer(lambda: torch.ones(4).as_strided((1, 2), (2, 1))),
        _buffer(lambda: torch.ones(4).as_strided((2, 2), (2, 1))),
    ),
    "stride": (_buffer(lambda: torch.ones(4, 4)), _buffer(lambda: torch.ones(4, 4).t())),
    "storage": (_buffer(lambda: torch.ones(4)), _buffer(lambda: torch.ones(5)[:4])),
    "offset": (_buffer(lambda: torch.ones(5)[:4]), _buffer(lambda: torch.ones(5)[1:])),
    "gradient": (lambda layer: None, lambda layer: layer.up.weight.requires_grad_(False)),
    "leaf": (_buffer(lambda: torch.ones(4).requires_grad_()), _buffer(lambda: torch.ones(4).requires_grad_() * 1)),
    "conjugated": (_buffer(_ones), _buffer(lambda: _ones().conj())),
    "negated": (_buffer(lambda: _ones().imag), _buffer(lambda: _ones().conj().imag)),
    "hook": (lambda layer: None, lambda layer: layer.up.weight.register_hook(print)),
    "attribute": (lambda layer: setattr(layer.up.weight, "note", 1), lambda layer: setattr(layer.up.weight, "note", 2)),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_outline_tells_blocks_apart_that_differ_in_one_part(part: str) -> None:
    layers = [Scaled(8) for _ in range(4)]
    for layer, change in zip(layers, (*PARTS[part], *PARTS[part]), strict=True):
        change(layer)
    one, other, like_one, like_other = map(outline_of, layers)
    assert one == like_one != other == like_other and None not in (one, other)
