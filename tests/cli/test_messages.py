"""What people read when something is wrong: every bad input of the command line, and its message."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import torch
from click.testing import CliRunner, Result

import monet_like
from monet_like.cli.commands import (
    benchmark_command,
    doctor_command,
    inspect_command,
    report_command,
    schedule_command,
    solve_command,
)
from monet_like.cli.group import main
from monet_like.compiler.words import parse_batch, parse_shape
from monet_like.errors import UsageError
from monet_like.files import cache_folder
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan import STRATEGIES
from monet_like.plan.strategies import from_schedule
from monet_like.solvers import interface, processes
from monet_like.solvers.processes import stop_waiting
from monet_like.zoo.download import find_record
from monet_like.zoo.registry import Registry

MODEL = """from torch import nn


def make():
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def chain():
    pairs = ((nn.GELU(), nn.Conv2d(4, 4, 3, padding=1)) for _ in range(10))
    return nn.Sequential(nn.Conv2d(3, 4, 3), *(part for pair in pairs for part in pair))


def short():
    pairs = ((nn.GELU(), nn.Conv2d(4, 4, 3, padding=1)) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 4, 3), *(part for pair in pairs for part in pair))


def without_parameters():
    return nn.ReLU()
"""

#: Nothing is measured, nothing is larger than it must be.
SMALL = ("--input-shape", "3,8,8", "--device", "cpu")
ROOFLINE = ("--profile", "roofline:cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a model file."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("net.py").write_text(MODEL)
    return tmp_path / "work"


def solve(
    *options: str,
    model: str = "net.py:make",
    batch: str = "4",
    budget: str = "1",
    mode: str = "normal",
    solver: str = "HIGHS",
    profile: tuple[str, ...] = ROOFLINE,
) -> Result:
    """The solve command in this process."""
    positional = ("--", model, batch, budget, mode, solver)
    return CliRunner().invoke(solve_command, [*SMALL, *profile, *options, *positional])


def schedule(*options: str, batch: str = "4", shape: str = "3,8,8") -> Result:
    """The schedule command in this process."""
    return CliRunner().invoke(
        schedule_command,
        ["--device", "cpu", "--input-shape", shape, *options, "net.py:make", batch, "1", "normal", "HIGHS"],
    )


def error(result: Result) -> str:
    """The message of a refusal: exit code 2, one line on stderr, no traceback."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


def click_error(result: Result) -> str:
    """The message of a refusal by the command line's parser: exit code 2, the last line of its usage note."""
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
    return result.stderr.strip().splitlines()[-1]


def written() -> list[str]:
    """Every file below the working directory, apart from the model and what importing it leaves."""
    return sorted(str(p) for p in Path().rglob("*") if p.is_file() and p.name != "net.py" and p.suffix != ".pyc")


# The positional arguments -------------------------------------------------------------------------------------


def test_model() -> None:
    """Its other messages are in tests/models/test_models.py."""
    call = "torch.nn.Linear(__import__('os').system('touch sentinel'), 2)"
    assert "has an argument that is not a literal" in error(solve(model=call))
    assert written() == []


@pytest.mark.parametrize("batch", ["0", "x", "-4", "1.5", "", "²", "1e3"])
def test_batch(batch: str) -> None:
    assert error(solve(batch=batch)) == f"batch {batch!r} must be a whole number of at least 1, such as 184"


def test_an_absurd_batch() -> None:
    assert error(solve(batch="9" * 20)) == (
        "an input of shape [99999999999999999999, 3, 8, 8] is too large; give a smaller batch or --input-shape"
    )


def test_batch_and_shape_as_numbers() -> None:
    assert parse_batch("184") == 184
    assert parse_shape(None) is None
    assert parse_shape("3,224,224") == parse_shape("3x224x224") == parse_shape("(3, 224, 224)") == (3, 224, 224)
    assert parse_shape("7") == (7,)


def test_budget_and_mode() -> None:
    """Their other messages are in tests/ir/test_units_and_modes.py."""
    assert error(solve(budget="0")) == "memory budget '0' must be more than 0; give GB as a number, such as 10"
    assert error(solve(mode="conv_dropit1")) == (
        "mode 'conv_dropit1' drops '1' of the elements; give a share of at least 0 and below 1 after dropit, such as "
        "dropit0.9"
    )


