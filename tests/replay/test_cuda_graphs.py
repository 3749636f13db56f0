"""Steps that are replayed as graphs compute the same bits, whatever a trainer does; the graphs are a CPU twin's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trainers
from dispatched import Dispatched
from graph_twin import TwinRecorder, twin_graphs
from torch import nn
from trainers import STEPS, accumulated, called, gradients, images, loss_of, state

import monet_like
from monet_like.capture.captured import Captured
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.errors import UsageError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.job.job import Job
from monet_like.profile.devices import DEVICES
from monet_like.replay.graphs.copies import CopiesOut
from monet_like.replay.graphs.model import MOST_CAPTURES, TAKES_OVER, WARM_UP, ModelGraphs
from monet_like.replay.wrapper import ScheduleWrapper

CPU = torch.device("cpu")


class Net(nn.Module):
    """Convolutions, running statistics, random masks, and two results."""

    images = (4, 3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.3)
        self.last, self.scale = nn.Linear(8, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.first(x)).relu()
        x = self.drop(self.second(x).relu() + x)
        made = self.last(x.mean((2, 3))) * self.scale
        return made[:, :4], made[:, 4:]


@functools.cache
def planned(with_gradient: bool = False) -> tuple[Net, ScheduleRecord, Captured]:
    torch.manual_seed(0)
    model = Net()
    example = (images(model).requires_grad_(with_gradient),), {}
    request = Request(model, example, "inplace_multiway_newnode", strategy="heuristic")
    found = Job(request, CPU, Given(DEVICES["cpu"])).plan("90%")
    record = dataclasses.replace(found.record, budget_bytes=2**30)  # which has room for graphs, too
    return model, record, found.ready.captured


def pair(with_gradient: bool = False, *, always: bool = True) -> tuple[Net, ScheduleWrapper, ModelGraphs]:
    """A plain model, and the same with a schedule whose steps are replayed as graphs.

    Args:
        with_gradient: of the input.
        always: without a trial.
    """
    model, record, captured = planned(with_gradient)
    example = (images(model).requires_grad_(with_gradient),), {}
    wrapped = ScheduleWrapper(copy.deepcopy(model), record, example=example, captured=captured)
    wrapped._graphs = twin_graphs(TwinRecorder(), always=always)
    return copy.deepcopy(model), wrapped, wrapped._graphs


def with_an_optimizer(model: nn.Module) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for number in range(STEPS):
        loss = loss_of(called(model, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        yield from (loss.detach(), *state(model), torch.rand(1))


def results_written_into(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(STEPS):
        first, second = called(model, number)
        second.mul_(2)
        loss_of((first, second)).backward()
        yield from (first.detach(), second.detach(), *gradients(model))


def backwards_in_order(model: nn.Module) -> Iterator[torch.Tensor]:
    before = loss_of(called(model, 99))
    for number in range(STEPS):
        loss = loss_of(called(model, number))
        before.backward()
        yield from gradients(model)
        before = loss


def graph_retained(model: nn.Module) -> Iterator[torch.Tensor]:
    """Where it was not, plain PyTorch says that the graph was freed."""
    for number in range(STEPS):
        loss = loss_of(called(model, number))
        loss.backward(retain_graph=True)
        yield from gradients(model)
        loss.backward(retain_graph=number % 2 == 0)
        yield from gradients(model)
        if number % 2:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()


def one_result_alone(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(STEPS):
        called(model, number)[number % 2].square().sum().backward()
        yield from gradients(model)
        model.zero_grad()


def some_gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(STEPS):
        wanted = [list(model.parameters())[number % 4]]
        yield from torch.autograd.grad(loss_of(called(model, number)), wanted)


def parameters_moved(model: nn.Module) -> Iterator[torch.Tensor]:
    """Some get other memory: between steps, and between a forward and its backward."""
    for number in range(WARM_UP + 12):
        if number in (WARM_UP + 2, WARM_UP + 7):
            model.last.weight.data = model.last.weight.detach() * 1.5  # type: ignore[union-attr, operator]
        loss = loss_of(called(model, number))
        if number == WARM_UP + 1:
            model.scale.data = model.scale.detach() * 0.5  # type: ignore[union-attr, operator]
        loss.backward()
        yield from gradients(model)
        model.zero_grad()


def moved_by_a_hook(model: nn.Module) -> Iterator[torch.Tensor]:
    """While the backward runs, and what it will still read."""
    old = model.second.weight.data  # type: ignore[union-attr]

    def move(_: Any) -> None:
        model.second.weight.data = old * 2  # type: ignore[union-attr, operator]

    for number in range(STEPS):
        hook = model.last.weight.register_hook(move) if number == STEPS - 2 else None  # type: ignore[union-attr, operator]
        loss_of(called(model, number)).backward()
        if hook is not None:
            hook.remove()
        yield from (*gradients(model), old.clone())  # type: ignore[operator]


def written_in_hooks(model: nn.Module) -> Iterator[torch.Tensor]:
    """An optimizer's step for each parameter as soon as its gradient is there."""

    def step(given: torch.Tensor) -> None:
        assert given.grad is not None
        with torch.no_grad():
            given -= 0.1 * given.grad
        given.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        loss_of(called(model, number)).backward()
        yield from state(model)


