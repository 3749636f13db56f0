"""``backend="inductor"``: calls are compiled within the bytes that a plan gives them, or follow their schedule."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from block_models import Decoder, Layer, loss_of, measured_peak, plan_of, tokens, train
from replays import LOSS_BYTES, record_for
from torch import nn
from training import Outcome, run, twin

import monet_like
from benchmarks.unrun_kernels import unrun_kernels
from monet_like.auto.block import blocks_of
from monet_like.capture.lower.step import capture
from monet_like.errors import InfeasibleError, UsageError
from monet_like.export.graph_plans import _run_as_it_is
from monet_like.inductor import compiled_call, draws, menu
from monet_like.inductor.compiled_call import CompiledCall, NotCompiled, menu_for
from monet_like.inductor.menu import efficient, within
from monet_like.inductor.planned_graph import Limits, PlannedGraph, Settings
from monet_like.ir.units import Budget
from monet_like.plan import store_all
from monet_like.replay.training_step import CompiledStep
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.torch_versions import release
from monet_like.variants import admitted

#: Of results and gradients in float64, relative.
TOLERANCE = 1e-9
QUICK = {"effort": "quick", "verbose": False}
#: The first PyTorch that was seen to compile what draws random numbers so that it draws the same.
DRAWS = (2, 14)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run operator by operator: no code is generated."""
    monkeypatch.setattr(compiled_call, "_without_donations", _run_as_it_is)


