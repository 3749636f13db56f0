"""CUDA graphs that nobody has asked for: used where they fit, make the same bits and are faster; on a CPU's twin."""

import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from graph_twin import TwinRecorder, twin_graphs
from test_cuda_graphs import compared, gradients, pair, planned
from torch import nn
from trainers import STEPS, called, loss_of

import monet_like
from monet_like.capture.example_inputs import Example
from monet_like.profile.launches import launches_of
from monet_like.replay.graphs import model as graphs_of_models
from monet_like.replay.graphs import trial
from monet_like.replay.graphs.copies import Tensors
from monet_like.replay.graphs.model import WARM_UP, ModelGraphs
from monet_like.replay.graphs.recorder import Replay
from monet_like.replay.graphs.step import _Parts
from monet_like.replay.graphs.trial import pool_bytes, too_large
from monet_like.replay.wrapper import ScheduleWrapper

WITHOUT = "training steps of a form run without CUDA graphs, and compute the same: "


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged about graphs."""
    caplog.set_level(logging.INFO, "monet_like")
    return lambda: [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Who has not asked for graphs is not warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def tried(recorder: TwinRecorder, numbers: range = range(STEPS)) -> tuple[ScheduleWrapper, ModelGraphs]:
    """A model after so many steps, which are plain PyTorch's to the bit."""
    plain, graphed, _ = pair()
    graphs = graphed._graphs = twin_graphs(recorder, always=False)
    compared(plain, graphed, numbers)
    return graphed, graphs


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each step without graphs that is no call's."""
    runs: list[int] = []
    run = _Parts.run

    def counted(parts: _Parts, gradients: Any) -> Iterator[Tensors]:
        runs.append(len(gradients))
        return run(parts, gradients)

    monkeypatch.setattr(_Parts, "run", counted)
    return runs


def test_graphs_are_used_where_they_are_faster(told: Callable[[], list[str]], ordinary: list[int]) -> None:
    """Five steps a window and three windows; one more without graphs before, and one replay."""
    recorder = TwinRecorder()
    recorder.pool_bytes = 3 * 2**20
    graphed, graphs = tried(recorder)
    assert (graphs.captures, graphs.replayed) == (1, STEPS - WARM_UP)
    (kept,) = graphed._kept
    count = 1 + len(kept.step.segments)
    assert recorder.recorded == count
    assert recorder.windows == [0, 0, 0, 0, count, *[5 * count] * 3]
    assert recorder.replayed == count * (16 + graphs.replayed)
    assert len(ordinary) == 16
    assert told() == [
        "training steps of a form are replayed as CUDA graphs: 20.0 ms with them, 40.0 ms without; they hold 3.0 MB"
    ]


@pytest.mark.parametrize(("share", "used"), [(0.969, True), (0.971, False), (1.5, False)])
def test_graphs_that_are_hardly_faster_are_not_used(
    share: float, used: bool, told: Callable[[], list[str]], ordinary: list[int]
) -> None:
    recorder = TwinRecorder()
    recorder.takes = 2.0, 2.0 * share  # seconds: one window each
    _, graphs = tried(recorder, range(2 * STEPS))
    assert graphs.captures == 1
    assert bool(graphs.replayed) is used
    assert (len(ordinary), len(recorder.windows)) == (6, 4)
    (said,) = told()
    assert said.startswith(WITHOUT + "a step takes ") is not used
    assert graphs._graphs is None or used  # its memory is free


class Other(TwinRecorder):
    """Replays of one part do something else once more."""

    def __init__(self, part: int, change: Callable[[Tensors], object]) -> None:
        super().__init__()
        self.part, self.change = part, change

    def record(self, function: Callable[[], Tensors]) -> Replay:
        replay, changes = super().record(function), self.recorded == self.part

        def other() -> Tensors:
            found = replay()
            if changes:
                self.change(found)
            return found

        return other


def flipped(found: Tensors) -> None:
    """The last bit of one number, in the storage of the first tensor."""
    tensor = next(tensor for tensor in found if tensor is not None)
    with torch.no_grad():
        tensor.view(torch.int32).reshape(-1)[:1] ^= 1 if tensor.is_contiguous() else 0
        if not tensor.is_contiguous():
            tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, 9e9)))


