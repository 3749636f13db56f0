"""The measurements of scripts/gpu_check.sh: profiles, plans from them, and their replays beside plain PyTorch.

Plans are made by the local search, in as many processes as there are cores; no solver is needed.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.rows import markdown_table, write_rows
from benchmarks.work import ASIDE, WORK
from benchmarks.worker import Casting, apart, emptied, gradients_of, rounding_of
from monet_like.build import library_path
from monet_like.capture.captured import Captured
from monet_like.capture.example_inputs import example_of
from monet_like.capture.precision import autocast_as
from monet_like.compiler.costs import measured_costs, to_profile
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import MonetError
from monet_like.files import write_atomically
from monet_like.ir.defaults import MODE
from monet_like.ir.mode import ALGORITHMS
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule_file import InputSpec, ScheduleRecord
from monet_like.models import build_model
from monet_like.profile.devices import device_name, device_slug, known_limits, machine_at
from monet_like.profile.launches import launches_of
from monet_like.replay.memory.allocator import place_memory, reserve
from monet_like.replay.memory.arena import RECORDED
from monet_like.replay.verify.comparison import Tensors
from monet_like.replay.verify.steps import judged, real_example, step_peak, step_seconds, takes_transforms, train_step
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.zoo.registry import FILE_NAME, Registry

ROOT = Path(__file__).resolve().parents[1]
MB, GIB = 10**6, 2**30
CPU = torch.device("cpu")
ALL = f"{MODE}_{ALGORITHMS}"
#: Class names of the modules that a user would give to ``torch.utils.checkpoint``.
BLOCKS = {
    "LlamaDecoderLayer",
    *(name for work in (*WORK.values(), *ASIDE.values()) for name in work.blocks if name != "Sequential"),
}
#: For the local search, for each budget.
PLAN_SECONDS = 10


@dataclass(frozen=True)
class Work:
    """What is profiled, and planned for.

    Attributes:
        autocast: its dtype, or "".
        budgets: as `solve.py` takes them.
    """

    model: str
    inputs: tuple[InputSpec, ...]
    autocast: str = ""
    mode: str = MODE
    budgets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Model, batch and dtype, for file names."""
        word = re.sub(r"\W+", "_", re.sub(r"\(.*", "", self.model).rpartition(".")[2])
        return "_".join(filter(None, (word, str(self.inputs[0].shape[0]), self.autocast)))

    def profile_in(self, folder: Path, device: torch.device) -> Path:
        """The file of its operators' costs."""
        return folder / "profiles" / f"profile_{self.name}_{device_slug(device)}.json"


def _images(batch: int, *extents: int) -> tuple[InputSpec, ...]:
    return (InputSpec((batch, *extents), "float32"),)


#: MONeT's five nets at its batches, decoders in bfloat16 and a 3-D U-Net. Where convolutions' workspaces are most of
#: the peak, other algorithms are what makes a budget possible.
FIRST = (
    Work("torchvision.models.resnet50()", _images(184, 3, 224, 224), "", ALL, ("10", "9", "8", "7", "6", "5", "4")),
    Work(
        "monet_like.zoo.models.llama_1b()",
        (InputSpec((4, 2048), "int64"),),
        "bfloat16",
        MODE,
        ("70%", "60%", "50%", "40%", "30%"),
    ),
    Work("torchvision.models.mobilenet_v2()", _images(272, 3, 224, 224), "", MODE, ("10", "8", "6", "5")),
    Work("torchvision.models.vgg16()", _images(176, 3, 224, 224), "", ALL, ("10", "8", "7", "6")),
    Work("unet", _images(11, 3, 416, 608), "", ALL, ("10", "8", "6", "5")),
    Work(
        "torchvision.models.googlenet(init_weights=False)", _images(320, 3, 224, 224), "", MODE, ("10", "8", "6", "5")
    ),
    Work("monet_like.zoo.models.gpt2()", (InputSpec((8, 1024), "int64"),), "bfloat16", MODE, ("50%", "40%")),
    Work("monet_like.models.volumes.nnunet_large()", _images(2, 1, 160, 224, 192), "", MODE, ("70%", "50%", "35%")),
)


