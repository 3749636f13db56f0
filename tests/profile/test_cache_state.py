"""What caches hold when an operator is timed, and when it is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from monet_like.capture.captured import distinct_tasks
from monet_like.capture.lower.step import capture
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import ProfileError
from monet_like.ir.program import REFUSED
from monet_like.profile.cache_state import NEVER, CacheState, reuse_bytes, touches
from monet_like.profile.profiler import PASSES, measure
from monet_like.profile.task_inputs import Inputs


def test_reuse_distances_are_counted_in_plain_pytorchs_order() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sigmoid(), nn.Linear(8, 4, bias=False))
    captured = capture(model, (torch.randn(4, 8),))
    found = reuse_bytes(captured)
    by_name = {task.name: found[task.cost, len(task.reads)] for task in captured.plain.every_task()}
    assert by_name == {
        "mm": (NEVER, NEVER),  # weight, input
        "sigmoid": (128,),
        "mm_1": (NEVER, 128),
        "mm_2": (NEVER, 128),  # the gradient comes from without; the product before has read the sigmoid
        "mm_3": (64, (64 + 128 + 128) + 128),
        "sigmoid_backward": (128, (64 + 128 + 128) + 128),
        "mm_4": (128, (128 + 128) + (128 + 128 + 64) + 2 * (64 + 128 + 128) + 3 * 128 + 128),
    }


def test_a_variant_stands_where_plain_pytorch_makes_what_it_writes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    example = (torch.randn(2, 3, 8, 8),), {}
    captured = captured_for(Request(model, example, "inplace_conv_multiway_newnode"), example)
    found = reuse_bytes(captured)
    x, size = next((i, v.bytes) for i, v in enumerate(captured.program.values) if v.name == "convolution")
    since = {
        task.calls[-1].op.split(".")[1]: dict(zip(task.reads, found[task.cost, len(task.reads)], strict=True))[x]
        for task in captured.program.every_task()
        if x in task.reads and task.cost and task.variant != "aten"
    }
    assert size <= since["batch_norm_train"] <= 3 * size < since["batch_norm_activation_backward"]


def test_touches_leave_every_tensor_as_long_ago_as_wanted() -> None:
    draw = random.Random(0)
    for _ in range(200):
        sizes = [(own, own + draw.choice((0, 5, 40, 300))) for own in (draw.randrange(1, 30) for _ in range(4))]
        order = touches(sizes, 200)
        assert {index for index, _ in order} == {i for i, (_, since) in enumerate(sizes) if since < 200}
        for place, (index, others) in enumerate(order):
            own, since = sizes[index]
            after = others + sum(sizes[i][0] + more for i, more in order[place + 1 :])
            assert others >= 0
            assert own + after == since or (own + after > since and others == 0)


def test_what_an_operator_reads_is_touched_and_left_alone() -> None:
    state, tensor = CacheState(torch.device("cpu")), torch.arange(5.0)[1:]
    state([(tensor, 64), (torch.empty(0), 0)])
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_inputs_of_one_task_are_tensors_of_their_own() -> None:
    """Two that look alike would come from the cache twice."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    captured = capture(model, (torch.randn(4, 8),))
    maker = Inputs(captured, torch.device("cpu"))
    (backward,) = (task for task in captured.program.every_task() if "sigmoid_backward" in task.name)
    first, second = maker.of(backward).values()
    assert first.data_ptr() != second.data_ptr()
    assert maker.of(backward)[backward.reads[0]] is first


def test_all_operators_are_timed_before_any_is_timed_again() -> None:
    captured = capture(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()), (torch.randn(4, 8),))
    tasks, order = distinct_tasks(captured), list[tuple[str, int, int]]()
    costs = measure(tasks, Inputs(captured, torch.device("cpu")), progress=lambda *found: order.append(found))
    names = [task.calls[-1].op.split(".")[1] for task in tasks.values()]
    assert [name for name, _, _ in order] == names * (1 + PASSES) + ["done"]
    assert [(done, total) for _, done, total in order] == [(i, len(order) - 1) for i in range(len(order))]
    assert list(costs) == list(tasks)
    assert all(cost.seconds > 0 for cost in costs.values())


def test_what_is_not_timed_takes_no_time() -> None:
    captured = capture(nn.Sequential(nn.Linear(8, 8), nn.GELU()), (torch.randn(4, 8),))
    costs = measure(distinct_tasks(captured), Inputs(captured, torch.device("cpu")), timed=False)
    assert costs and all(cost.seconds == 0 for cost in costs.values())


@pytest.mark.parametrize(("short_seconds", "twins"), [(1.0, 2 * (PASSES - 1)), (0.0, 0)])
def test_short_tasks_run_on_other_tensors_before_every_timed_run(
    short_seconds: float, twins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their code is then in the caches, and their inputs are not; the first pass tells which are short."""
    captured = capture(nn.Sequential(nn.MaxPool2d(2), nn.GELU()), (torch.randn(2, 3, 8, 8, requires_grad=True),))
    (key,) = (key for key, task in distinct_tasks(captured).items() if "max_pool2d_with_indices_backward" in key)
    backward, seen = distinct_tasks(captured)[key], list[tuple[int, ...]]()
    original = torch.ops.aten.max_pool2d_with_indices_backward.default

    def pool(*args: Any) -> torch.Tensor:
        seen.append(tuple(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)))
        return original(*args)

    monkeypatch.setattr("monet_like.profile.profiler._SHORT", short_seconds)
    monkeypatch.setattr("monet_like.profile.profiler.without_fallback", lambda: {backward.calls[-1].op: pool})
    measure({key: backward}, Inputs(captured, torch.device("cpu")))
    timed, others = seen[0], [pointers for pointers in seen if pointers != seen[0]]
    assert len(seen) == 1 + 2 * PASSES + twins and len(others) == twins
    assert all(not {*timed} & {*pointers} for pointers in others)
    assert others == seen[3::2][:twins] if twins else seen == [timed] * len(seen)


@pytest.mark.parametrize("fails_at", [1, 2, 4, 1 + 2 + 4 * (PASSES - 1)])
def test_an_algorithm_that_fails_at_any_of_its_runs_is_refused(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries may run out of scratch memory after their first call too."""
    captured = capture(nn.Sequential(nn.Linear(8, 8), nn.GELU()), (torch.randn(4, 8),))
    tasks, runs = distinct_tasks(captured), list[int]()
    (key,) = (key for key, task in tasks.items() if task.name == "gelu")

    def gelu(*args: Any, **kwargs: Any) -> torch.Tensor:
        runs.append(len(runs) + 1)
        if runs[-1] == fails_at:
            raise RuntimeError("no scratch memory")
        return torch.ops.aten.gelu(*args, **kwargs)

    monkeypatch.setattr("monet_like.profile.profiler._SHORT", 1.0)  # how busy the machine is must not count
    monkeypatch.setattr("monet_like.profile.profiler.without_fallback", lambda: {"aten.gelu.default": gelu})
    if fails_at > 1:  # what is no algorithm must not; its first failure may be the inputs'
        with pytest.raises(ProfileError, match=r"profiling gelu failed: .*no scratch memory"):
            measure(tasks, Inputs(captured, torch.device("cpu")))
        runs.clear()
    costs = measure({**tasks, key: replace(tasks[key], word="algorithms")}, Inputs(captured, torch.device("cpu")))
    assert len(runs) == fails_at
    assert {found for found, cost in costs.items() if cost == REFUSED} == {key}