@pytest.mark.parametrize("part", [1, 2, -1])
def test_graphs_that_make_other_bits_are_not_used(part: int, told: Callable[[], list[str]]) -> None:
    """In a result, and in a gradient of the first or the last segment."""
    (kept,) = pair()[1]._kept
    recorder = Other(part if part > 0 else 1 + len(kept.step.segments), flipped)
    _, graphs = tried(recorder)
    assert (graphs.captures, graphs.replayed, recorder.windows) == (1, 0, [0, 0, 0, 0])
    assert told() == [WITHOUT + "they make other bits; some kernels add in another order each time"]


@pytest.mark.parametrize("what", ["a buffer", "the generator"])
def test_graphs_that_change_something_else_are_not_used(what: str, told: Callable[[], list[str]]) -> None:
    plain, graphed, _ = pair()

    def change(_: Tensors) -> None:
        if what == "a buffer":
            graphed.norm.running_mean += 1
        else:
            torch.rand(1)

    graphs = graphed._graphs = twin_graphs(Other(1, change), always=False)
    compared(plain, graphed, range(STEPS))
    assert (graphs.captures, graphs.replayed) == (1, 0)
    assert len(told()) == 1 and "other bits" in told()[0]


def test_graphs_fit_where_the_budget_and_the_device_have_room_for_the_pool_beside_a_step() -> None:
    """By a byte. A pool: the step's tensors without parameters, buffers, inputs and the optimizer's state."""
    model, record, captured = planned()
    adam = dataclasses.replace(record, optimizer_bytes=1000, peak_bytes=record.peak_bytes + 1000)
    example: Example = (torch.zeros(4, 3, 8, 8),), {}
    (kept,) = ScheduleWrapper(copy.deepcopy(model), adam, example=example, captured=captured)._kept
    step = kept.step
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + 4 * 3 * 8 * 8 * 4
    pool = pool_bytes(step)
    assert pool == record.peak_bytes - weights > 0
    copies = (4 * 3 * 8 * 8 + 4 * 4 + 4 * 2) * 4
    for budget, free, reason in (
        (adam.peak_bytes + pool + copies, 2 * (pool + copies), ""),
        (adam.peak_bytes + pool + copies - 1, 2**40, "the budget has"),
        (2**40, 2 * (pool + copies) - 1, "the GPU has"),
        (2**40, -1, "the GPU has 0 B more"),
    ):
        step.record = dataclasses.replace(adam, budget_bytes=budget)
        found = too_large(step, pool, free)
        assert reason in found and bool(reason) == bool(found), found
    step.record = dataclasses.replace(adam, peak_bytes=0)
    assert too_large(step, 0, 2**40) == "no plan says how much memory they need"


@pytest.mark.parametrize("told_when", ["before", "after"])
def test_graphs_without_room_are_not_used(told_when: str, told: Callable[[], list[str]], ordinary: list[int]) -> None:
    """Nothing is tried if the plan says so; the graphs are given back if the allocator has taken more."""
    recorder = TwinRecorder()
    recorder.pool_bytes, recorder.free = 2**21, 0 if told_when == "before" else 2**21
    graphed, graphs = tried(recorder, range(2 * STEPS))
    (kept,) = graphed._kept
    assert recorder.beside == pool_bytes(kept.step) > 0
    assert (graphs.captures, graphs.replayed) == (int(told_when == "after"), 0)
    assert (len(ordinary), recorder.replayed) == ((0, 0) if told_when == "before" else (16, 0))
    (said,) = told()
    assert said.startswith(WITHOUT + "they need ") and "the GPU has" in said


