"""Schedules compiled by Inductor: equal to plain PyTorch up to rounding, in the schedule's order, within its peak."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from replays import LOSS_BYTES, costs_of, record_for
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import Outcome, run, twin

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.errors import UsageError
from monet_like.ir.program import Call, Ref, Task
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import find_start
from monet_like.replay.fusion import _Fuser, compile_function, runs_of
from monet_like.replay.fusion_order import Level
from monet_like.replay.training_step import CompiledStep
from monet_like.replay.verify.comparison import compare
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.runtime.codegen import Block
from monet_like.variants import admitted

#: Relative 2-norm, float32: sums in another order, and what they do to what follows.
TOLERANCE = 1e-5


class Layer(nn.Module):
    """Norm, linear layer, GELU written out, dropout, residual."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x))
        y = 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.045 * y.pow(3))))
        return x + self.dropout(y)


class Images(nn.Module):
    """Convolutions with batch norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(self.one(x)))
        return torch.relu(x + self.second(self.two(y)))


def layers(drop: float = 0.0, count: int = 4) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(64, drop) for _ in range(count))).train(), torch.randn(512, 64)


def captured_for(model: nn.Module, x: torch.Tensor, mode: str = "normal") -> Captured:
    return admitted(capture(model, (x,)), mode)


def wrapped(
    model: nn.Module, x: torch.Tensor, captured: Captured, schedule: Schedule, budget: int, mode: str = "normal"
) -> ScheduleWrapper:
    record = replace(record_for(captured, schedule, mode, (model, (x,), {})), budget_bytes=budget)
    return ScheduleWrapper(twin(model), record, example=((x,), {}), captured=captured, backend="inductor")


def step_of(model: ScheduleWrapper) -> CompiledStep:
    (step,) = (each.step for each in model._kept)
    assert step.fused is not None
    return step


def source_of(model: ScheduleWrapper) -> str:
    """The generated code of the forward and of all segments."""
    step = step_of(model)
    return step.forward.__doc__ + step.backward.__doc__


def peak_of(captured: Captured, outcome: Outcome) -> int:
    return captured.program.resident_bytes + outcome.rise_bytes - LOSS_BYTES


def worst(one: Outcome, other: Outcome) -> float:
    return max(one.differences(other).values())


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    (verdict,) = compare({"output": one}, {"output": other})
    return verdict.error


def train(model: nn.Module, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Outputs of some steps of SGD from a fixed seed."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, torch.Tensor, Captured, Schedule, int]:
    """Layers with a schedule for 60 % of the peak of keeping everything, and its predicted peak."""
    model, x = layers()
    captured = captured_for(model, x, "inplace_normal")
    costs = costs_of(captured, (model, (x,), {}), "inplace_normal", timed=False)
    full = simulate(captured.program, store_all(captured.program), costs).peak_bytes
    schedule = find_start(Instance(captured.program, costs), int(0.6 * full), evaluations=2000)
    assert schedule is not None
    assert schedule.rerun_count
    return model, x, captured, schedule, simulate(captured.program, schedule, costs).peak_bytes


@pytest.mark.slow(rare=1)
def test_reruns_run_again_and_the_measured_peak_is_within_the_predicted_one(planned: tuple) -> None:
    model, x, captured, schedule, peak = planned
    plain = run(twin(model), (x,), {}, measured=True)
    lean = wrapped(model, x, captured, schedule, peak, "inplace_normal")
    fused = step_of(lean).fused
    assert "op_inductor_same" in source_of(lean)  # gradients that meet are added in place
    outcome = run(lean, (x,), {}, measured=True)
    assert 0 < worst(plain, outcome) <= TOLERANCE
    assert peak_of(captured, outcome) <= peak
    assert fused.compiled > fused.operators // 3
    assert fused.distinct < fused.pieces  # equal layers are compiled once
    keeping = wrapped(model, x, captured, store_all(captured.program), 0, "inplace_normal")
    assert outcome.rise_bytes < 0.75 * run(keeping, (x,), {}, measured=True).rise_bytes


@pytest.mark.slow
def test_dropout_has_the_masks_of_plain_pytorch() -> None:
    model, x = layers(drop=0.3, count=2)
    model.append(nn.Dropout(0.5))  # whose mask can be seen in the output
    captured = captured_for(model, x)
    program = captured.program
    draws = tuple(i for i, t in enumerate(program.tasks) if t.runs == "again" and "rng" in t.calls[0].op)
    assert len(draws) == 3
    schedule = store_all(program)
    first, *rest = schedule.again
    schedule = replace(schedule, again=(tuple(sorted({*first, *draws})), *rest))  # all are drawn again
    replay = wrapped(model, x, captured, schedule, 10**9)
    plain = twin(model)
    for expected, found in zip(train(plain, x, 3), train(replay, x, 3), strict=True):
        assert torch.equal(expected == 0, found == 0)
        assert difference(expected, found) <= TOLERANCE
    for parameter, other in zip(plain.parameters(), replay.parameters(), strict=True):
        assert difference(parameter.detach(), other.detach()) <= TOLERANCE


@pytest.mark.slow
def test_batch_norm_moves_its_statistics_once_a_step() -> None:
    torch.manual_seed(0)
    model, x = Images().train(), torch.randn(4, 8, 16, 16)
    captured = captured_for(model, x)
    replay = wrapped(model, x, captured, store_all(captured.program), 10**9)
    assert "batch_norm" not in source_of(replay)  # all of it is in pieces
    plain = twin(model)
    for expected, found in zip(train(plain, x, 3), train(replay, x, 3), strict=True):
        assert difference(expected, found) <= TOLERANCE
    for name, buffer in plain.named_buffers():
        assert difference(buffer, dict(replay.named_buffers())[name]) <= TOLERANCE, name
    assert int(replay.first.num_batches_tracked) == 3


@pytest.mark.slow
def test_statistics_that_the_step_itself_makes_are_moved_before_they_are_read() -> None:
    """Instance norm's running statistics: copies for every image, of which the mean is taken."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Tanh()).train(), torch.randn(3, 4, 8)
    model.append(nn.Conv1d(4, 4, 1))
    captured = captured_for(model, x)
    replay, plain = wrapped(model, x, captured, store_all(captured.program), 10**9), twin(model)
    for expected, found in zip(train(plain, x, 3), train(replay, x, 3), strict=True):
        assert difference(expected, found) <= TOLERANCE
    for name, buffer in plain.named_buffers():
        assert difference(buffer, dict(replay.named_buffers())[name]) <= TOLERANCE, name