def test_an_infeasible_budget_names_one_that_does() -> None:
    """And the budget that it names works."""
    message = error(solve(budget="1 KB"))
    assert message.startswith("no schedule fits into 1.0 KB")
    assert message.endswith("; give more memory or a smaller batch")
    found = re.search(r"the smallest known budget is ([0-9.]+ [KM]B) \(([0-9]+) bytes\)", message)
    assert found, message
    assert written() == []
    result = solve("--out", "fits.json", budget=f"{found.group(2)} B")
    assert result.exit_code == 0, result.output
    record = ScheduleRecord.load(Path("fits.json"))
    assert record.peak_bytes <= record.budget_bytes == int(found.group(2))


def test_solver() -> None:
    message = error(solve(solver="CBCC"))
    assert "solver 'CBCC'" in message
    assert "unknown" in message
    assert "HIGHS" in message.partition("installed: ")[2]


def test_solver_names_in_any_case() -> None:
    assert solve("--out", "plan.json", solver="highs").exit_code == 0


@pytest.mark.parametrize(("count", "missing"), [(0, "MODEL"), (1, "BATCH"), (2, "BUDGET")])
def test_missing_arguments(count: int, missing: str) -> None:
    result = CliRunner().invoke(solve_command, ["net.py:make", "4", "1"][:count])
    assert click_error(result) == f"Error: Missing argument '{missing}'."


# Options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--dtype", "float31"), "dtype 'float31' is unknown; give float32, float64, bfloat16 or float16"),
        (("--dtype", "int32"), "dtype 'int32' is unknown; give float32, float64, bfloat16 or float16"),
        (("--dtype", "zeros"), "dtype 'zeros' is unknown; give float32, float64, bfloat16 or float16"),
        (("--device", "gpu"), "device 'gpu' is unknown; give auto, cpu, cuda or cuda:1"),
        (("--device", "meta"), "device 'meta' is not supported; give auto, cpu, cuda or cuda:1"),
        (
            ("--device", "cuda:99"),
            f"device 'cuda:99' is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices",
        ),
        *(
            (
                ("--input-shape", shape),
                f"input shape {shape!r} must be positive whole numbers without the batch, such as 3,224,224",
            )
            for shape in ("3,8,", "3,0,8", "3,-8,8", "big", "", "3,8.5,8", "3,²,8")
        ),
        (("--profile-batch", "0"), "--profile-batch 0 must be at least 1"),
        (("--processes", "0"), "--processes 0 must be at least 1"),
        (
            ("--processes", "2"),
            "--processes 2 is for models with SyncBatchNorm, and net.py:make has none; leave it out, or give a file "
            "with a function that returns monet_like.convert_sync_batchnorm(...)",
        ),
        (("--time-limit", "0"), "--time-limit 0.0 must be more than 0 seconds"),
        (("--time-limit", "nan"), "--time-limit nan must be more than 0 seconds"),
        (("--time-limit", "inf"), "--time-limit inf must be at most 1e+09 seconds"),
        (("--threads", "0"), "--threads 0 must be at least 1"),
        (("--threads", "9" * 40), "--threads 999999999999… (40 digits) must be at most 4096"),
        (("--processes", "2000000"), "--processes 2000000 must be at most 1048576"),
        (
            ("--input-shape", "3," + "9" * 5000),
            f"input shape '3,{'9' * 58}' must be positive whole numbers without the batch, such as 3,224,224",
        ),
        (("--gap", "2"), "--gap 2.0 must be at least 0 and less than 1, such as 0.01 for 1 %"),
        (("--gap", "nan"), "--gap nan must be at least 0 and less than 1, such as 0.01 for 1 %"),
        (
            ("--optimizer", "adma"),
            "optimizer 'adma' is unknown; choose one of none, sgd, momentum, adam, adamw, adam_fused, adamw_fused, "
            "adam8bit, adamw8bit, paged_adamw, paged_adamw8bit",
        ),
        (
            ("--profile", "roofline:h900"),
            "there is no roofline for 'h900'; choose one of cpu, p100, a100, a100-80gb-pcie, a100-80gb-sxm, h100, "
            "h100-pcie, h100-nvl, h200, h200-nvl, gh200, rtx2080ti, rtx4090, rtx4080, l40s, t4, v100-16gb, v100-32gb, "
            "rtx3070, rtx3080, rtx3090, a10, rtxa6000, rtx4070, l4, rtx6000ada, rtx5070ti, rtx5080, rtx5090",
        ),
    ],
)
def test_option_values(options: tuple[str, str], expected: str) -> None:
    assert error(solve(*options)) == expected
    assert written() == []