def work_of(record: ScheduleRecord) -> Work:
    """What a schedule is of."""
    return Work(record.model, record.inputs, record.autocast, record.mode)


@dataclass(frozen=True)
class Replay:
    """A schedule beside plain PyTorch; `status` is measured, or what went wrong.

    Attributes:
        profile: device the costs are from, on which predictions depend.
        gradient_error: of all gradients together, relative, in the 2-norm, of steps `in_float32`; ``rounding``: that of
            plain PyTorch with weights changed in the last places. ``wrong``: the gradients that are not plain
            PyTorch's, by `monet_like.replay.verify.comparison`.
        reserved_bytes: by the caching allocator, which had one block to begin with.
        placed_reserved_bytes, placed_seconds: the same, and the step, after `monet_like.place_memory`; 0: not compiled.
        plain_start_seconds, start_seconds: what both predictions have of the CPU's time before the first launch.
    """

    file: str
    status: str
    model: str = ""
    batch: int = 0
    budget_bytes: int = 0
    profile: str = ""
    plain_peak_bytes: int = 0
    peak_bytes: int = 0
    predicted_bytes: int = 0
    reserved_bytes: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    predicted_plain_seconds: float = 0.0
    predicted_seconds: float = 0.0
    gradient_error: float = 0.0
    rounding: float = 0.0
    wrong: str = ""
    placed_reserved_bytes: int = 0
    placed_seconds: float = 0.0
    plain_start_seconds: float = 0.0
    start_seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What there is one row of."""
        return self.model, self.file


def moved(gradients: Tensors, device: torch.device) -> Tensors:
    """The same on a device: on the CPU, where they take none of the GPU's memory, or where a further step's are."""
    return {name: tensor.to(device) if tensor is not None else None for name, tensor in gradients.items()}


@contextmanager
def in_float32(mode: str = "") -> Iterator[None]:
    """Convolutions in float32, and, unless a mode names algorithms, by some that give the same bits each time.

    By default PyTorch computes them in TF32, whose rounding is 8,192 times as coarse: gradients of a deep net with
    batch norm then differ by a third from those of weights changed in the last place, and comparing them would show
    nothing.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, ALGORITHMS not in mode
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


class Plain:
    """A model as it is, measured once for all its schedules.

    Args:
        known: its program, if that was captured for its profile.
    """

    def __init__(self, record: ScheduleRecord, device: torch.device, known: Captured | None = None) -> None:
        torch.manual_seed(0)
        with device:
            module = build_model(record.model).module.to(device)
        self.device, self.model = device, Casting(module, record.autocast, device)
        self.example = real_example(example_of(record.inputs, device), device)
        with in_float32():
            gradients = gradients_of(self.model, self.example)
            self.model.zero_grad(set_to_none=True)
            self.rounding = rounding_of(self.model, self.example, gradients)
        self.gradients = moved(gradients, CPU)
        del gradients
        emptied(device)
        self.peak_bytes = step_peak(self.model, self.example, device)
        self.model.zero_grad(set_to_none=True)
        self._captured: dict[tuple[str, bool, tuple[str, ...]], Captured] = {}
        if known is not None:
            self._captured[record.mode, False, known.made_last] = known

    def captured(self, record: ScheduleRecord) -> Captured:
        """The program that a schedule is for."""
        key = (record.mode, record.ablation, record.made_last)
        if key not in self._captured:
            request = Request(
                self.model.model, self.example, key[0], ablation=key[1], autocast=record.autocast, made_last=key[2]
            )
            self._captured[key] = captured_for(request, self.example)
        return self._captured[key]


def beside(plain: Plain, model: nn.Module, steps: int) -> tuple[int, int, list[float]]:
    """A model's peak, what the allocator reserved for it, and the seconds of plain PyTorch's step and of its own."""
    device, example = plain.device, plain.example
    peak = step_peak(model, example, device)
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    seconds = step_seconds([(plain.model, example), (model, example)], device, steps)
    for trained in (plain.model, model):
        trained.zero_grad(set_to_none=True)
    return peak, reserved, seconds


