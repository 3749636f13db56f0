"""The CPU's clock of steps on a GPU: whose steps have one, and what is told of a step by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from monet_like.compiler.pipeline import make_record, plan_for, prepare
from monet_like.compiler.prepared import Prepared
from monet_like.compiler.request import Request
from monet_like.ir.program import Program, Value
from monet_like.ir.simulate import Launches, simulate
from monet_like.plan import Plan
from monet_like.plan.baseline import plain_report
from monet_like.profile.devices import DEVICES
from monet_like.profile.launches import HOST_PACES, HostPace, launches_of

CARD = "cuda: NVIDIA H200"
Asked = tuple[Request, Prepared, Plan]


def test_the_first_launch_waits_for_every_parameter_and_buffer() -> None:
    kinds = ("parameter", "buffer", "buffer", "input", "forward", "backward")
    program = Program(tuple(Value(kind, 4, kind) for kind in kinds), (), (), ())
    assert HostPace(0.5, 0.25, 0.125).of(program) == Launches(1.25, 0.125)
    assert program.residents == 3


def test_only_a_measured_gpu_has_the_second_clock() -> None:
    program = Program((Value("w", 4, "parameter"),), (), (), ())
    for device in ("cpu: some, 2 threads", "roofline:h200", "roofline:cpu"):
        assert launches_of(program, device, planned=True) is None
    planned, plain = (launches_of(program, CARD, planned=planned) for planned in (True, False))
    assert planned == HOST_PACES["planned"].of(program) and plain == HOST_PACES["plain"].of(program)
    assert planned is not None and plain is not None
    assert planned.start_seconds > plain.start_seconds and planned.call_seconds < plain.call_seconds


@pytest.fixture(scope="module")
def asked() -> Asked:
    """A net, its program at a CPU's rates, and a plan."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).train()
    request = Request(net, ((torch.randn(8, 3, 16, 16),), {}), "inplace_multiway_newnode", strategy="heuristic")
    ready = prepare(request, torch.device("cpu"), profile=DEVICES["cpu"])
    return request, ready, plan_for(ready, request, ready.plain.peak_bytes)


def test_a_record_tells_the_time_by_two_clocks_on_a_gpu_alone(asked: Asked) -> None:
    request, ready, found = asked
    found = replace(found, bound_kind="unrestricted", bound_seconds=0.9 * found.report.seconds, gap=0.1)
    own = make_record(request, ready, found, ready.plain.peak_bytes)
    assert (own.seconds, own.plain_seconds) == (found.report.seconds, ready.plain.seconds)
    assert (own.bound_seconds, own.gap) == (found.bound_seconds, 0.1)
    there = replace(ready, profile=replace(ready.profile, device=CARD))
    record = make_record(request, there, found, ready.plain.peak_bytes)
    captured = ready.captured
    assert captured.program.residents == 9  # two convolutions' and one norm's: weights, biases, and three buffers
    assert (record.device_seconds, own.device_seconds) == (found.report.seconds, 0.0)
    launches = Launches(1.3e-3 + 9 * 4.2e-6, 2.8e-6)
    assert record.seconds == simulate(captured.program, found.schedule, ready.costs, launches=launches).seconds
    nodes = captured.autograd_nodes
    plain = plain_report(captured.plain, ready.costs, 0, autograd_nodes=nodes, launches=Launches(1e-4, 4.8e-6))
    assert record.plain_seconds == plain.seconds
    assert record.seconds >= found.report.seconds + 1.3e-3 and record.plain_seconds > ready.plain.seconds
    assert record.bound_seconds == found.bound_seconds + launches.start_seconds
    assert record.gap == pytest.approx((record.seconds - record.bound_seconds) / record.seconds)
    own_names = ("seconds", "plain_seconds", "bound_seconds", "gap", "device_seconds")
    times: dict[str, Any] = dict.fromkeys(own_names, 0.0) | {"device": ""}
    assert replace(record, **times) == replace(own, **times)


def test_without_times_there_is_no_clock(asked: Asked) -> None:
    """Where only workspaces were measured, all seconds stay 0."""
    request, ready, found = asked
    costs = {key: replace(cost, seconds=0.0) for key, cost in ready.costs.items()}
    there = replace(ready, profile=replace(ready.profile, device=CARD), costs=costs)
    there = replace(there, plain=replace(ready.plain, seconds=0.0))
    record = make_record(request, there, found, ready.plain.peak_bytes)
    assert (record.seconds, record.plain_seconds) == (0.0, 0.0)
