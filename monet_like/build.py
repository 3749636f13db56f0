"""Compile csrc/ with ninja: `python -m monet_like.build [--cuda | --no-cuda] [--force] [-v]`.

Shared libraries, in `lib/` beside this file:

    monet_like_kernels.so        the operators' schemas and CPU kernels
    monet_like_kernels_cuda.so   their CUDA kernels, where there is a GPU and nvcc, or where they are asked for
    monet_like_kernels_cudnn.so  convolutions by named algorithms, where also the headers of torch's cuDNN are found
    monet_like_search.so         the planner's local search and placement, which know nothing of torch
    monet_like_arena.so          places the memory of training steps on a CPU
    monet_like_arena_cuda.so     the same on a GPU, where CUDA is compiled for and torch's allocator is a known one

Environment:
    MONET_LIKE_CUDA       1: compile the CUDA sources or fail, 0: do not; unset: if torch sees a GPU and nvcc is found
    TORCH_CUDA_ARCH_LIST  compute capabilities, default those of the visible GPUs, or 8.0;9.0 without one
    CXX, CUDA_HOME        where to find the compilers
    CUDNN_HOME            where to find cuDNN, default: where torch has it from pip, then $CUDA_HOME and /usr
    MAX_JOBS              compilers run at the same time
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monet_like.errors import MonetError
from monet_like.files import shipped_folder

# Products and sums must stay apart where the code keeps them apart: bit-equality with ATen depends on it. Operations that ATen's
# CUDA kernels fuse is fused in the source.
_COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
_CXX_FLAGS = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_OPERATOR_FLAGS = ("-O1",)  # what calls ATen has no loops of its own
_NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler",
    "-fPIC",
)


class KernelBuildError(MonetError):
    """The kernels could not be compiled; the package works without them, slower."""


def library_path(part: str = "kernels") -> Path:
    """Path of a compiled library, built or not: ``kernels``, ``kernels_cuda``, ``kernels_cudnn``, ``search``, ``arena``, ``arena_cuda``."""
    return Path(__file__).resolve().parent / "lib" / f"monet_like_{part}.so"


def manifest() -> dict[str, str]:
    """The note beside the libraries: the torch they were built for, and whether CUDA's are there; empty if none are."""
    try:
        found = json.loads(library_path().with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def source_directory() -> Path:
    """The folder of the C++ sources, csrc/, in a checkout or beside the installed package."""
    folder = shipped_folder("csrc")
    if folder is None:
        raise KernelBuildError(f"the C++ sources (csrc/) are not there, beside or in {Path(__file__).parent}")
    return folder


@dataclass(frozen=True)
class _Cudnn:
    """Where cuDNN's headers are, and the library that torch runs."""

    include: Path
    library: Path


@dataclass(frozen=True)
class _CudaAllocator:
    """Where CUDA's headers are, and which functions torch's CUDA allocator has that not all versions have."""

    include: Path
    functions: tuple[str, ...]


@dataclass(frozen=True)
class _Toolchain:
    """Compilers and flags of one build."""

    torch_version: str
    cxx: str
    nvcc: str | None
    torch_flags: tuple[str, ...]
    architectures: tuple[str, ...]
    link_flags: tuple[str, ...]
    cudnn: _Cudnn | None
    allocator: _CudaAllocator | None


def build(
    *, cuda: bool | None = None, force: bool = False, progress: bool = False, verbose: bool = False
) -> list[Path]:
    """Compile the libraries that are out of date; returns the paths of all libraries and of the note beside them.

    Args:
        cuda: also compile the CUDA sources; None decides as described at the top of this file.
        force: compile everything anew.
        progress: print a line for every file that is compiled.
        verbose: print each command and its output.

    Raises:
        KernelBuildError: no ninja, compiler or torch was found, or compiling failed.
    """
    ninja = find_ninja()
    tools = _toolchain(cuda)
    from filelock import FileLock  # comes with torch

    note = library_path().with_suffix(".json")
    folder = note.parent / "build"
    folder.mkdir(parents=True, exist_ok=True)
    needed = [library_path(part) for part in ("kernels", "search", "arena", *(["kernels_cuda"] if tools.nvcc else []))]
    made = [*needed]
    source = source_directory()
    with FileLock(folder / "lock"):
        _write_if_changed(folder / "operators.cpp", _operators(source))
        (folder / "build.ninja").write_text(_rules(tools, source))
        command = [ninja, "-C", str(folder), *(["-j", jobs] if (jobs := os.environ.get("MAX_JOBS")) else [])]
        if force:
            _run([*command, "-t", "clean"])
        command += ["-v"] if verbose else []
        _run([*command, *map(str, needed)], progress or verbose)
        for part, there in (("kernels_cudnn", tools.cudnn), ("arena_cuda", tools.allocator)):
            if there:
                made += _unless_it_fails([*command, str(library_path(part))], library_path(part), progress or verbose)
        for part in ("kernels_cuda", "kernels_cudnn", "arena_cuda"):
            if library_path(part) not in made:
                library_path(part).unlink(missing_ok=True)
        note.write_text(json.dumps({"torch": tools.torch_version, "cuda": str(bool(tools.nvcc))}, indent=1) + "\n")
    return [*made, note]


def _unless_it_fails(command: Sequence[str], library: Path, show: bool) -> list[Path]:
    """Run a command that makes a library, and return the library; if it fails print why: all else works without it."""
    try:
        _run(command, show)
    except KernelBuildError as error:
        print(f"{library.name} is left out: {error}", file=sys.stderr)
        return []
    return [library]


def _operators(source: Path) -> str:
    """The text of one file that includes all that call ATen: its headers and torch/library.h take 8 seconds in each file."""
    paths = [source / "ops.cpp", *sorted(source.glob("cpu/*.cpp"))]
    return "".join(f'#include "{path.as_posix()}"\n' for path in paths)


def _write_if_changed(path: Path, text: str) -> None:
    """Write a file unless it has this text already, so that its time stays and nothing is compiled anew."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _rules(tools: _Toolchain, source: Path) -> str:
    """The text of ninja's build file. A new torch changes the commands, so everything is compiled anew."""
    from ninja import ninja_syntax

    text = io.StringIO()
    make: Any = ninja_syntax.Writer  # its type hints do not fit what it does
    writer = make(text)
    version = "-DMONET_LIKE_FOR_TORCH=" + re.sub(r"\W", "_", tools.torch_version)
    with_torch = (version, *tools.torch_flags)
    for rule, words in (
        ("cxx", (tools.cxx, *_COMMON_FLAGS, *_CXX_FLAGS, *with_torch)),
        ("operators", (tools.cxx, *_COMMON_FLAGS, *_CXX_FLAGS, *_OPERATOR_FLAGS, *with_torch)),
        ("plain", (tools.cxx, *_COMMON_FLAGS)),
        ("cxx_cuda", (tools.cxx, *_COMMON_FLAGS, *with_torch, *_allocator_flags(tools.allocator))),
        ("nvcc", (str(tools.nvcc), "-ccbin", tools.cxx, *_NVCC_FLAGS, *with_torch, *tools.architectures)),
        (
            "nvcc_cudnn",
            (
                *(str(tools.nvcc), "-ccbin", tools.cxx, *_NVCC_FLAGS, *with_torch, *tools.architectures),
                *(("-isystem", str(tools.cudnn.include)) if tools.cudnn else ()),
            ),
        ),
    ):
        writer.rule(rule, _shell(words) + " -MMD -MF $out.d -c $in -o $out", "$out", "$out.d", deps="gcc")
    # A library is replaced, never overwritten: a running process may have the old one mapped.
    for rule, linker in (
        ("link", [tools.cxx, "-shared"]),
        ("link_cuda", [str(tools.nvcc), "-shared", "-cudart=shared", "-ccbin", tools.cxx]),
    ):
        writer.rule(rule, _shell(linker) + " $in -o $out.partial $libraries && mv -f $out.partial $out", "$out")

    def library(
        part: str,
        patterns: Sequence[str],
        compile_with: str,
        link_with: str,
        flags: Sequence[str],
        objects: Sequence[str] = (),
    ) -> None:
        objects = list(objects)
        for path in sorted(path for pattern in patterns for path in source.glob(pattern)):
            objects += writer.build(f"{part}-{path.stem}.o", compile_with, str(path))
        writer.build(str(library_path(part)), link_with, objects, variables={"libraries": _shell(flags)})

    operators = writer.build("kernels-operators.o", "operators", "operators.cpp")
    library("kernels", ("cpu/loops/*.cpp",), "cxx", "link", tools.link_flags, operators)
    library("search", ("plan/*.cpp",), "plain", "link", ())
    library("arena", ("arena/cpu.cpp",), "cxx", "link", tools.link_flags)
    if tools.allocator:
        library("arena_cuda", ("arena/cuda.cpp",), "cxx_cuda", "link", (*tools.link_flags, "-lc10_cuda"))
    if tools.nvcc:
        library("kernels_cuda", ("cuda/*.cu",), "nvcc", "link_cuda", (*tools.link_flags, "-lc10_cuda"))
    if tools.cudnn:
        flags = (*tools.link_flags, "-lc10_cuda", "-ltorch_cuda", "-Xlinker", str(tools.cudnn.library))
        library("kernels_cudnn", ("cudnn/*.cpp",), "nvcc_cudnn", "link_cuda", flags)
    return text.getvalue()


def _allocator_flags(found: _CudaAllocator | None) -> tuple[str, ...]:
    return (
        () if found is None else ("-isystem", str(found.include), *(f"-DMONET_LIKE_HAS_{f}" for f in found.functions))
    )


def _shell(words: Sequence[str]) -> str:
    """The words of a command, quoted for ninja and the shell."""
    from ninja import ninja_syntax

    return str(ninja_syntax.escape(shlex.join(words)))


def _run(command: Sequence[str], show: bool = False) -> None:
    """Run a command and show its output line by line as it comes, or only if it fails."""
    status = {**os.environ, "NINJA_STATUS": "[%f of %t, %e s] "}
    with subprocess.Popen(command, env=status, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        lines: deque[str] = deque(maxlen=30)
        for line in running.stdout:
            lines.append(line)
            if show:
                print(line, end="", flush=True)
    if running.returncode != 0:
        tail = "the output is above" if show else "".join(lines).strip()
        raise KernelBuildError(f"compiling failed (exit code {running.returncode}): {' '.join(command)}\n{tail}")


# ---- finding the tools ----


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
    """The CUDA compiler: $CUDA_HOME/bin/nvcc, else from the PATH, else from the usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _find_cudnn(torch_root: Path) -> _Cudnn | None:
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
            return _Cudnn(root / "include", found)
    return None


def _find_allocator(torch_root: Path, nvcc: str | None) -> _CudaAllocator | None:
    """CUDA's headers, and the functions of torch's allocator if csrc/arena/cuda.cpp knows them all; else None."""
    wheels = (torch_root.parent / "nvidia").glob("cu*")
    roots = [
        *([Path(nvcc).resolve().parents[1]] if nvcc else []),
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")),
        *wheels,
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
            f"{library_path('arena_cuda').name} is left out: this torch's CUDA allocator has functions that it does not pass on "
            f"({', '.join(unknown)})",
            file=sys.stderr,
        )
        return None
    return _CudaAllocator(include, tuple(name for name in functions if f"MONET_LIKE_HAS_{name}\n" in known))


def _toolchain(cuda: bool | None) -> _Toolchain:
    cxx = find_cxx()
    try:
        import torch
    except ImportError as error:
        raise KernelBuildError(
            f"torch cannot be imported ({error}); install torch >= 2.11 first, then run python -m monet_like.build"
        ) from error
    torch_root = Path(torch.__file__).resolve().parent
    nvcc = _cuda_compiler(cuda)

    # Link the very OpenMP runtime torch runs on: with a second one, torch.set_num_threads would not reach us.
    bundled = sorted([*torch_root.glob("lib/libgomp*.so*"), *torch_root.parent.glob("torch.libs/libgomp*.so*")])
    openmp = ["-Xlinker", str(bundled[0])] if bundled else ["-lgomp"]
    return _Toolchain(
        torch_version=torch.__version__,
        cxx=cxx,
        nvcc=nvcc,
        torch_flags=(
            "-isystem",
            str(torch_root / "include"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        architectures=_architectures() if nvcc else (),
        link_flags=(f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", *openmp),
        cudnn=_find_cudnn(torch_root) if nvcc else None,
        allocator=_find_allocator(torch_root, nvcc)
        if nvcc or (cuda is not False and torch.cuda.is_available())
        else None,
    )


def _cuda_compiler(cuda: bool | None) -> str | None:
    """Path of nvcc if the CUDA sources are to be compiled, else None."""
    import torch

    asked: bool | None = cuda
    if asked is None and os.environ.get("MONET_LIKE_CUDA", "") != "":
        asked = os.environ["MONET_LIKE_CUDA"].lower() not in ("0", "off", "false", "no")
    if asked is False or (asked is None and not torch.cuda.is_available()):
        return None
    nvcc = find_nvcc()
    problem = ""
    if torch.version.cuda is None:
        problem = "this torch is built without CUDA"
    elif nvcc is None:
        problem = "nvcc was not found (looked in $CUDA_HOME/bin, on the PATH, in /usr/local/cuda/bin)"
    else:
        # Minor versions of CUDA are compatible with each other, major ones are not.
        shown = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True).stdout
        release = re.search(r"release (\d+)\.(\d+)", shown)
        if release is None or release.group(1) != torch.version.cuda.split(".")[0]:
            version = release.group(0) if release else "an unknown version"
            problem = f"nvcc is {version}, torch is built for CUDA {torch.version.cuda}: the major versions must agree"
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m monet_like.build", description="Compile the kernels.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--cuda", action="store_true", default=None, help="compile the CUDA sources too, though there is no GPU"
    )
    which.add_argument("--no-cuda", dest="cuda", action="store_false", help="compile the CPU sources only")
    parser.add_argument("--force", action="store_true", help="compile everything anew")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the compilers' commands")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        path, *_ = build(cuda=options.cuda, force=options.force, progress=True, verbose=options.verbose)
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with_cuda = "CPU and CUDA" if manifest().get("cuda") == "True" else "CPU"
    print(f"{with_cuda} kernels ready in {time.perf_counter() - started:.1f} s: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