def checkpointed(record: ScheduleRecord, plain: Plain, steps: int) -> Iterator[Replay]:
    """``torch.utils.checkpoint`` around every block, beside plain PyTorch; nothing if the model has none
    that we know.
    """
    model = copy.deepcopy(plain.model)
    blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    if not blocks:
        return
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    emptied(plain.device)
    peak, reserved, seconds = beside(plain, model, steps)
    yield Replay(
        f"{work_of(record).name}: checkpoint per block", "measured", record.model, record.inputs[0].shape[0],
        plain_peak_bytes=plain.peak_bytes + record.cublas_bytes, peak_bytes=peak + record.cublas_bytes,
        reserved_bytes=reserved,
        plain_seconds=seconds[0], seconds=seconds[1],
    )  # fmt: skip


def replay(name: str, record: ScheduleRecord, plain: Plain, steps: int) -> Replay:
    """Run a schedule beside plain PyTorch."""
    device, example = plain.device, plain.example
    scheduled = ScheduleWrapper(
        copy.deepcopy(plain.model.model), record, example=example, captured=plain.captured(record), cuda_graphs=False
    )
    wrapped = Casting(scheduled, record.autocast, device)
    emptied(device)
    reserve(record, device)
    peak, reserved, seconds = beside(plain, wrapped, steps)
    placed = measured_placed(scheduled, wrapped, plain, steps)
    with in_float32(record.mode):
        gradients = moved(gradients_of(wrapped, example), CPU)
    wrapped.zero_grad(set_to_none=True)
    error = apart(plain.gradients, gradients)
    with in_float32(), autocast_as(record.autocast, device):  # by the tolerance of the dtype that was computed in
        both = moved(plain.gradients, device), moved(gradients, device)
        verdicts = judged(plain.model, example, *both, transforms=takes_transforms(record))
    reasons = [f"{verdict.name} {verdict.reason}" for verdict in verdicts if not verdict.right]
    wrong = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    return Replay(
        name, "measured", record.model, record.inputs[0].shape[0], record.budget_bytes, record.device,
        plain.peak_bytes + record.extra_bytes, peak + record.extra_bytes, record.peak_bytes, reserved, seconds[0],
        seconds[1], record.plain_seconds, record.seconds,
        error, plain.rounding, wrong, *placed, *starts(plain.captured(record), record.device),
    )  # fmt: skip


def starts(captured: Captured, device: str) -> Iterator[float]:
    """Seconds before the first launch, as they are predicted for plain PyTorch and for a schedule from costs of
    ``device``.
    """
    for program, planned in ((captured.plain, False), (captured.program, True)):
        launches = launches_of(program, device, planned=planned)
        yield launches.start_seconds if launches else 0.0


def measured_placed(scheduled: ScheduleWrapper, wrapped: nn.Module, plain: Plain, steps: int) -> tuple[int, float]:
    """What is reserved and how long a step takes after `monet_like.place_memory`; zeros where it is not compiled."""
    device, example = plain.device, plain.example
    if not library_path("arena_cuda" if device.type == "cuda" else "arena").exists():
        return 0, 0.0
    emptied(device)
    place_memory(scheduled)
    for _ in range(RECORDED + 2):
        train_step(wrapped, example)
        wrapped.zero_grad(set_to_none=True)
    _, reserved, seconds = beside(plain, wrapped, steps)
    return reserved, seconds[1]


def profile(work: Work, device: torch.device, folder: Path) -> tuple[str, Captured]:
    """Measure a model's operators at this batch and write the file that solve.py takes, adding to what it has.

    Returns:
        A line on what was done, with the program's fingerprint: what is captured elsewhere for this card should have
        it. And that program.
    """
    started = time.monotonic()
    with device:
        spec = build_model(work.model)
    example = real_example(example_of(work.inputs, device), device)
    batch = work.inputs[0].shape[0]
    request = Request(
        spec.module.to(device), example, work.mode, spec.expression, profile_batch=batch, autocast=work.autocast
    )
    captured = captured_for(request, example)
    path = work.profile_in(folder, device)
    known = Profile.load(path).costs if path.exists() else {}
    capture_seconds = time.monotonic() - started
    costs, note = measured_costs(request, captured, device, known=known)
    to_profile(costs, device, note or f"measured at batch {batch}").save(path)
    line = (
        f"{path.name}: {len(costs) - len(known)} operators in {time.monotonic() - started:.0f} s, "
        f"{capture_seconds:.0f} s of it the capture; program {captured.program.fingerprint[:12]}"
    )
    return line, replace(captured, reads=None, undelayed=None, without_variants=None)  # which would hold the model


