"""Plain-torch twins in the place of compiled kernels: their memory is predicted, and that they run on a GPU is said."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import monet_like
from monet_like import ops
from monet_like.capture.captured import Captured
from monet_like.compiler.request import Request, captured_for
from monet_like.compiler.sources import Given
from monet_like.errors import ScheduleFileError
from monet_like.ir.program import Task
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.job.job import Job
from monet_like.profile.devices import DEVICES
from monet_like.profile.measure import allocated_peak
from monet_like.profile.task_inputs import Inputs
from monet_like.replay.checks import twins
from monet_like.replay.checks.compatibility import exceeds
from monet_like.replay.checks.twins import twins_of, warn_of_twins, workspace_of_twin, workspaces_of_twins
from monet_like.runtime.codegen import Block, compile_block

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MODE = "inplace_conv_multiway_newnode"


@pytest.fixture(name="only_twins")
def _only_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing is compiled."""
    monkeypatch.setattr(ops, "runs_here", lambda op, _: not op.startswith("monet_like."))
    monkeypatch.setattr(ops, "available", lambda _: False)
    monkeypatch.setattr(twins, "_warned", False)


def request_of(mode: str = MODE) -> Request:
    layers = (nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3), nn.ReLU())
    return Request(nn.Sequential(*layers), ((torch.randn(4, 8, 32, 32),), {}), mode, strategy="heuristic")


@pytest.fixture(name="captured", scope="module")
def _captured() -> Captured:
    return captured_for(request_of(), request_of().example)


def of_ours(captured: Captured) -> list[Task]:
    found = {task.cost: task for task in captured.every_task() if any("monet_like." in c.op for c in task.calls)}
    return list(found.values())


class _RunningTwins(TorchDispatchMode):
    """Runs twins, whatever is compiled."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "monet_like":
            return ops.operators()[func._schema.name.partition("::")[2]].reference(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _run_twins(run: Any, inputs: list[Any]) -> None:
    with _RunningTwins(), torch.no_grad():
        run([*inputs])


def test_what_is_counted_is_what_twins_take(captured: Captured) -> None:
    """But for what ATen's operators take inside, which a count of their results does not see."""
    maker, seen = Inputs(captured, CPU), 0
    for task in of_ours(captured):
        run, inputs = compile_block(Block(task.reads, (task,)), task.name), maker.of(task)

        made = task.writes if task.overwrites is None else task.writes[1:]
        measured = allocated_peak(partial(_run_twins, run, [inputs[v] for v in task.reads]), CPU) - sum(
            captured.metas[v].storage_bytes for v in made
        )
        counted = workspace_of_twin(captured, task)
        assert 0.6 * measured - 512 <= counted <= measured + 512, (task.variant, counted, measured)
        seen += counted > 10_000
    assert seen >= 6


def test_what_depends_on_numbers_is_taken_to_be_large() -> None:
    request = request_of("normal_dropit0.5")
    captured = captured_for(request, request.example)
    packing = [t for t in of_ours(captured) if any("pack_largest" in c.op and "un" not in c.op for c in t.calls)]
    assert packing
    for task in packing:
        data = [captured.metas[v].storage_bytes for v in (*task.reads, *task.writes)]
        assert workspace_of_twin(captured, task) >= sum(data)


def within(record: ScheduleRecord, budget_bytes: int) -> ScheduleRecord:
    return dataclasses.replace(record, budget_bytes=budget_bytes)


@pytest.fixture(name="record")
def _record() -> ScheduleRecord:
    """Of a schedule that keeps bits and bytes instead of floats, at datasheet rates, so that nothing has
    a workspace.
    """
    return Job(request_of(), CPU, Given(DEVICES["cpu"])).plan("86%").record


def test_a_schedule_whose_twins_exceed_its_budget_is_refused(
    record: ScheduleRecord, captured: Captured, only_twins: None
) -> None:
    used = [captured.program.tasks[i] for i in record.schedule.forward]
    used += [ways[way] for ways, way in zip(captured.program.slots, record.schedule.ways, strict=True)]
    assert any(twins_of(task, "cpu") for task in used)
    needed = simulate(captured.program, record.schedule, workspaces_of_twins(captured, "cpu")).peak_bytes
    assert needed > record.peak_bytes
    assert exceeds(within(record, needed), captured, "it", CPU) == ""
    reason = exceeds(within(record, needed - 1), captured, "it", CPU)
    assert reason.startswith(
        "this schedule needs the compiled kernels of monet_like: with the plain-torch twins, which run here on cpu, "
    )
    assert f"({needed} bytes), more than its budget" in reason and "monet_like.build" in reason
    with pytest.raises(ScheduleFileError, match="needs the compiled kernels"):
        monet_like.ScheduleWrapper(request_of().model, within(record, needed - 1))
    monet_like.ScheduleWrapper(request_of().model, within(record, needed))


def test_with_compiled_kernels_nothing_is_counted(
    record: ScheduleRecord, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "runs_here", lambda *_: True)
    assert exceeds(within(record, record.peak_bytes), captured, "it", CPU) == ""


def test_twins_on_a_gpu_are_said_once(captured: Captured, only_twins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"twins run on the GPU.*Install nvcc .*monet_like\.build") as caught:
        warn_of_twins(captured, CUDA, stacklevel=1)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_twins(captured, CUDA, stacklevel=1)  # once in a process
        monkeypatch.setattr(twins, "_warned", False)
        warn_of_twins(captured, CPU, stacklevel=1)  # where there is no compiler, doctor tells
        plain = request_of("normal")
        nothing = captured_for(dataclasses.replace(plain, model=nn.Linear(8, 8)), ((torch.randn(2, 8),), {}))
        warn_of_twins(nothing, CUDA, stacklevel=1)
        monkeypatch.setattr(ops, "available", lambda _: True)
        warn_of_twins(captured, CUDA, stacklevel=1)
