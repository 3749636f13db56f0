"""Models that cannot be captured whole: their largest parts that can be get schedules, the rest runs as it is, and
training is plain PyTorch's to the bit.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from block_models import EXACT, plan_of, trained
from torch import nn

import monet_like
from monet_like.auto import block, blocks, found_parts
from monet_like.auto.auto_schedule import AutoSchedule
from monet_like.auto.shared_captures import SharedCaptures
from monet_like.errors import CaptureError, UsageError
from monet_like.replay.wrapper import ScheduleWrapper

QUICK: dict[str, Any] = {"mode": EXACT, "effort": "quick", "verbose": False, "memory_budget": "200%"}
PARTS_OF_DETECTOR = ["backbone", "heads.selects.first", "heads.selects.after"]


def part(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())


class Selecting(nn.Module):
    """Selects rows by values, and has parts before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.after, self.tiny = part(), part(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.tiny(self.after(x[x.sum(1) > x.sum(1).median()]))


class Detector(nn.Module):
    """A backbone, and heads that select; one of them has parts that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(part(), nn.Dropout(0.2), part())
        self.heads = nn.ModuleDict({"selects": Selecting()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["selects"](self.backbone(x)).square().mean()


class Made(nn.Module):
    """Parts, and how they are called."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.called = forward
        for name, each in parts.items():
            setattr(self, name, each)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(self, x)


class Between(nn.Module):
    """Two parts with something between them that no trace can take."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] | nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.behind = part(), middle, part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.middle(self.before(x))).square().mean()


def with_script(compiled: Callable[[nn.Module], Any] = torch.jit.script) -> Between:
    torch.manual_seed(0)
    return Between(compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU())))


def rows(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 8)


def selected(x: torch.Tensor) -> torch.Tensor:
    return x[x.sum(1) > x.sum(1).median()]


def assert_trains(plain: nn.Module, batches: list[Any], parts: list[str], *, given: bool = False) -> AutoSchedule:
    """The model with schedules, after a loop that has been compared with plain PyTorch's."""
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain), batches[0] if given else None, **QUICK)
    assert isinstance(mine, AutoSchedule)
    found, expected = trained(mine, batches), trained(plain, batches)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert mine._parts is not None and list(mine._parts) == parts
    return mine


def parts_of(model: nn.Module, x: Any) -> list[str]:
    return list(found_parts.find_parts(model, ((x,), {}), EXACT, SharedCaptures(), "alone")[0])


