"""Copies on the host: equal to the bit, their bytes the host's, their time beside the rest's as the simulator says."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from offload_cases import MODELS, layers, taken
from replays import LOSS_BYTES, costs_of, record_for, replayed, worst
from torch import Tensor
from training import run, twin

from monet_like.capture.lower.step import capture
from monet_like.cli.commands import inspect_command, schedule_command, solve_command
from monet_like.errors import MonetError
from monet_like.ir.program import Cost, Program, Task, Value
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import Launches, cost_of, simulate
from monet_like.ir.units import MIB
from monet_like.plan import plan
from monet_like.plan.baseline import store_all
from monet_like.plan.budgets import pareto, smallest_budget
from monet_like.plan.instance import Instance
from monet_like.plan.offload import hide
from monet_like.plan.random_schedules import random_schedule
from monet_like.plan.subprogram import without_overlap
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.runtime import offload
from monet_like.variants import admitted, with_variants
from monet_like.variants.offload import LEAST_BYTES

# ---- the word ----


def test_nothing_without_the_word() -> None:
    model, args = MODELS["layers"]()
    raw = capture(model, args)
    assert not any(task.copies for task in with_variants(raw).program.every_task())
    plain, offloading = (admitted(raw, mode).program for mode in ("inplace_conv", "inplace_conv_offload"))
    assert not any(value.host_bytes for value in plain.values)
    count = len(plain.values)
    assert offloading.values[:count] == plain.values
    assert [task for task in offloading.tasks if task.word != "offload"] == list(plain.tasks)
    assert offloading.slots == plain.slots


def test_what_is_sent() -> None:
    """A page or more, read by a gradient, no output: 4 x 16 KiB between layers here, but for the model's own input."""
    model, args = MODELS["layers"]()
    program = admitted(capture(model, args), "offload").program
    copies = {v for v, value in enumerate(program.values) if value.host_bytes}
    assert {value.bytes for value in program.values if value.host_bytes} == {0}
    assert {program.values[v].host_bytes for v in copies} == {64 * 64 * 4}
    sent = {task.reads[0] for task in program.tasks if task.variant == "offload.send"}
    assert len(copies) == 2 * len(sent) and LEAST_BYTES <= 64 * 64 * 4
    assert not sent & set(program.outputs)
    read = {v for slot in program.slots for way in slot for v in program.forward_reads(way)}
    assert sent == {v for v in read - set(program.outputs) if program.values[v].bytes >= LEAST_BYTES}


# ---- replay ----


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", list(MODELS))
def test_any_schedule_is_exact_and_takes_what_is_predicted(name: str) -> None:
    """Bits, and the peak to the byte; what is on the host is not in it."""
    model, args = MODELS[name]()
    example = (model, args, {})
    captured = admitted(capture(model, args), "normal_offload")
    costs = costs_of(captured, example, "normal_offload", timed=False)
    plain = run(twin(model), args, {})
    seen: set[str] = set()
    for seed in range(6):
        schedule = random_schedule(captured.program, seed, drop=0.6, others=0.7)
        seen.update(taken(captured, schedule))
        outcome = replayed(example, captured, schedule, "normal_offload")
        assert worst(plain, outcome) == 0.0, seed
        measured = captured.program.resident_bytes + outcome.rise_bytes - LOSS_BYTES
        assert abs(measured - simulate(captured.program, schedule, costs).peak_bytes) <= 64, seed
    assert seen == {"", "whole", "start", "end"}


#: In a process of its own: other tests may have told the allocator to keep freed memory.
MEMORY = """
import torch
from benchmarks.resident_memory import status_bytes
from monet_like.runtime import offload
MIB = 2**20
x = torch.arange(24 * MIB, dtype=torch.float32).view(-1, 1024).t()
before, wanted = status_bytes("VmRSS"), float(x.double().sum())
copy = offload.send(x)
assert status_bytes("VmRSS") < before + 16 * MIB
shape, stride = x.shape, x.stride()
del x
assert status_bytes("VmRSS") < before - 80 * MIB
back = offload.fetch(copy, shape, stride, torch.float32, torch.device("cpu"))
assert back.stride() == stride and float(back.double().sum()) == wanted
assert torch.equal(back[:, -1], torch.arange(24 * MIB - 1024, 24 * MIB, dtype=torch.float32))
"""


