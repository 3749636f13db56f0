"""The wrapper inside other people's training loops: everything a plain module can do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from any_schedule import assert_as_plain
from nets import linear, rows
from replays import record_for
from torch import nn
from training import run, twin

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.errors import ScheduleFileError, UsageError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.measure import allocated_peak
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted


class Deep(nn.Module):
    """A chain of layers, whose weights take more than activations, with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64)))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + norm(layer(x)).relu()
        return self.fc(x)


def made() -> tuple[Deep, torch.Tensor]:
    """A model and its input."""
    torch.manual_seed(0)
    return Deep(), rows(16, 64)


@functools.cache
def recorded(drop: float = 0.5) -> tuple[Captured, ScheduleRecord]:
    """What a model of `made` is captured as, and a schedule with some recompute for it."""
    model, x = Deep(), rows(16, 64)
    captured = admitted(capture(model, (x,)), "normal")
    schedule = random_schedule(captured.program, 1, drop=drop, others=0.0) if drop else store_all(captured.program)
    return captured, record_for(captured, schedule, "normal", (model, (x,), {}))


def scheduled(model: nn.Module, *, drop: float = 0.5) -> ScheduleWrapper:
    """A wrapper of a model of `made`, which is captured once for all tests, unlike one from a file."""
    captured, record = recorded(drop)
    return ScheduleWrapper(model, record, example=((rows(16, 64),), {}), captured=captured)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_state_dict_round_trip_and_assignment_are_followed() -> None:
    model, x = made()
    wrapped = scheduled(model)
    fresh = Deep()
    wrapped.load_state_dict(fresh.state_dict())
    model.fc.weight = nn.Parameter(fresh.fc.weight.detach() * 2)  # another Parameter object
    plain = twin(model)
    step(plain, x)
    step(wrapped, x)
    assert same(gradients(plain), gradients(wrapped))


def test_to_another_dtype_is_not_silently_wrong() -> None:
    model, x = made()
    wrapped = scheduled(model).double()
    assert next(model.parameters()).dtype == torch.float64
    with pytest.raises(ScheduleFileError, match="was solved for float32"):
        wrapped(x.double())


def normed() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout(0.3), linear())


def test_the_gradient_of_the_input_alone_as_in_adversarial_training() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        x = rows().requires_grad_()
        (sign,) = torch.autograd.grad(called(x).square().mean(), [x])
        note(sign, x.grad is None and all(p.grad is None for p in model.parameters()))
        step(called, (x + 0.01 * sign.sign()).detach().requires_grad_())

    assert_as_plain(normed, script, captures=1)


def test_forwards_in_threads_do_not_mix() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))).train()
    x = torch.randn(8, 16)
    captured = admitted(capture(model, (x,)), "normal")
    schedule = random_schedule(captured.program, 1, drop=0.5, others=0.0)
    wrapped = ScheduleWrapper(model, record_for(captured, schedule, "normal", (model, (x,), {})))
    weight = model[0][0].weight

    def gradient(called: nn.Module, index: int) -> torch.Tensor:
        return torch.autograd.grad(called(x * (index + 1)).square().mean(), weight)[0]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(functools.partial(gradient, wrapped), range(8)))
    assert same(results, [gradient(model, index) for index in range(8)])


def test_eval_and_no_grad_run_the_plain_model() -> None:
    model, x = made()
    wrapped, plain = scheduled(model), twin(model)
    with torch.no_grad():
        assert torch.equal(wrapped(x), plain(x))
    assert wrapped.eval() is wrapped
    assert not model.training
    plain.eval()
    result = wrapped(x)
    assert torch.equal(result, plain(x))
    result.sum().backward()  # the plain model's own autograd
    wrapped.train()
    assert model.training
    assert all(m.training for m in model.modules())


def test_a_larger_batch_another_size_or_another_model_is_refused() -> None:
    (model, x), (_, record) = made(), recorded()
    wrapped = scheduled(model)
    with pytest.raises(ScheduleFileError, match=r"solved for float32\[16, 64\].*called with float32\[32, 64\]"):
        wrapped(torch.cat((x, x)))
    with pytest.raises(ScheduleFileError, match="input_shape is \\[32\\]"):
        ScheduleWrapper(model, record, (32,))
    with pytest.raises(
        ScheduleFileError, match="does not match the model: it was planned for test, Sequential has 2 parameters"
    ):
        ScheduleWrapper(nn.Sequential(nn.Linear(64, 2)), record)
    with pytest.raises(UsageError, match="already wrapped"):
        ScheduleWrapper(wrapped, record)


def test_a_second_backward_reads_what_the_first_one_writes_over() -> None:
    """Ways in place take the memory of saved values; with ``retain_graph`` they take that of copies."""

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        loss = called(x).square().sum()
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            note(x.grad)
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()

    layers = nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)
    assert_as_plain(lambda: nn.Sequential(*map(twin, layers)), script, captures=1, seed=1)