class Called(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op.namespace)
        return op(*args, **(kwargs or {}))


@pytest.mark.slow
def test_own_kernels_are_inlined_as_their_twins() -> None:
    ops = torch.ops.monet_like

    def function(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        y, rstd = ops.rms_norm(2 * x, weight, 1, 1e-6, False, torch.float32)
        gate, up = ops.swiglu_backward(ops.swiglu(y, y + 1), y, x)
        return [ops.rms_norm_backward(gate, x, weight, rstd, up, 1)[0]]

    torch.manual_seed(0)
    given = [torch.randn(64, 32), torch.randn(32)]
    compiled = compile_function(function, given, [False, False])
    with Called() as eager:
        (expected,) = function(*given)
    with Called() as called:
        (found,) = compiled(list(given))
    assert difference(expected, found) <= TOLERANCE
    assert "monet_like" in eager.names and "monet_like" not in called.names


class Parallel(nn.Module):
    """Branches whose activations die one after the other: in one graph all of them would exist at once."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.last = nn.Linear(64, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [branch(x) for branch in self.branches]
        scaled = [(y * 2.0 + 1.0) * 3.0 for y in made]
        return torch.stack([self.last(y) for y in scaled]).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("roomy", [False, True])
def test_pieces_are_cut_where_they_would_exceed_the_peak(roomy: bool) -> None:
    torch.manual_seed(0)
    model, x = Parallel().train(), torch.randn(4096, 64)
    captured = captured_for(model, x)
    example = (model, (x,), {})
    costs = costs_of(captured, example, "normal", timed=False)
    peak = simulate(captured.program, store_all(captured.program), costs).peak_bytes
    replay = wrapped(model, x, captured, store_all(captured.program), 10**9 if roomy else peak)
    outcome = run(replay, (x,), {}, measured=True)
    assert worst(run(twin(model), (x,), {}), outcome) <= TOLERANCE
    assert (peak_of(captured, outcome) <= peak) is not roomy
    assert step_of(replay).fused.pieces == (2 if roomy else 8)


def test_without_room_nothing_is_compiled() -> None:
    model, x = Images().train(), torch.randn(4, 8, 16, 16)
    captured = captured_for(model, x, "conv_normal")  # in which the gradients of ReLU and batch norm are one task
    tasks = tuple(way for way, *_ in captured.program.slots)
    fused = _Fuser(captured, 1, {}).run([Block((), tasks)], [Level(1, 1)] * len(tasks), lambda *_: None)
    assert fused.blocks[0].tasks == tasks
    assert (fused.compiled, fused.pieces, fused.distinct) == (0, 0, 0)
    assert fused.operators > len(tasks)


def test_a_value_and_its_rerun_are_never_in_one_piece() -> None:
    def task(name: str, reads: int, writes: int, op: str = "aten.relu.default") -> Task:
        return Task(name, (reads,), (writes,), calls=(Call(op, (Ref(reads),), (), (Ref(writes),)),))

    first, second = task("first", 0, 1), task("second", 1, 2)
    mm = task("product", 2, 3, "aten.mm.default")
    assert list(runs_of([first, second], [0, 0])) == [(0, 2)]
    assert list(runs_of([first, second], [1, 2])) == [(0, 1), (1, 2)]
    assert list(runs_of([first, second, first, second], [0] * 4)) == [(0, 2), (2, 4)]
    assert list(runs_of([second, first], [0, 0])) == [(0, 1), (1, 2)]  # what it has read is made anew
    assert list(runs_of([first, mm, second], [0, 1, 1])) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.slow
def test_a_smaller_batch_is_replayed_by_eager_and_copies_keep_the_backend() -> None:
    model, x = layers(count=1)
    captured = captured_for(model, x)
    replay = copy.deepcopy(wrapped(model, x, captured, store_all(captured.program), 10**9))
    plain = run(twin(model), (x[:100],), {})
    assert worst(plain, run(replay, (x[:100],), {})) == 0.0
    assert replay.backend == "inductor"
    assert next(iter(replay._kept)).step.fused is None


def test_an_unknown_backend_is_refused() -> None:
    model, x = layers(count=1)
    captured = captured_for(model, x)
    record = record_for(captured, store_all(captured.program), "normal", (model, (x,), {}))
    with pytest.raises(UsageError, match=r"backend 'tvm' is unknown; give eager or inductor"):
        ScheduleWrapper(model, record, backend="tvm")


def test_a_missing_compiler_is_said_at_once() -> None:
    from torch._inductor import config

    model, x = layers(count=1)
    captured = captured_for(model, x)
    record = record_for(captured, store_all(captured.program), "normal", (model, (x,), {}))
    make = partial(ScheduleWrapper, model, record, backend="inductor")
    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(
            UsageError, match=r"needs a C\+\+ compiler, and none runs here \(tried: no-such-compiler\); install"
        ),
    ):
        make()
