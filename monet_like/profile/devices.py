"""Devices: the name of this machine's, and rates and memory of GPUs from their data sheets.

GPUs stand in ``gpus.csv``, each with the name of the datasheet or whitepaper that its figures are from. All rates are
peaks without sparsity, which no operator reaches (`monet_like.profile.gpu_paces` has the shares); where a datasheet
gives the rate with sparsity, half of it is taken. 16-bit products are those with sums in float32. Nothing here was
measured, but for ``cpu``.

Multiprocessors are those of the same cards by NVIDIA's whitepapers (P100, Turing, A100, H100 and Ada architectures).

What cuBLAS keeps there follows from the compute capability ("CUDA GPU Compute Capability",
developer.nvidia.com/cuda/gpus) and from PyTorch's source, see `monet_like.profile.cublas`.

The rates are those of PyTorch's default settings: convolutions of float32 run in TF32
(``torch.backends.cudnn.allow_tf32``), matrix products of float32 do not (``torch.backends.cuda.matmul.allow_tf32``).
"""

from __future__ import annotations

import csv
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..ir.units import GIB
from .cublas import are_kept, default_bytes, workspace_bytes


def device_name(device: torch.device) -> str:
    """The name of the device that a profile is valid for."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {_cpu_model()}, {torch.get_num_threads()} threads"


def device_slug(device: torch.device) -> str:
    """`device_name` in letters that fit into file names."""
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


#: Bytes a second and direction of a link of 16 lanes: of PCI Express 3.0, 4.0 and 5.0 by NVIDIA's datasheets 32, 64 and
#: 128 GB/s in both, of a Grace Hopper Superchip 900; and the share of it that large copies of pinned memory are taken
#: to reach.
LINKS = {name: 0.8 * rate for name, rate in (("pcie3", 16e9), ("pcie4", 32e9), ("pcie5", 64e9), ("nvlink-c2c", 450e9))}


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """A device's rates.

    Attributes:
        name: for people.
        flops_per_second: of matrix products of float32 (on a GPU without TF32, PyTorch's default).
        convolution_flops_per_second: of convolutions of float32 (with TF32 where there is some, PyTorch's default).
        half_flops_per_second: of both for 16-bit floats.
        bytes_per_second: memory bandwidth.
        host_bytes_per_second: of copies to and from the host, in one direction.
        launch_seconds: the least any operator takes.
        multiprocessors: of a GPU; 0: not told.
        source: where the figures come from.
        memory_bytes: in all, a GB of the datasheet taken as 2**30 bytes; 0: not told.
        device: ``cuda`` or ``cpu``, what programs for it are captured as.
        products: PyTorch's names of the device, without the maker's; none: none are known.
        cublas_bytes: what cuBLAS's workspaces take all through a step (`monet_like.profile.cublas`).
        product_bytes: of a product's own workspace, where none are kept.
        capability: compute capability; None: not told, or no GPU.
    """

    name: str
    flops_per_second: float
    convolution_flops_per_second: float
    half_flops_per_second: float
    bytes_per_second: float
    host_bytes_per_second: float
    launch_seconds: float
    source: str
    memory_bytes: int = 0
    multiprocessors: int = 0
    device: str = "cpu"
    products: tuple[str, ...] = ()
    cublas_bytes: int = 0
    product_bytes: int = 0
    capability: tuple[int, int] | None = None

    def flop_rates(self, half: bool) -> tuple[float, float]:
        """Floating-point operations a second of matrix products and of convolutions; ``half``: of 16-bit floats."""
        if half:
            return self.half_flops_per_second, self.half_flops_per_second
        return self.flops_per_second, self.convolution_flops_per_second

    @property
    def settings(self) -> str:
        """The settings that the rates are of, in words; "" for a CPU, where there is no choice."""
        if self.device == "cpu":
            return ""
        return (
            f"PyTorch's default precisions: float32 convolutions at {self.convolution_flops_per_second / 1e12:g} "
            f"TFLOP/s (TF32 where there is one), matrix products at {self.flops_per_second / 1e12:g} (no TF32); "
            "workspaces of convolutions estimated"
        )


def _gpu(row: Mapping[str, str]) -> DeviceLimits:
    """A row of ``gpus.csv``."""
    major, minor = (int(part) for part in row["capability"].split("."))
    return DeviceLimits(
        name=row["name"],
        flops_per_second=float(row["float32_tflops"]) * 1e12,
        convolution_flops_per_second=float(row["convolution_tflops"]) * 1e12,
        half_flops_per_second=float(row["half_tflops"]) * 1e12,
        bytes_per_second=float(row["gb_per_second"]) * 1e9,
        host_bytes_per_second=LINKS[row["link"]],
        launch_seconds=4e-6,
        source=row["source"],
        memory_bytes=int(row["gigabytes"]) * GIB,
        multiprocessors=int(row["multiprocessors"]),
        device="cuda",
        products=tuple(row["products"].split("|")),
        cublas_bytes=default_bytes(major),
        product_bytes=0 if are_kept() else workspace_bytes(major),
        capability=(major, minor),
    )


def _gpus() -> Iterator[DeviceLimits]:
    with Path(__file__).with_name("gpus.csv").open(newline="") as file:
        yield from map(_gpu, csv.DictReader(file))


_CPU = DeviceLimits(
    name="cpu",
    flops_per_second=1.0e11,
    convolution_flops_per_second=1.0e11,
    half_flops_per_second=1.0e11,
    bytes_per_second=1.5e10,
    host_bytes_per_second=1e9,
    launch_seconds=2e-6,
    source="a server CPU on two cores, as measured; files: a guess",
)

DEVICES: Mapping[str, DeviceLimits] = {limits.name: limits for limits in (_CPU, *_gpus())}


@dataclass(frozen=True)
class Machine:
    """A device, as far as it is known.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        name: for people.
        memory_bytes, flops_per_second, bytes_per_second: 0: not known. Arithmetic in float32, without TF32.
        convolution_flops_per_second: of float32 by PyTorch's default, which is with TF32 where there is one; 0: not
            known.
    """

    kind: str
    name: str
    memory_bytes: int = 0
    flops_per_second: float = 0.0
    bytes_per_second: float = 0.0
    convolution_flops_per_second: float = 0.0


def known_limits(name: str) -> DeviceLimits | None:
    """The datasheet of the device that PyTorch calls so, if there is one.

    Names must be equal: an "NVIDIA GH200 480GB" is no H200, and a part of a card ("... MIG 1g.5gb") not the card.
    """
    product = name.removeprefix("NVIDIA ")
    return next((limits for limits in DEVICES.values() if product in limits.products), None)


def limits_of(device: str) -> DeviceLimits | None:
    """The datasheet of a device as files name it: ``roofline:h100`` or ``cuda: NVIDIA H100 80GB HBM3``; None: not
    known.
    """
    kind, _, name = (part.strip() for part in device.partition(":"))
    return DEVICES.get(name) if kind == "roofline" else known_limits(name) if kind == "cuda" else None


def planned_for(device: str) -> Machine:
    """The machine that a schedule file names: ``roofline:h100``, ``cuda: NVIDIA H100 80GB HBM3`` or ``cpu: ...``."""
    kind, _, name = (part.strip() for part in device.partition(":"))
    limits = limits_of(device)
    if limits is None:
        return Machine("cuda" if kind == "cuda" else "cpu", name)
    shown = f"{name} (datasheet rates)" if kind == "roofline" else name
    return Machine(limits.device, shown, limits.memory_bytes, *_rates(limits))


def machine_at(device: torch.device) -> Machine:
    """The machine that ``device`` is: its own memory, and the rates of its datasheet."""
    name = device_name(device).partition(": ")[2]
    if device.type != "cuda":
        return Machine("cpu", name)
    limits = known_limits(name)
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    return Machine("cuda", name, memory, *(_rates(limits) if limits else ()))


def _rates(limits: DeviceLimits) -> tuple[float, float, float]:
    return limits.flops_per_second, limits.bytes_per_second, limits.convolution_flops_per_second