@pytest.mark.slow(but=["False"])
@pytest.mark.parametrize("given", [True, False])
def test_the_largest_parts_have_schedules(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    plain = Detector()
    names = PARTS_OF_DETECTOR
    with caplog.at_level(logging.INFO, "monet_like"):
        mine = assert_trains(plain, [rows() for _ in range(3)], names, given=given)
    (line,) = [record.message for record in caplog.records if record.message.startswith("Detector, 3 blocks of 3")]
    assert (
        'planned: blocks=["backbone", "heads.selects.first", "heads.selects.after"] with 98 % of its parameters; '
        in line
    )
    assert line.endswith("all else runs as it is, because Detector cannot be captured: DynamicOutputShapeException: "
                         "its computation depends on the values of a tensor, not only on shapes: "
                         "aten.nonzero.default")  # fmt: skip
    assert f"schedules of 3 parts: {', '.join(names)}; whole step: budget " in repr(mine)
    assert list(mine.state_dict()) == list(plain.state_dict())
    plan = plan_of(mine)
    assert plan.peak_bytes <= plan.budget_bytes == 2 * plan.plain_peak_bytes
    copied, x = copy.deepcopy(mine), [rows()]
    assert all(map(torch.equal, trained(copied, x), trained(plain, x)))
    assert torch.equal(copied.eval()(*x), plain.eval()(*x))  # as it is
    back = monet_like.unwrap(mine)
    assert type(back) is Detector and not any(isinstance(module, ScheduleWrapper) for module in back.modules())


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_evaluation_before_training_plans_nothing() -> None:
    plain = with_script()
    mine: Any = monet_like.auto_schedule(with_script(), **QUICK).eval()
    plain.eval()
    x = rows()
    assert torch.equal(mine(x), plain(x))
    assert mine._parts is None
    mine.train(), plain.train()
    assert all(map(torch.equal, trained(mine, [x]), trained(plain, [x])))
    assert list(mine._parts) == ["before", "behind"]


def test_threads_that_call_a_model_first_plan_it_once() -> None:
    mine: Any = monet_like.auto_schedule(Between(selected), **QUICK)
    together, raised = threading.Barrier(3), []

    def call() -> None:
        together.wait()
        try:
            mine(rows()).backward()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    assert list(mine._parts) == ["before", "behind"] == [part._block_name for part in block.blocks_of(mine)]


@pytest.mark.slow
def test_a_model_with_parts_may_be_prepared_for_another_call() -> None:
    torch.manual_seed(0)
    plain = Detector()
    mine = assert_trains(plain, [rows(), rows()], PARTS_OF_DETECTOR, given=True)
    for count in (16, 32):
        mine.prepare(rows(count))
        assert mine._parts == tuple(PARTS_OF_DETECTOR)
    batches = [rows(32), rows()]
    assert all(map(torch.equal, trained(mine, batches), trained(plain, batches)))


def test_a_search_changes_nothing() -> None:
    class Counting(Detector):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Counting(), rows()
    before, state, call = copy.deepcopy(model.state_dict()), torch.get_rng_state(), nn.Module.__call__
    assert parts_of(model, x) == ["backbone", "heads.selects.first", "heads.selects.after"]
    assert nn.Module.__call__ is call and torch.equal(torch.get_rng_state(), state) and model.calls == 0
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parts_whose_sizes_depend_on_values_are_left_out() -> None:
    class Sliced(Detector):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.backbone(x[:, 0])
            return self.heads["selects"].after(x[x[:, 0] > x.mean()]).square().sum()

    assert parts_of(Sliced(), torch.randn(16, 3, 8)) == ["backbone"]


def test_experts_that_get_other_tokens_in_each_step_are_left_out_together() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.mix(x)
        to = net.gate(x).argmax(1)
        places = [torch.where(to == number)[0] for number in range(4)]
        made = [expert(x[at]) for expert, at in zip(net.experts, places, strict=True) if len(at) > 1]
        return torch.cat(made).square().sum()

    torch.manual_seed(0)
    experts = Made(forward, gate=nn.Linear(8, 4), mix=part(), experts=nn.ModuleList([part() for _ in range(4)]))
    assert parts_of(experts, torch.randn(40, 8)) == ["mix"]


def test_an_expert_that_gets_rows_with_other_weights_alone_is_not_found() -> None:
    """All rows go to the first one. With the gate's columns exchanged half of them go to the second."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        chosen = net.gate(x)[:, 0] > 0
        places = chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]
        return (
            torch.cat([expert(x[at]) for expert, at in zip(net.experts, places, strict=True) if len(at)]).square().sum()
        )

    model = Made(forward, gate=nn.Linear(2, 1, bias=False), experts=nn.ModuleList([part(2), part(2)]))
    model.gate.weight.data.copy_(torch.tensor([[2.0, -1.0]]))
    assert parts_of(model, torch.tensor([[1.0, 1.0], [1.0, 0.0]]).repeat(2, 1)) == []


def test_what_stands_in_the_place_of_a_part_that_is_left_out_is_left_out_too() -> None:
    """By chance one of the experts gets as many rows with both sets of values."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.mix(x)
        some = x[(net.gate(x) > 0.1).squeeze(1)]
        return torch.cat([net.experts[0](x[:5]), net.experts[1](some)]).square().sum()

    torch.manual_seed(0)
    experts = Made(forward, gate=nn.Linear(8, 1), mix=part(), experts=nn.ModuleList([part(), part()]))
    assert parts_of(experts, torch.randn(40, 8)) == ["mix"]


class Doubled(nn.Module):
    """Reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).tanh() * self.other(x) + 1


def test_parts_that_would_add_gradients_up_in_another_order_are_left_out() -> None:
    def reads_twice(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.stem(x)
        return selected(net.doubled(x) * x.sin()).square().mean()

    once = Made(lambda net, x: selected(net.doubled(net.stem(x))).square().mean(), stem=part(), doubled=Doubled())
    assert parts_of(once, rows()) == ["stem", "doubled"]
    assert_trains(Made(reads_twice, stem=part(), doubled=Doubled()), [rows() for _ in range(3)], ["stem"])


def test_parts_whose_results_are_changed_in_place_are_left_out() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.stem(x)
        x[torch.from_numpy(np.array([True, False] * 8))] = net.mask
        return net.head(selected(x[1::2])).square().mean()

    stem = nn.Sequential(part(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)))
    masks = Made(forward, stem=stem, head=part(), mask=nn.Parameter(torch.zeros(8)))
    assert_trains(masks, [rows() for _ in range(2)], ["stem.0", "head"])


def test_parts_with_gradients_in_another_layout_are_left_out() -> None:
    """A gradient that is copied may be summed in another order: of channels that are moved to the end, say."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return selected(net.head(net.stem(x)).permute(0, 2, 3, 1).reshape(-1, 5)).square().mean()

    head = nn.Sequential(nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU()), nn.Conv2d(6, 5, 1))
    moves = Made(forward, stem=nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), head=head)
    assert_trains(moves, [torch.randn(2, 3, 12, 12) for _ in range(2)], ["stem", "head.0"])


