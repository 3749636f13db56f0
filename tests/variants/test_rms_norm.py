"""RMS norm fused: the kernels against float64 and their twins, the variant against PyTorch's own operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from replays import FULL, record_for, replayed
from torch import Tensor, nn
from training import Outcome, run, twin
from zoo import SpelledRMSNorm, decoder

from monet_like import ops
from monet_like.capture.captured import Captured
from monet_like.capture.lowering import capture
from monet_like.ir.schedule import Schedule, prune
from monet_like.ops import rms_norm
from monet_like.plan import store_all
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

ops.load()
ops = torch.ops.monet_like
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Largest error allowed, as a fraction of the largest element of the exact result: a few roundings of the dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
EPS = 1e-5


#: Shape and how many dimensions a row has: odd, empty, one element, more than one flush of the sums, several dimensions.
SHAPES = [((3, 5, 17), 1), ((2, 3, 4), 2), ((7,), 1), ((1, 1), 1), ((0, 4), 1), ((150, 33), 1), ((2, 4099), 1)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    yield torch.randn(shape).to(dtype)
    yield torch.randn((*shape[:-1], 2 * shape[-1] + 1)).to(dtype)[..., 1::2]
    yield torch.randn(shape[::-1]).to(dtype).permute(tuple(reversed(range(len(shape)))))


def exact(x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
    """By autograd in float64."""
    over = tuple(range(-dims, 0))
    y = x.double() * (x.double().square().mean(over, keepdim=True) + EPS).rsqrt()
    return y if weight is None else y * weight.double()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, summands: float = 1e-2) -> None:
    """Sums lose what cancels in them: their scale is at least that of their ``summands``."""
    assert actual.shape == expected.shape
    if expected.numel():
        scale = max(float(expected.detach().abs().max()), summands)
        assert float((actual.double() - expected.detach()).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_kernels_are_accurate(impl: Any, shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> None:
    for x, affine in product(inputs(shape, dtype), ("none", "same", "float32")):
        weight = (
            None if affine == "none" else torch.randn(shape[-dims:]).to(dtype if affine == "same" else torch.float32)
        )
        for rounded in (False, True):
            out = torch.float32 if affine == "float32" and dtype != torch.float64 else dtype
            y, rstd = impl("rms_norm")(x, weight, dims, EPS, rounded, out)
            assert y.dtype == out and rstd.dtype == rms_norm.row_statistic(x)
            assert y.is_contiguous() and rstd.shape == (*shape[: len(shape) - dims], *[1] * dims)
            assert torch.equal(impl("rms_norm_apply")(x, weight, rstd, dims, rounded, out), y)
            wide = x.double().clone().requires_grad_()
            parameter = None if weight is None else weight.double().clone().requires_grad_()
            expected = exact(wide, parameter, dims)
            assert_near(y, expected, TOLERANCE[dtype])
        grad, residual = torch.randn(shape).to(out), torch.randn(shape).to(dtype)
        wanted = [wide, *([] if parameter is None else [parameter])]
        terms = (
            float((grad.abs().max() * rstd.max() * (1 if weight is None else weight.abs().max())).nan_to_num())
            if x.numel()
            else 0.0
        )
        of_x, *of_weight = torch.autograd.grad(expected, wanted, grad.double())
        for before in (None, residual):
            got = impl("rms_norm_backward")(grad, x, weight, rstd, before, dims)
            assert got[0].dtype == dtype and got[0].is_contiguous()
            assert_near(got[0], of_x if before is None else of_x + before.double(), TOLERANCE[dtype], terms)
            if weight is None:
                assert got[1] is None
            else:
                assert got[1].dtype == weight.dtype
                assert_near(got[1], of_weight[0], 4 * TOLERANCE[torch.float32] + TOLERANCE[weight.dtype])


def test_rows_in_parallel(impl: Any) -> None:
    x, w, grad = torch.randn(1300, 130), torch.randn(130), torch.randn(1300, 130)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            y, rstd = impl("rms_norm")(x, w, 1, EPS, False, x.dtype)
            found.append((y, rstd, *impl("rms_norm_backward")(grad, x, w, rstd, None, 1)))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert_near(three, one.double(), 2e-6)


def test_what_is_not_finite_stays_in_its_row(impl: Any) -> None:
    x = torch.ones(3, 5)
    x[1, 2] = torch.inf
    y, rstd = impl("rms_norm")(x, None, 1, EPS, False, x.dtype)
    assert rstd[1].item() == 0.0 and y[1].isnan().tolist() == [False, False, True, False, False]
    assert torch.allclose(y[::2], torch.ones(2, 5))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, rstd = ops.rms_norm(x, weight, 1, EPS, False, x.dtype)
        ctx.save_for_backward(x, weight, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        return ops.rms_norm_backward(grad, x, weight, rstd, None, 1)


def test_gradcheck() -> None:
    x, w = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(_Fused.apply, (x.requires_grad_(), w.requires_grad_()))


# ---- the variant ----


def variant_schedule(captured: Captured) -> Schedule:
    """Store-all with every norm fused, forward and backward, and its result made again before each slot that reads it."""
    program = captured.program
    kept = store_all(program)
    fused = [p for p, task in enumerate(program.tasks) if task.variant == "rms_norm.train"]
    again = [p for p, task in enumerate(program.tasks) if task.variant == "rms_norm.apply"]
    made = {v for p in fused for v in program.tasks[p].writes}
    others = (p for p in kept.forward if made.isdisjoint(program.tasks[p].writes))
    ways = tuple(
        next((k for k, way in enumerate(ways) if way.variant == "rms_norm.backward"), 0) for ways in program.slots
    )
    reads = [set(ways[k].reads) for ways, k in zip(program.slots, ways, strict=True)]
    rerun = tuple(tuple(p for p in again if not read.isdisjoint(program.tasks[p].writes)) for read in reads)
    assert any(rerun)
    forward = tuple(sorted((*others, *fused)))
    return prune(program, replace(kept, forward=forward, again=rerun, ways=ways))


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


NORMS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.RMSNorm(8),
    "two dimensions": lambda: nn.RMSNorm((4, 8)),
    "no weight": lambda: nn.RMSNorm(8, elementwise_affine=False),
    "frozen": _frozen,
    "spelled out": lambda: SpelledRMSNorm(8),
}


@pytest.mark.parametrize("kind", list(NORMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
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
        outcome = replayed((model, args, kwargs), captured, variant_schedule(captured), FULL, measured=False)
        assert max(run(twin(model), args, kwargs).differences(outcome).values()) <= 1e-12
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
    outcome = replayed((model, args, {}), captured, store_all(captured.program), FULL, measured=False)
    assert max(run(twin(model), args, {}).differences(outcome).values()) == 0.0


def test_apart_without_the_word() -> None:
    model, args, _ = decoder()
    captured = admitted(capture(model, args), "inplace_multiway_newnode")
    assert not any(task.variant.startswith("rms_norm") for task in captured.program.every_task())
