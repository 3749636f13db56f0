"""cuDNN's convolution algorithms and the kinds of attention on a GPU. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from algorithm_cases import FORMATS, MODE, Attends, captured
from replays import record_for
from torch import nn
from training import twin

from monet_like import ops
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request
from monet_like.ir.program import REFUSED
from monet_like.ops import convolution
from monet_like.plan import plan, store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.plan.subprogram import without_refused
from monet_like.profile.measure import allocated_peak
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.runtime.operators import resolve
from monet_like.variants import admitted
from monet_like.variants.convolution import offered

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not ops.has("cudnn_convolution", "cuda"):
    pytest.skip(ops.status(), allow_module_level=True)

CUDA = torch.device("cuda", 0)
registered, aten = torch.ops.monet_like, torch.ops.aten
# Largest error allowed, as a fraction of the result's largest element: sums of at most a few thousand products, and
# transforms, which lose up to three digits of them.
SUMS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TRANSFORMS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
CASES = [
    (((4, 8, 17, 19), (16, 8, 3, 3)), ([1, 1], [1, 1], [1, 1], 1)),
    (((4, 8, 17, 19), (16, 4, 5, 5)), ([1, 1], [2, 2], [1, 1], 2)),
    (((4, 8, 17, 19), (16, 8, 3, 2)), ([2, 1], [0, 1], [1, 2], 1)),
    (((4, 8, 17, 19), (8, 1, 3, 3)), ([1, 1], [1, 1], [1, 1], 8)),
    (((4, 8, 17, 19), (16, 8, 1, 1)), ([2, 2], [0, 0], [1, 1], 1)),
]


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def unless_refused(op: Any, algorithm: str, *arguments: Any) -> torch.Tensor | None:
    """The result; None if cuDNN says that it has none, and nothing else says so."""
    try:
        result: torch.Tensor = op(*arguments, algorithm)
    except RuntimeError as error:
        if f"cuDNN's algorithm {algorithm} is not to be had for these shapes" not in str(error):
            raise
        return None
    return result


def close(actual: torch.Tensor, exact: torch.Tensor, algorithm: str) -> bool:
    table = TRANSFORMS if algorithm.startswith(("fft", "winograd")) else SUMS
    allowed = table[actual.dtype] * float(exact.abs().max())
    return actual.shape == exact.shape and float((actual.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("dtype", list(SUMS))
@pytest.mark.parametrize(("sizes", "options"), CASES)
def test_algorithms_compute_the_convolution(sizes: Any, options: Any, dtype: torch.dtype) -> None:
    """Or say that cuDNN has them not; of each of the three, one at least has to be there in the default layout."""
    plain = (*options[:3], False, [0, 0], options[3])
    x, weight = (torch.randn(size, device=CUDA).to(dtype) for size in sizes)
    bias = torch.randn(sizes[1][0], device=CUDA).to(dtype)
    y = aten.convolution(x.double(), weight.double(), bias.double(), *plain)
    grad = torch.randn_like(y).to(dtype)
    wanted = aten.convolution_backward(
        grad.double(), x.double(), weight.double(), None, *plain, [True, True, False]
    )  # fmt: skip
    for layout in FORMATS:
        rest = (*options, layout is torch.channels_last)
        for given in FORMATS:
            a, b, g = (t.contiguous(memory_format=given) for t in (x, weight, grad))
            runs = [(registered.cudnn_convolution, (a, b, bias), y, convolution.FORWARD_ALGORITHMS)]
            runs += [
                (registered.cudnn_convolution_backward_input, (g, b, x.shape), wanted[0], convolution.INPUT_ALGORITHMS)
            ]
            runs += [
                (
                    registered.cudnn_convolution_backward_weight,
                    (g, a, b.shape),
                    wanted[1],
                    convolution.WEIGHT_ALGORITHMS,
                )
            ]
            for op, arguments, exact, algorithms in runs:
                done = 0
                for algorithm in algorithms:
                    if not offered(algorithm, sizes[1][2:], options[0], options[2]):
                        continue
                    made = unless_refused(op, algorithm, *arguments, *rest)
                    if made is None:
                        continue
                    assert close(made, exact, algorithm), (op, algorithm, layout, given)
                    assert made.is_contiguous(memory_format=layout)
                    done += 1
                assert done or layout is torch.channels_last or dtype == torch.bfloat16


def test_a_schedule_goes_on_where_cudnn_has_not_the_algorithm() -> None:
    x, weight = torch.randn(2, 4, 9, 9, device=CUDA), torch.randn(4, 4, 3, 3, device=CUDA)
    arguments = (x, weight, None, [2, 2], [1, 1], [1, 1], 1, False, "winograd")  # knows no strides
    assert unless_refused(registered.cudnn_convolution, "winograd", *arguments[:-1]) is None
    made = resolve("monet_like.cudnn_convolution.default")(*arguments)
    assert close(made, aten.convolution(x.double(), weight.double(), None, *arguments[3:6], False, [0, 0], 1), "gemm")


def test_the_workspace_is_pytorchs() -> None:
    """Winograd not fused writes the transformed image out: more than the image, and all of it counted."""
    x, weight = torch.randn(32, 64, 56, 56, device=CUDA), torch.randn(8, 64, 3, 3, device=CUDA)

    def run(algorithm: str) -> int:
        rest = ([1, 1], [1, 1], [1, 1], 1, False, algorithm)
        return allocated_peak(lambda: registered.cudnn_convolution(x, weight, None, *rest), CUDA)

    result = 4 * 32 * 8 * 56 * 56
    assert result <= run("implicit_gemm") < 2 * result
    assert run("winograd_nonfused") > 4 * 32 * 64 * 56 * 56


def test_sums_in_no_fixed_order_are_refused_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, weight = torch.randn(2, 4, 8, 8, device=CUDA), torch.randn(4, 4, 3, 3, device=CUDA)
    rest = ([1, 1], [1, 1], [1, 1], 1, False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with pytest.raises(RuntimeError, match=r"in no fixed order, and torch\.backends\.cudnn\.deterministic is set"):
        registered.cudnn_convolution_backward_input(grad, weight, grad.shape, *rest, "0")
    registered.cudnn_convolution_backward_input(grad, weight, grad.shape, *rest, "1")


def test_opcheck() -> None:
    x, weight = torch.randn(2, 3, 6, 6, device=CUDA), torch.randn(4, 3, 3, 3, device=CUDA)
    torch.library.opcheck(
        registered.cudnn_convolution.default, (x, weight, None, [1, 1], [1, 1], [1, 1], 1, False, "implicit_gemm")
    )


class Both(nn.Module):
    """Convolutions, then attention over their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, groups=2), nn.ReLU()
        )
        self.attends = Attends(causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attends(self.images(x).flatten(2).transpose(1, 2))


def on_gpu(dtype: torch.dtype, layout: Any) -> tuple[nn.Module, torch.Tensor, Captured]:
    model = Both().to(CUDA, dtype).to(memory_format=layout)
    x = torch.randn(4, 3, 20, 20, device=CUDA, dtype=dtype).to(memory_format=layout)
    return model, x, admitted(capture(model, (x,)), MODE)


def test_programs_are_the_same_as_without_a_gpu() -> None:
    of = on_gpu(torch.float32, FORMATS[0])[2]
    there = captured(Both(), 4, 3, 20, 20)
    assert [task.name for task in there.program.every_task()] == [task.name for task in of.program.every_task()]
    assert there.program.fingerprint == of.program.fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", FORMATS)
def test_any_schedule_gives_what_keeping_all_gives(dtype: torch.dtype, layout: Any) -> None:
    """Whatever runs here: outputs and gradients agree to rounding, and the fastest plan is one of these."""
    model, x, of = on_gpu(dtype, layout)
    costs, _ = measured_costs(Request(model, ((x,), {}), MODE, profile_batch=4), of, CUDA)
    left = without_refused(of.program, costs)
    assert any(cost != REFUSED for t in of.program.every_task() if t.word == "algorithms" for cost in [costs[t.cost]])
    part = of.program if left is None else left.program
    schedules = [store_all(part), *(random_schedule(part, seed, drop=0.6, others=0.8) for seed in range(4))]
    if left is not None:
        schedules = [left.whole(schedule) for schedule in schedules]
    schedules.append(plan(of.program, costs, 2**34, strategy="heuristic").schedule)
    outcomes = []
    for schedule in schedules:
        record = record_for(of, schedule, MODE, (model, (x,), {}))
        wrapped = ScheduleWrapper(twin(model), record, example=((x,), {}), captured=of)
        result = wrapped(x)
        result.float().square().mean().backward()
        outcomes.append([result.detach(), *(p.grad for p in wrapped.parameters())])
    for other in outcomes[1:]:
        for one, another in zip(outcomes[0], other, strict=True):
            allowed = TRANSFORMS[dtype] * max(float(one.float().abs().max()), 1e-6)
            assert float((one.float() - another.float()).abs().max()) <= allowed
