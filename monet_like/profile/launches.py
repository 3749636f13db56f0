"""What the CPU takes to launch a step on a GPU: constants of plain PyTorch's steps and of scheduled ones.

A scheduled step launches nothing before its wrapper has compared the call and every parameter and buffer with what was
captured; the GPU waits that long. ``launches.csv`` has the seconds: before the first launch in any step, for each
parameter and buffer, and for each operator call, views included.

Where they are from: ``start_seconds`` and ``resident_seconds`` of planned steps were fitted to 30 steps of eight nets
on an H200, and hold for seven of ResNet-50 on an H100 (`benchmarks/results/two_clocks.md`); ``python -m
benchmarks.two_clocks`` fits them anew to the tables that ``scripts/gpu_check.sh`` writes on cards. The others were
timed without a GPU, on the CUDA runtime of ``tests/fake_gpu``, and have 2.5 us more for each real launch. A call's
seconds decide in small nets alone, which no GPU was timed with.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..ir.program import Program
from ..ir.simulate import Launches


@dataclass(frozen=True, slots=True)
class HostPace:
    """CPU seconds of a kind of step: before the first launch, there for each parameter and buffer, and for a call."""

    start_seconds: float
    resident_seconds: float
    call_seconds: float

    def of(self, program: Program) -> Launches:
        """The CPU's clock of a step of ``program``."""
        return Launches(self.start_seconds + self.resident_seconds * program.residents, self.call_seconds)


def _rows() -> Iterator[tuple[str, HostPace]]:
    with Path(__file__).with_name("launches.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield row.pop("step"), HostPace(**{name: float(seconds) for name, seconds in row.items()})


#: ``plain``: PyTorch's own step; ``planned``: one that follows a schedule.
HOST_PACES: Mapping[str, HostPace] = dict(_rows())


def launches_of(program: Program, device: str, *, planned: bool) -> Launches | None:
    """The CPU's clock of a step on a device as files name it; None: on a CPU, and for datasheet rates.

    Estimates from a datasheet are off by more than the CPU takes (`benchmarks/results/cuda-nvidia-h200`).
    """
    return HOST_PACES["planned" if planned else "plain"].of(program) if device.startswith("cuda:") else None