def test_a_typo_in_an_option() -> None:
    message = click_error(solve("--time-limt", "3"))
    assert message.startswith("Error: No such option")
    assert "--time-limt" in message
    assert "Did you mean" in message
    assert "--time-limit" in message


def test_strategy() -> None:
    message = error(solve("--strategy", "chne"))
    assert "strategy 'chne'" in message
    assert "unknown" in message
    assert all(name in message for name in ("chen_sqrt", "milp", "store_all"))


def test_a_shape_that_the_model_refuses() -> None:
    message = error(solve("--input-shape", "1,8,8"))
    assert message.startswith(
        "Sequential cannot be captured: RuntimeError: Given groups=1, weight of size [4, 3, 3, 3]"
    )


def test_an_unwritable_out_is_found_before_any_work() -> None:
    Path("circle").symlink_to("circle")
    # the budget is infeasible, which only the planner, later, could say
    message = "cannot write circle/plan.json: Too many levels of symbolic links; choose another place"
    assert error(solve("--out", "circle/plan.json", budget="1 B")) == message


@pytest.mark.parametrize(
    "options",
    [
        ("solve", *SMALL, "--profile", "n" * 300, "net.py:make", "4", "1"),
        ("solve", *SMALL, *ROOFLINE, f"{'n' * 300}.py:make", "4", "1"),
        ("inspect", "n" * 300),
        ("report", "n" * 300, "--model", "net.py:make"),
        ("zoo", "verify", "--folder", "n" * 300),
    ],
)
def test_no_path_gives_a_traceback(options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert len(result.stderr.strip().splitlines()) == 1 or "Usage: " in result.stderr


def test_a_message_echoes_a_part_of_what_is_long() -> None:
    content = {"format": "monet_like profile", "version": "x" * 100_000}
    for text in (json.dumps(content), "y" * 100_000, json.dumps({"format": "z " * 50_000})):
        Path("profile.json").write_text(text)
        message = error(solve(profile=("--profile", "profile.json")))
        assert message.startswith("profile.json") and len(message) < 2000
    long = str(UsageError("a" * 5000 + "; do that"))
    assert long.startswith("aaa") and long.endswith("aaa; do that") and " [... " in long and len(long) < 2000
    assert str(UsageError("b" * 1800)) == "b" * 1800


@pytest.mark.parametrize("device", ["cpu: another, 64 threads", "roofline:abacus"])
def test_a_profile_of_another_machine(device: str) -> None:
    Profile(device, {}).save(Path("profile.json"))
    message = error(solve(profile=("--profile", "profile.json")))
    assert message.startswith(f"the profile was measured on {device}, lacks ")
    assert message.endswith("; profile the model there, or give another --profile file")


def test_options_take_dashes_and_underscores_alike() -> None:
    out = "--out=with_underscore-and-dash.json"
    result = solve("--time_limit", "20", "--input_shape=3,8,8", out, "--profile_batch", "2")
    assert result.exit_code == 0, result.output
    assert written() == ["with_underscore-and-dash.json"]
    result = schedule("--solution_file", "with_underscore-and-dash.json", "--check_diff", "--run-bs")
    assert "check_diff: passed" in result.output


def test_options_take_underscores_under_the_group_too() -> None:
    result = CliRunner().invoke(
        main, ["solve", *SMALL, "--time_limit=0", *ROOFLINE, "net.py:make", "4", "1", "normal", "HIGHS"]
    )
    assert error(result) == "--time-limit 0.0 must be more than 0 seconds"


def test_a_model_without_parameters_is_no_crash() -> None:
    """Its dtype is asked for when the profile's file is named."""
    result = solve(model="net.py:without_parameters", profile=())
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception


# Files of the zoo ---------------------------------------------------------------------------------------------


@pytest.fixture
def zoo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo in ``solutions/`` with a schedule under the name that solve.py gives it, and its measured profile."""
    found = folder / "solutions"
    schedule_file, profile = found / "solution_net_make_4_normal_1.00.json", found / "profiles" / "measured.json"
    monkeypatch.setenv("MONET_LIKE_ZOO", str(found))
    result = solve("--out", str(schedule_file), "--gap", "0.5", profile=("--profile", str(profile)))
    assert result.exit_code == 0, result.output
    Registry(found).save()
    result = CliRunner().invoke(main, ["zoo", "add", "net", "here", str(schedule_file), str(profile)])
    assert result.exit_code == 0, result.output
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_solved_replaces_no_file_of_the_zoo(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, schedule_file = contents(zoo), zoo / "solution_net_make_4_normal_1.00.json"
    assert solve().exit_code == 0
    assert contents(zoo) == before
    assert Path(schedule_file.name).exists()  # in the current folder
    Path("link.json").symlink_to(schedule_file)
    for out in (
        str(schedule_file),
        f"solutions/../solutions/{schedule_file.name}",
        "link.json",
        "solutions/registry.json",
    ):
        assert error(solve("--out", out)) == (
            f"{out} belongs to the zoo, whose registry names it; give another name with --out, or run in another folder"
        )
    tuned = CliRunner().invoke(main, ["tune", "--out", str(schedule_file), *SMALL, *ROOFLINE, "net.py:make", "1"])
    assert error(tuned).startswith(f"{schedule_file} belongs to the zoo")
    assert contents(zoo) == before
    assert find_record("zoo:net_4_1.00@here").model == "net.py:make"
    (zoo / "net.py").write_text(MODEL)
    monkeypatch.chdir(zoo)  # where the default name is the zoo's
    assert error(solve()).startswith(f"{schedule_file.name} belongs to the zoo")


def test_a_profile_of_the_zoo_is_read_and_not_written(zoo: Path) -> None:
    before, profile = contents(zoo), ("--profile", "solutions/profiles/measured.json")
    result = solve(profile=profile)
    assert result.exit_code == 0 and "profile in solutions/profiles/measured.json" in result.output, result.output
    result = solve(mode="multiway", profile=profile)  # more operators, which are measured
    assert result.exit_code == 0 and "profile in measured.json" in result.output, result.output
    assert contents(zoo) == before
    assert len(Profile.load(Path("measured.json")).costs) > len(Profile.load(zoo / "profiles" / "measured.json").costs)
    changed = Path("measured.json").read_bytes()
    assert solve(mode="multiway", profile=profile).exit_code == 0
    assert Path("measured.json").read_bytes() == changed  # read the next time


def test_a_schedule_is_looked_for_here_and_then_in_solutions(zoo: Path) -> None:
    assert "check_diff: passed" in schedule("--check-diff").output
    Path("solution_net_make_4_normal_1.00.json").write_bytes(b"else")
    assert error(schedule("--check-diff")).startswith("solution_net_make_4_normal_1.00.json is not a ")


# The schedule and inspect commands ----------------------------------------------------------------------------


@pytest.fixture
def solved() -> Iterator[ScheduleRecord]:
    """A schedule file under the name that both commands agree on."""
    result = solve()
    assert result.exit_code == 0, result.output
    yield ScheduleRecord.load(Path("solution_net_make_4_normal_1.00.json"))


def test_no_check_asked_for() -> None:
    assert error(schedule()) == "say what to check: --check_runtime, --check_diff or --run_bs"


def test_a_missing_solution_file() -> None:
    assert error(schedule("--run-bs")) == (
        "there is no schedule file solution_net_make_4_normal_1.00.json; make one with solve.py, or give another"
    )
    assert error(CliRunner().invoke(inspect_command, ["no.json"])) == (
        "there is no schedule file no.json; make one with solve.py, or give another"
    )


def test_steps() -> None:
    assert error(schedule("--check-runtime", "--steps", "0")) == "--steps 0 must be at least 1"


@pytest.mark.usefixtures("solved")
def test_a_schedule_of_another_shape() -> None:
    message = error(schedule("--run-bs", "--solution-file", "solution_net_make_4_normal_1.00.json", batch="5"))
    assert message == (
        "the schedule was solved for float32[4, 3, 8, 8], the model was called with float32[5, 3, 8, 8]; "
        "smaller inputs (a batch, a length) are fine, anything else needs a schedule of its own"
    )


def test_a_step_that_does_not_fit_is_told_by_the_exit_code(solved: ScheduleRecord) -> None:
    replace(solved, budget_bytes=1000).save(Path("tight.json"))
    result = schedule("--run-bs", "--solution-file", "tight.json")
    assert (result.exit_code, result.stdout.strip().splitlines()[-1]) == (1, "run_bs: did not fit")


def test_inspect(solved: ScheduleRecord) -> None:
    """Markup in a file's texts is shown, not obeyed; --json is one object with every field."""
    replace(solved, model="net[/bold].py:make[red]").save(Path("odd.json"))
    result = CliRunner().invoke(inspect_command, ["odd.json"])
    assert result.exit_code == 0, result.exception
    assert "net[/bold].py:make[red]" in result.stdout
    assert "float32[4, 3, 8, 8]" in result.stdout
    content = json.loads(CliRunner().invoke(inspect_command, ["--json", "odd.json"]).stdout)
    assert content["fingerprint"] == solved.fingerprint
    assert content["schedule"]["forward"] == list(solved.schedule.forward)
    assert content["budget_bytes"] == 2**30


# Help ---------------------------------------------------------------------------------------------------------

COMMANDS = {
    "solve": solve_command,
    "schedule": schedule_command,
    "benchmark": benchmark_command,
    "inspect": inspect_command,
    "doctor": doctor_command,
    "report": report_command,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_every_option_its_default_and_an_example(name: str) -> None:
    command = COMMANDS[name]
    text = CliRunner().invoke(command, ["--help"]).output
    assert re.search(r"^  Examples?:\n    +\S", text, re.MULTILINE)
    usage, _, section = text.partition("\nOptions:\n")
    entries = [" ".join(entry.split()) for entry in re.split(r"^  (?=-)", section, flags=re.MULTILINE)]
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            assert parameter.human_readable_name.strip("[]") in usage
            continue
        assert isinstance(parameter, click.Option)
        (entry,) = [entry for entry in entries if entry.split()[:1] == [parameter.opts[-1]]]
        assert re.search(r"\[required\]$" if parameter.required else r"\[default: \S.*\]$", entry), entry
        if not parameter.is_flag:  # a value is shown, or all of them are listed
            assert re.search(r"[Ss]uch as \S|: (auto|none|milp)\b|roofline:h100", entry), entry


def test_help_has_examples_that_parse() -> None:
    """Every example line in the help is accepted up to the model's name."""
    text = solve_command.help or ""
    examples = [line.split(None, 2)[2] for line in text.splitlines() if line.strip().startswith("python solve.py")]
    assert len(examples) >= 3
    for example in examples:
        with solve_command.make_context("solve.py", shlex.split(example)) as context:
            parse_batch(context.params["batch"])
            parse_shape(context.params["input_shape"])


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_groups_help_lists_the_commands(flag: str) -> None:
    text = CliRunner().invoke(main, [flag]).output
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in COMMANDS)


# Failures on the way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), "ran out of memory"),
        (MemoryError(), "ran out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "ran out of memory",
        ),
        (RuntimeError("no kernel for this"), "failed"),
    ],
)
def test_an_operator_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str) -> None:
    def fail(*_: Any) -> int:
        raise failure

    monkeypatch.setattr("monet_like.profile.profiler.allocated_peak", fail)
    message = error(solve(profile=()))
    first = str(failure).partition("\n")[0] or "MemoryError"
    assert re.match(rf"profiling \w+ {reason}: ", message)
    assert first in message
    assert re.search(r"4, \d, 8, 8", message)  # the shapes tell which call it is
    assert message.endswith("; measure at a smaller batch with --profile-batch") == (reason == "ran out of memory")
    assert written() == []


