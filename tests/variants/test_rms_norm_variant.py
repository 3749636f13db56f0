"""The variants of RMS norm against PyTorch's own operators: where they are found, and that gradients agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from replays import FULL, record_for
from taking import error_of, taking
from torch import Tensor, nn
from training import Outcome, run, twin
from zoo import SpelledRMSNorm, decoder

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.ir.schedule import Schedule
from monet_like.plan.baseline import store_all
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted


def variant_schedule(captured: Captured) -> Schedule:
    """Store-all with every norm fused, forward and backward, and its result made again before each slot
    that reads it.
    """
    return taking(captured, "rms_norm.train", "rms_norm.backward", again="rms_norm.apply")


class _Plain(nn.Module):
    """One norm between two layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.one, self.norm, self.other = nn.Linear(8, 8), norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.norm(self.one(x)))
        return y


def _frozen() -> nn.Module:
    return nn.RMSNorm(8).requires_grad_(False)


class _OnePlus(nn.Module):
    """Gemma's: the factor, one more than the weight, is made after the rows are normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.to(y.dtype))).type_as(x)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.RMSNorm(8),
    "two dimensions": lambda: nn.RMSNorm((4, 8)),
    "no weight": lambda: nn.RMSNorm(8, elementwise_affine=False),
    "frozen": _frozen,
    "spelled out": lambda: SpelledRMSNorm(8),
    "one more": lambda: _OnePlus(8),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in NORMS),
        *((kind, dtype) for kind in ("torch", "spelled out", "one more") for dtype in ("bfloat16", "autocast")),
    ],
)
def test_every_form_is_found_and_agrees(kind: str, dtype: str) -> None:
    model = _Plain(NORMS[kind]())
    x = torch.randn(2, 4, 8)
    if dtype == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    autocast = "bfloat16" if dtype == "autocast" else ""

    def under() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()

    def replay(schedule: Schedule) -> Outcome:
        record = replace(record_for(captured, schedule, FULL, (model, (x,), {})), autocast=autocast)
        wrapped = ScheduleWrapper(twin(model), record, example=((x,), {}), captured=captured)
        with under():
            return run(wrapped, (x,), {})

    with under():
        captured = admitted(capture(model, (x,)), FULL)
        plain = run(twin(model), (x,), {})
    found = Counter(t.variant for t in captured.program.every_task())
    assert [found[f"rms_norm.{what}"] for what in ("train", "apply", "backward")] == [1, 1, 1]
    (slot,) = (ways for ways in captured.program.slots if ways[-1].variant == "rms_norm.backward")
    assert len(captured.program.forward_reads(slot[-1])) == 2  # the input and the rows' numbers
    assert max(plain.differences(replay(store_all(captured.program))).values()) == 0.0
    fused = replay(variant_schedule(captured))
    assert max(plain.differences(fused).values()) <= (1e-5 if dtype == "float32" else 3e-2)


def test_a_decoders_gradients_are_exact_in_float64() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, args, kwargs = decoder()
        captured = admitted(capture(model, args), FULL)
        assert error_of((model, args, kwargs), captured, variant_schedule(captured)) <= 1e-12
    finally:
        torch.set_default_dtype(before)
    plain = captured.plain
    assert len(plain.slots) - len(captured.program.slots) >= 4 * 9  # a dozen slots each became one


class _Gated(nn.Module):
    """Normalised rows that something else reads too, and a factor that is no weight."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one, self.norm, self.shared = nn.Linear(8, 8), nn.RMSNorm(8, elementwise_affine=False), shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z: Tensor = self.norm(y)
        return z * z.sigmoid() if self.shared else z * y


@pytest.mark.parametrize("shared", [False, True])
def test_a_gate_is_no_weight(shared: bool) -> None:
    model, args = _Gated(shared), (torch.randn(2, 4, 8),)
    captured = admitted(capture(model, args), FULL)
    made = [task.calls[-1] for task in captured.program.tasks if task.variant == "rms_norm.train"]
    assert [call.args[1] for call in made] == [None]
    assert captured.metas[made[0].outs[0].name].shape == (2, 4, 8)  # type: ignore[union-attr, index]
    assert error_of((model, args, {}), captured, store_all(captured.program)) == 0.0
