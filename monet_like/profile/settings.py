"""Settings and versions that change the costs of operators on a device, so that measured costs hold only under the
same.

Seconds and workspaces that were measured under other settings are another device's, in effect. Profiles say which they
were measured under, and the cache keeps profiles and plans apart by them. Programs are not in here: operators' names,
dtypes, shapes and layouts are the keys of costs. Neither is autocast, which changes programs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..build import library_path
from ..ops import liger

#: Variables of PyTorch's, of CUDA's libraries and of oneDNN's that change which kernels run, on how much workspace, and
#: how sizes are rounded. All but the last six are of GPUs.
VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDNN_CONV_WSCAP_DBG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUDNN_V8_API_DISABLED",
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
_OF_CPUS = VARIABLES[-6:]

_BACKENDS: Any = torch.backends
_UTILS: Any = torch.utils
#: What is asked of PyTorch, by the name under which it is told: on both kinds of device, on a GPU, on a CPU.
_BOTH: Mapping[str, Callable[[], Any]] = {
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "filled uninitialized memory": lambda: _UTILS.deterministic.fill_uninitialized_memory,
}
_GPU: Mapping[str, Callable[[], Any]] = {
    "cuda": lambda: torch.version.cuda,
    "cudnn": lambda: _BACKENDS.cudnn.version(),
    "cudnn.enabled": lambda: _BACKENDS.cudnn.enabled,
    "cudnn.benchmark": lambda: _BACKENDS.cudnn.benchmark,
    "cudnn.benchmark_limit": lambda: _BACKENDS.cudnn.benchmark_limit,
    "cudnn.deterministic": lambda: _BACKENDS.cudnn.deterministic,
    "float32 convolutions": lambda: _BACKENDS.cudnn.conv.fp32_precision,
    "float32 recurrent layers": lambda: _BACKENDS.cudnn.rnn.fp32_precision,
    "float32 matrix products": lambda: _BACKENDS.cuda.matmul.fp32_precision,
    "float16 reductions": lambda: _BACKENDS.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "bfloat16 reductions": lambda: _BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "float16 accumulation": lambda: _BACKENDS.cuda.matmul.allow_fp16_accumulation,
    "BLAS library": lambda: str(_BACKENDS.cuda.preferred_blas_library()),
    "attention": lambda: [
        name for name in ("flash", "mem_efficient", "math", "cudnn") if getattr(_BACKENDS.cuda, f"{name}_sdp_enabled")()
    ],
}
_CPU: Mapping[str, Callable[[], Any]] = {
    "threads": torch.get_num_threads,
    "CPU capability": lambda: _BACKENDS.cpu.get_cpu_capability(),
    "oneDNN": lambda: _BACKENDS.mkldnn.enabled,
    "oneDNN deterministic": lambda: _BACKENDS.mkldnn.deterministic,
    "NNPACK": torch._C._get_nnpack_enabled,
    "float32 convolutions": lambda: _BACKENDS.mkldnn.conv.fp32_precision,
    "float32 matrix products": lambda: _BACKENDS.mkldnn.matmul.fp32_precision,
}


def versions() -> dict[str, str]:
    """Versions of what a profile or schedule depends on."""
    from .._version import __version__

    found = {"monet_like": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
    return found


def settings_of(device: torch.device) -> dict[str, str]:
    """The present settings and versions that change costs on this kind of device, by names for people.

    Returns:
        Versions of libraries, whether compiled kernels or twins run and which, settings of PyTorch, and variables of
        the environment that are set.
    """
    found = versions()
    found["kernels"] = _kernels(device.type)
    if liger.runs_on(device.type):
        found[liger.PACKAGE] = liger.version()
    asked = {**_BOTH, **(_GPU if device.type == "cuda" else _CPU)}
    found.update({name: str(_answer(question)) for name, question in asked.items()})
    read = VARIABLES if device.type == "cuda" else _OF_CPUS
    found.update({name: os.environ[name] for name in read if name in os.environ})
    return found


def settings_digest(device: torch.device) -> str:
    """A digest of `settings_of`, for file names."""
    return hashlib.sha256(json.dumps(settings_of(device), sort_keys=True).encode()).hexdigest()[:12]


def changed_settings(measured: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The differences between two results of `settings_of`, in words; "" if there are none, or the first is empty."""
    if not measured:
        return ""
    names = [name for name in sorted({*measured, *now}) if measured.get(name) != now.get(name)]
    return ", ".join(f"{name} {measured.get(name, 'unset')} instead of {now.get(name, 'unset')}" for name in names)


def _answer(question: Callable[[], Any]) -> Any:
    """What PyTorch says; a word where this version has no such setting."""
    try:
        return question()
    except (AttributeError, RuntimeError):
        return "unknown"


def _kernels(device: str) -> str:
    """Whether the operators of this package run compiled kernels, and a digest of these."""
    if not ops.available(device):
        return "twins"
    parts = ["kernels"] if device == "cpu" else ["kernels_cuda", "kernels_cudnn"]
    present = [part for part in parts if part != "kernels_cudnn" or ops.has("cudnn_convolution", "cuda")]
    digests = [_digest(library_path(part)) for part in present if library_path(part).exists()]
    return " ".join(["compiled", *digests])


def _digest(path: Path) -> str:
    return _digest_of(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _digest_of(path: Path, _changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
