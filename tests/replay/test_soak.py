"""Many steps: plain and scheduled training, from one seed, stay together to the bit and do not grow."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import together
from replays import record_for
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from torch.nn.parallel import DistributedDataParallel

from monet_like.compiler.request import Request, captured_for
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.measure import allocated_stretches
from monet_like.replay.wrapper import ScheduleWrapper

MODE = "inplace_multiway_newnode"
ACCUMULATED = 2
#: Of the distributed runs; one process is killed in the middle.
STEPS, KILLED_AT = 12, 5


class Block(nn.Module):
    """The residual block of ResNet, with dropout."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm_one(self.one(x)).relu()
        return (x + self.norm_two(self.two(self.drop(inner)))).relu()


def small_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Block(8) for _ in range(2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (8,), generator=generator)
    return torch.randn(8, 3, 12, 12, generator=generator) + labels[:, None, None, None], labels


def record_of(model: nn.Module, autocast: str) -> ScheduleRecord:
    """A schedule that runs half of what it can again."""
    example = ((batch(0)[0],), {})
    captured = captured_for(Request(model, example, MODE, autocast=autocast), example)
    schedule = random_schedule(captured.program, 5, drop=0.5)
    return replace(record_for(captured, schedule, MODE, (model, *example)), autocast=autocast)


def growth(function: Callable[[], Any]) -> int:
    """Bytes allocated while ``function`` runs less those released that were."""
    return allocated_stretches(lambda _: function(), torch.device("cpu"))[-1].end_bytes


class Training:
    """A model, its optimizer and loss scaler; each step accumulates gradients under autocast."""

    def __init__(self, model: nn.Module, autocast: torch.dtype) -> None:
        self.model, self.autocast = model, autocast
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=15)

    def step(self, number: int) -> float:
        loss = torch.zeros(())
        for part in range(ACCUMULATED):
            x, labels = batch(number * ACCUMULATED + part)
            torch.manual_seed(number * ACCUMULATED + part)  # dropout
            with torch.autocast("cpu", self.autocast):
                loss = nn.functional.cross_entropy(self.model(x), labels)
            self.scaler.scale(loss / ACCUMULATED).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)


@pytest.mark.slow
def test_many_steps_with_dropout_amp_and_accumulation() -> None:
    torch.manual_seed(0)
    model = small_resnet()
    plain = Training(copy.deepcopy(model), torch.float16)
    ours = Training(ScheduleWrapper(model, record_of(model, "float16")), torch.float16)
    losses = [(plain.step(number), ours.step(number)) for number in range(25)]
    assert [n for n, (one, other) in enumerate(losses) if one != other] == []
    assert sum(one for one, _ in losses[-10:]) < 0.9 * sum(one for one, _ in losses[:10])
    for (name, one), other in zip(plain.model.state_dict().items(), ours.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    growth(lambda: [ours.step(number) for number in range(4)])  # the gradients that wait are now known to the profiler
    assert growth(lambda: [ours.step(number) for number in range(8)]) == 0


@pytest.mark.slow
def test_a_killed_process_resumes_where_it_was(tmp_path: Path) -> None:
    """Both processes start again when one of them has been killed, as those of torchrun do."""
    record_of(small_resnet(), "bfloat16").save(tmp_path / "schedule.json")
    for attempt in range(2):
        meeting = tmp_path / f"attempt_{attempt}"  # the first one has the killed process's address
        meeting.mkdir()
        with pytest.raises(ProcessException) if attempt == 0 else contextlib.nullcontext():
            together(meeting, _resumed, tmp_path, attempt, within_seconds=300.0)
    told = (tmp_path / "told").read_text()
    begun = [(int(attempt), int(step)) for attempt, step in re.findall(r"^attempt (\d+) from step (\d+)$", told, re.M)]
    assert [attempt for attempt, _ in begun] == [0, 1] and 0 < begun[1][1] <= KILLED_AT, told
    steps = re.findall(r"^step (\d+): (\S+) (\S+)$", told, re.MULTILINE)
    assert {int(number) for number, _, _ in steps} == set(range(STEPS))
    assert all(plain == ours for _, plain, ours in steps), steps


def _resumed(rank: int, folder: Path, attempt: int) -> None:
    """Plain and scheduled data parallel training side by side, with a checkpoint after every step."""

    def tell(line: str) -> None:
        if rank == 0:
            with (folder / "told").open("a") as file:
                file.write(f"{line}\n")

    model = small_resnet()
    scheduled = ScheduleWrapper(copy.deepcopy(model), folder / "schedule.json")
    runs = [Training(DistributedDataParallel(one), torch.bfloat16) for one in (model, scheduled)]
    checkpoint, start = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        states = torch.load(checkpoint)
        start = states.pop("step")
        for run, state in zip(runs, states["runs"], strict=True):
            run.load(state)
    tell(f"attempt {attempt} from step {start}")
    for number in range(start, STEPS):
        if (rank, attempt, number) == (1, 0, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)
        losses = [run.step(2 * number + rank) for run in runs]
        tell(f"step {number}: {losses[0]!r} {losses[1]!r}")
        if rank == 0:
            torch.save({"step": number + 1, "runs": [run.state() for run in runs]}, folder / "new.pt")
            (folder / "new.pt").replace(checkpoint)
