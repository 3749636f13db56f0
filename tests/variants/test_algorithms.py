"""cuDNN's convolution algorithms and the kinds of attention: what is offered, and what is refused.

Without a GPU: captured as on one, and run on the CPU by the twins. What a GPU makes of them:
tests/gpu/test_algorithms_cuda.py.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import EXACT, FORMATS, MODE, Attends, captured
from click.testing import CliRunner
from random_programs import best_seconds, random_program
from taking import outcome, random_inputs
from torch import nn

from monet_like.capture.captured import Captured, fake_mode
from monet_like.capture.lower.step import capture
from monet_like.cli.group import main
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request
from monet_like.errors import InfeasibleError, ProfileError
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import REFUSED, Cost, Program
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.plan import plan
from monet_like.plan.baseline import store_all
from monet_like.plan.budgets import fits, smallest_budget
from monet_like.plan.subprogram import without_refused
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.profile.scaling import Scaling, on_line
from monet_like.variants import admitted

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# What is offered -----------------------------------------------------------------------------------------------


def found(of: Captured, start: str) -> Counter[str]:
    """Variants that begin so, without that."""
    tasks = of.program.every_task()
    return Counter(task.variant.removeprefix(start) for task in tasks if task.variant.startswith(start))


ANY = {"implicit_gemm", "implicit_precomp_gemm", "gemm", "0", "1", "3"}
TRANSFORMS = {"fft", "fft_tiling"}


OPTIONS: list[tuple[dict[str, Any], set[str]]] = [
    ({"kernel_size": 3, "padding": 1}, ANY | TRANSFORMS | {"winograd", "winograd_nonfused"}),
    ({"kernel_size": 5, "groups": 2, "bias": False}, ANY | TRANSFORMS),
    ({"kernel_size": (7, 3)}, ANY | TRANSFORMS),
    ({"kernel_size": 3, "stride": 2}, ANY),
    ({"kernel_size": 3, "dilation": 2, "padding": "same"}, ANY),
    ({"kernel_size": 1}, ANY),
]


@pytest.mark.parametrize(
    ("case", "dtype", "layout"),
    [
        *((case, torch.float32, FORMATS[case % 2]) for case in range(len(OPTIONS))),
        *((0, dtype, layout) for dtype in (torch.bfloat16, torch.float16) for layout in FORMATS),
        (1, torch.bfloat16, FORMATS[0]),
    ],
)
def test_algorithms_that_can_do_it_are_offered(case: int, dtype: torch.dtype, layout: Any) -> None:
    options, wanted = OPTIONS[case]
    of = captured(nn.Conv2d(4, 6, **options), 2, 4, 12, 10, dtype=dtype, layout=layout)
    assert set(found(of, "conv.cudnn_")) == wanted
    tasks = [task for task in of.program.every_task() if task.variant.startswith("conv.cudnn_")]
    assert {task.word for task in tasks} == {"algorithms"}
    results = {of.metas[value] for task in of.plain.tasks for value in task.writes}
    wide = {call.args[-2] for task in tasks for call in task.calls if "cudnn" in call.op}
    assert wide == {not any(meta.contiguous for meta in results)}
    assert dtype != torch.float32 or wide == {layout is torch.channels_last}


def test_nothing_is_offered_unasked_or_for_a_cpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3), nn.Flatten(2), nn.Conv1d(3, 3, 2))
    of = captured(model, 2, 3, 8, 8)
    transposed = {"aten.convolution.default", "aten.convolution_backward.default"}
    named = [task for task in of.program.every_task() if task.word == "algorithms"]
    assert named and all("convolution_1" not in task.name and "convolution_2" not in task.name for task in named)
    assert transposed <= {call.op for task in of.program.every_task() for call in task.calls}
    plain = captured(model, 2, 3, 8, 8, mode=EXACT)
    assert not [task for task in plain.program.every_task() if task.word == "algorithms"]
    raw = capture(model, (torch.randn(2, 3, 8, 8),))
    assert admitted(raw, MODE).program.fingerprint == admitted(raw, EXACT).program.fingerprint


@pytest.mark.parametrize("layout", FORMATS)
def test_every_way_makes_what_pytorchs_own_makes(layout: Any) -> None:
    """Arguments in their places, views and bias gradients with them, in the layout that the values have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, (3, 5), 2, groups=2, bias=False))
    of = captured(model, 2, 4, 12, 10, layout=layout)
    count = 0
    producers = of.program.producers
    for task in of.program.every_task():
        if not task.variant.startswith("conv.cudnn_"):
            continue
        slot = next((slot for slot in of.program.slots if task in slot), None)
        own = slot[0] if slot else of.program.tasks[producers[task.writes[0]][0]]
        inputs = random_inputs(of, own, task)
        for value, expected, made in zip(task.writes, outcome(own, inputs), outcome(task, inputs), strict=True):
            torch.testing.assert_close(made, expected)
            assert made.stride() == of.metas[value].stride
            count += 1
    assert count >= 20


# Attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "causal"), [("flash", False), ("flash", True), ("efficient", True), ("cudnn", False)])
def test_other_kinds_of_attention_are_offered(kind: str, causal: bool) -> None:
    of = captured(Attends(kind, causal), 2, 6, 16, dtype=torch.bfloat16)
    others = {"flash", "efficient", "cudnn"} - {kind}
    assert found(of, "attention.") == dict.fromkeys(others, 2)  # forward and gradient
    for other in others:
        forward, way = (task for task in of.program.every_task() if task.variant == f"attention.{other}")
        own = next(task for task in of.program.tasks if task.writes[0] == forward.writes[0] and task is not forward)
        # One result for all kinds, and what each saves for itself.
        assert not set(forward.writes[1:]) & set(own.writes) and len(forward.writes) == 4
        assert set(way.reads) & {*forward.writes, *own.writes} == set(forward.writes)


@pytest.mark.parametrize(
    ("options", "dtype", "kinds"),
    [
        ({"kind": "efficient", "width": 12}, torch.bfloat16, set()),  # rows that are no multiple of 16 bytes
        ({"kind": "efficient", "width": 160}, torch.bfloat16, {"flash"}),  # too wide for cuDNN's
        ({"kind": "efficient", "scale": 0.3}, torch.float16, {"flash", "cudnn"}),
        ({}, torch.float32, {"written_out"}),
        ({"dropout_p": 0.1}, torch.float32, set()),
    ],
)
def test_kinds_of_attention_that_take_it(options: dict[str, Any], dtype: torch.dtype, kinds: set[str]) -> None:
    of = captured(Attends(**options), 2, 6, 16, dtype=dtype)
    assert set(found(of, "attention.")) == kinds
    calls = [call for task in of.program.every_task() if task.variant.startswith("attention.") for call in task.calls]
    scaled = [call for call in calls if "scaled_dot" in call.op]
    assert all(("scale" in dict(call.kwargs)) == ("scale" in options) for call in scaled)


@pytest.mark.parametrize(("causal", "options"), [(False, {}), (True, {}), (True, {"scale": 0.3})])
def test_attention_written_out(causal: bool, options: dict[str, Any]) -> None:
    """Against PyTorch's attention in float64: result and gradients, in the layouts that the values have."""
    torch.manual_seed(0)
    of = captured(Attends("", causal, **options), 2, 6, 16)
    forward, way = (task for task in of.program.every_task() if task.variant == "attention.written_out")
    inputs = random_inputs(of, forward, way)
    (out,) = forward.writes
    made = [*outcome(forward, inputs), *outcome(way, inputs)]
    (projected,), (grad,) = forward.reads, [v for v in way.reads if v not in forward.reads]
    exact = inputs[projected].double().requires_grad_()
    q, k, v = exact.view(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4)
    result = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
    wanted = torch.autograd.grad(result, (q, k, v), inputs[grad].double().view(2, 6, 4, 8).transpose(1, 2))
    for value, found, expected in zip((out, *way.writes), made, (result, *wanted), strict=True):
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert found.stride() == of.metas[value].stride
    assert out not in way.reads  # neither the result nor what a fused kind saves


# What is refused -----------------------------------------------------------------------------------------------


def test_rates_know_no_algorithms() -> None:
    """Plans from datasheet rates are those without the word."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    with_them, without = captured(model, 4, 3, 32, 32), captured(model, 4, 3, 32, 32, mode=EXACT)
    costs = roofline(with_them, DEVICES["h100"])
    refused = {task.cost for task in with_them.program.every_task() if task.word == "algorithms"}
    assert refused == {key for key, cost in costs.items() if cost == REFUSED} and refused
    assert {key: cost for key, cost in costs.items() if cost != REFUSED} == roofline(without, DEVICES["h100"])
    left = without_refused(with_them.program, costs)
    assert left is not None and left.program.fingerprint == without.program.fingerprint


@pytest.mark.slow
def test_what_fails_where_it_is_measured_is_refused() -> None:
    """Here that is all of it: no CPU has these operators. What is not of the word must not fail."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.Linear(36, 16), Attends())
    with fake_mode():
        example = ((torch.empty(2, 3, 8, 8),), {})
    of = admitted(capture(model, *example, target=CUDA), MODE)
    wanted = {"conv.cudnn_gemm", "attention.written_out"}
    tasks = [task for task in of.program.every_task() if task.variant in wanted]
    request = Request(model, example, MODE, target=CUDA, profile_batch=2)
    known = dict.fromkeys({task.cost for task in of.every_task()} - {task.cost for task in tasks}, Cost(1.0, 1))
    costs, _ = measured_costs(request, of, CPU, known=known)
    assert {costs[t.cost] == REFUSED for t in tasks if t.variant == "conv.cudnn_gemm"} == {True}
    assert all(0 < costs[t.cost].seconds < 60 for t in tasks if t.variant == "attention.written_out")
    efficient = next(t for t in of.program.tasks if "efficient" in t.calls[-1].op)
    del known[efficient.cost]
    with pytest.raises(ProfileError, match=f"profiling {efficient.name} failed"):
        measured_costs(request, of, CPU, known=known)


