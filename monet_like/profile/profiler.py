"""The profiler: seconds and workspace of every distinct operator call, alternatives included.

Every task is run by itself on inputs of its own shapes and strides, through the very code that the replay generates for
it, and with caches that hold of its inputs, and of short ones the code, what they would in a step; all are timed in
turn, in passes. What waits for other processes is measured without waiting: every schedule does it as often, and one
process may be measuring alone. Where measuring at the wanted batch would take too long or too much memory, it is done at
a smaller one and scaled: seconds in proportion, workspace along a line through two batches, because weights' layout
changes do not grow with the batch.
"""

from __future__ import annotations

import math
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from ..capture.lowering import Captured, TensorMeta, allocated_bytes
from ..errors import ProfileError
from ..ir.mode import ALGORITHMS
from ..ir.profile_file import Profile
from ..ir.program import REFUSED, Cost, Task
from ..ops import runs_here
from ..ops.sync_batch_norm import COMMUNICATING
from ..runtime.codegen import Block, compile_block
from ..runtime.operators import without_fallback
from .cache_state import reuse_bytes
from .cublas import measured_bytes
from .measure import CacheState, allocated_peak, seconds_of
from .settings import settings_of, versions

#: Called with (what, done, total) as profiling goes on.
Progress = Callable[[str, int, int], None]

_Found = TypeVar("_Found")

#: How often all operators are timed.
PASSES = 3

#: Tasks of fewer seconds are timed with their code in the caches, where a step finds it; what got the data out got the
#: code out, too. DenseNet-121's backward has 1,000 additions of 10 to 40 us, of which code from memory was half: its
#: schedules were predicted to take 5.7 % less of plain PyTorch's step than they do, and with this 1.7 and 2.4 %. (Two CPU
#: cores, each in one run; with limits of 1 and 3 ms 5 %.)
_SHORT = 3e-4


def device_name(device: torch.device) -> str:
    """What a profile is valid for."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {_cpu_model()}, {torch.get_num_threads()} threads"


def device_slug(device: torch.device) -> str:
    """`device_name` as a part of file names."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def distinct_tasks(captured: Captured) -> dict[str, Task]:
    """One task for every cost key."""
    found: dict[str, Task] = {}
    for task in captured.every_task():
        if task.cost:
            found.setdefault(task.cost, task)
    return found


def measure(
    tasks: Mapping[str, Task], maker: Inputs, *, timed: bool = True, progress: Progress | None = None
) -> dict[str, Cost]:
    """Seconds and workspace of tasks of the program that ``maker`` makes inputs for.

    All tasks are timed once before any is timed again, and the least of `PASSES` counts: a machine that is slow for
    some seconds then makes few of them look slow, and those in one pass only. (What a schedule of MobileNetV2 takes in
    units of plain PyTorch's step moved by 4 % from profile to profile where a task's runs followed each other, two CPU
    cores; with passes that took as long in all, by 0.4 %.)

    Args:
        tasks: by what their costs are returned under.
        timed: measure seconds as well as workspace; else they are 0.

    Raises:
        ProfileError: a task failed; out of memory is said to be that. An algorithm of a library's that fails is
            `REFUSED` instead: libraries do not say before which they have.
    """
    passes = PASSES if timed else 0
    trials, seconds, total = dict[str, _Trial](), dict[str, float](), (1 + passes) * len(tasks)

    def report(done: int, task: Task | None = None) -> None:
        if progress:
            progress(task.calls[-1].op.split(".")[1] if task else "done", done, total)

    for done, (key, task) in enumerate(tasks.items()):
        report(done, task)
        trial = _unless_refused(task, partial(_Trial, task, maker))
        if trial is not None:
            trials[key] = trial
    for number in range(1, 1 + passes):
        for done, (key, trial) in enumerate(list(trials.items()), number * len(tasks)):
            report(done, trial.task)
            took = _unless_refused(trial.task, trial.seconds)
            if took is None:
                del trials[key]
            else:
                seconds[key] = min(took, seconds.get(key, math.inf))
    report(total)
    return {
        key: Cost(seconds.get(key, 0.0), trials[key].workspace_bytes) if key in trials else REFUSED for key in tasks
    }


def _unless_refused(task: Task, what: Callable[[], _Found]) -> _Found | None:
    """What ``what`` returns; None where it fails and the task is an algorithm of a library's."""
    try:
        return what()
    except ProfileError:
        if task.word != ALGORITHMS:
            raise
        return None


