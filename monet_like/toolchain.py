"""Finds the compilers that `monet_like.build` runs, and what they compile against: torch, CUDA, cuDNN.

CUDA's compiler is that of an installed toolkit or, for CUDA 13, of pip: ``pip install 'monet_like[kernels]'`` (105 MB).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from monet_like.errors import MonetError
from monet_like.files import shipped_folder

#: Where NVIDIA's packages put the toolkit.
_USUAL = "/usr/local/cuda/bin"
#: Said where there is no CUDA compiler.
NO_NVCC = (
    "not found in $CUDA_HOME/bin, on the PATH, in /usr/local/cuda/bin or among pip's packages; for CUDA 13 pip has it "
    "(python -m pip install 'monet_like[kernels]'), for CUDA 12 install NVIDIA's CUDA toolkit"
)


class KernelBuildError(MonetError):
    """The kernels could not be compiled; the package works without them, slower."""


def source_directory() -> Path:
    """The folder of the C++ sources, csrc/, in a checkout or beside the installed package."""
    folder = shipped_folder("csrc")
    if folder is None:
        raise KernelBuildError(f"the C++ sources (csrc/) are not there, beside or in {Path(__file__).parent}")
    return folder


@dataclass(frozen=True)
class Cudnn:
    """Where cuDNN's headers are, and the library that torch runs."""

    include: Path
    library: Path


@dataclass(frozen=True)
class CudaAllocator:
    """Where CUDA's headers are, and which functions torch's CUDA allocator has that not all versions have."""

    include: Path
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Toolchain:
    """Compilers and flags of one build; ``class_flags`` are for sources that use C++ classes of torch."""

    torch_version: str
    cxx: str
    nvcc: str | None
    torch_flags: tuple[str, ...]
    class_flags: tuple[str, ...]
    architectures: tuple[str, ...]
    link_flags: tuple[str, ...]
    cuda_link_flags: tuple[str, ...]
    cudnn: Cudnn | None
    allocator: CudaAllocator | None


def find_cxx() -> str:
    """The C++ compiler: $CXX, else g++, c++ or clang++ from the PATH."""
    asked = os.environ.get("CXX")
    candidates = [asked] if asked else ["g++", "c++"]
    for name in candidates:
        found = shutil.which(name)
        if found:
            return found
    raise KernelBuildError(
        f"no C++ compiler: looked for {', '.join(candidates)} on the PATH. Install one with C++20 "
        "(GCC 11 or newer: `apt-get install g++`, `dnf install gcc-c++`, `conda install gxx`) or set CXX, then run "
        "python -m monet_like.build. Without it the plain-torch twins are used."
    )


def find_ninja() -> str:
    """ninja, of the Python package or from the PATH."""
    try:
        import ninja
    except ImportError as error:
        raise KernelBuildError(
            "the Python package ninja is missing: python -m pip install ninja, then run "
            "python -m monet_like.build. Without it the plain-torch twins are used."
        ) from error
    return shutil.which("ninja", path=ninja.BIN_DIR) or "ninja"


def find_nvcc() -> str | None:
    """The CUDA compiler: of $CUDA_HOME, from the PATH, in the usual place, or pip's; the first of torch's major
    version, else the first.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [*([f"{home}/bin"] if home else []), None, _USUAL, *(f"{root}/bin" for root in _cuda_from_pip())]
    found = [path for path in (shutil.which("nvcc", path=folder) for folder in folders) if path]
    return next((path for path in found if not _misfit(path)), next(iter(found), None))


def nvcc_is_wanted() -> bool:
    """Whether the CUDA kernels are to be compiled, no compiler fits, and pip has one: from CUDA 13 on.

    For install.sh.
    """
    import torch

    asked, nvcc = _asked_for(None), find_nvcc()
    wanted = torch.cuda.is_available() if asked is None else asked
    on_pip = int((torch.version.cuda or "0").partition(".")[0]) >= 13
    return wanted and on_pip and (nvcc is None or bool(_misfit(nvcc)))


def _cuda_from_pip() -> Iterator[Path]:
    """Where pip installs CUDA's parts, from CUDA 13 on all in one folder: ``site-packages/nvidia/cu13``."""
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations if nvidia else None) or ():
        yield from sorted(Path(root).glob("cu[0-9]*"))


def _misfit(nvcc: str) -> str:
    """Why a CUDA compiler does not fit torch, in words; "" if it does.

    Minor versions of CUDA are compatible, major ones are not.
    """
    try:
        import torch
    except ImportError:
        return ""  # `toolchain` says so

    shown = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", shown)
    if torch.version.cuda and release and release.group(1) == torch.version.cuda.split(".")[0]:
        return ""
    version = release.group(0) if release else "an unknown version"
    return f"{nvcc} is {version}, torch is built for CUDA {torch.version.cuda}: the major versions must agree"


def _cuda_runtime(nvcc: str) -> tuple[str, ...]:
    """Flags that link the CUDA runtime, by its full name: pip's packages have no ``libcudart.so`` beside
    ``libcudart.so.13``.
    """
    import torch

    name = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
    roots = (Path(nvcc).resolve().parents[1], *_cuda_from_pip())
    paths = (root / folder / name for root in roots for folder in ("lib", "lib64", "targets/x86_64-linux/lib"))
    return next((("-Xlinker", str(path)) for path in paths if path.exists()), ("-lcudart",))


