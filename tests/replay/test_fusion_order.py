"""The order of tasks for fusion: random models train as plain PyTorch, within the budget; pieces run uncompiled."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import uncompiled
from small_models import draw
from small_models.cases import Case
from small_models.judging import ROUNDING, costs_of, difference, peak_of, plainly, planned, train
from torch import nn

import monet_like
from monet_like.capture.captured import Captured
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import MonetError
from monet_like.ir.program import Call, Program, Ref, Task, Value
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay import fusion, training_step
from monet_like.replay.fusion_order import in_fusion_order, levels_of, workspaces_of
from monet_like.replay.segments import Runs, cut, tasks_of, with_run_bytes
from monet_like.replay.wrapper import ScheduleWrapper

#: Of budgets, in peaks of the plan.
ROOM = (1.0, 1.1, 10.0)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that is made has another order than its plan; these steps are run, uncompiled."""
    found: list[bool] = []
    order = fusion.in_fusion_order

    def noted(captured: Captured, runs: Runs, *given: Any) -> Any:
        made = order(captured, runs, *given)
        ran, planned = ([*chain(*run)] for run in (made[0], runs))
        assert sorted(ran, key=repr) == sorted(planned, key=repr)
        found.append(ran != planned)
        return made

    def first_that_fits(ways: Any, limit_bytes: int) -> Any:
        return next((way for way in ways if way[1].peak_bytes <= limit_bytes), ways[-1])

    monkeypatch.setattr(fusion, "in_fusion_order", noted)
    monkeypatch.setattr(fusion, "compile_function", uncompiled)
    monkeypatch.setattr(fusion, "best_of", first_that_fits)
    return found


def planned_for(case: Case) -> tuple[ScheduleRecord, Captured]:
    """With the memory of each task, and a budget."""
    record, captured = planned(case)
    request = Request(case.model(), case.inputs(0), case.mode, "small model", autocast=case.autocast)
    report = simulate(captured.program, record.schedule, costs_of(request, captured))
    budget = int(ROOM[case.seed % len(ROOM)] * record.peak_bytes)
    return replace(record, run_bytes=tuple(step.bytes for step in report.steps), budget_bytes=budget), captured


def wrapped(case: Case, record: ScheduleRecord, captured: Captured, backend: str = "inductor") -> ScheduleWrapper:
    return ScheduleWrapper(case.model(), record, example=case.inputs(0), captured=captured, backend=backend)


@pytest.mark.slow(every=10)
@pytest.mark.parametrize("seed", range(40))
def test_another_order_changes_no_number_and_keeps_to_the_budget(seed: int, moved: list[bool]) -> None:
    case = draw(seed)
    plain, failure, reason = plainly(case)
    if reason or failure:
        pytest.skip(reason or "plain PyTorch fails as well")
    try:
        record, captured = planned_for(case)
        left = train(case, wrapped(case, record, captured))
    except MonetError as error:
        pytest.skip(f"refused: {error}")
    assert not difference(case, plain, left, rounding=ROUNDING[case.dtype] / 100)
    model, eager = wrapped(case, record, captured), wrapped(case, record, captured, "eager")
    peak_of(case, model)  # pieces are made in its first step
    if peak_of(case, eager) <= record.peak_bytes:  # nothing draws from a state that no plan counts
        assert peak_of(case, model) <= record.budget_bytes


@pytest.mark.slow
def test_many_steps_have_another_order(moved: list[bool]) -> None:
    for seed in range(1, 30, 3):
        case = draw(seed)
        with contextlib.suppress(Exception):  # what is refused, and trainers that need more
            wrapped(case, *planned_for(case))(*case.inputs(0)[0])
    assert len(moved) > 5
    assert sum(moved) > len(moved) // 3