class Images(nn.Module):
    """A residual block with batch norms."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(width), nn.InstanceNorm2d(width, track_running_stats=True)
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(self.one(x)))
        return torch.relu(x + self.second(self.two(y)))


def decoder(*args: Any, **kwargs: Any) -> Decoder:
    """A decoder with dropout, where this PyTorch draws in compiled code as in plain."""
    model = Decoder(*args, **kwargs)
    for part in model.modules() if release() < DRAWS else ():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def planned(model: nn.Module, x: Any, budget: str = "100%", **more: Any) -> Any:
    """A copy of a model with a plan, whose calls Inductor compiles."""
    return monet_like.auto_schedule(twin(model), x, memory_budget=budget, backend="inductor", **QUICK, **more)


def steps_of(model: nn.Module) -> list[CompiledStep]:
    return [kept.step for part in {model, *blocks_of(model)} for kept in getattr(part, "_kept", ())]


def worst(one: Outcome, other: Outcome) -> float:
    return max(one.differences(other).values())


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, "layers.*"])
def test_a_compiled_step_has_plain_pytorchs_gradients_and_masks(blocks: str | None) -> None:
    model, x = decoder(blocks=2).double(), tokens()
    if release() >= DRAWS:
        model.between = partial(nn.functional.dropout, p=0.3)
    ours = planned(model, x, "75%", blocks=blocks)
    for _ in range(2):
        plain, found = run(model, (x,), {}), run(ours, (x,), {})
        assert 0 < worst(plain, found) <= TOLERANCE
    steps = steps_of(ours)
    assert len(steps) == (2 if blocks else 1) and all(step.compiled and step.compiled.graphs for step in steps)


@pytest.mark.parametrize("budget", ["90%", "60%"])
def test_the_peak_of_blocks_is_within_their_plan(budget: str) -> None:
    model, x = decoder(Layer, blocks=4), tokens()
    ours = planned(model, x, budget, blocks="layers.*", loss=loss_of)
    with unrun_kernels():
        peak = measured_peak(ours, x)
    plan, steps = plan_of(ours), steps_of(ours)
    assert len(steps) == 4 and all(step.compiled and step.compiled.graphs for step in steps)
    assert peak <= plan.peak_bytes <= plan.budget_bytes < 0.95 * measured_peak(model, x)


def test_the_peak_of_a_whole_model_is_within_its_budget() -> None:
    model, x = nn.Sequential(*decoder(Layer).layers), torch.randn(16, 32, 32)
    ours = planned(model, x, "70%")
    with unrun_kernels():
        run(ours, (x,), {})
        rise = run(ours, (x,), {}, measured=True).rise_bytes
    (step,), budget = steps_of(ours), ours.record.budget_bytes
    assert step.compiled is not None and step.compiled.graphs
    assert step.captured.program.resident_bytes + rise - LOSS_BYTES <= budget


@pytest.mark.usefixtures("uncompiled")
def test_equal_blocks_are_compiled_once_for_each_way() -> None:
    model, x = decoder(Layer, blocks=4), tokens()
    ours = planned(model, x, "100%", blocks="layers.*")
    train(ours, x)
    calls = [step.compiled for step in steps_of(ours)]
    assert len(calls) == 4 and len(set(calls)) <= 2  # the last one's result is held by the loss


@pytest.mark.usefixtures("uncompiled")
def test_statistics_move_once_a_step() -> None:
    model, x = nn.Sequential(Images(), Images()).double(), torch.randn(4, 8, 16, 16).double()
    ours = planned(model, x)
    for _ in range(3):
        assert worst(run(model, (x,), {}), run(ours, (x,), {})) <= TOLERANCE
    assert int(dict(ours.named_buffers())["0.first.num_batches_tracked"]) == 3


@pytest.mark.usefixtures("uncompiled")
def test_a_second_backward_reads_what_the_first_has_left() -> None:
    model, x = decoder(blocks=1).double(), tokens()
    ours = planned(model, x)
    for net in (model, ours):
        torch.manual_seed(1)
        result = net(x)
        result.sum().backward(retain_graph=True)
        result.square().sum().backward()
    for one, other in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.usefixtures("uncompiled")
def test_copies_keep_the_backend_and_other_batches_are_planned_anew() -> None:
    model, x = Images().double(), torch.randn(4, 8, 16, 16).double()
    ours = planned(model, x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.backend == "inductor"
        assert worst(run(twin(model), (x,), {}), run(other, (x,), {})) <= TOLERANCE
        assert [step.compiled is not None for step in steps_of(other)] == [True]
    assert worst(run(twin(model), (x[:3],), {}), run(ours, (x[:3],), {})) <= TOLERANCE  # planned anew


def test_inductors_code_has_a_second_backward() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8)
    ours = planned(model, x, "120%")
    with unrun_kernels():
        ours(x).sum().backward()  # compiles the backward, for saved tensors that are used once
        result = ours(x)
        result.sum().backward(retain_graph=True)
        result.sum().backward()
    assert [bool(step.compiled and step.compiled.graphs) for step in steps_of(ours)] == [True]


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        return torch.tanh(2 * y if y.sum() > 0 else y)


class Several(Asks):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.one(x)
        return y, y.log_softmax(-1)


class Breaks(Asks):
    """What Dynamo cannot have in one graph, and a buffer that would show a forward which ran twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        torch._dynamo.graph_break()
        return torch.tanh(self.one(x))


class Unused(Asks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(self.one(x), 0.5)


class InColumns(Asks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.one(x).t(), 0.5)


class Noisy(Asks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        return y + torch.randn_like(y)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Asks, "asks for values of tensors"),
        (Several, "takes zeros for the others"),
        (Breaks, "graph_break"),
        (Unused, "random numbers that nothing uses"),
        (InColumns, "do not lie row by row"),
        (Noisy, "draws other random numbers in Inductor's graph"),
    ],
)
def test_what_cannot_be_compiled_follows_its_schedule_with_one_warning(kind: Any, reason: str) -> None:
    model, x = kind().double(), torch.randn(2048, 8, dtype=torch.float64)

    def differs() -> float:
        ours = planned(model, x, "150%")
        found.extend(steps_of(ours))
        return max(worst(run(model, (x,), {}), run(ours, (x,), {})) for _ in range(2))

    found: list[CompiledStep] = []
    with pytest.warns(UserWarning, match=f"Inductor compiles nothing of {kind.__name__} .*{reason}") as told:
        assert differs() <= 1e-12
    assert len([one for one in told if "Inductor compiles" in str(one.message)]) == 1
    assert [step.compiled for step in found] == [None]