@pytest.mark.slow
def test_the_memory_is_really_free() -> None:
    """The copy of 96 MiB is in a file, not in this process's memory; what comes back are its bits."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), str(root / "tests" / "helpers")])
    subprocess.run([sys.executable, "-c", MEMORY], check=True, env={**os.environ, "PYTHONPATH": paths})


def descriptors() -> list[str]:
    folder = "/proc/self/fd"
    found = (os.path.join(folder, name) for name in os.listdir(folder))
    return [os.readlink(path) for path in found if os.path.islink(path)]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_files_are_gone_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no names, and live as long as the step that made them, whether it ends or fails."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, args = MODELS["layers"]()
    args[0].requires_grad_()
    captured = admitted(capture(model, args), "offload")
    schedules = (random_schedule(captured.program, seed, drop=0.6, others=0.7) for seed in range(20))
    schedule = next(s for s in schedules if {"start", "whole", "end"} <= set(taken(captured, s)))

    def ours() -> int:
        with open("/proc/self/maps") as file:
            mapped = sum(str(tmp_path) in line for line in file)
        assert list(tmp_path.iterdir()) == []
        return mapped + sum(str(tmp_path) in path for path in descriptors())

    record = record_for(captured, schedule, "offload", (model, args, {}))
    wrapped = ScheduleWrapper(model, record, example=(args, {}), captured=captured)
    result = wrapped(*args)
    assert ours() > 0
    result.sum().backward()
    assert ours() == 0

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("stop here")

    first = next(iter(model.parameters()))
    handle = first.register_hook(fail)
    result = wrapped(*args)
    with pytest.raises(ArithmeticError):
        result.sum().backward()
    del result
    assert ours() == 0
    handle.remove()
    wrapped(*args)  # a forward without its backward
    assert ours() == 0


def test_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MonetError) as caught:
        offload.send(torch.zeros(1024))
    assert str(caught.value) == (
        f"a copy on the host needs a file of 4.0 KB in {tempfile.gettempdir()}: No space left on device; set TMPDIR to "
        "a folder with more room, or plan without the mode word offload"
    )


# ---- time ----


def two_sent() -> tuple[Program, dict[str, Cost]]:
    """a -> b -> c; the backward reads b, then a, both of which may be on the host while c is made."""
    sizes = {"x": 10, "a": 20, "b": 30, "c": 1, "go": 1, "g1": 1, "g2": 1}
    kinds = {"x": "input", "go": "backward", "g1": "backward", "g2": "backward"}
    values = [Value(name, size, kinds.get(name, "forward")) for name, size in sizes.items()]  # type: ignore[arg-type]
    x, a, b, c, go, g1, g2 = range(7)
    host_a, host_b, sending, landing = range(7, 11)
    values += [Value(name, 0, "forward", "", size) for name, size in (("ha", 20), ("hb", 30), ("sending", 30))]
    values.append(Value("landing", 20, "forward"))
    tasks = (
        Task("a", (x,), (a,), "4", runs="first"),
        Task("fetch_a.start", (host_a,), (landing,), "2", runs="again", copies="start"),
        Task("fetch_a.end", (landing,), (a,), overwrites=landing, runs="again", copies="end"),
        Task("send_a", (a,), (host_a,), "2", runs="first", copies="whole"),
        Task("b", (a,), (b,), "4", runs="first"),
        Task("fetch_b", (host_b,), (b,), "3", runs="again", copies="whole"),
        Task("send_b.start", (b,), (sending,), "3", runs="first", copies="start"),
        Task("c", (b,), (c,), "1", runs="first"),
        Task("send_b.end", (b, sending), (host_b,), overwrites=sending, runs="first", copies="end"),
    )
    slots = ((Task("bb", (b, go), (g1,), "1"),), (Task("ba", (a, g1), (g2,), "1"),))
    program = Program(tuple(values), tasks, slots, (c,), (go,), (g2,))
    program.check()
    return program, {key: Cost(float(key)) for key in "1234"}


def test_two_clocks_by_hand() -> None:
    program, costs = two_sent()
    report = simulate(program, Schedule((0, 3, 4, 6, 7, 8), ((1, 5), (2,)), (0, 0)), costs)
    # a 0-4, its copy 4-6, b 6-10, its copy from 10 to 13, c 10-11, waits to 13; a's fetching from 13 to 15, b's to 18
    # (the copies take turns), bb to 19, ba to 20.
    assert [step.task for step in report.steps] == [
        "a", "send_a", "b", "send_b.start", "c", "send_b.end", "fetch_a.start", "fetch_b", "bb", "fetch_a.end", "ba",
    ]  # fmt: skip
    assert [step.seconds for step in report.steps] == [4, 2, 4, 0, 1, 2, 0, 5, 1, 0, 1]
    assert report.seconds == 20
    # x; a; b beside a; b until its copy is there; landing, which becomes a; b.
    assert [step.bytes for step in report.steps] == [30, 30, 60, 40, 41, 41, 32, 62, 63, 32, 33]
    assert report.host_bytes == 50


def longest_path(
    program: Program, schedule: Schedule, costs: dict[str, Cost], launches: Launches | None = None
) -> float:
    """The step's seconds by another way than `simulate`'s: the longest path through what waits for what."""
    tasks = [program.tasks[p] for p in schedule.forward]
    for slot, again in enumerate(schedule.again):
        tasks += [*(program.tasks[p] for p in again), program.slots[slot][schedule.ways[slot]]]
    nodes: list[tuple[float, list[int]]] = [(0.0, [])]  # seconds, and what has to be over before
    start, call = (launches.start_seconds, launches.call_seconds) if launches else (0.0, 0.0)
    run = copy = 0
    launched = -1
    writer: dict[int, int] = {}

    def node(seconds: float, *before: int) -> int:
        nodes.append((seconds, list(before)))
        return len(nodes) - 1

    for task in tasks:
        launched = node(len(task.calls) * call, launched) if launched > 0 else node(start + len(task.calls) * call)
        ready = node(0.0, run, launched, *(writer[v] for v in task.reads if v in writer))
        seconds = cost_of(task, costs).seconds
        done = node(seconds, ready, copy) if task.copies in ("whole", "start") else node(seconds, ready)
        copy = done if task.copies in ("whole", "start") else copy
        run = ready if task.copies == "start" else done
        writer.update(dict.fromkeys(task.writes, done))
    ends: list[float] = []
    for seconds, before in nodes:
        ends.append(seconds + max((ends[i] for i in before), default=0.0))
    return ends[run]


@pytest.mark.parametrize("name", ["layers", "tokens", "default_layout"])
def test_the_simulated_time_is_the_longest_path(name: str) -> None:
    """Of random schedules at random costs; never more than the sum, and just that where every copy is waited for."""
    model, args = MODELS[name]()
    program = admitted(capture(model, args), "inplace_multiway_newnode_offload").program
    rng = random.Random(5)
    hidden = 0
    for seed in range(12):
        costs = {task.cost: Cost(rng.choice((0.1, 1.0, 5.0))) for task in program.every_task() if task.cost}
        schedule = random_schedule(program, seed, drop=0.6, others=0.7)
        for launches in (None, Launches(2.0, 0.05), Launches(0.0, 0.5)):
            report = simulate(program, schedule, costs, launches=launches)
            assert report.seconds == pytest.approx(longest_path(program, schedule, costs, launches), rel=1e-12)
        report = simulate(program, schedule, costs)
        runs = [program.tasks[p] for p in (*schedule.forward, *(p for tasks in schedule.again for p in tasks))]
        runs += [slot[way] for slot, way in zip(program.slots, schedule.ways, strict=True)]
        total = sum(cost_of(task, costs).seconds for task in runs)
        assert report.seconds <= total * (1 + 1e-12)
        hidden += report.seconds < total * 0.99
        if "start" not in taken_of(runs):
            assert report.seconds == pytest.approx(total, rel=1e-12)
    assert hidden > 3


def taken_of(tasks: list[Task]) -> set[str]:
    return {task.copies for task in tasks}


# ---- the planner's choice ----


def test_plans_hide_copies_and_run() -> None:
    """Where products take long for what they make, copies beside them beat running again; and the step is exact."""
    model, args = layers()
    raw = capture(model, args)
    seconds = {}
    for mode in ("normal", "normal_offload"):
        captured = admitted(raw, mode)
        program, costs = captured.program, roofline(captured, DEVICES["cpu"])
        budget = int(0.6 * simulate(raw.program, store_all(raw.program), costs).peak_bytes)
        found = plan(program, costs, budget, strategy="heuristic", evaluations=3000)
        assert found.report.peak_bytes <= budget
        assert found.report == simulate(program, found.schedule, costs)
        assert found.bound_kind == "none"
        seconds[mode] = found.report.seconds
    products = sum(cost.seconds for key, cost in costs.items() if "addmm" in key)
    assert products > 0 and seconds["normal_offload"] < 0.95 * seconds["normal"]
    assert taken(captured, found.schedule).count("start") > 1
    assert found.report.host_bytes >= MIB
    outcome = replayed((model, args, {}), captured, found.schedule, "normal_offload")
    assert worst(run(twin(model), args, {}), outcome) == 0.0
    measured = program.resident_bytes + outcome.rise_bytes - LOSS_BYTES
    assert abs(measured - found.report.peak_bytes) <= 0.01 * found.report.peak_bytes


def test_hiding_keeps_the_budget_and_never_slows_down() -> None:
    model, args = MODELS["layers"]()
    captured = admitted(capture(model, args), "offload")
    program = captured.program
    rng = random.Random(3)
    moved = 0
    for seed in range(8):
        costs = {task.cost: Cost(rng.choice((0.5, 1.0, 2.0))) for task in program.every_task() if task.cost}
        small = without_overlap(program)
        assert taken_of(list(small.program.tasks)) == {"", "whole"}
        schedule = small.whole(random_schedule(small.program, seed, drop=0.6, others=0.9))
        before = simulate(program, schedule, costs)
        for room in (0, 20_000, 10**9):
            after, report = hide(Instance(program, costs), schedule, before.peak_bytes + room)
            assert report == simulate(program, after, costs)
            assert report.peak_bytes <= before.peak_bytes + room and report.seconds <= before.seconds
            moved += after != schedule
    assert moved > 4


@pytest.mark.slow
def test_fronts_and_the_smallest_budget() -> None:
    """With copies a front is nowhere slower, and goes further down."""
    model, args = layers(4, 64, 4096)
    raw = capture(model, args)
    fronts, least = {}, {}
    for mode in ("normal", "offload"):
        captured = admitted(raw, mode)
        costs = roofline(captured, DEVICES["cpu"])
        least[mode] = smallest_budget(captured.program, costs, time_limit_seconds=0.5)
        simulated = simulate(captured.program, least[mode].schedule, costs)
        assert simulated.peak_bytes == least[mode].report.peak_bytes >= least[mode].proven_bytes
        top = simulate(raw.program, store_all(raw.program), costs).peak_bytes
        budgets = [top * share // 10 for share in (6, 10)]
        fronts[mode] = pareto(captured.program, costs, budgets, strategy="heuristic")
    assert least["offload"].report.peak_bytes <= least["normal"].report.peak_bytes
    for normal, other in zip(fronts["normal"], fronts["offload"], strict=True):
        if normal.plan is not None:
            assert other.plan is not None
            assert other.plan.report.seconds <= normal.plan.report.seconds * 1.001
    seconds = [point.plan.report.seconds for point in fronts["offload"] if point.plan is not None]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
def test_every_strategy_plans_with_the_word() -> None:
    """The integer program chooses copies and gives no bound; strategies of others keep and run again, as ever."""
    model, args = layers(6, 256, 1024)
    captured = admitted(capture(model, args), "offload")
    program, costs = captured.program, roofline(captured, DEVICES["cpu"])
    peak = simulate(program, store_all(program), costs).peak_bytes
    found = plan(program, costs, int(0.65 * peak), solver="HIGHS", time_limit_seconds=4, gap=0.1)
    assert found.bound_kind == "none" and "start" in taken(captured, found.schedule)
    assert found.report == simulate(program, found.schedule, costs)
    for strategy in ("store_all", "chen_sqrt"):
        found = plan(program, costs, peak, strategy=strategy)
        assert set(taken(captured, found.schedule)) == {""}


def test_datasheet_rates() -> None:
    """A copy takes its bytes over the link's rate, whoever waits for it; the ends of copies take nothing."""
    model, args = MODELS["layers"]()
    captured = admitted(capture(model, args), "offload")
    for limits in DEVICES.values():
        costs = roofline(captured, limits)
        for task in captured.program.tasks:
            if task.copies:
                wanted = (
                    0.0 if task.copies == "end" else limits.launch_seconds + 64 * 64 * 4 / limits.host_bytes_per_second
                )
                assert cost_of(task, costs) == Cost(wanted)
        assert limits.host_bytes_per_second < limits.bytes_per_second


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedule files, `inspect` and `--check_diff` know the word."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from torch import nn\n\ndef make():\n"
        "    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(256, 256), nn.GELU())))\n"
    )
    common = ["--device", "cpu", "--input-shape", "256", "net.py:make", "1024", "0.0095", "normal_offload", "heuristic"]
    solved = CliRunner().invoke(solve_command, ["--profile", "roofline:cpu", *common])
    assert solved.exit_code == 0, solved.output
    assert "of its memory for copies" in solved.output
    (path,) = Path().glob("*offload*.json")
    assert "offload.fetch" in CliRunner().invoke(inspect_command, [str(path)]).output
    checked = CliRunner().invoke(schedule_command, ["--check_diff", *common])
    assert checked.exit_code == 0 and "check_diff: passed" in checked.output, checked.output