def plan(work: Work, budget: str, device: torch.device, folder: Path) -> str:
    """Solve for a budget from the profile in ``folder``, in a process of its own, by the local search alone.

    Returns:
        A line on what came of it; the schedule is in ``folder/schedules``.
    """
    batch, *extents = work.inputs[0].shape
    out = folder / "schedules" / f"{work.name}_{budget.replace('%', 'p')}.json"
    command = [sys.executable, ROOT / "solve.py", work.model, batch, budget, work.mode, "heuristic", "--device", device]
    command += ["--profile", work.profile_in(folder, device), "--time-limit", PLAN_SECONDS, "--out", out]
    command += ["--autocast", work.autocast] if work.autocast else []
    if work.inputs[0].dtype == "float32":  # else the model makes its inputs
        command += ["--input-shape", ",".join(map(str, extents))]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
    said = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if "(predicted)" in line or "error:" in line]
    return f"{out.stem}: {'; '.join(' '.join(line.split()) for line in said)}"


def schedules(folder: Path, device: torch.device, models: str) -> list[tuple[str, ScheduleRecord]]:
    """One schedule of every name in ``folder``: from this device, else its datasheet's, else another's.

    The models of `FIRST` come first, schedules of one model in a row.
    """
    limits = known_limits(machine_at(device).name)
    wanted = (device_name(device), f"roofline:{limits.name}" if limits else "")
    chosen: dict[str, tuple[int, ScheduleRecord]] = {}
    for name, record in _all_schedules(folder):
        rank = wanted.index(record.device) if record.device in wanted else len(wanted)
        if re.search(models, record.model) and (name not in chosen or rank < chosen[name][0]):
            chosen[name] = rank, record
    first = [work.model for work in FIRST]

    def order(pair: tuple[str, ScheduleRecord]) -> tuple[int, str, int]:
        _, record = pair
        place = first.index(record.model) if record.model in first else len(first)
        return place, record.model, -record.budget_bytes

    return sorted(((name, record) for name, (_, record) in chosen.items()), key=order)


def _all_schedules(folder: Path) -> Iterator[tuple[str, ScheduleRecord]]:
    """Schedules by name: of the zoo that ``folder`` is, if it is one, and of schedule files below it."""
    if (folder / FILE_NAME).exists():
        registry = Registry.load(folder)
        for listed in registry.schedules:
            yield listed.name, registry.record(listed)
        return
    for path in sorted(folder.rglob("*.json")):
        try:
            yield path.stem, ScheduleRecord.load(path)
        except MonetError as error:
            click.echo(f"{path.name}: {error}")


def _cells(row: Replay) -> list[str]:
    """A row of the report's table; of those that do not apply, empty cells."""
    if row.status != "measured":
        return [row.file, row.status, *[""] * 11]
    budget = predicted_peak = told = gradients = ""
    placed = ["", ""]
    if row.placed_seconds:
        placed = [f"{row.placed_reserved_bytes / MB:,.0f} MB", f"{1e3 * row.placed_seconds:,.1f} ms"]
    if row.predicted_plain_seconds:
        budget, predicted_peak = f"{row.budget_bytes / GIB:.2f} GiB", f"{row.predicted_bytes / MB:,.0f} MB"
        told = f"{100 * (row.predicted_seconds / row.predicted_plain_seconds - 1):+.1f} %"
        gradients = f"{row.gradient_error:.0e}, rounding {row.rounding:.0e}"
    peaks = [f"{row.plain_peak_bytes / MB:,.0f} MB", f"{row.peak_bytes / MB:,.0f} MB", predicted_peak]
    steps = [f"{1e3 * row.plain_seconds:,.1f} ms", f"{1e3 * row.seconds:,.1f} ms"]
    over = f"{100 * (row.seconds / row.plain_seconds - 1):+.1f} %"
    return [row.file, budget, *peaks, f"{row.reserved_bytes / MB:,.0f} MB", *placed, *steps, over, told, gradients]


