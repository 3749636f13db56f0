"""What is said of a GPU's memory when it was not enough; the fake GPU's tests have real errors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monet_like
from monet_like.ir.program import Task
from monet_like.ir.simulate import Free, simulate
from monet_like.ir.units import GIB, MIB
from monet_like.runtime.operators import resolve
from monet_like.runtime.out_of_memory import AFTER, BACKWARD, Held, as_pytorchs, in_words, running_task


def held(*, asked: int = GIB, tensors: int, reserved: int = 0, free: int = 0, limit: int = 24 * GIB) -> Held:
    return Held(asked, tensors, reserved or tensors, free, limit, 24 * GIB)


def test_other_processes_get_a_smaller_budget() -> None:
    said = in_words("Net", BACKWARD, 15 * GIB, 16 * GIB, "adamw", held(tensors=14 * GIB, reserved=14 * GIB))
    assert said.splitlines()[0] == (
        "out of memory in the backward of Net's scheduled step: PyTorch was asked for 1.00 GB"
    )
    assert "outside of PyTorch           10.00 GB" in said
    assert "not in the plan" not in said and "in no tensor" not in said and "limit" not in said
    assert 'next: plan for what is free: memory_budget="13.30 GB"' in said  # 95 % of 14 GB


def test_pieces_are_told_from_tensors() -> None:
    said = in_words("Net", BACKWARD, 16 * GIB, 16 * GIB, "adamw", held(tensors=15 * GIB, reserved=24 * GIB))
    assert "reserved, but in no tensor   9.00 GB" in said and "place_memory" in said
    assert "outside of PyTorch" not in said
    assert said.splitlines()[-1].startswith("next: free what is not in the plan, or see the lines above")


@pytest.mark.parametrize(("optimizer", "named"), [("none", True), ("adamw", False)])
def test_the_optimizer_is_named_where_the_plan_has_none(optimizer: str, named: bool) -> None:
    said = in_words("Net", AFTER, 8 * GIB, 8 * GIB, optimizer, held(asked=512 * MIB, tensors=23 * GIB))
    assert ("the state that the optimizer makes" in said) == ('optimizer="adamw"' in said) == named


def test_the_limit_of_the_process_counts() -> None:
    there = held(tensors=11 * GIB, limit=12 * GIB, free=13 * GIB)
    said = in_words("Net", BACKWARD, 12 * GIB, 16 * GIB, "sgd", there)
    assert "limit of this process        12.00 GB of 24.00 GB" in said
    assert 'memory_budget="11.40 GB"' in said


def test_where_no_budget_helps_the_others_are_named() -> None:
    said = in_words("Net", BACKWARD, 8 * GIB, 8 * GIB, "sgd", held(tensors=23 * GIB + 512 * MIB, limit=20 * GIB))
    assert "of it not in the plan        16.50 GB" in said
    assert said.splitlines()[-1].startswith("next: plan for what is free")
    said = in_words("Net", BACKWARD, 16 * GIB, 16 * GIB, "sgd", held(tensors=38 * GIB))
    assert "free some of it" in said


def test_what_is_predicted_there_is_told_from_the_peak() -> None:
    there = held(tensors=10 * GIB, free=13 * GIB)
    said = in_words("Net", BACKWARD, 16 * GIB, 16 * GIB, "adamw", there, "mm_3", 4 * GIB).splitlines()
    assert said[0].startswith("out of memory in the backward of Net's scheduled step, at mm_3: PyTorch was asked for")
    assert said[1:3] == [
        "  predicted there              4.00 GB", "  predicted peak of the step   16.00 GB, budget 16.00 GB"
    ]  # fmt: skip
    assert said[4].startswith("  of it not in the plan        7.00 GB with what was asked for")  # 10 + 1 - 4


@pytest.mark.parametrize("kind", ["whole", "file"])
def test_the_task_that_runs_is_found_with_what_is_predicted_there(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Task | None] = []

    def noting(name: str) -> Callable[..., Any]:
        function = resolve(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(running_task(sys._getframe()))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr("monet_like.runtime.codegen.resolve", noting)
    model = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU(), nn.Tanh())))
    x = torch.randn(512, 64)
    wrapped: Any = monet_like.auto_schedule(model, x, memory_budget="80%", effort="quick")
    if kind == "file":
        wrapped.record.save(tmp_path / "schedule.json")
        wrapped = monet_like.ScheduleWrapper(model, tmp_path / "schedule.json")
    seen.clear()
    wrapped(x).sum().backward()
    assert running_task(sys._getframe()) is None and None not in seen
    ran = [(task.name, task.run_bytes) for task, _ in itertools.groupby(filter(None, seen))]
    (kept,) = wrapped._kept
    found = simulate(kept.captured.program, wrapped.record.schedule, Free(), extra_bytes=wrapped.record.extra_bytes)
    named = list(zip((step.task for step in found.steps), wrapped.record.run_bytes, strict=True))
    assert max(count or 0 for _, count in ran) == wrapped.record.peak_bytes and wrapped.record.schedule.rerun_count
    assert all(step.bytes <= count for step, (_, count) in zip(found.steps, named, strict=True))  # without workspaces
    assert [entry for entry in named if entry in ran] == ran and len(ran) > len(model)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), torch.OutOfMemoryError),
        (RuntimeError("monet_like::swiglu: up must have gate's shape [4], got [3]"), RuntimeError),
        (NotImplementedError("CUDA out of memory"), NotImplementedError),
    ],
)
def test_an_error_of_a_kernel_gets_pytorchs_type_again(raised: Exception, seen: type[Exception]) -> None:
    def run(given: list[int]) -> None:
        raise raised

    call: Callable[[list[int]], None] = as_pytorchs(run)
    with pytest.raises(RuntimeError) as found:
        call([1])
    assert type(found.value) is seen and str(found.value) == str(raised)