def test_ctrl_c_while_solving_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real SIGINT, sent while the solver's process is at work (held there, so that it cannot be done before): that
    is gone, and the best plan so far is written."""
    stop_waiting()  # of earlier tests
    seen: list[int] = []
    own = processes.start_worker

    def start(*args: Any) -> processes.Worker:
        worker = own(*args)
        if not seen:
            worker.child.send_signal(signal.SIGSTOP)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()  # as no person is faster
        seen.append(worker.child.pid)
        return worker

    for module in (processes, interface):
        monkeypatch.setattr(module, "start_worker", start)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    try:
        result = solve("--gap", "0", "--out", "plan.json", model="net.py:chain", budget="24 KB")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen, result.output
    assert result.exit_code == 0, result.output
    assert "stopped by hand" in result.output
    assert written() == ["plan.json"]
    assert not psutil.pid_exists(seen[0])


def test_ctrl_c_while_profiling_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("monet_like.profile.profiler.allocated_peak", interrupt)
    result = solve(profile=())
    assert (result.exit_code, result.stderr.strip()) == (130, "interrupted; files are as they were, or whole")
    assert written() == []


# What users' own code raises, and what a command is told twice ----------------------------------------------------


def test_code_that_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\ndef make(): return torch.nn.Linear(8, 8)\ndef make_inputs(batch): raise KeyError('no data')\n"
    )
    asked = ["solve", f"{tmp_path}/own.py:make", "4", "1", "normal", "HIGHS", "--device", "cpu"]
    message = error(CliRunner().invoke(main, asked))
    assert message.startswith("make_inputs(4) of MODEL failed: KeyError: 'no data' (")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    assert "could not be loaded: SystemExit: 3" in error(solve(model=f"{tmp_path}/leaves.py:make"))


def test_a_dotted_module_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_of_mine.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "could not be imported: ZeroDivisionError" in error(solve(model="broken_module_of_mine.Net()"))


def test_nothing_to_train(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import torch\ndef make(): return torch.nn.Linear(8, 8).requires_grad_(False)\n")
    assert "requires a gradient" in error(solve("--input-shape", "8", model=f"{tmp_path}/own.py:make"))


def test_a_schedule_of_another_mode_than_is_typed(solved: ScheduleRecord) -> None:
    replace(solved, mode="multiway").save(Path("other.json"))
    message = "other.json is of mode multiway, and MODE is normal; give the file's, or another file"
    assert error(schedule("--run-bs", "--solution-file", "other.json")) == message


def test_pictures_have_a_known_ending() -> None:
    result = CliRunner().invoke(main, ["compare", "net.py:make", "4", "1", "--plot", "front.xyz"])
    assert error(result) == "--plot front.xyz must end in one of .png, .svg, .pdf"


@pytest.mark.slow
def test_operators_that_take_no_time() -> None:
    """Nothing is so many percent of a step of no seconds."""
    assert solve(profile=("--profile", "profile.json")).exit_code == 0
    profile = Profile.load(Path("profile.json"))
    nothing = {key: replace(cost, seconds=0.0) for key, cost in profile.costs.items()}
    replace(profile, costs=nothing).save(Path("profile.json"))
    compare = ["compare", "net.py:make", "4", "100%", "--strategies", "heuristic,ogc"]
    for command in (compare, ["pareto", "net.py:make", "4", "--points", "2"]):
        result = CliRunner().invoke(main, [*command, *SMALL, "--profile", "profile.json"])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [["list", "--profile"], ["download", "--profile"], ["table", "--summary"]])
def test_profiles_that_the_zoo_does_not_have(command: list[str]) -> None:
    assert error(CliRunner().invoke(main, ["zoo", *command, "a1000"])).startswith(
        "the zoo has nothing for the profile 'a1000'; give a100, "
    )


# Said early, and in words ---------------------------------------------------------------------------------------


def test_a_budget_below_one_task_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monet_like.compiler.quick.profiled", None)  # nobody may come here
    message = error(solve(budget="4 KB", profile=()))
    assert re.fullmatch(
        r"no schedule fits into 4\.0 KB \(proven, nothing was measured\): \S+.* alone needs [\d.]+ KB, parameters, "
        r"inputs and results included; the smallest known budget is [\d.]+ KB \(\d+ bytes\), which \S+ needs; "
        r"give more memory or a smaller batch",
        message,
    )
    assert written() == []


def test_the_input_that_is_assumed_is_said() -> None:
    arguments = [*ROOFLINE, "--device", "cpu", "--", "net.py:short", "1", "1", "normal", "heuristic"]
    said = "input: float32[1, 3, 224, 224], assumed; another: --input-shape, or make_inputs(batch) in MODEL's file"
    assert said in CliRunner().invoke(solve_command, arguments).output
    assert "assumed" not in solve().output


def test_a_model_on_the_meta_device() -> None:
    Path("meta.py").write_text(
        "import torch\n\n\ndef make():\n    with torch.device('meta'):\n        return torch.nn.Linear(8, 8)\n"
    )
    expected = (
        "weight of Linear is on the meta device, where tensors have no values; build the model on the device that it "
        "will train on, or call model.to_empty(device=...) and load its weights; to plan it as it is, name a GPU that "
        "is not here (roofline:h100)"
    )
    assert error(solve(model="meta.py:make")) == expected
    for wrap in (
        lambda model: monet_like.auto_schedule(model, torch.randn(4, 8)),
        lambda model: monet_like.auto_schedule(model)(torch.randn(4, 8)),
    ):
        with pytest.raises(UsageError, match=re.escape(expected)):
            wrap(torch.nn.Linear(8, 8, device="meta"))


def test_why_a_strategy_has_no_schedule_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Any, costs: Any, budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
        return Schedule((), ((),) * len(program.slots), (0,) * len(program.slots))

    def raising(*_: Any, **__: Any) -> Schedule:
        raise KeyError("no plan")

    monkeypatch.setitem(STRATEGIES, "broken", from_schedule("broken", broken))
    monkeypatch.setitem(STRATEGIES, "raising", from_schedule("raising", raising))
    words = ["compare", *SMALL, *ROOFLINE, "--strategies", "store_all,broken,raising", "net.py:make", "4", "100%,40%"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "step time against plain PyTorch; -: no schedule: store_all at " in text
    assert "raising at " in text and "it raised KeyError: 'no plan'" in text
    assert re.search(r"broken at \S+ KB: \S+", text)
    points = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["points"]
    assert all(bool(point["reason"]) == (point["peak_bytes"] is None) for point in points)


def test_a_schedule_for_another_device_is_said_to_be_one(solved: ScheduleRecord) -> None:
    replace(solved, device="roofline:a100", fingerprint="0" * 64).save(Path("other.json"))
    assert error(schedule("--run-bs", "--solution-file", "other.json")) == (
        "this schedule was planned for a100 (datasheet rates), a cuda device, and Sequential is on cpu, where PyTorch "
        "runs other operators; move the model to cuda, name a schedule for cpu (zoo:NAME@PROFILE as monet-like zoo "
        "list shows them), or plan for it with monet-like solve --device cpu"
    )


def test_planning_anew_is_told_at_the_users_line() -> None:
    torch.manual_seed(0)
    model = monet_like.auto_schedule(torch.nn.Linear(8, 4), torch.randn(4, 8), memory_budget="1 MB", mode="normal")
    with pytest.warns(UserWarning, match="planning Linear anew: ") as told:
        model(torch.randn(6, 8))
    assert [warning.filename for warning in told if "anew" in str(warning.message)] == [__file__]


def test_zoo_show_lists_a_models_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(main, ["zoo", "show", "resnet50"])
    assert result.exit_code == 0 and "resnet50_184_10.00" in result.output and "vgg16" not in result.output
    assert CliRunner().invoke(main, ["zoo", "show", "resnet50_184"]).output == result.output
    found = json.loads(CliRunner().invoke(main, ["zoo", "show", "resnet50@h100", "--json"]).stdout)["schedules"]
    assert {one["profile"] for one in found} == {"h100"}
    assert error(CliRunner().invoke(main, ["zoo", "show", "resnet5"])).startswith("the zoo has no 'resnet5'")


@pytest.mark.slow
def test_the_largest_batch_from_measured_costs() -> None:
    """Measured at two batches; what is found fits."""
    words = ["largest-batch", *SMALL, "--json", "net.py:short", "100 KB", "normal"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    batch = json.loads(result.stdout)["batch"]
    assert batch >= 4
    (profile,) = cache_folder().glob("profile_*.json")
    before = profile.read_bytes()
    assert json.loads(CliRunner().invoke(main, words).stdout)["batch"] == batch
    assert profile.read_bytes() == before  # nothing is measured again
    assert solve(model="net.py:short", batch=str(batch), budget="110 KB", profile=()).exit_code == 0  # costs are scaled
    assert solve(model="net.py:short", batch=str(4 * batch), budget="100 KB", profile=()).exit_code == 2
