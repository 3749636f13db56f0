"""Devices: the name of this machine's, and rates and memory of GPUs from their data sheets.

Where the rates are from (all are peaks without sparsity, which no operator reaches: `monet_like.profile.gpu_paces` has the shares; where a datasheet gives the rate with
sparsity, half of it is taken; nothing here was measured, but for ``cpu``):

* a100: "NVIDIA A100 Tensor Core GPU" datasheet, A100 40GB PCIe (SXM alike): FP32 19.5 TFLOPS, TF32 156, BFLOAT16 312,
  40 GB, 1,555 GB/s. a100-80gb-pcie, a100-80gb-sxm: the same rates, 80 GB, 1,935 and 2,039 GB/s.
* h100: "NVIDIA H100 Tensor Core GPU" datasheet, H100 SXM: FP32 67 TFLOPS, TF32 989 with sparsity, BFLOAT16 1,979 with
  sparsity, 80 GB, 3.35 TB/s. h100-pcie: H100 PCIe, FP32 51, TF32 756 and BFLOAT16 1,513 with sparsity, 80 GB, 2 TB/s.
  h100-nvl: H100 NVL, FP32 60, TF32 835 and BFLOAT16 1,671 with sparsity, 94 GB, 3.9 TB/s.
* h200: "NVIDIA H200 Tensor Core GPU" datasheet, H200 SXM: as H100 SXM, but 141 GB, 4.8 TB/s. h200-nvl: H200 NVL, as
  H100 NVL, but 141 GB, 4.8 TB/s.
* gh200: "NVIDIA GH200 Grace Hopper Superchip" datasheet: as H100 SXM, but 96 GB HBM3, 4 TB/s, NVLink-C2C 900 GB/s in
  both directions.
* rtx4090: "NVIDIA Ada GPU Architecture" whitepaper, appendix A: FP32 82.6 TFLOPS, TF32 82.6, FP16 with FP32
  accumulate 165.2, 24 GB GDDR6X, 1,008 GB/s.
* rtx4080: the same whitepaper, RTX 4080: FP32 48.7 TFLOPS, TF32 48.7, FP16 with FP32 accumulate 97.5, 16 GB GDDR6X,
  716.8 GB/s.
* l40s: "NVIDIA L40S" datasheet: FP32 91.6 TFLOPS, TF32 366 with sparsity, BFLOAT16 733 with sparsity, 48 GB GDDR6, 864 GB/s.
* rtx2080ti: "NVIDIA Turing GPU Architecture" whitepaper, reference card: FP32 13.4 TFLOPS, FP16 with FP32 accumulate
  53.8, 11 GB, 616 GB/s. It has no TF32.
* p100: "NVIDIA Tesla P100" datasheet, PCIe 16 GB: FP32 9.3 TFLOPS, FP16 18.7, 732 GB/s. It has no TF32.

Multiprocessors are those of the same cards by NVIDIA's whitepapers (P100, Turing, A100, H100 and Ada architectures).

What cuBLAS keeps there follows from the compute capability ("CUDA GPU Compute Capability", developer.nvidia.com/cuda/gpus) and
from PyTorch's source, see `monet_like.profile.cublas`.

The rates are those of PyTorch's default settings: convolutions of float32 run in TF32 (``torch.backends.cudnn.allow_tf32``),
matrix products of float32 do not (``torch.backends.cuda.matmul.allow_tf32``).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

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


#: Bytes a second and direction of a link of 16 lanes: PCI Express 3.0, 4.0 and 5.0, by NVIDIA's datasheets 32, 64 and
#: 128 GB/s in both; and the share of it that large copies of pinned memory are taken to reach.
PCIE3, PCIE4, PCIE5 = (0.8 * rate for rate in (16e9, 32e9, 64e9))
#: The same for the link of a Grace Hopper Superchip.
NVLINK_C2C = 0.8 * 450e9


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
            f"PyTorch's default precisions: float32 convolutions at {self.convolution_flops_per_second / 1e12:g} TFLOP/s "
            f"(TF32 where there is one), matrix products at {self.flops_per_second / 1e12:g} (no TF32); "
            "workspaces of convolutions estimated"
        )


def _gpu(
    name: str,
    *,
    tflops: tuple[float, float, float],
    bandwidth: float,
    link: float,
    gigabytes: int,
    multiprocessors: int,
    capability: tuple[int, int],
    products: tuple[str, ...],
    source: str,
) -> DeviceLimits:
    """``tflops``: of float32, of float32's convolutions, and of 16-bit floats."""
    return DeviceLimits(
        name=name,
        flops_per_second=tflops[0] * 1e12,
        convolution_flops_per_second=tflops[1] * 1e12,
        half_flops_per_second=tflops[2] * 1e12,
        bytes_per_second=bandwidth,
        host_bytes_per_second=link,
        launch_seconds=4e-6,
        source=source,
        memory_bytes=gigabytes * GIB,
        multiprocessors=multiprocessors,
        device="cuda",
        products=products,
        cublas_bytes=default_bytes(capability[0]),
        product_bytes=0 if are_kept() else workspace_bytes(capability[0]),
        capability=capability,
    )


_A100, _H100, _NVL = (19.5, 156.0, 312.0), (67.0, 494.5, 989.5), (60.0, 417.5, 835.5)