class Failing(TwinRecorder):
    """A recorder, a clock or a question about memory that fails."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _may_fail(self, where: str) -> None:
        if where == self.where:
            raise torch.OutOfMemoryError(f"out of memory in {where}")

    def record(self, function: Callable[[], Tensors]) -> Replay:
        if self.recorded == 2:
            self._may_fail("the capture")
        replay = super().record(function)

        def failing() -> Tensors:
            self._may_fail("a replay")
            return replay()

        return failing

    def seconds(self) -> float:
        if len(self.windows) == 2:
            self._may_fail("the clock")
        return super().seconds()

    def free_bytes(self, beside: int) -> int:
        self._may_fail("free_bytes")
        return super().free_bytes(beside)


@pytest.mark.parametrize("where", ["the capture", "a replay", "the clock", "free_bytes"])
def test_a_trial_that_fails_ends_no_run(where: str, told: Callable[[], list[str]]) -> None:
    _, graphs = tried(Failing(where))
    assert (graphs.replayed, graphs._graphs) == (0, None)
    assert told() == [
        "training steps run without CUDA graphs, and compute the same: OutOfMemoryError: out of memory in " + where
    ]


def test_nothing_of_the_callers_sees_the_trial() -> None:
    """No hook of a parameter or a module, no gradient, no version, and no mode that sees operators."""
    plain, graphed, _ = pair()
    graphs = graphed._graphs = twin_graphs(recorder := TwinRecorder(), always=False)
    seen: list[list[str]] = [[], []]
    for model, found in zip((plain, graphed), seen, strict=True):
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name, found=found: found.append(name))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, found=found: found.append(name + ".grad"))
    for number in range(WARM_UP):
        for model in (plain, graphed):
            loss_of(called(model, number)).backward()
    with Dispatched():
        compared(plain, graphed, range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        compared(plain, graphed, range(2))
    assert (graphs.captures, recorder.windows) == (0, [])
    assert graphs.why_not == "the call is captured by somebody else, or modes or inputs are others"
    for model in (plain, graphed):
        model.zero_grad(set_to_none=False)
    before = [(p, p.grad, p.grad._version) for p in graphed.parameters() if p.grad is not None]
    changes = []
    for number in range(2):  # the second call is one without a trial
        versions = [t._version for t in (*graphed.parameters(), *graphed.buffers())]
        results = [called(model, number) for model in (plain, graphed)]
        now = [t._version for t in (*graphed.parameters(), *graphed.buffers())]
        changes.append([after - was for was, after in zip(versions, now, strict=True)])
        assert (graphs.captures, graphs.replayed) == (1, 1 + number)
        assert before == [(p, p.grad, p.grad._version) for p in graphed.parameters() if p.grad is not None]
        assert sorted(seen[0]) == sorted(seen[1])
        if number == 0:
            del results
    assert changes[0] == changes[1]
    for result in results:
        loss_of(result).backward()
    assert all(map(torch.equal, gradients(plain), gradients(graphed)))
    assert sorted(seen[0]) == sorted(seen[1])


def test_the_reducer_of_distributed_data_parallel_sees_no_trial(tmp_path: Path) -> None:
    plain, graphed, _ = pair()
    graphs = graphed._graphs = twin_graphs(TwinRecorder(), always=False)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        sent: list[int] = []

        def send(_: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sent.append(bucket.buffer().numel())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model = nn.parallel.DistributedDataParallel(graphed)
        model.register_comm_hook(None, send)
        model.images = plain.images  # type: ignore[assignment]
        for number in range(STEPS):
            for each in (plain, model):
                each.zero_grad()
                loss_of(called(each, number)).backward()
            assert all(map(torch.equal, gradients(plain), gradients(model)))
        assert sum(sent) == STEPS * sum(p.numel() for p in plain.parameters())
        assert graphs.replayed == STEPS - WARM_UP
    finally:
        torch.distributed.destroy_process_group()


def test_a_form_is_tried_once() -> None:
    """Where its parameters have moved it is captured anew, without a trial."""
    plain, graphed, _ = pair()
    recorder = TwinRecorder()
    graphs = graphed._graphs = twin_graphs(recorder, always=False)
    compared(plain, graphed, range(WARM_UP + 1))
    readings = len(recorder.windows)
    for model in (plain, graphed):
        model.scale.data = model.scale.data.clone()
    compared(plain, graphed, range(WARM_UP + 2))
    assert (graphs.captures, len(recorder.windows)) == (2, readings)
    assert graphs.replayed == 3


def test_by_a_plan_that_knows_the_times_graphs_are_tried_only_where_the_host_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]], ordinary: list[int]
) -> None:
    gpu = "cuda: a card"
    monkeypatch.setattr(trial, "device_name", lambda device: gpu)
    model, record, captured = planned()
    calls = sum(
        len(task.calls)
        for stage in (
            [captured.program.tasks[i] for i in record.schedule.forward],
            *([captured.program.tasks[i] for i in again] for again in record.schedule.again),
            [slot[way] for slot, way in zip(captured.program.slots, record.schedule.ways, strict=True)],
        )
        for task in stage
    )
    clock = launches_of(captured.program, gpu, planned=True)
    assert clock is not None
    host = clock.start_seconds + calls * clock.call_seconds
    for device, seconds, fewer, tries in (
        (gpu, 1.001 * host, False, False),
        (gpu, 0.999 * host, False, True),
        (gpu, 1.001 * host, True, True),  # of smaller inputs no times are known
        ("cuda: another", 1.001 * host, False, True),
        (gpu, 0.0, False, True),
    ):
        measured = dataclasses.replace(record, device=device, device_seconds=seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graphed = ScheduleWrapper(copy.deepcopy(model), measured, captured=captured)
        graphs = graphed._graphs = twin_graphs(recorder := TwinRecorder(), always=False)
        ordinary.clear()
        compared(copy.deepcopy(model), graphed, range(STEPS), fewer=fewer)
        assert bool(graphs.replayed) is bool(ordinary) is tries, (device, seconds)
        assert tries or (recorder.beside, recorder.windows) == (-1, [])
    assert sum("and not for the host" in said for said in told()) == 1


def test_steps_that_graphs_cannot_have_are_told_in_the_log(told: Callable[[], list[str]]) -> None:
    model, record, captured = planned()
    graphed = ScheduleWrapper(copy.deepcopy(model), record, captured=captured)
    graphs = graphed._graphs = twin_graphs(TwinRecorder(), always=False)
    (kept,) = graphed._kept
    kept.step.may_end = True
    compared(copy.deepcopy(model), graphed, range(STEPS))
    assert graphs.captures == 0
    assert told() == [WITHOUT + "its forward asks for values of tensors, or sets Python values"]


def test_placed_memory_takes_the_place_of_graphs() -> None:
    plain, graphed, _ = pair()
    recorder = TwinRecorder()
    graphs = graphed._graphs = twin_graphs(recorder, always=False)
    compared(plain, graphed, range(WARM_UP + 1))
    assert graphs.replayed == 1
    monet_like.place_memory(graphed)
    replayed = recorder.replayed
    compared(plain, graphed, range(STEPS))
    assert graphed._graphs is None
    assert recorder.replayed == replayed


def test_a_model_on_a_cpu_is_not_touched(monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a CPU has no graphs")

    for name in ("refusal", "unneeded", "Trial", "StepGraphs", "GraphedCall", "CudaRecorder"):
        monkeypatch.setattr(graphs_of_models, name, never)
    monkeypatch.setattr(ModelGraphs, "_graphs_for", never)
    model, record, captured = planned()
    wrapped = ScheduleWrapper(copy.deepcopy(model), record, captured=captured)
    assert isinstance(wrapped._graphs, ModelGraphs)
    before = dict(vars(wrapped._graphs))
    compared(copy.deepcopy(model), wrapped, range(STEPS))
    assert vars(wrapped._graphs) == before
    assert told() == []


def test_none_are_tried_where_a_capture_that_fails_would_end_the_process(
    told: Callable[[], list[str]], ordinary: list[int]
) -> None:
    recorder = TwinRecorder()
    recorder.fails_safely = False
    _, graphs = tried(recorder)
    assert (graphs.captures, recorder.recorded, ordinary) == (0, 0, [])
    assert told() == [WITHOUT + "with this PyTorch a capture that fails would end the process"]
