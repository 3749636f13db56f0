"""Registration of operators: a fake names the arguments that it needs, as the schema names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from monet_like.ops import operators
from monet_like.ops.registry import PYTHON_OPERATORS, Operator, register_fakes

SCHEMA = "(Tensor x, int[] size, float scale=2.0, *, bool flat=False) -> Tensor"


def registered(name: str, fake: Any) -> Any:
    """An operator that has only this fake, and the library in which it lives."""
    library = torch.library.Library("monet_like", "FRAGMENT")
    library.define(name + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    register_fakes({name: Operator(SCHEMA, lambda *_, **__: None, fake=fake)}, library)
    return getattr(torch.ops.monet_like, name), library


def test_fakes_get_the_arguments_that_they_name() -> None:
    given: list[Any] = []

    def fake(flat: bool, size: Sequence[int], scale: float) -> Tensor:
        given.append((flat, list(size), scale))
        return torch.empty(tuple(size), device="meta")

    op, _library = registered("of_a_test", fake)
    x = torch.empty(3, device="meta")
    assert op(x, [4, 2]).shape == (4, 2)
    op(x, size=[1], flat=True, scale=3.0)
    assert given == [(False, [4, 2], 2.0), (True, [1], 3.0)]


def test_a_fake_cannot_name_what_the_schema_lacks() -> None:
    with pytest.raises(AssertionError, match=r"the fake of of_another_test needs \{'sizes'\}, which the schema lacks"):
        registered("of_another_test", lambda sizes: None)


def test_every_operator_has_a_fake_and_one_place() -> None:
    ours = operators()
    assert all(known.fake is not None for known in (*ours.values(), *PYTHON_OPERATORS.values()))
    assert ours.keys().isdisjoint(PYTHON_OPERATORS)