def gradients_of_inputs(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(STEPS):
        torch.manual_seed(number)
        x = images(model, number).requires_grad_()
        loss_of(model(x)).backward()
        assert x.grad is not None
        yield from (x.grad, *gradients(model))


def eval_in_between(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(STEPS):
        results = called(model, number)
        model.eval()
        with torch.no_grad():
            yield from called(model, number)
        model.train()
        loss_of(results).backward()
        yield from gradients(model)


def changed_before_the_backward(model: nn.Module) -> Iterator[torch.Tensor]:
    """Autograd refuses it in both."""
    for number in range(STEPS):
        loss = loss_of(called(model, number))
        with torch.no_grad():
            model.second.weight.mul_(1.0)  # type: ignore[union-attr, operator]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    yield from state(model)


TRAINERS = [
    *trainers.TRAINERS, with_an_optimizer, results_written_into, backwards_in_order, graph_retained, one_result_alone,
    some_gradients, parameters_moved, moved_by_a_hook, written_in_hooks, gradients_of_inputs, eval_in_between,
    changed_before_the_backward,
]  # fmt: skip


@pytest.mark.parametrize("always", [True, False], ids=["always", "where_faster"])
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.__name__)
def test_whatever_the_trainer_does(trainer: Callable[[nn.Module], Iterator[torch.Tensor]], always: bool) -> None:
    plain, graphed, graphs = pair(trainer is gradients_of_inputs, always=always)
    wanted, found = [*trainer(plain)], [*trainer(graphed)]
    assert len(wanted) == len(found) > 0
    for number, (mine, theirs) in enumerate(zip(wanted, found, strict=True)):
        assert torch.equal(mine, theirs), number
    assert graphs.replayed > 0, graphs.why_not


def graphs_of(model: ScheduleWrapper, recorder: TwinRecorder) -> ModelGraphs:
    model._graphs = twin_graphs(recorder)
    return model._graphs


def test_a_step_is_one_graph_and_one_for_each_segment() -> None:
    _, graphed, _ = pair()
    recorder = TwinRecorder()
    graphs = graphs_of(graphed, recorder)
    assert [*with_an_optimizer(graphed)]
    (kept,) = graphed._kept
    count = 1 + len(kept.step.segments)
    assert count > 2
    assert (graphs.captures, recorder.recorded) == (1, count)
    assert graphs.replayed == STEPS - WARM_UP
    assert recorder.replayed == count * graphs.replayed


def test_the_graphs_are_free_after_the_backward_though_the_loss_is_held() -> None:
    _, graphed, graphs = pair()
    held = []
    for number in range(STEPS):
        held.append(loss_of(called(graphed, number)))
        held[-1].backward()
    assert graphs.replayed == STEPS - WARM_UP


def compared(plain: nn.Module, graphed: nn.Module, numbers: range, *, fewer: bool = False) -> None:
    for number in numbers:
        for model in (plain, graphed):
            model.zero_grad()
            loss_of(called(model, number, fewer=fewer)).backward()
        assert all(map(torch.equal, gradients(plain), gradients(graphed))), number
        assert all(map(torch.equal, state(plain), state(graphed))), number


def test_calls_that_graphs_do_not_serve_run_without() -> None:
    plain, graphed, _ = pair()
    recorder = TwinRecorder()
    graphs = graphs_of(graphed, recorder)
    compared(plain, graphed, range(WARM_UP + 2))
    assert (graphs.replayed, graphs.why_not) == (2, "")
    for place in ("another stream", None):
        recorder.place = place
        compared(plain, graphed, range(3))
        assert (graphs.replayed, graphs.why_not) == (2, "stream, modes or inputs are others")
    recorder.place = "a stream"
    with Dispatched():
        compared(plain, graphed, range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        compared(plain, graphed, range(3))
    recorder.alignment_bytes = 2**62
    compared(plain, graphed, range(3))
    recorder.alignment_bytes = 1
    assert graphs.replayed == 2
    compared(plain, graphed, range(3))
    assert graphs.replayed == 5


def test_the_backward_on_another_stream_runs_without() -> None:
    plain, graphed, _ = pair()
    recorder = TwinRecorder()
    graphs = graphs_of(graphed, recorder)
    for number in range(STEPS):
        losses = [loss_of(called(model, number)) for model in (plain, graphed)]
        recorder.place = "another stream"
        for loss in losses:
            loss.backward()
        recorder.place = "a stream"
        assert all(map(torch.equal, gradients(plain), gradients(graphed))), number
    assert graphs.replayed == STEPS - WARM_UP
    assert recorder.replayed == graphs.replayed  # the forwards


def test_a_setting_for_kernels_that_changes_has_graphs_of_its_own() -> None:
    plain, graphed, graphs = pair()
    compared(plain, graphed, range(WARM_UP + 1))
    torch.backends.cudnn.benchmark = True
    try:
        compared(plain, graphed, range(1))
        assert graphs.why_not == "settings of PyTorch for kernels have changed"
        compared(plain, graphed, range(WARM_UP))
        assert (graphs.captures, graphs.replayed) == (2, 2)
    finally:
        torch.backends.cudnn.benchmark = False


def test_parameters_that_move_in_every_phase_end_the_captures() -> None:
    plain, graphed, graphs = pair()
    for _ in range(MOST_CAPTURES):
        compared(plain, graphed, range(WARM_UP + 2))
        for model in (plain, graphed):
            model.scale.data = model.scale.data.clone()  # type: ignore[union-attr, operator]
    assert graphs.captures == MOST_CAPTURES
    with pytest.warns(UserWarning, match=f"captured {MOST_CAPTURES} times, and its parameters or buffers have moved"):
        compared(plain, graphed, range(1))
    replayed = graphs.replayed
    compared(plain, graphed, range(WARM_UP + 2))
    assert graphs.replayed == replayed > 0


def test_a_form_that_comes_for_long_takes_the_graphs_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TAKES_OVER > WARM_UP
    monkeypatch.setattr("monet_like.replay.graphs.model.TAKES_OVER", 3)
    plain, graphed, graphs = pair()
    compared(plain, graphed, range(WARM_UP + 1))
    compared(plain, graphed, range(3), fewer=True)
    assert (graphs.captures, graphs.replayed) == (1, 1)
    compared(plain, graphed, range(3), fewer=True)
    assert (graphs.captures, graphs.replayed) == (2, 4)
    compared(plain, graphed, range(3))
    assert graphs.replayed == 4


class Failing(TwinRecorder):
    def record(self, function: Any) -> Any:
        if self.recorded == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return super().record(function)


def test_a_capture_that_fails_ends_no_run() -> None:
    plain, graphed, _ = pair()
    graphs = graphs_of(graphed, Failing())
    with pytest.warns(
        UserWarning, match="without CUDA graphs, and compute the same: RuntimeError: operation not"
    ) as told:
        compared(plain, graphed, range(STEPS))
    assert len(told) == 1
    assert "more of it" not in str(told[0].message)
    assert graphs.replayed == 0


def by_strategy(model: nn.Module, x: torch.Tensor, strategy: str) -> ScheduleWrapper:
    request = Request(model, ((x,), {}), "normal", strategy=strategy)
    record = Job(request, CPU, Given(DEVICES["cpu"])).plan("100%").record
    return ScheduleWrapper(copy.deepcopy(model), record)


class Returning(nn.Module):
    """Returns a part of a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(6, 6), nn.Buffer(torch.ones(2, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.layer(x).relu() * self.table[1]).tanh(), self.table[1]


@pytest.mark.filterwarnings("ignore:training steps of a form run without CUDA graphs")
def test_a_result_in_the_memory_of_a_buffer_is_not_copied() -> None:
    model = by_strategy(Returning(), torch.randn(4, 6), "store_all")
    graphs = graphs_of(model, TwinRecorder())
    for _ in range(STEPS):
        made, row = model(torch.randn(4, 6))
        made.sum().backward()
        assert row.data_ptr() == model.table[1].data_ptr()
    assert graphs.replayed == 0
    assert graphs.why_not.startswith("a result lies in the memory of a parameter, a buffer or an input")


class Drawn(nn.Module):
    """Wide layers between narrow ones, so that little memory has dropout's noise drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(nn.functional.dropout(x.repeat(1, 64), 0.5)[:, :8]).tanh()
        return x


def test_a_warning_says_once_which_steps_graphs_cannot_have(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, x = Drawn(), torch.randn(512, 8)
    graphed = by_strategy(model, x, "chen_sqrt")
    graphs = graphs_of(graphed, TwinRecorder())
    for number in range(STEPS):
        found = []
        for each in (model, graphed):
            torch.manual_seed(number)
            each.zero_grad()
            each(x).square().sum().backward()
            found.append(gradients(each))
        assert all(map(torch.equal, *found))
    assert graphs.replayed == 0
    assert graphs.why_not == "its schedule draws random numbers again, from an earlier state of the generator"
    assert [str(one.message).partition(": ")[2] for one in recwarn] == [graphs.why_not]


def test_copies_lie_as_their_originals() -> None:
    """Results share memory where the originals do; gradients never."""
    whole = torch.arange(24.0).reshape(4, 6)
    originals = [whole[:, :4], None, whole[:, 4:], torch.ones(3).expand(2, 3), torch.arange(6).reshape(2, 3).t()]
    for shared in (True, False):
        out = CopiesOut(originals, shared=shared)
        whole += 1
        copies, again = out(), out()
        for one, copied, other in zip(originals, copies, again, strict=True):
            if one is None or copied is None or other is None:
                assert one is copied is other is None
                continue
            assert torch.equal(one, copied)
            assert (one.stride(), one.storage_offset()) == (copied.stride(), copied.storage_offset())
            ends = {t.untyped_storage().data_ptr() for t in (one, copied, other)}
            assert len(ends) == 3
        assert copies[0] is not None and copies[2] is not None
        one, other = (copies[place].untyped_storage().data_ptr() for place in (0, 2))  # type: ignore[union-attr]
        assert (one == other) is shared


def test_copies_and_pickles_of_a_model_begin_without_graphs() -> None:
    _, graphed, graphs = pair()
    assert [*accumulated(graphed)]
    assert graphs.captures == 1
    for other in (copy.deepcopy(graphed), pickle.loads(pickle.dumps(graphed))):
        assert other._graphs is not graphs
        assert (other._graphs.always, other._graphs.captures) == (True, 0)


def test_who_asks_for_graphs_on_a_cpu_is_warned_once(recwarn: pytest.WarningsRecorder) -> None:
    model, record, captured = planned()
    wrapped = ScheduleWrapper(copy.deepcopy(model), record, captured=captured, cuda_graphs=True)
    for number in range(STEPS):
        loss_of(called(wrapped, number)).backward()
    assert [str(one.message).partition(": ")[2] for one in recwarn] == ["there are none on cpu"]


def test_what_has_no_graphs_is_refused() -> None:
    _, graphed, _ = pair()
    with pytest.raises(UsageError, match="place_memory was given a model with cuda_graphs=True"):
        monet_like.place_memory(graphed)
    with pytest.raises(UsageError, match="cuda_graphs=True is for a schedule of the whole model"):
        monet_like.auto_schedule(nn.Sequential(Net()), memory_budget="80%", blocks=["0"], cuda_graphs=True)
    with pytest.raises(UsageError, match="cuda_graphs 'yes' must be True, False or None"):
        monet_like.auto_schedule(Net(), cuda_graphs="yes")  # type: ignore[arg-type]
    blocks = monet_like.auto_schedule(nn.Sequential(Net()), memory_budget="80%", blocks=["0"])
    assert [m._graphs for m in blocks.modules() if isinstance(m, ScheduleWrapper)] == [None]
    assert monet_like.auto_schedule(Net(), cuda_graphs=False)._graphs is None
