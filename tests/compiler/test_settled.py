"""Plans from costs that were measured at a smaller batch: the peak is that of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from monet_like.capture.captured import Captured, distinct_tasks
from monet_like.compiler import pipeline, quick
from monet_like.compiler.costs import inputs_on, measured_costs
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request, captured_for
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost
from monet_like.ir.simulate import simulate
from monet_like.job.job import Job
from monet_like.plan.baseline import plain_report
from monet_like.profile.profiler import measure
from monet_like.profile.scaling import Scaling

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def problem() -> tuple[Request, Captured, dict[str, Cost]]:
    """A request that measures 16 at batch 2, its program, and exact workspaces."""
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1))
        for _ in range(3)
    )
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), *layers, nn.Flatten(), nn.Linear(8 * 121, 4)).train()
    request = Request(
        net, ((torch.randn(16, 3, 23, 23),), {}), "inplace_conv_multiway_newnode", strategy="heuristic", profile_batch=2
    )
    captured = captured_for(request, request.example)
    measure(distinct_tasks(captured), inputs_on(captured, CPU), timed=False)  # the first batch norm tries its kernel
    exact, _ = measured_costs(replace(request, profile_batch=16), captured, CPU, timed=False)
    return request, captured, exact


@pytest.mark.slow(but=["True-True"])
@pytest.mark.parametrize("quickly", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_peaks_are_exact_though_a_small_batch_was_measured(
    wrong: bool,
    quickly: bool,
    problem: tuple[Request, Captured, dict[str, Cost]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where workspaces at the whole batch are all guessed as 0, so that the first plan does not fit. Those that
    reach no peak stay guesses: single runs of all operators at the whole batch would take minutes for a large net.
    """
    request, captured, exact = problem
    plans: list[int] = []
    plan_for, scale, at_whole_batch = pipeline.plan_for, Scaling.scale, quick._at_whole_batch

    def counting(*args: Any, **options: Any) -> Any:
        plans.append(1)
        return plan_for(*args, **options)

    def nothing(*args: Any) -> tuple[dict[str, int], dict[str, int]]:
        guesses, most = at_whole_batch(*args)
        return dict.fromkeys(guesses, 0), most

    monkeypatch.setattr(pipeline, "plan_for", counting)
    if wrong:
        monkeypatch.setattr(Scaling, "scale", lambda *args: replace(scale(*args), workspace_bytes=0))
        monkeypatch.setattr(quick, "_at_whole_batch", nothing)
    plain = plain_report(captured.plain, exact, 0, autograd_nodes=captured.autograd_nodes).peak_bytes
    for share in (90, 60):
        saved: list[Profile] = []
        job = Job(request, CPU, SimpleNamespace(known=None, save=saved.append), captured=captured)
        compiled = job.plan(f"{share}%", strategy="milp" if quickly else None, quick=quickly)
        record = compiled.record
        assert record.plain_peak_bytes == plain
        assert record.peak_bytes == simulate(captured.program, record.schedule, exact).peak_bytes
        assert record.peak_bytes <= record.budget_bytes == plain * share // 100
        guesses = [key for key in exact if compiled.ready.costs[key].workspace_bytes != exact[key].workspace_bytes]
        assert wrong or guesses
        if not quickly:
            settled = exact.keys() - saved[-1].scaled
            assert settled and {saved[-1].costs[key].workspace_bytes for key in settled} <= {
                exact[key].workspace_bytes for key in settled
            }
    assert len(plans) > 2 or not wrong  # one or both did not fit at first


def test_a_file_knows_which_workspaces_are_guessed(problem: tuple[Request, Captured, dict[str, Cost]]) -> None:
    """What one start has settled, the next one does not measure; what it has not is still a guess."""
    request, captured, exact = problem
    saved: list[Profile] = []
    first = prepare(request, CPU, captured=captured, save_profile=saved.append)
    assert saved[0].scaled and {*first.guessed} <= saved[-1].scaled < saved[0].costs.keys()
    assert first.profile.scaled == saved[-1].scaled and saved[-1].note == first.profile.note
    count = len(saved)
    again = prepare(request, CPU, captured=captured, profile=saved[-1], save_profile=saved.append)
    assert (again.guessed, again.costs, len(saved)) == (first.guessed, first.costs, count)
    whole = prepare(replace(request, profile_batch=16), CPU, captured=captured, save_profile=saved.append)
    assert whole.guessed == {} and saved[-1].scaled == frozenset()
    elsewhere = replace(saved[count - 1], device="cuda: NVIDIA H200")
    assert prepare(request, CPU, captured=captured, profile=elsewhere).guessed == {}  # nothing can be measured here
    assert {key: cost.workspace_bytes for key, cost in whole.costs.items()} == {
        key: cost.workspace_bytes for key, cost in exact.items()
    }
