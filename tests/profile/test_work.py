"""What operators do, counted from their arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import flop_counter

from monet_like.compiler.request import Request, captured_for
from monet_like.profile import observing, work

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


class _Kinds(nn.Module):
    """Operators of many kinds, each alone in its task: grouped and transposed convolutions, norms, poolings, attention,
    dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.deep = nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up, self.norm, self.pool = nn.ConvTranspose2d(8, 4, 2, 2), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.pool(self.norm(self.deep(self.grouped(x)))))
        x = functional.dropout(functional.softmax(x, 1), 0.2).reshape(2, -1, 8)
        return torch.cat([self.attention(x, x, x)[0].tanh(), x]).mean((1, 2))


@pytest.mark.parametrize("mode", ["normal", "inplace_conv_multiway_newnode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_that_need_not_run_are_counted_as_if_they_did(
    mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = torch.channels_last if dtype == torch.bfloat16 else torch.contiguous_format
    model = _Kinds().to(dtype, memory_format=layout)
    example = ((torch.randn(2, 4, 8, 8, dtype=dtype).to(memory_format=layout),), {})
    first, second = (captured_for(Request(model, example, mode), example) for _ in range(2))
    ran = list[str]()
    own = observing._run_fake
    monkeypatch.setattr(observing, "_run_fake", lambda *args: (ran.append(args[1].name), own(*args))[1])
    found, seldom = work.works_of(first), len(ran)
    monkeypatch.setattr(observing, "_is_operator", lambda call: False)
    ran.clear()
    monkeypatch.setattr(work, "_WORKS", weakref.WeakKeyDictionary())
    assert found == work.works_of(second)
    assert seldom < len(ran)


class _Tiles(nn.Module):
    """A block whose variants in tiles have many equal calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def test_operators_of_tiles_are_counted_as_if_each_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = _Tiles(), ((torch.randn(4, 64, 16),), {})
    first, second = (captured_for(Request(model, example, "inplace_conv_multiway_newnode"), example) for _ in range(2))
    assert any(len(task.calls) > 50 for task in first.every_task())
    found = work.works_of(first)
    monkeypatch.setattr(
        observing._Repeated,
        "__torch_dispatch__",
        lambda _, func, __, args=(), kwargs=None: func(*args, **(kwargs or {})),
    )
    monkeypatch.setattr(work, "_WORKS", weakref.WeakKeyDictionary())
    assert found == work.works_of(second)


def test_equal_tasks_of_programs_that_exist_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, of which one has inputs with a gradient; and one on larger inputs."""
    model = _Tiles()
    looks = [(4, False), (4, True), (8, True)]
    examples = [((torch.randn(rows, 64, 16, requires_grad=grad),), {}) for rows, grad in looks]
    first, second, larger = (captured_for(Request(model, x, "inplace_conv_multiway_newnode"), x) for x in examples)
    counted, own = list[str](), work._work
    monkeypatch.setattr(work, "_work", lambda captured, task: (counted.append(task.cost), own(captured, task))[1])
    mine = work.works_of(first)
    assert sorted(counted) == sorted(mine)
    counted.clear()
    found = work.works_of(second)
    assert set(counted) == set(found) - set(mine) and len(counted) < len(found) / 2
    monkeypatch.setattr(work, "_WORKS", weakref.WeakKeyDictionary())
    assert work.works_of(second) == found
    counted.clear()
    assert len(work.works_of(larger)) == len(counted) + len(found.keys() & work.works_of(larger).keys())
