"""What a replay with ``backend="inductor"`` launches on a GPU, counted on the fake one.

`counted` answers ``NAME:SHARE`` about a layer of `layers.LAYERS`: its step with all values kept, or for a share of that
step's peak, within a budget of so many times its own peak: ``NAME:SHARE within TIMES``. ``as captured`` behind it has
tasks run in the order of the capture.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from lowered import Launched, lowered, on_gpu, step_bytes

from monet_like.capture.example_inputs import input_spec
from monet_like.capture.precision import weights_layout
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request, captured_for
from monet_like.ir.program import Cost
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import find_start
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.replay import fusion
from monet_like.replay.fusible import is_fusible, operators_of
from monet_like.replay.wrapper import ScheduleWrapper

MODE = "inplace_normal"


def counted(asked: str) -> dict[str, Any]:
    """A step of a layer, counted: see above."""
    name, what = asked.split(":")
    share, _, within = what.partition(" within ")
    times, _, captured = within.partition(" as ")
    model, args = on_gpu(name)
    with mock.patch.object(fusion, "in_fusion_order", _as_captured) if captured else contextlib.nullcontext():
        return _replayed(model, args, float(share), float(times))


def _as_captured(_: Any, runs: Any, __: Any, beside: Any, ___: Any) -> tuple[Any, Any, Any]:
    return runs, beside, [0] * len(beside)


def _replayed(model: torch.nn.Module, args: tuple[Any, ...], share: float, times: float) -> dict[str, Any]:
    request = Request(model, (args, {}), MODE, "layer", profile_batch=10**6)
    captured = captured_for(request, request.example)
    program, measured = captured.program, measured_costs(request, captured, captured.device, timed=False)[0]
    seconds = roofline(captured, DEVICES["h100"])  # plans are the same each time
    costs = {key: Cost(cost.seconds, measured[key].workspace_bytes) for key, cost in seconds.items()}
    schedule = store_all(program)
    full = simulate(program, schedule, costs).peak_bytes
    if share < 1:
        found = find_start(Instance(program, costs), int(share * full), evaluations=2000)
        assert found is not None
        schedule = found
    report = simulate(program, schedule, costs)
    record = ScheduleRecord(
        schedule, "layer", tuple(map(input_spec, args)), MODE, int(times * report.peak_bytes), program.fingerprint,
        "cuda", {}, report.peak_bytes, report.seconds, full, 0.0, "heuristic", "feasible",
        layout=weights_layout(model), made_last=captured.made_last,
        run_bytes=tuple(step.bytes for step in report.steps),
    )  # fmt: skip
    pieces: dict[int, Launched] = {}
    compile_function = fusion.compile_function

    def noted(*given: Any) -> fusion.Compiled:
        with lowered() as found:
            run = compile_function(*given)
        pieces[id(run)] = found
        return run

    with mock.patch.object(fusion, "compile_function", noted):
        wrapped = ScheduleWrapper(model, record, example=(args, {}), captured=captured, backend="inductor")
        peak, _ = step_bytes(wrapped, args)
    (step,) = (kept.step for kept in wrapped._kept)
    kernels, moved = 0, 0
    for task in (task for block in step.fused.blocks for task in block.tasks):
        if task.variant == "inductor":
            piece = pieces[id(step.fused.functions[task.calls[0].op])]
            kernels, moved = kernels + piece.kernels, moved + piece.moved_bytes
        elif is_fusible(task):
            kernels += operators_of(task)
            touched = (*task.reads, *task.writes) if operators_of(task) else ()
            moved += sum(program.values[v].bytes for v in touched)
    return {
        "kernels": kernels, "moved_bytes": moved, "peak_bytes": peak, "budget_bytes": record.budget_bytes,
        "planned_bytes": record.peak_bytes,
    }  # fmt: skip
