"""The attention that a GPU would take: PyTorch's choice by card, kinds by name, and what is uncertain without it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import build
from fake_gpu.attention_choices import CASES, tensors
from fake_gpu.captures import Grouped
from torch import nn

from monet_like import problem
from monet_like.capture.absent_gpu.attention import KINDS, AttentionCall, attention_as, choice
from monet_like.capture.captured import Captured, fake_mode
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError, ScheduleFileError, UsageError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.replay.wrapper import ScheduleWrapper

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is here")

CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))


@pytest.fixture(scope="module")
def chosen(fake_gpu_library: Path, request: pytest.FixtureRequest) -> dict[tuple[int, int], list[int]]:
    """PyTorch's choices on the fake GPU, for the cards that are asked for in this run."""
    asking = (item for item in request.session.items if request.path == item.path and "chosen" in item.fixturenames)  # type: ignore[attr-defined]
    cards = [item.callspec.params["capability"] for item in asking]
    command = [sys.executable, str(build.HERE / "attention_choices.py"), *(f"{10 * a + b}" for a, b in cards)]
    done = build.run(fake_gpu_library, command)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(cards, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow(but=["(9, 0)"])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_choice_is_pytorchs_own(chosen: dict[tuple[int, int], list[int]], capability: tuple[int, int]) -> None:
    there = chosen[capability]
    names = {int(backend.value): name for name, backend in KINDS.items()}
    with fake_mode():
        for case, expected in zip(CASES, there, strict=True):
            q, k, v, mask = tensors(case, "cpu")
            call = AttentionCall(q, k, v, mask, 0.0, case[6], None, case[1] != case[2])
            assert choice(call, capability) == names[expected], case
    assert len(set(there)) > 1


def operators(captured: Captured) -> set[str]:
    """Names of the kinds of attention in a program."""
    calls = {call.op for task in captured.program.every_task() for call in task.calls}
    return {op.removeprefix("aten._scaled_dot_product_").split("_")[0] for op in calls if "_attention" in op}


def grouped(**options: object) -> Captured:
    model = Grouped().to(torch.bfloat16)
    return capture(model, (torch.randn(2, 32, 64, dtype=torch.bfloat16),), target=CUDA, **options)  # type: ignore[arg-type]


def test_the_card_decides() -> None:
    assert operators(grouped(capability=(8, 0))) == {"flash"}
    assert operators(grouped(capability=(9, 0))) == {"cudnn"}
    assert operators(grouped(capability=(7, 5))) == set()  # matrix products


def test_what_depends_on_the_card_is_refused_where_it_is_not_known() -> None:
    of_what = re.escape("bfloat16 [2, 4, 32, 16] and [2, 2, 32, 16], grouped heads")
    with pytest.raises(CaptureError, match=rf"{of_what} depends on the card \(cudnn or flash or math\); plan for"):
        grouped()


def test_a_kind_is_taken_by_name() -> None:
    for name in ("flash", "cudnn"):
        assert operators(grouped(attention=name)) == {name}
    assert operators(grouped(attention="math", capability=(9, 0))) == set()
    with pytest.raises(CaptureError, match=r"^flash attention does not take these arguments .*: float32 \[2, 4"):
        capture(Grouped(), (torch.randn(2, 32, 64),), target=CUDA, attention="flash")


def test_masks_are_certain_for_matrix_products_alone() -> None:
    model, mask = Grouped().to(torch.bfloat16), torch.ones(32, 32, dtype=torch.bool).tril()
    inputs = (torch.randn(2, 32, 64, dtype=torch.bfloat16), mask)
    with pytest.raises(CaptureError, match="flash attention does not take these arguments on the GPU"):
        capture(model, inputs, target=CUDA, capability=(8, 0), attention="flash")
    with pytest.raises(CaptureError, match="how PyTorch prepares a mask for cudnn attention is known only on the GPU"):
        capture(model, inputs, target=CUDA, capability=(9, 0))
    assert operators(capture(model, inputs, target=CUDA, capability=(9, 0), attention="math")) == set()


def test_an_unknown_kind() -> None:
    with pytest.raises(UsageError, match="is unknown; give flash, efficient, cudnn or math"), attention_as("paged"):
        pass


def test_a_schedule_pins_the_attention_it_was_planned_with(tmp_path: Path) -> None:
    """On a CPU, where PyTorch takes its flash attention unless another kind is pinned."""
    torch.manual_seed(0)
    model, x = Grouped(), torch.randn(2, 32, 64)
    found = problem(model, x, device="cpu", attention="math", mode="normal", profile="roofline:cpu").plan(
        "200%", strategy="store_all"
    )
    found.save(tmp_path / "math.json")
    record = ScheduleRecord.load(tmp_path / "math.json")
    assert record.attention == "math"
    wrapped = ScheduleWrapper(model, record, example=((x,), {}))
    for _ in range(2):
        model.zero_grad()
        wrapped(x).backward()
        found_gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(wrapped._kept) == 1  # captured once
    model.zero_grad()
    with attention_as("math"):
        model(x).backward()
    assert all(map(torch.equal, found_gradients, (p.grad for p in model.parameters())))
    other = tmp_path / "other.json"
    ScheduleRecord(**{**vars(record), "attention": "paged"}).save(other)
    with pytest.raises(ScheduleFileError, match="attention is 'paged', which this version does not know"):
        ScheduleWrapper(nn.Sequential(), other)