def test_a_part_within_another_or_with_two_names_is_found_once() -> None:
    outer, tied = nn.Sequential(part(), part()), part()
    twice = Made(lambda net, x: selected(net.outer(net.inner(x))).square().mean(), outer=outer, inner=outer[0])
    assert parts_of(twice, rows()) == ["outer"]
    same = Made(lambda net, x: selected(net.first(x)).square().mean(), last=tied, first=tied)
    assert parts_of(same, rows()) == ["last"]


def test_parts_stand_in_the_order_of_their_calls() -> None:
    backwards = Made(lambda net, x: net.last(selected(net.first(x))).square().mean(), last=part(), first=part())
    assert parts_of(backwards, rows()) == ["first", "last"]


def test_a_found_part_that_cannot_be_captured_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the search names a part that selects."""
    model = Detector()
    wrong = {"heads.selects": model.heads["selects"]}
    monkeypatch.setattr(blocks, "find_parts", lambda *_: (wrong, "alone"))
    mine = monet_like.auto_schedule(model, **QUICK)
    with pytest.raises(CaptureError, match="Selecting cannot be captured"):
        mine(rows())
    assert not any(isinstance(module, ScheduleWrapper) for module in model.modules())  # as it was given
    monkeypatch.undo()
    trained(mine, [rows()])
    assert monet_like.block_plan(mine) is not None


class Refusing(nn.Module):
    """Raises an error of its own for inputs that it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) + torch.rand_like(x)
        if x.shape[0] == 3:
            raise FloatingPointError("three samples")
        return self.layer(x).relu()


def test_what_the_forward_raises_in_the_first_call_is_raised_as_it_is() -> None:
    torch.manual_seed(0)
    model = Refusing()
    plain, planned = copy.deepcopy(model), monet_like.auto_schedule(model, exact=True)
    state = torch.get_rng_state()
    with pytest.raises(FloatingPointError, match="three samples"):
        planned(torch.ones(3, 8))
    assert torch.equal(torch.get_rng_state(), state) and model.norm.num_batches_tracked == 0
    results = []
    for each in (plain, planned):
        torch.manual_seed(1)
        results.append(each(torch.ones(4, 8)))
    assert torch.equal(*results)


