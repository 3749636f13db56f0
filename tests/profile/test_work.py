"""What operators do, counted from their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import flop_counter

from monet_like.profile import work

aten = torch.ops.aten
KINDS = ("flash", "efficient", "cudnn")


def _as_before_2_12(function: Callable[..., int]) -> Callable[..., int]:
    """PyTorch's counter of attention, which then refused heads that share keys and values."""

    def counted(*shapes: Any) -> int:
        assert len({shape[1] for shape in shapes}) == 1, "query/key/value shapes are incompatible"
        return function(*shapes)

    return counted


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_grouped_heads_is_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if keys and values were repeated for the heads that share them, whatever PyTorch's own counter says."""
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        monkeypatch.setattr(flop_counter, name, _as_before_2_12(getattr(flop_counter, name)))
    formulas = work._flop_formulas()
    forward = formulas[getattr(aten, f"_scaled_dot_product_{kind}_attention")]
    backward = formulas[getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")]
    query, key, value, grad = (2, 8, 30, 16), (2, 2, 40, 16), (2, 2, 40, 24), (2, 8, 30, 24)
    wide_key, wide_value = (2, 8, 40, 16), (2, 8, 40, 24)
    wanted = flop_counter.sdpa_flop_count(query, wide_key, wide_value)
    assert forward(query, key, value, out_val=None) == wanted == 2 * 2 * 8 * 30 * 40 * (16 + 24)
    wanted = flop_counter.sdpa_backward_flop_count(grad, query, wide_key, wide_value)
    assert backward(grad, query, key, value, out_val=None) == wanted == 2 * 2 * 8 * 30 * 40 * (3 * 16 + 2 * 24)