def test_a_model_with_nothing_to_train() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    x = torch.randn(5, 4)
    captured = admitted(capture(model, (x,)), "normal")
    record = record_for(captured, store_all(captured.program), "normal", (model, (x,), {}))
    plain = twin(model)(x)
    wrapped = ScheduleWrapper(model, record)
    assert torch.equal(wrapped(x), plain) and not wrapped(x).requires_grad


def test_freezing_the_models_own_parameters_is_noticed() -> None:
    """Those of the outermost module, which are the wrapper's too."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.layer = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.sin() + self.shift)

    model, x = Shifted(), torch.randn(5, 4)
    captured = admitted(capture(model, (x,)), "normal")
    record = record_for(captured, store_all(captured.program), "normal", (model, (x,), {}))
    wrapped = ScheduleWrapper(model, record)
    wrapped(x)
    model.shift.requires_grad_(False)
    with pytest.warns(UserWarning, match="Shifted runs as plain PyTorch when .*frozen parameters"):
        wrapped(x).sum().backward()
    assert model.shift.grad is None
    assert model.layer.weight.grad is not None


def test_gradients_arrive_while_the_backward_runs() -> None:
    """Hooks fire in spread-out order, and accumulating into existing gradients needs no second full set."""
    model, x = made()
    wrapped = scheduled(model, drop=0.0)
    last = next(iter(wrapped._kept)).step.segments
    assert len(last) > 10
    order: list[str] = []
    seen: list[int] = []
    for name, parameter in wrapped.named_parameters():

        def arrived(_: torch.Tensor, name: str = name) -> None:
            order.append(name)
            seen.append(count_alive(model))

        parameter.register_post_accumulate_grad_hook(arrived)
    step(wrapped, x)
    assert order.index("fc.weight") < order.index("layers.8.weight") < order.index("layers.0.weight")
    assert seen[0] < 0.1 * len(order)
    assert seen == sorted(seen)


def count_alive(model: nn.Module) -> int:
    return sum(p.grad is not None for p in model.parameters())


def test_accumulating_needs_no_second_set_of_gradients() -> None:
    model, x = made()
    device = torch.device("cpu")
    full = sum(p.numel() * 4 for p in model.parameters())
    rises = []
    for candidate in (twin(model), scheduled(twin(model), drop=0.0)):
        step(candidate, x)  # now every .grad exists
        rises.append(allocated_peak(lambda c=candidate: step(c, x), device))
    assert rises[1] - rises[0] < 0.25 * full


def test_an_optimizer_and_averaged_weights_end_where_plain_ones_do() -> None:
    model, x = made()
    ends = []
    for candidate in (twin(model), scheduled(twin(model))):
        optimizer = torch.optim.AdamW(candidate.parameters(), lr=1e-3, fused=True)
        average = torch.optim.swa_utils.AveragedModel(
            candidate, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for number in range(4):
            step(candidate, x)
            torch.nn.utils.clip_grad_norm_(candidate.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            average.update_parameters(candidate)
        ends.append([*candidate.state_dict().values(), *average.module.state_dict().values()])
    assert same(*ends)


def test_hooks_see_parameters_and_the_whole_model_and_what_those_of_submodules_set_is_set_again() -> None:
    model, x = made()
    wrapped = scheduled(model)
    seen: list[str] = []
    wrapped.register_forward_hook(lambda *_: seen.append("whole"))
    wrapped.fc.register_forward_hook(lambda *_: seen.append("submodule"))
    wrapped.fc.weight.register_hook(lambda gradient: seen.append("parameter") or gradient * 2)
    step(wrapped, x)
    assert seen == ["submodule", "whole", "parameter"]  # what the first hook has set is set again
    doubled = wrapped.fc.weight.grad
    wrapped.zero_grad()
    plain = twin(model)
    plain.fc._forward_hooks.clear()
    step(plain, x)
    assert torch.equal(doubled, plain.fc.weight.grad * 2)


def test_a_schedule_that_breaks_the_programs_rules_is_refused() -> None:
    model, x = made()
    captured, record = recorded()
    schedule = record.schedule
    for broken in (
        replace(schedule, forward=(*schedule.forward, 9999)),
        replace(schedule, forward=schedule.forward[1:]),
        replace(schedule, ways=(7, *schedule.ways[1:])),
        replace(schedule, again=schedule.again[1:]),
    ):
        with pytest.raises(ScheduleFileError, match="does not fit the program"):
            ScheduleWrapper(model, replace(record, schedule=broken), example=((x,), {}), captured=captured)


def test_a_schedule_from_a_file_and_the_models_own_names_and_tensors(tmp_path: Path) -> None:
    (model, x), (_, record) = made(), recorded()
    path = tmp_path / "schedule.json"
    record.save(path)
    plain = twin(model)
    wrapped = ScheduleWrapper(model, path, (64,))
    assert not any(run(plain, (x,), {}).differences(run(wrapped, (x,), {})).values())
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert wrapped.fc is model.fc and "peak" in repr(wrapped)