def test_a_model_that_can_be_captured_nowhere() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.one(x)
        return x[x > 0].sum()

    for given in (rows(), None):
        with pytest.raises(CaptureError, match=r"depends on the values of a tensor.*none of its parts of several"):
            monet_like.auto_schedule(Made(forward, one=nn.Linear(8, 8)), given, **QUICK)(rows())


class _ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(1 - np.tanh(x.numpy()) ** 2)


def test_code_that_cannot_be_traced_runs_between_parts() -> None:
    assert_trains(Between(_ByNumpy.apply), [rows() for _ in range(2)], ["before", "behind"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("compiled", "at_once"), [(torch.jit.script, True), (lambda module: torch.jit.trace(module, rows()), False)]
)
def test_scripted_modules_run_between_parts(compiled: Callable[[nn.Module], Any], at_once: bool) -> None:
    batches, plain = [rows() for _ in range(2)], with_script(compiled)
    mine: Any = monet_like.auto_schedule(with_script(compiled), *batches[:at_once], **QUICK)
    assert all(map(torch.equal, trained(mine, batches), trained(plain, batches)))
    assert list(mine._parts) == ["before", "behind"]


def test_a_module_with_a_hook_that_sets_something_in_the_backward_runs_as_it_is() -> None:
    def with_hook() -> Between:
        torch.manual_seed(0)
        model = Between(part())
        seen = lambda module, _, grads: setattr(module, "seen", grads[0])  # noqa: E731
        model.middle.register_full_backward_hook(seen)
        return model

    batches, models = [rows() for _ in range(2)], [with_hook(), with_hook()]
    mine: Any = monet_like.auto_schedule(models[1], **QUICK)
    assert all(map(torch.equal, trained(mine, batches), trained(models[0], batches)))
    assert "before" in mine._parts and "middle" not in mine._parts
    assert torch.equal(mine.middle.seen, models[0].middle.seen)  # type: ignore[arg-type]


def test_code_around_a_part_may_look_into_it() -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = selected(net.body(x))
        assert isinstance(net.body, nn.Sequential) and isinstance(net.body[0][0], nn.Linear)
        return x.square().mean() * len(net.body) * len([*net.body])

    assert_trains(Made(forward, body=nn.Sequential(part(), part())), [rows()], ["body"])


def test_a_part_whose_sizes_keep_changing_runs_as_it_is_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "MOST_FORMS", 3)
    plain = Between(selected)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_trains(plain, [rows(count) for count in (32, 30, 28, 26, 24, 22, 20)], ["before", "behind"])
    assert sum("was called in 3 ways in 4 calls" in str(warning.message) for warning in told) == 1


def test_no_memory_is_placed_for_parts() -> None:
    mine = monet_like.auto_schedule(Between(selected), **QUICK)
    monet_like.place_memory(mine)
    with pytest.warns(UserWarning, match="no memory is placed for Between"):
        trained(mine, [rows()])
    with pytest.raises(UsageError, match="place_memory was given a AutoSchedule"):
        monet_like.place_memory(mine)


def test_parts_have_no_graphs_and_who_asks_for_them_is_warned() -> None:
    mine = monet_like.auto_schedule(Between(selected), cuda_graphs=True, **QUICK)
    with pytest.warns(UserWarning, match="Between has no CUDA graphs: its parts have schedules of their own"):
        trained(mine, [rows()])


@pytest.mark.slow
def test_rules_mean_the_same_for_parts() -> None:
    plain = Between(selected)
    mine = monet_like.auto_schedule(copy.deepcopy(plain), rows(), **QUICK, on_new_input="error")
    with pytest.raises(UsageError, match="no plan of the block before serves this call"):
        mine(rows(18))
    share = monet_like.block_plan(monet_like.auto_schedule(copy.deepcopy(plain), rows(), **QUICK))
    room = monet_like.auto_schedule(copy.deepcopy(plain), rows(), **QUICK, optimizer_in_backward=True)
    assert share is not None and (plan := monet_like.block_plan(room)) is not None
    assert plan.peak_bytes == share.peak_bytes  # with room for all gradients
