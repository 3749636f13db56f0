"""Batch norm by cuDNN: chosen as PyTorch chooses on a GPU, counted, run again by cuDNN alone, and ours admitted by
``conv``.

No GPU is needed: captures are of one that is absent, and where steps run, a stand-in on the CPU has cuDNN's arguments
and results. Its gradient takes the batch's means from the reserve, so no other reserve gives the right one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from cudnn_setting import cudnn_enabled
from replays import LOSS_BYTES, costs_of, replayed, worst
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from training import run, twin

from monet_like.capture.captured import Captured
from monet_like.capture.lower import eager_results
from monet_like.capture.lower import rules as lowering_rules
from monet_like.capture.lower.step import capture
from monet_like.ir.program import Cost, Program, Task
from monet_like.ir.simulate import simulate
from monet_like.plan.baseline import store_all
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import find_start
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.runtime import batch_norm, operators
from monet_like.runtime.batch_norm import CUDNN, CUDNN_BACKWARD, NATIVE, NATIVE_BACKWARD, by_cudnn
from monet_like.variants import admitted

CUDA = torch.device("cuda", 0)
FULL = "inplace_conv_multiway_newnode"
_FLOAT, _HALF, _BF16, _DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
NORMS = 7


class Net(nn.Module):
    """Batch norms with ReLU, with an addition and ReLU, and alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first, *others, self.last = (nn.BatchNorm2d(width) for _ in range(NORMS))
        self.between = nn.ModuleList(others)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.one(x)).relu()
        for norm in self.between:
            x = (norm(self.two(x)) + x).relu()
        return self.last(self.two(x)).square().mean((2, 3))


def example() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 3, 16, 16),), {}


def calls_of(tasks: Program | list[Task]) -> Counter[str]:
    """How many calls there are of each of PyTorch's batch norms."""
    found = tasks.every_task() if isinstance(tasks, Program) else tasks
    return Counter(call.op for task in found for call in task.calls if "batch_norm" in call.op and "aten" in call.op)