DEVICES: Mapping[str, DeviceLimits] = {
    limits.name: limits
    for limits in (
        DeviceLimits(
            name="cpu",
            flops_per_second=1.0e11,
            convolution_flops_per_second=1.0e11,
            half_flops_per_second=1.0e11,
            bytes_per_second=1.5e10,
            host_bytes_per_second=1e9,
            launch_seconds=2e-6,
            source="a server CPU on two cores, as measured; files: a guess",
        ),
        _gpu(
            "p100",
            tflops=(9.3, 9.3, 18.7),
            bandwidth=732e9,
            link=PCIE3,
            gigabytes=16,
            multiprocessors=56,
            capability=(6, 0),
            products=("Tesla P100-PCIE-16GB",),
            source="NVIDIA Tesla P100 PCIe 16 GB datasheet",
        ),
        _gpu(
            "a100",
            tflops=_A100,
            bandwidth=1555e9,
            link=PCIE4,
            gigabytes=40,
            multiprocessors=108,
            capability=(8, 0),
            products=("A100-SXM4-40GB", "A100-PCIE-40GB"),
            source="NVIDIA A100 40 GB PCIe datasheet",
        ),
        _gpu(
            "a100-80gb-pcie",
            tflops=_A100,
            bandwidth=1935e9,
            link=PCIE4,
            gigabytes=80,
            multiprocessors=108,
            capability=(8, 0),
            products=("A100 80GB PCIe",),
            source="NVIDIA A100 80 GB PCIe datasheet",
        ),
        _gpu(
            "a100-80gb-sxm",
            tflops=_A100,
            bandwidth=2039e9,
            link=PCIE4,
            gigabytes=80,
            multiprocessors=108,
            capability=(8, 0),
            products=("A100-SXM4-80GB",),
            source="NVIDIA A100 80 GB SXM datasheet",
        ),
        _gpu(
            "h100",
            tflops=_H100,
            bandwidth=3350e9,
            link=PCIE5,
            gigabytes=80,
            multiprocessors=132,
            capability=(9, 0),
            products=("H100 80GB HBM3",),
            source="NVIDIA H100 SXM datasheet",
        ),
        _gpu(
            "h100-pcie",
            tflops=(51.0, 378.0, 756.5),
            bandwidth=2000e9,
            link=PCIE5,
            gigabytes=80,
            multiprocessors=114,
            capability=(9, 0),
            products=("H100 PCIe",),
            source="NVIDIA H100 PCIe datasheet",
        ),
        _gpu(
            "h100-nvl",
            tflops=_NVL,
            bandwidth=3900e9,
            link=PCIE5,
            gigabytes=94,
            multiprocessors=132,
            capability=(9, 0),
            products=("H100 NVL",),
            source="NVIDIA H100 NVL datasheet",
        ),
        _gpu(
            "h200",
            tflops=_H100,
            bandwidth=4800e9,
            link=PCIE5,
            gigabytes=141,
            multiprocessors=132,
            capability=(9, 0),
            products=("H200",),
            source="NVIDIA H200 SXM datasheet",
        ),
        _gpu(
            "h200-nvl",
            tflops=_NVL,
            bandwidth=4800e9,
            link=PCIE5,
            gigabytes=141,
            multiprocessors=132,
            capability=(9, 0),
            products=("H200 NVL",),
            source="NVIDIA H200 NVL datasheet",
        ),
        _gpu(
            "gh200",
            tflops=_H100,
            bandwidth=4000e9,
            link=NVLINK_C2C,
            gigabytes=96,
            multiprocessors=132,
            capability=(9, 0),
            products=("GH200 480GB", "GH200 120GB"),  # the host's memory: the GPU has 96 GB in both
            source="NVIDIA GH200 Grace Hopper Superchip datasheet",
        ),
        _gpu(
            "rtx2080ti",
            tflops=(13.4, 13.4, 53.8),
            bandwidth=616e9,
            link=PCIE3,
            gigabytes=11,
            multiprocessors=68,
            capability=(7, 5),
            products=("GeForce RTX 2080 Ti",),
            source="NVIDIA Turing whitepaper, reference card",
        ),
        _gpu(
            "rtx4090",
            tflops=(82.6, 82.6, 165.2),
            bandwidth=1008e9,
            link=PCIE4,
            gigabytes=24,
            multiprocessors=128,
            capability=(8, 9),
            products=("GeForce RTX 4090",),
            source="NVIDIA Ada architecture whitepaper",
        ),
        _gpu(
            "rtx4080",
            tflops=(48.7, 48.7, 97.5),
            bandwidth=716.8e9,
            link=PCIE4,
            gigabytes=16,
            multiprocessors=76,
            capability=(8, 9),
            products=("GeForce RTX 4080",),
            source="NVIDIA Ada architecture whitepaper",
        ),
        _gpu(
            "l40s",
            tflops=(91.6, 183.0, 366.5),
            bandwidth=864e9,
            link=PCIE4,
            gigabytes=48,
            multiprocessors=142,
            capability=(8, 9),
            products=("L40S",),
            source="NVIDIA L40S datasheet",
        ),
    )
}


@dataclass(frozen=True)
class Machine:
    """A device, as far as it is known.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        name: for people.
        memory_bytes, flops_per_second, bytes_per_second: 0: not known. Arithmetic in float32, without TF32.
        convolution_flops_per_second: of float32 by PyTorch's default, which is with TF32 where there is one; 0: not known.
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
    """The datasheet of a device as files name it: ``roofline:h100`` or ``cuda: NVIDIA H100 80GB HBM3``; None: not known."""
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