def test_profiles_keep_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    Profile("cuda: X", {"a": REFUSED, "b": Cost(1.0, 2)}).save(path)
    assert "Infinity" not in path.read_text()
    assert Profile.load(path).costs == {"a": REFUSED, "b": Cost(1.0, 2)}
    assert on_line(4, (1, REFUSED), (2, Cost(1.0, 1))) == REFUSED
    assert Scaling(8, 2, 4).scale(Cost(1.0, 1), REFUSED) == REFUSED


def refusing(program: Program, costs: dict[str, Cost], rng: random.Random) -> dict[str, Cost]:
    """Some of what there is another way for is refused."""
    found = dict(costs)
    makers = [tuple(program.tasks[index] for index in made) for made in program.producers]
    for group in (*makers, *program.slots):
        found.update((task.cost, REFUSED) for task in group[1:] if task.cost and rng.random() < 0.7)
    return found


@pytest.mark.slow
def test_plans_without_what_is_refused_are_the_best() -> None:
    """Of all schedules, as tried one by one; they name tasks by their place in the whole program."""
    tried = 0
    for seed in range(60):
        rng = random.Random(seed)
        program, plain_costs = random_program(rng, 4)
        costs = refusing(program, plain_costs, rng)
        left = without_refused(program, costs)
        if left is None or len(left.program.every_task()) > 9:
            continue
        kept = left.whole(store_all(left.program))
        assert left.part(kept) == store_all(left.program)
        budget = simulate(program, kept, costs).peak_bytes - rng.randint(0, 2)
        best = best_seconds(program, costs, budget)
        start = {"start": kept} if tried % 2 and simulate(program, kept, costs).peak_bytes <= budget else {}
        try:
            made = plan(program, costs, budget, solver="HIGHS", time_limit_seconds=20.0, gap=0.0, **start)
        except InfeasibleError:
            assert best is None
            continue
        assert simulate(program, made.schedule, costs) == made.report
        assert made.report.seconds == best != float("inf")
        tried += 1
        if tried == 2:
            break
    assert tried == 2
    quick = fits(program, costs, budget)
    assert quick is not None and simulate(program, quick, costs).peak_bytes <= budget
    least = smallest_budget(program, costs, time_limit_seconds=2.0)
    assert simulate(program, least.schedule, costs) == least.report and least.report.peak_bytes <= budget


def test_a_slot_that_cannot_be_done_is_named() -> None:
    program, costs = random_program(random.Random(1), 4)
    refused = {**costs, **{way.cost: REFUSED for way in program.slots[0]}}
    with pytest.raises(
        ProfileError, match=f"says that {program.slots[0][0].name} cannot run; profile this model again"
    ):
        plan(program, refused, 10**6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is here")
def test_a_schedule_by_algorithms_from_a_recorded_profile(tmp_path: Path) -> None:
    """An algorithm that was measured to be faster is taken; by datasheet rates none is."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, "
        "3))\n"
    )
    model, store, out = f"{tmp_path / 'net.py'}:net", tmp_path / "recorded.json", tmp_path / "plan.json"
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    of = captured(layers, 8, 3, 64, 64)
    costs = roofline(of, DEVICES["h200"])
    chosen = next(task for task in of.program.tasks if task.variant == "conv.cudnn_winograd")
    costs[chosen.cost] = Cost(1e-7, 512)
    Profile("cuda: NVIDIA H200", costs, "measured at batch 8", {}).save(store)
    arguments = ["solve", model, "8", "0.05", MODE, "heuristic", "--input-shape", "3,64,64", "--out", str(out)]
    for profile, wanted in ((str(store), True), ("roofline:h200", False)):
        result = CliRunner().invoke(main, [*arguments, "--device", "cuda", "--profile", profile])
        assert result.exit_code == 0, result.output
        record = ScheduleRecord.load(out)
        assert ("variant conv.cudnn_winograd" in record.counts) is wanted
        assert record.fingerprint == of.program.fingerprint and record.mode == MODE