# The choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch._C._has_cudnn, reason="PyTorch is built without cuDNN")
def test_the_rule_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a PyTorch without CUDA decides for a GPU is what one with CUDA asks for."""
    dtypes = [(x, w) for x, w in itertools.product((_FLOAT, _HALF, _BF16, _DOUBLE), repeat=2)]
    shapes = [(4, 3), (4, 3, 5), (4, 3, 5, 5), (65535, 1, 1), (65536, 1, 1), (880801, 1, 1), (880802, 1, 1)]
    shapes += [(2, 2**15 - 1, 2**15), (2, 2**15, 2**15)]
    chosen = Counter[bool]()
    for (dtype, of_weight), shape, training, enabled in itertools.product(dtypes, shapes, (True, False), (True, False)):
        x = torch.empty(shape, dtype=dtype, device="meta")
        weight = torch.empty(shape[1], dtype=of_weight, device="meta")
        with cudnn_enabled(enabled):
            asked = by_cudnn(CUDA, x, weight, weight, weight, weight, training, 1e-5)
            with monkeypatch.context() as patch:
                patch.setattr(torch._C, "_has_cudnn", False)
                assert by_cudnn(CUDA, x, weight, weight, weight, weight, training, 1e-5) == asked
        chosen[asked] += 1
    assert min(chosen[True], chosen[False]) > 50


def test_without_parameters_or_on_a_cpu_it_is_not_cudnn() -> None:
    x, weight = torch.empty(4, 3, 5, 5, device="meta"), torch.empty(3, device="meta")
    assert by_cudnn(CUDA, x, weight, weight, None, None, True, 1e-5)
    assert not by_cudnn(CUDA, x, weight, weight, None, None, False, 1e-5)
    assert not by_cudnn(CUDA, x, None, weight, weight, weight, True, 1e-5)
    assert not by_cudnn(CUDA, x, weight, None, weight, weight, True, 1e-5)
    assert not by_cudnn(torch.device("cpu"), x, weight, weight, weight, weight, True, 1e-5)


def test_what_cudnn_takes_as_it_lies_is_in_rows_or_channels_last() -> None:
    """As its operator checks it, extents of 1 included."""
    copied = 0
    for shape in itertools.product((1, 2, 3), repeat=4):
        for order in itertools.permutations(range(4)):
            x = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
            taken = batch_norm.as_cudnn_takes(x)
            assert taken.is_contiguous(memory_format=suggest_memory_format(taken))
            copied += taken is not x
            assert taken is x or not x.is_contiguous(memory_format=suggest_memory_format(x))
    assert copied


# Captures -----------------------------------------------------------------------------------------------------------


def absent(model: nn.Module, *shape: int, autocast: torch.dtype | None = None) -> Captured:
    with torch.autocast("cpu", autocast or _BF16, enabled=autocast is not None):
        return capture(model, (torch.randn(shape, dtype=next(model.parameters()).dtype),), target=CUDA)


_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is here, which has a reserve")


@_NO_GPU
@pytest.mark.parametrize(
    ("norm", "dtype", "autocast", "cudnn"),
    [
        (nn.BatchNorm2d(4), _FLOAT, None, True),
        (nn.BatchNorm2d(4), _HALF, None, False),
        (nn.BatchNorm2d(4), _BF16, None, False),
        (nn.BatchNorm2d(4), _FLOAT, _HALF, True),
        (nn.BatchNorm2d(4), _FLOAT, _BF16, False),
        (nn.BatchNorm2d(4, affine=False), _FLOAT, None, False),
        (nn.BatchNorm2d(4, track_running_stats=False), _FLOAT, None, True),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), _FLOAT, None, True),
    ],
)
def test_a_capture_has_the_operator_that_pytorch_takes(
    norm: nn.Module, dtype: torch.dtype, autocast: torch.dtype | None, cudnn: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()).to(dtype).train()
    captured = absent(model, 2, 3, 8, 8, autocast=autocast)
    found = calls_of(captured.program)
    assert (found[CUDNN] > 0, found[CUDNN_BACKWARD]) == (cudnn, int(cudnn))
    assert found[NATIVE] == 0 or not cudnn
    assert found[NATIVE_BACKWARD] == int(not cudnn)
    reserves = [v for v in captured.program.values if v.name.endswith(".reserve")]
    assert [(v.spec, v.bytes) for v in reserves] == [("uint8[0]", 0)] * cudnn


@_NO_GPU
def test_without_cudnn_a_capture_has_atens_own() -> None:
    with cudnn_enabled(False):
        found = calls_of(absent(Net(), 2, 3, 8, 8).program)
    assert found[CUDNN] == found[CUDNN_BACKWARD] == 0
    assert found[NATIVE_BACKWARD] == NORMS


@_NO_GPU
def test_of_a_model_in_eval_mode_only_the_forward_is_cudnns() -> None:
    captured = absent(Net().eval(), 2, 3, 8, 8)
    assert calls_of(captured.program) == {CUDNN: NORMS, NATIVE_BACKWARD: NORMS}
    assert not any(v.name.endswith(".reserve") for v in captured.program.values)


@_NO_GPU
def test_running_statistics_move_once_and_a_rerun_is_by_the_same_operator() -> None:
    program = absent(Net(), 2, 3, 8, 8).program
    tasks = [task for task in program.tasks if task.calls[-1].op == CUDNN]
    first, again = ([t for t in tasks if t.runs == runs] for runs in ("first", "again"))
    assert (len(first), len(again)) == (NORMS, NORMS)
    for one, other in zip(first, again, strict=True):
        (update,), (rerun,) = one.calls, other.calls
        assert None not in update.args
        assert update.args == (*rerun.args[:3], *update.args[3:5], *rerun.args[5:])
        assert rerun.args[3:5] == (None, None)
        assert (rerun.outs[0], rerun.outs[3]) == (update.outs[0], update.outs[3])
        assert rerun.outs[1:3] == (None, None)
        backward = next(c for s in program.slots for c in s[0].calls if c.args[-1] == update.outs[3])
        assert backward.op == CUDNN_BACKWARD
        x, _, weight, mean, var, save_mean, save_invstd, _, _ = backward.args
        assert (x, weight, mean, var, save_mean, save_invstd) == (*update.args[:2], None, None, *update.outs[1:3])


@pytest.mark.slow
@_NO_GPU
def test_what_rounds_otherwise_is_for_conv() -> None:
    raw = absent(Net(), 2, 3, 8, 8)
    captured = admitted(raw, FULL)
    ours = [t for t in captured.program.every_task() if any("monet_like.batch_norm" in c.op for c in t.calls)]
    assert {task.word for task in ours} == {"conv"}
    forms = {"batch_norm_clamp.train_in_vectors", "batch_norm_add_clamp.train_in_vectors", "batch_norm.apply"}
    assert forms <= {t.variant for t in ours}
    native = [t for t in captured.program.every_task() if calls_of([t])[NATIVE_BACKWARD]]
    assert {task.word for task in native} == {"conv"}
    reserves = {v for v, value in enumerate(captured.program.values) if value.name.endswith(".reserve")}
    assert all(reserves.isdisjoint((*task.reads, *task.writes)) for task in (*ours, *native))
    for mode in ("normal", "inplace_multiway_newnode"):
        program = admitted(raw, mode).program
        assert set(calls_of(program)) == {CUDNN, CUDNN_BACKWARD}
        assert not any("monet_like.batch_norm" in c.op for t in program.every_task() for c in t.calls)


@_NO_GPU
def test_estimates_price_its_forward_as_atens_and_count_an_unwanted_gradient() -> None:
    costs: dict[bool, dict[str, Cost]] = {}
    for enabled in (True, False):
        with cudnn_enabled(enabled):
            captured = absent(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), 64, 3, 64, 64)
            priced = roofline(captured, DEVICES["h100"])
            costs[enabled] = {t.name: priced[t.cost] for t in captured.program.every_task()}
    names = [name for name in costs[True] if "batch_norm" in name]
    assert len(names) == 3
    for name in names:
        of_cudnn, of_aten = costs[True][name].seconds, costs[False][name].seconds
        if "backward" in name:  # PyTorch's own kernel was slower where both were measured
            assert of_cudnn < of_aten < 2 * of_cudnn
        else:
            assert of_cudnn == pytest.approx(of_aten, rel=1e-3)
    unwanted = {name: cost.workspace_bytes for name, cost in costs[True].items() if cost.workspace_bytes}
    assert unwanted["native_batch_norm_backward"] == 64 * 3 * 64 * 64 * 4
    assert costs[False]["native_batch_norm_backward"].workspace_bytes == 0


# Steps, with a stand-in ---------------------------------------------------------------------------------------------


def _stand_in(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    if mean is None:
        made = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, *options)
    else:
        made = torch.native_batch_norm(x, weight, bias, mean, var, *options)
    return (*made, made[1].clone().view(torch.uint8))


def _stand_in_backward(
    x: Tensor, grad: Tensor, weight: Tensor, _: None, __: None, ___: Tensor, invstd: Tensor, eps: float, reserve: Tensor
) -> Any:
    mean = reserve.view(weight.dtype)
    return torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, eps, [True] * 3)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Captures of a CPU choose as on a GPU, and what they then call is the stand-in."""
    monkeypatch.setattr(eager_results, "by_cudnn", lambda device, *args: by_cudnn(CUDA, *args))
    monkeypatch.setattr(lowering_rules, "reserve_bytes", lambda x: x.shape[1] * x.element_size())
    monkeypatch.setitem(operators._OURS, CUDNN, _stand_in)
    monkeypatch.setitem(operators._OURS, CUDNN_BACKWARD, _stand_in_backward)
    operators.resolve.cache_clear()
    yield
    operators.resolve.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("mode", ["inplace_multiway_newnode", FULL])
