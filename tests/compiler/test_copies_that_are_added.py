"""Where a plan takes copies of activations on the host without being asked for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from offload_cases import Gated, layers
from replays import worst
from torch import nn
from training import run, twin

from monet_like.compiler.offloading import WORTH, Found, Host, planned
from monet_like.compiler.pipeline import compile_prepared, prepare
from monet_like.compiler.prepared import Prepared
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import InfeasibleError, ProfileError, SolverError
from monet_like.ir.defaults import EXACT_MODE, MODE
from monet_like.ir.simulate import simulate
from monet_like.plan.instance import Instance
from monet_like.profile.devices import DEVICES
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.torch_versions import release

CPU = torch.device("cpu")
FAST, SLOW, ROOM = 1e13, 1e6, 2**40
#: Of the local search alone.
BRIEF: dict[str, Any] = {"quick": False, "evaluations": 2000, "seconds": 0.01}


@pytest.fixture(scope="module")
def products() -> tuple[Request, Prepared]:
    return prepared(*layers(8, 512, 4096))


def prepared(model: nn.Module, args: tuple[Any, ...], mode: str = MODE) -> tuple[Request, Prepared]:
    request = Request(model, (args, {}), mode)
    return request, prepare(request, CPU, profile=DEVICES["a100"])


def found(
    of: tuple[Request, Prepared], share: float, host: Callable[[], Host | None], *, quick: bool = True, **options: Any
) -> Found:
    budget = int(share * of[1].plain.peak_bytes)
    compiled = partial(compile_prepared, budget=budget, device=CPU, quick=quick, **options)
    return planned(*of, budget, host, compiled)


def never() -> Host:
    raise AssertionError("the link was measured")


@pytest.mark.filterwarnings("ignore:the schedule was planned for a100")
def test_copies_that_gain_are_taken_exact_and_as_predicted() -> None:
    request, ready = exact = prepared(*layers(8, 512, 4096), EXACT_MODE)
    without, best = found(exact, 0.55, lambda: None), found(exact, 0.55, lambda: Host(FAST, ROOM))
    record, captured = best.compiled.record, best.ready.captured
    assert (without.request, best.request.mode, best.only) == (request, f"{EXACT_MODE}_offload", False)
    assert record.mode == best.request.mode and record.fingerprint == captured.program.fingerprint
    assert record.seconds < WORTH * without.compiled.record.seconds
    assert record.peak_bytes <= record.budget_bytes == without.compiled.record.budget_bytes
    assert 0 < record.counts["host_bytes"] == best.compiled.plan.report.host_bytes
    assert record.counts["host_bytes"] == simulate(captured.program, record.schedule, best.ready.costs).host_bytes
    assert ready.captured.metas == captured.metas[: len(ready.captured.metas)]  # of the same capture
    wrapped = ScheduleWrapper(twin(request.model), record, example=request.example, captured=captured)
    assert worst(run(twin(request.model), *request.example), run(wrapped, *request.example)) == 0.0
    again = captured_for(best.request, request.example)  # as when a file with the schedule is read
    assert (again.program.fingerprint, again.metas) == (captured.program.fingerprint, captured.metas)


@pytest.mark.parametrize(
    ("share", "host"),
    [
        (0.55, lambda: Host(SLOW, ROOM)),
        (0.55, lambda: Host(3e11, ROOM)),
        (0.55, lambda: Host(FAST, ROOM, lambda captured, schedule: False)),  # whose memory cannot be pinned
        (1.0, never),
    ],
    ids=["slow", "no gain", "pinned", "no pressure"],
)
def test_it_is_planned_without(products: tuple[Request, Prepared], share: float, host: Callable[[], Host]) -> None:
    best = found(products, share, host)
    assert (best.request, best.compiled.record.mode) == (products[0], MODE)
    assert "host_bytes" not in best.compiled.record.counts


@pytest.mark.parametrize("room", [2**12, 2**26])
def test_no_more_is_on_the_host_than_it_has_room_for(products: tuple[Request, Prepared], room: int) -> None:
    best = found(products, 0.55, lambda: Host(FAST, room))
    assert best.compiled.record.counts.get("host_bytes", 0) <= room


def test_what_a_slow_link_can_carry_is_told_without_a_plan(
    products: tuple[Request, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []

    def compiled(request: Request, *args: Any, **options: Any) -> Any:
        modes.append(request.mode)
        return compile_prepared(request, *args, **options)

    budget = int(0.55 * products[1].plain.peak_bytes)
    for rate in (SLOW, FAST):
        planned(*products, budget, partial(Host, rate, ROOM), partial(compiled, budget=budget, device=CPU, quick=True))
    assert modes == [MODE, MODE, f"{MODE}_offload"]


@pytest.fixture(scope="module")
def gates() -> tuple[Request, Prepared]:
    request, ready = prepared(Gated(8), (torch.randn(256, 256),), EXACT_MODE)
    return replace(request, strategy="heuristic"), ready


def failure(of: tuple[Request, Prepared], host: Host | None) -> InfeasibleError | SolverError:
    """Of the least budget for which copies are tried."""
    if release() > (2, 14):
        pytest.skip("in the program of this PyTorch recomputing alone reaches what one task needs")
    least, _ = Instance(of[1].captured.program, of[1].costs, of[1].extra_bytes).floor
    with pytest.raises((InfeasibleError, SolverError)) as caught:
        found(of, (least + 1) / of[1].plain.peak_bytes, lambda: host, **BRIEF)
    return caught.value


@pytest.mark.filterwarnings("ignore:the schedule was planned for a100")
def test_what_fits_only_with_copies_is_planned_with_them(gates: tuple[Request, Prepared]) -> None:
    smallest = failure(gates, None).smallest_bytes
    assert smallest is not None
    best = found(gates, 0.97 * smallest / gates[1].plain.peak_bytes, lambda: Host(FAST, ROOM), **BRIEF)
    record, (model, example) = best.compiled.record, (gates[0].model, gates[0].example)
    assert best.only and record.mode == f"{EXACT_MODE}_offload"
    assert record.peak_bytes <= record.budget_bytes < smallest and record.counts["host_bytes"] >= 256 * 256 * 4
    wrapped = ScheduleWrapper(twin(model), record, example=example, captured=best.ready.captured)
    assert worst(run(twin(model), *example), run(wrapped, *example)) == 0.0


@pytest.mark.slow
def test_an_error_names_the_smaller_budget_of_both(gates: tuple[Request, Prepared]) -> None:
    hosts = (None, Host(FAST, ROOM), Host(FAST, 2**12))
    without, mine, no_room = (failure(gates, host) for host in hosts)
    assert mine.smallest_bytes is not None and without.smallest_bytes is not None
    assert mine.smallest_bytes < without.smallest_bytes == no_room.smallest_bytes
    report = simulate(mine.found_for.captured.program, mine.smallest, mine.found_for.costs)
    assert report.host_bytes > 0


def test_where_one_task_is_too_large_copies_are_not_tried(gates: tuple[Request, Prepared]) -> None:
    with pytest.raises((InfeasibleError, SolverError)):
        found(gates, 0.5, never, **BRIEF)


def test_copies_that_cannot_be_measured_are_left_out(products: tuple[Request, Prepared]) -> None:
    def fails(request: Request, *args: Any, **options: Any) -> Any:
        if request.mode.endswith("offload"):
            raise ProfileError("no memory")
        return compile_prepared(request, *args, **options)

    budget = int(0.55 * products[1].plain.peak_bytes)
    best = planned(*products, budget, lambda: Host(FAST, ROOM), partial(fails, budget=budget, device=CPU, quick=True))
    assert best.request is products[0]
