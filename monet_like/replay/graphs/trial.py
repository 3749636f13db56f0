"""Whether a step has CUDA graphs that nobody has asked for: if it waits for the host, they fit, and a trial is won."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from ...ir.units import format_bytes, format_seconds
from ...profile.devices import device_name
from ...profile.launches import launches_of
from .copies import Tensors
from .recorder import Recorder
from .refusals import Step

#: Graphs are used if they take less than this share of the time without.
FASTER = 0.97
#: Steps of a window, which one synchronisation ends; windows, of which the fastest counts; no more of them after so
#: many seconds.
STEPS, WINDOWS, MOST_SECONDS = 5, 3, 1.0

#: Runs a step; yields the results, and the gradients of one segment after the other.
Run = Callable[[], Iterator[Tensors]]


class Unused(Exception):
    """Why graphs are not used."""


def unneeded(step: Step) -> str:
    """Why graphs cannot make a step faster, by the plan; "" if they may, or if the plan does not know.

    The plan knows if it is for this GPU and these inputs, and its times were measured. The CPU then has a clock for
    launches, the GPU one for its work. In steps that follow each other, the one that takes longer is waited for.
    """
    record, captured = step.record, step.captured
    if record is None or not record.device_seconds or record.device != device_name(captured.device):
        return ""
    if [captured.metas[value].shape for value in captured.inputs] != [spec.shape for spec in record.inputs]:
        return ""
    clock = launches_of(captured.program, record.device, planned=True)
    calls = sum(len(task.calls) for block in step.blocks for task in block.tasks)
    if clock is None or (host := clock.start_seconds + clock.call_seconds * calls) > record.device_seconds:
        return ""
    return (
        f"by the plan the step waits for the GPU, which works for {format_seconds(record.device_seconds)}, and not for "
        f"the host, which launches that in {format_seconds(host)}"
    )


def pool_bytes(step: Step) -> int:
    """What the pool of a step's graphs holds at most, as planned: the step's peak without what lies there anyway."""
    record = step.record
    return 0 if record is None else record.peak_bytes - step.captured.program.resident_bytes - record.optimizer_bytes


def too_large(step: Step, taken: int, free: int) -> str:
    """Why graphs do not fit; "" if they do.

    They fit if, in bytes::

        peak + pool + copies <= budget
        2 * (taken + copies) <= free

    ``peak`` and ``budget`` are the plan's. ``peak`` has parameters, buffers, inputs, the optimizer's state and a step
    without graphs: the pool (`pool_bytes`) stays taken while a call that graphs do not serve, such as a smaller last
    batch, runs such a step. ``copies`` are those of inputs and incoming gradients, which the graphs read. Of the device
    as much stays free as they take, for evaluation and all that has not run yet.

    Args:
        taken: of the device for the pool, as planned or measured.
        free: on the device, beside a step without graphs.
    """
    record, metas = step.record, step.captured.metas
    if record is None or not record.peak_bytes:
        return "no plan says how much memory they need"
    values = (*step.captured.inputs, *(value for _, value in step.tangents))
    copies = sum(metas[value].allocated_bytes for value in values)
    left = record.budget_bytes - record.peak_bytes
    for whose, wanted, room in (("budget", pool_bytes(step) + copies, left), ("GPU", 2 * (taken + copies), free)):
        if wanted > room:
            return f"they need {format_bytes(wanted)} of room, and the {whose} has {format_bytes(max(0, room))} more"
    return ""


class Trial:
    """Compares graphs with the same step without: first the bits, then the time.

    Args:
        recorder: of the graphs.

    Raises:
        Unused: the graphs do not fit.
    """

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self._step, self._recorder = step, recorder
        self._free = recorder.free_bytes(pool_bytes(step))
        self._check_size(pool_bytes(step))
        self._expected: deque[Tensors] = deque()
        self._without = 0.0
        self.won = ""

    def _check_size(self, taken: int) -> None:
        if reason := too_large(self._step, taken, self._free):
            raise Unused(reason)

    def before(self, expected: list[Tensors], run: Run) -> None:
        """Before the capture: time the step without graphs.

        Args:
            expected: what the step makes and changes.
        """
        self._expected.extend(expected)
        self._without = self._seconds(run)

    def compare(self, found: Iterable[Tensors]) -> None:
        """After the capture: check its bytes, and that a replay from the same contents makes the same bits.

        Raises:
            Unused: it does not, or the allocator has taken more for the graphs than fits.
        """
        self._check_size(self._recorder.pool_bytes)
        for mine in found:
            if not all(map(_same_bits, mine, self._expected.popleft())):  # of which nothing is held for longer
                raise Unused("they make other bits; some kernels add in another order each time")

    def after(self, run: Run) -> None:
        """Time replays.

        Raises:
            Unused: they are not faster.
        """
        seconds = self._seconds(run)
        self.won = (
            f"{format_seconds(seconds)} with them, {format_seconds(self._without)} without; they hold "
            f"{format_bytes(self._recorder.pool_bytes)}"
        )
        if seconds >= FASTER * self._without:
            raise Unused(f"a step takes {self.won}")

    def _seconds(self, run: Run) -> float:
        """Seconds of a step. The host may run ahead of the GPU from step to step, as in training."""
        windows: list[float] = []
        began = self._recorder.seconds()
        while len(windows) < WINDOWS and sum(windows) < MOST_SECONDS:
            for _ in range(STEPS):
                for _ in run():
                    pass
            ended = self._recorder.seconds()
            windows.append(ended - began)
            began = ended
        return min(windows) / STEPS


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As whole numbers, which are few: a comparison makes a byte for each."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.dtype.itemsize, torch.int64)
    return tensor.contiguous().reshape(-1).view(dtype)