def test_any_amount_of_recompute_gives_plain_pytorchs_values(mode: str) -> None:
    """To the bit without ``conv``; with it gradients that need no reserve are among them."""
    whole = example()
    plain = run(twin(whole[0]), whole[1], whole[2])
    captured = admitted(capture(*whole[:2]), mode)
    ran = Counter[str]()
    for seed in range(6):
        schedule = random_schedule(captured.program, seed=seed, drop=0.5, others=0.5)
        program = captured.program
        ran += calls_of([program.slots[slot][way] for slot, way in enumerate(schedule.ways)])
        ran.update(f"again {call.op}" for tasks in schedule.again for p in tasks for call in program.tasks[p].calls)
        difference = worst(plain, replayed(whole, captured, schedule, mode))
        assert difference <= (1e-5 if "conv" in mode else 0.0), seed
    assert ran[f"again {CUDNN}"]
    assert ran[CUDNN_BACKWARD]
    assert (ran[NATIVE_BACKWARD] > 0) == ("conv" in mode)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("mode", ["normal", FULL])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_planned_schedules_fit_and_count_the_reserve(mode: str, share: float) -> None:
    whole = example()
    plain = run(twin(whole[0]), whole[1], whole[2])
    captured = admitted(capture(*whole[:2]), mode)
    program = captured.program
    reserves = [value for value in program.values if value.name.endswith(".reserve")]
    assert [value.bytes for value in reserves] == [8 * 4] * NORMS
    costs = costs_of(captured, whole, mode, timed=False)
    budget = int(share * simulate(program, store_all(program), costs).peak_bytes)
    schedule = find_start(Instance(program, costs), budget, evaluations=300)
    assert schedule is not None
    report = simulate(program, schedule, costs)
    assert report.peak_bytes <= budget
    first = {program.tasks[p].variant for p in schedule.forward}
    assert share < 1 or any("train" in variant for variant in first) == (mode == FULL)  # these leave no reserve
    outcome = replayed(whole, captured, schedule, mode)
    assert worst(plain, outcome) <= (1e-5 if "conv" in mode else 0.0)
    assert program.resident_bytes + outcome.rise_bytes - LOSS_BYTES == report.peak_bytes


# Plans --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide() -> Captured:
    return admitted(absent(Net(32), 64, 3, 64, 64), FULL)


@pytest.mark.slow
@_NO_GPU
@pytest.mark.parametrize("faster", [1.0, 3.0])
def test_a_first_run_without_a_reserve_and_a_gradient_that_reads_it_are_never_in_one_plan(
    wide: Captured, faster: float
) -> None:
    """However much faster the gradient by cuDNN is."""
    program, priced = wide.program, roofline(wide, DEVICES["h100"])
    costs = {
        key: Cost(cost.seconds * (faster if NATIVE_BACKWARD.split(".")[1] in key else 1), cost.workspace_bytes)
        for key, cost in priced.items()
    }
    plain = simulate(program, store_all(program), costs)
    for share in (1.0, 0.6):
        schedule = find_start(Instance(program, costs), int(share * plain.peak_bytes), evaluations=2000)
        assert schedule is not None
        report = simulate(program, schedule, costs)  # refuses what reads a value that is not there
        assert report.peak_bytes <= share * plain.peak_bytes
        assert share < 1 or report.seconds < plain.seconds