@pytest.mark.usefixtures("uncompiled")
def test_a_pytorch_that_may_draw_in_another_order_compiles_nothing_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_KEPT_DRAWS", (("torch._inductor.lowering", "no such constraint"),))
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()), torch.randn(2048, 8)
    ours = planned(model, x, "150%")
    with pytest.warns(UserWarning, match="may draw its random numbers in another order"):
        found = run(ours, (x,), {})
    assert worst(run(model, (x,), {}), found) == 0.0


@pytest.mark.usefixtures("uncompiled")
def test_blocks_whose_inputs_change_later_follow_their_schedule() -> None:
    model, x = decoder(blocks=2).double(), tokens()
    model.between = lambda y: y.mul_(1.5)
    ours = planned(model, x, blocks="layers.*")
    with pytest.warns(UserWarning, match="changes in place what it reads in its backward"):
        found = run(ours, (x,), {})
    assert worst(run(model, (x,), {}), found) <= TOLERANCE


@pytest.mark.usefixtures("uncompiled")
def test_a_graph_that_lacks_room_follows_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = decoder(blocks=2).double(), tokens()
    ours = planned(model, x, "90%", blocks="layers.*")
    monkeypatch.setattr(PlannedGraph, "needs", Limits(2**40, 2**40, 2**40))
    with pytest.warns(UserWarning, match=r"it needs at least 1024.00 GB more than the plan of the whole step gives"):
        found = run(ours, (x,), {})
    assert worst(run(model, (x,), {}), found) <= TOLERANCE
    assert all(step.compiled is None for step in steps_of(ours))


def test_a_menu_is_found_without_running_anything_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Layer(32), torch.randn(8, 16, 32, requires_grad=True)
    before = torch.get_rng_state()
    found = menu_for(layer, (x,), {}, Settings(Budget(), quick=True, measured=False))
    assert torch.equal(before, torch.get_rng_state()) and all(p.grad is None for p in layer.parameters())
    assert len(found) > 1 and all(graph.plan.report.seconds == graph.seconds for graph in found)
    lean, fast = found[0], min(found, key=lambda graph: graph.seconds)
    assert lean.needs.carried_bytes < fast.needs.carried_bytes and lean.seconds > fast.seconds
    assert fast in within(fast.needs, found)
    assert all(one.needs.carried_bytes <= lean.needs.carried_bytes for one in within(lean.needs, found))
    with pytest.raises(InfeasibleError, match="at least 4 B more"):
        within(Limits(lean.needs.carried_bytes - 4, 2**40, 2**40), [lean])
    assert efficient([*found, *found]) == efficient(found)
    monkeypatch.setattr(menu, "efficient", None)  # the next process has it in the cache
    torch._dynamo.reset()
    again = menu_for(layer, (x,), {}, Settings(Budget(), quick=True, measured=False))
    assert [graph.needs for graph in again] == [graph.needs for graph in found]
    with pytest.raises(NotCompiled, match="graph_break"):
        menu_for(Breaks(), (torch.randn(4, 8),), {}, Settings(Budget(), quick=True))


@pytest.mark.usefixtures("uncompiled")
def test_a_call_that_was_refused_is_not_compiled_again() -> None:
    call, x = CompiledCall(Settings(Budget(2**40), quick=True)), torch.randn(4, 8)
    for _ in range(2):
        with pytest.raises(NotCompiled, match="graph_break"):
            call(Breaks(), (x,), {})
    with pytest.raises(NotCompiled, match="graph_break"):
        call(Asks(), (x,), {})


def wrapping(backend: str) -> Any:
    model, x = Images().train(), torch.randn(4, 8, 16, 16)
    captured = admitted(capture(model, (x,)), "normal")
    record = record_for(captured, store_all(captured.program), "normal", (model, (x,), {}))
    return partial(ScheduleWrapper, model, record, backend=backend)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match=r"backend 'tvm' is unknown; give eager or inductor"):
        wrapping("tvm")()


def test_what_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    make = wrapping("inductor")
    said = r"needs a C\+\+ compiler, and none runs here \(tried: no-such-compiler\); install"
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(UsageError, match=said):
        make()
    monkeypatch.setattr(compiled_call, "missing_hook", lambda: "custom_partitioner_fn")
    with pytest.raises(UsageError, match="custom_partitioner_fn, which PyTorch"):
        make()