class _Trial:
    """A task, compiled and run once for its workspace, to be timed.

    Random inputs are normal; where an operator refuses these, as those do that want probabilities, uniform in 0 to 1.

    Attributes:
        task: what it is of.
        workspace_bytes: as of `Cost`.

    Raises:
        ProfileError: as of `measure`.
    """

    def __init__(self, task: Task, maker: Inputs) -> None:
        self.task, self._maker, self._is_short = task, maker, False
        if task.word == ALGORITHMS and not all(runs_here(call.op, maker.device.type) for call in task.calls):
            raise ProfileError(f"{task.name} does not run here")  # what would be measured is PyTorch's own
        writes = tuple(v for v in task.writes if _has_tensor(task, v))
        self._run = compile_block(Block(task.reads, (task,), (), writes), task.name, COMMUNICATING | without_fallback())
        try:
            allocated = self._by_itself(self._peak)
        except ProfileError as error:
            if maker.uniform or task.word == ALGORITHMS or _is_out_of_memory(error.__cause__):
                raise
            self._maker = maker.as_uniform
            allocated = self._by_itself(self._peak)
        # The copy counts once among what is allocated, and takes the place of the first thing that is written.
        beside = allocated - sum(maker.captured.metas[v].storage_bytes for v in writes)
        self.workspace_bytes = allocated_bytes(max(0, beside), maker.device)

    def seconds(self) -> float:
        """Least wall seconds of a few runs."""
        found = self._by_itself(self._seconds)
        self._is_short = found < _SHORT
        return found

    def _peak(self, inputs: Mapping[int, Any]) -> int:
        task = self.task

        def call() -> None:
            # What the task takes over is made for it and given away: some tasks release it on the way.
            self._run([inputs[v].clone() if v == task.overwrites else inputs[v] for v in task.reads])

        if self._maker.device.type == "cuda":
            call()  # libraries keep what their first call allocates: cuBLAS a workspace, cuDNN's trials memory
        return allocated_peak(call, self._maker.device)

    def _seconds(self, inputs: Mapping[int, Any]) -> float:
        def run(inputs: Mapping[int, Any]) -> None:
            self._run([inputs[v] for v in self.task.reads])

        def run_twins() -> None:
            if self._is_short:
                run(self._maker.of(self.task, twin=True))

        before = self._maker.caches_before(self.task, inputs, run_twins)
        return seconds_of(partial(run, inputs), self._maker.device, before=before)

    def _by_itself(self, what: Callable[[Mapping[int, Any]], _Found]) -> _Found:
        """``what`` of the task's inputs; where that fails, a `ProfileError` instead."""
        device, task = self._maker.device, self.task
        try:
            with (
                torch.no_grad(),
                torch._C._DisableAutocast(),
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            ):
                return what(self._maker.of(task))
        except (RuntimeError, MemoryError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            reason, hint = "failed", ""
            if _is_out_of_memory(error):
                reason, hint = "ran out of memory", "; measure at a smaller batch with --profile-batch"
            raise ProfileError(f"profiling {task.name} {reason}: {task.cost}: {first}{hint}") from error


def _is_out_of_memory(error: BaseException | None) -> bool:
    first = (str(error).strip().splitlines() or [""])[0]
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in first


def _has_tensor(task: Task, value: int) -> bool:
    return any(out is not None and out.name == value for call in task.calls for out in call.outs)


class Inputs:
    """Tensors of given shapes to run operators on, made once and shared by all that read alike."""

    def __init__(
        self, captured: Captured, device: torch.device, batches: float = 1.0, *, uniform: bool = False
    ) -> None:
        """Args: batches: the wanted batch in units of the one that is measured. uniform: in 0 to 1, not normal."""
        self.captured, self.device, self.batches, self.uniform = captured, device, batches, uniform
        self.cache: dict[tuple[TensorMeta, int, int | None], torch.Tensor] = {}  # by meta, alike and value
        random = torch.rand if uniform else torch.randn
        self.block = random(2**18, generator=torch.Generator().manual_seed(0)).to(device)

    @cached_property
    def as_uniform(self) -> Inputs:
        """The same, uniform."""
        return Inputs(self.captured, self.device, self.batches, uniform=True)

    @cached_property
    def _reuse(self) -> Mapping[tuple[str, int], tuple[int, ...]]:
        return reuse_bytes(self.captured)

    @cached_property
    def _caches(self) -> CacheState:
        return CacheState(self.device)

    def of(self, task: Task, *, twin: bool = False) -> dict[int, Any]:
        """What a task reads, by value: tensors of its own, however alike they are; with ``twin`` others like them."""
        found, alike = dict[int, Any](), Counter[TensorMeta]()
        for value in task.reads:
            found[value] = self.make(value, alike[self.captured.metas[value]] + twin * len(task.reads))
            alike[self.captured.metas[value]] += 1
        return found

    def caches_before(self, task: Task, inputs: Mapping[int, Any], warm: Callable[[], object]) -> Callable[[], None]:
        """To be called before a task with a cost is timed: as much of its inputs is in the cache as in a step.

        ``warm`` is as of `CacheState`.
        """
        since = self._reuse[task.cost, len(task.reads)]
        pairs = zip(map(inputs.__getitem__, task.reads), since, strict=True)
        recent = [(tensor, int(count * self.batches)) for tensor, count in pairs if isinstance(tensor, torch.Tensor)]
        return lambda: self._caches(recent, warm)

    def make(self, value: int, alike: int = 0) -> Any:
        """The tensor of a value: random if it is floating, else made by the operator that makes it in the model.

        Random ones are shared by all values of the same shape. ``alike`` tells those apart that must not be one tensor.
        """
        meta = self.captured.metas[value]
        program = self.captured.program
        made = program.producers[value]
        if program.values[value].spec == "state":
            return torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state(self.device)
        if meta.dtype.is_floating_point or meta.dtype.is_complex or not made:
            return self._random(meta, alike)
        key = (meta, alike, value)
        if key not in self.cache:
            task = program.tasks[made[0]]
            run = compile_block(Block(task.reads, (task,), (), (value,)), task.name, COMMUNICATING)
            self.cache[key] = run([self.make(v) for v in task.reads])[1][0]
        return self.cache[key]

    def _random(self, meta: TensorMeta, alike: int) -> torch.Tensor:
        key = (meta, alike, None)
        if key not in self.cache:
            if sum(t.untyped_storage().nbytes() for t in self.cache.values()) > 2**31:
                self.cache.clear()  # only what is alive at once counts against the device
            elements = meta.storage_bytes // meta.dtype.itemsize
            flat = torch.zeros(elements, dtype=meta.dtype, device=self.device)
            if meta.dtype.is_floating_point:
                whole = elements // len(self.block) * len(self.block)
                flat[:whole].view(-1, len(self.block)).copy_(self.block)
                flat[whole:].copy_(self.block[: elements - whole])
            self.cache[key] = flat.as_strided(meta.shape, meta.stride, meta.offset)
        return self.cache[key]


@dataclass(frozen=True)
class Scaling:
    """How costs at a small batch become costs at the wanted one.

    Attributes:
        wanted, measured: batch sizes; ``second`` (twice ``measured``) gives the workspace's slope.
    """

    wanted: int
    measured: int
    second: int

    def scale(self, small: Cost, large: Cost) -> Cost:
        """The cost at the wanted batch, from costs at ``measured`` and (workspace only) at ``second``."""
        if REFUSED in (small, large):
            return REFUSED
        slope = (large.workspace_bytes - small.workspace_bytes) / (self.second - self.measured)
        workspace = small.workspace_bytes + max(0.0, slope) * (self.wanted - self.measured)
        return Cost(small.seconds * self.wanted / self.measured, int(workspace))


def matched(wanted: Captured, measured: Captured) -> Iterable[tuple[Task, Task]]:
    """The same task in two captures of one model at different batches.

    Raises:
        ProfileError: the captures differ in more than sizes.
    """
    if wanted.program.fingerprint != measured.program.fingerprint:
        raise ProfileError(
            "this model computes something else at the batch it would be profiled at; "
            "profile at the full batch: give --profile-batch the same number as the batch"
        )
    return zip(wanted.every_task(), measured.every_task(), strict=True)


def to_profile(costs: Mapping[str, Cost], device: torch.device, note: str) -> Profile:
    """A `Profile` of this machine."""
    return Profile(device_name(device), dict(costs), note, versions(), settings_of(device), measured_bytes(device))