def render(device: torch.device, rows: Sequence[Replay], stages: str, lines: Sequence[str]) -> str:
    """The report."""
    heads = ("schedule", "budget", "plain peak", "peak", "predicted", "reserved", "placed: reserved", "step")
    heads += ("plain step", "step", "overhead", "predicted", "gradients off")
    text = f"# `scripts/gpu_check.sh`: {device_name(device)}\n\ntorch {torch.__version__}.\n\n```\n{stages}```\n\n"
    text += markdown_table(heads, map(_cells, rows)) + "\n"
    if any(row.profile not in ("", device_name(device)) for row in rows):
        text += "\nTimes predicted from other devices' costs are not this device's.\n"
    return text + "".join(f"\n* {line}" for line in lines) + "\n"


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
@click.option("--seconds", default=400.0, show_default=True, help="Start nothing after so many.")
@click.option("--solutions", type=click.Path(path_type=Path), help="Replay the schedules in this folder, too.")
@click.option("--steps", default=5, show_default=True)
@click.option("--models", default="", help="Regular expression: only schedules and profiles of such models.")
@click.option("--plans/--no-plans", default=True, help="Without: only the schedules of --solutions are replayed.")
@click.option("--device", "where", default="cuda", hidden=True)
def main(out: Path, seconds: float, solutions: Path | None, steps: int, models: str, plans: bool, where: str) -> None:
    """Profile, plan, replay, report."""
    device, deadline = torch.device(where), time.monotonic() + seconds
    found = schedules(solutions, device, models) if solutions else []
    works: list[Work] = []
    if plans:
        works += [work for work in FIRST if re.search(models, work.model)]
        works += dict.fromkeys(work_of(record) for _, record in found if record.device != device_name(device))
    rows: list[Replay] = []
    lines: list[str] = []

    def report() -> None:
        stages = out / "stages.txt"
        text = render(device, rows, stages.read_text() if stages.exists() else "", lines)
        write_atomically(out / "gpu_check.md", text.encode())
        write_rows(out / "replays.csv", rows)

    (out / "schedules").mkdir(parents=True, exist_ok=True)
    programs: dict[tuple[str, str], Captured] = {}  # by work and mode
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 4)) as processes:  # plans are made beside the next profiles
        planning: list[Future[str]] = []
        for work in works:
            if time.monotonic() > deadline - seconds / 2:
                lines.append(f"{work.name}: not profiled, the time was over")
                continue
            try:
                line, programs[work.name, work.mode] = profile(work, device, out)
                lines.append(line)
                planning += [processes.submit(plan, work, budget, device, out) for budget in work.budgets]
            except (MonetError, RuntimeError) as error:
                lines.append(f"{work.name}: not profiled: {str(error).splitlines()[0]}")
            emptied(device)
            report()
        lines += [future.result() for future in planning]
    report()
    found += schedules(out / "schedules", device, "")
    work, plain = None, None
    for name, record in found:
        if time.monotonic() > deadline - seconds / 20:
            rows.append(Replay(name, "not replayed, the time was over", record.model))
            continue
        try:
            if plain is None or work != work_of(record):
                work, plain = work_of(record), None
                emptied(device)
                plain = Plain(record, device, programs.get((work.name, work.mode)))
                rows += checkpointed(record, plain, steps)
            rows.append(replay(name, record, plain, steps))
        except (MonetError, RuntimeError) as error:
            rows.append(Replay(name, str(error).splitlines()[0].replace("|", "\\|"), record.model))
        emptied(device)
        report()
    report()
    assert "cvxpy" not in sys.modules, "a solver was imported"
    wrong = [f"{row.file} ({row.wrong})" for row in rows if row.wrong]
    if wrong:
        sys.exit(f"wrong gradients: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