@pytest.mark.parametrize("seed", range(3))
def test_memory_of_each_task_is_that_of_the_simulator(seed: int) -> None:
    """Workspaces included, and what exists besides the step left out."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    request = Request(model, ((torch.randn(5, 3, 8, 8),), {}), "inplace_conv_multiway_newnode", "net", profile_batch=9)
    captured = captured_for(request, request.example)
    schedule, costs = random_schedule(captured.program, seed, drop=0.5, others=0.5), costs_of(request, captured)
    report = simulate(captured.program, schedule, costs, extra_bytes=1000)
    stretches = cut(captured, schedule)
    forward = tuple(captured.program.tasks[i] for i in schedule.forward)
    runs = [forward, *(tasks_of(captured, schedule, start, stop) for start, stop, _ in stretches)]
    runs = with_run_bytes(runs, [step.bytes for step in report.steps])
    workspaces = [costs[task.cost].workspace_bytes if task.cost else 0 for task in chain(*runs)]
    assert workspaces_of(captured.program, runs) == (workspaces, 1000)
    levels = levels_of(captured.program, runs, workspaces)
    assert [level.bytes + 1000 for level in levels] == [step.bytes for step in report.steps]


def test_what_reads_a_value_runs_before_it_is_overwritten() -> None:
    """A cosine would be fused with what reads it, behind a product of what is written over its argument."""

    def task(op: str, reads: tuple[int, ...], writes: int, overwrites: int | None = None) -> Task:
        call = Call(f"aten.{op}", tuple(map(Ref, reads)), (), (Ref(writes),))
        return Task(op, reads, (writes,), overwrites=overwrites, calls=(call,))

    product, cosine = task("mm.default", (0, 0), 1), task("cos.default", (1,), 2)
    over, again = task("relu_.default", (1,), 3, overwrites=1), task("mm.default", (3, 3), 4)
    last = task("add.Tensor", (2, 4), 5)
    values = tuple(Value(str(v), 2**20, "forward" if v else "input") for v in range(6))
    program = Program(values, (product, cosine, over, again, last), (), (5,))
    captured: Any = SimpleNamespace(program=program, device=torch.device("cpu"), parameters=())
    ((*ran,),), *_ = in_fusion_order(captured, [program.tasks], [], [0] * 5, 2**40)
    assert ran == [product, cosine, over, again, last]
    pure = task("relu.default", (1,), 3)  # then the cosine may move
    program = replace(program, tasks=(product, cosine, pure, again, last))
    captured.program = program
    ((*ran,),), *_ = in_fusion_order(captured, [program.tasks], [], [0] * 5, 2**40)
    assert ran == [product, pure, again, cosine, last]


def test_what_reads_a_value_runs_before_a_view_of_it_is_written_into() -> None:
    def made(name: str, calls: tuple[Call, ...], reads: tuple[int, ...], writes: int) -> Task:
        return Task(name, reads, (writes,), calls=calls)

    view = Call("aten.select.int", (Ref(0), 0, 1), (), (Ref("row"),))
    fill = Call("aten.zero_.default", (Ref("row"),), (), (Ref("filled"),))
    copy = Call("aten.clone.default", (Ref("filled"),), (), (Ref(3),))
    cosine = made("cosine", (Call("aten.cos.default", (Ref(0),), (), (Ref(1),)),), (0,), 1)
    cleared = made("cleared", (view, fill, copy), (0,), 3)
    product = made("product", (Call("aten.mm.default", (Ref(3), Ref(3)), (), (Ref(4),)),), (3,), 4)
    total = made("total", (Call("aten.add.Tensor", (Ref(1), Ref(4)), (), (Ref(5),)),), (1, 4), 5)
    tasks = (cosine, cleared, product, total)
    program = Program(tuple(Value(str(v), 2**20, "forward" if v else "buffer") for v in range(6)), tasks, (), (5,))
    captured: Any = SimpleNamespace(program=program, device=torch.device("cpu"), parameters=())
    ((*ran,),), *_ = in_fusion_order(captured, [tasks], [], [0] * 4, 2**40)
    assert ran == [*tasks]


@pytest.mark.usefixtures("moved")
def test_pieces_of_blocks_have_what_the_plan_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside their own peak: one block runs at a time."""
    limits: list[int] = []
    fuse = training_step.fuse

    def noted(captured: Captured, runs: Any, stretches: Any, cut_into: Any, within_bytes: int, told: Any) -> Any:
        limits.append(within_bytes)
        return fuse(captured, runs, stretches, cut_into, within_bytes, told)

    monkeypatch.setattr(training_step, "fuse", noted)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)))
    plain, x = copy.deepcopy(model), torch.randn(256, 32)
    ours = monet_like.auto_schedule(model, x, memory_budget="200%", blocks="*", backend="inductor", effort="quick")
    for net in (plain, ours):
        net(x).square().mean().backward()
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(expected.grad, found.grad)
    plan = model[0]._block_plan
    left = plan.budget_bytes - plan.peak_bytes
    assert left > 0
    assert {*limits} == {block.record.peak_bytes + left for block in model}