def find_cudnn(torch_root: Path) -> Cudnn | None:
    """Headers and library of the cuDNN that torch runs; None if missing or too old for csrc/cudnn."""
    import torch

    runs = torch.backends.cudnn.version() or 0
    major = runs // (10_000 if runs >= 90_000 else 1_000)  # 90100 is 9.1.0, 8902 is 8.9.2
    home = os.environ.get("CUDNN_HOME")
    roots = [Path(home)] if home else [torch_root.parent / "nvidia" / "cudnn"]
    if not home:
        nvcc = find_nvcc()
        roots += [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr")]
    for root in roots:
        try:
            version, api = ((root / "include" / name).read_text() for name in ("cudnn_version.h", "cudnn_cnn.h"))
        except OSError:
            continue
        told = re.search(r"#define CUDNN_MAJOR (\d+)", version)
        fits = told is not None and int(told.group(1)) == major and "cudnnConvolutionBackwardFilter(" in api
        libraries = [root / lib / f"libcudnn.so.{major}" for lib in ("lib", "lib64", "lib/x86_64-linux-gnu")]
        found = next((path for path in libraries if path.exists()), None)
        if fits and found:
            return Cudnn(root / "include", found)
    return None


def find_allocator(torch_root: Path, nvcc: str | None) -> CudaAllocator | None:
    """CUDA's headers, and the functions of torch's allocator if csrc/arena/cuda.cpp knows them all; else None."""
    roots = [
        *([Path(nvcc).resolve().parents[1]] if nvcc else []),
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")),
        *_cuda_from_pip(),
    ]
    include = next((root / "include" for root in roots if (root / "include/crt/host_defines.h").exists()), None)
    header = torch_root / "include" / "c10" / "cuda" / "CUDACachingAllocator.h"
    if include is None or not header.exists():
        return None
    text = header.read_text().partition("class CUDAAllocator")[2].partition("\n};")[0]
    functions = re.findall(r"virtual [^;{(]*?(\w+)\(", text)
    known = (source_directory() / "arena" / "cuda.cpp").read_text()
    if unknown := [name for name in functions if f" {name}(" not in known and f"*{name}(" not in known]:
        print(
            f"monet_like_arena_cuda.so is left out: this torch's CUDA allocator has functions that it does not pass on "
            f"({', '.join(unknown)})",
            file=sys.stderr,
        )
        return None
    return CudaAllocator(include, tuple(name for name in functions if f"MONET_LIKE_HAS_{name}\n" in known))


def toolchain(cuda: bool | None) -> Toolchain:
    """Find everything that a build needs.

    Args:
        cuda: compile the CUDA sources; None decides as described in `monet_like.build`.

    Raises:
        KernelBuildError: no compiler or torch was found.
    """
    cxx = find_cxx()
    try:
        import torch
    except ImportError as error:
        raise KernelBuildError(
            f"torch cannot be imported ({error}); install torch >= 2.11 first, then run python -m monet_like.build"
        ) from error
    torch_root = Path(torch.__file__).resolve().parent
    nvcc = cuda_compiler(cuda)

    link_flags = (f"-L{torch_root / 'lib'}", "-ltorch_cpu")
    return Toolchain(
        torch_version=torch.__version__,
        cxx=cxx,
        nvcc=nvcc,
        torch_flags=("-isystem", str(torch_root / "include")),
        class_flags=(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",),
        architectures=_architectures() if nvcc else (),
        link_flags=link_flags,
        cuda_link_flags=(*link_flags, "-ltorch_cuda", *_cuda_runtime(nvcc)) if nvcc else (),
        cudnn=find_cudnn(torch_root) if nvcc else None,
        allocator=find_allocator(torch_root, nvcc)
        if nvcc or (cuda is not False and torch.cuda.is_available())
        else None,
    )


def _asked_for(cuda: bool | None) -> bool | None:
    """Whether the CUDA sources are to be compiled as far as that was said, by ``cuda`` or $MONET_LIKE_CUDA; None: it
    was not.
    """
    said = os.environ.get("MONET_LIKE_CUDA", "")
    return said.lower() not in ("0", "off", "false", "no") if cuda is None and said else cuda


def cuda_compiler(cuda: bool | None) -> str | None:
    """Path of nvcc if the CUDA sources are to be compiled, else None."""
    import torch

    asked = _asked_for(cuda)
    if asked is False or (asked is None and not torch.cuda.is_available()):
        return None
    nvcc = find_nvcc()
    if torch.version.cuda is None:
        problem = "this torch is built without CUDA"
    elif nvcc is None:
        problem = f"nvcc was {NO_NVCC}"
    else:
        problem = _misfit(nvcc)
    if not problem:
        return nvcc
    if asked:
        raise KernelBuildError(f"the CUDA kernels cannot be compiled: {problem}")
    return None


def _architectures() -> tuple[str, ...]:
    """-gencode flags: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else 8.0 and 9.0; PTX of the newest."""
    import torch

    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if not text and torch.cuda.is_available():
        seen = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        text = ";".join(f"{major}.{minor}" for major, minor in seen)
    names = sorted(
        {name.replace("+PTX", "").replace(".", "") for name in re.split(r"[;,\s]+", text or "8.0;9.0") if name},
        key=lambda name: int(re.sub(r"\D", "", name)),
    )
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    return (*flags, f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}")
