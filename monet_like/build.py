"""Compile csrc/ with ninja: `python -m monet_like.build [--cuda | --no-cuda] [--force] [-v]`.

Shared libraries, in `lib/` beside this file:

    monet_like_kernels.so        the operators' CPU kernels
    monet_like_kernels_cuda.so   their CUDA kernels, where there is a GPU and nvcc, or where they are asked for
    monet_like_kernels_cudnn.so  convolutions by named algorithms, where also the headers of torch's cuDNN are found
    monet_like_search.so         the planner's local search and placement, which know nothing of torch
    monet_like_arena.so          places the memory of training steps on a CPU
    monet_like_arena_cuda.so     the same on a GPU, where CUDA is compiled for and torch's allocator is a known one

The first two call torch through its stable ABI (csrc/tensor.h): once compiled, they run in every torch from 2.11 on.
cuDNN's convolutions and the arenas use C++ classes of torch, and run in the torch that they are compiled for.

Environment:
    MONET_LIKE_CUDA       1: compile the CUDA sources or fail, 0: do not; unset: if torch sees a GPU and nvcc is found
    TORCH_CUDA_ARCH_LIST  compute capabilities, default those of the visible GPUs, or 8.0;9.0 without one
    CXX, CUDA_HOME        where to find the compilers; default: see `monet_like.toolchain`
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
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monet_like.toolchain import CudaAllocator, KernelBuildError, Toolchain, find_ninja, source_directory, toolchain

# Products and sums must stay apart where the code keeps them apart: bit-equality with ATen depends on it. Operations
# that ATen's CUDA kernels fuse is fused in the source.
_COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
_CXX_FLAGS = ("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
_OPERATOR_FLAGS = ("-O1",)  # what calls ATen has no loops of its own
#: Of the note beside the libraries: kernels of another interface than this cannot be loaded.
_INTERFACE = "torch 2.11"
_NVCC_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-diag-suppress=128,177",  # what some template arguments do not use
    "-Xcompiler",
    "-fPIC",
)


def library_path(part: str = "kernels") -> Path:
    """Path of a compiled library, built or not: ``kernels``, ``kernels_cuda``, ``kernels_cudnn``, ``search``,
    ``arena``, ``arena_cuda``.
    """
    return Path(__file__).resolve().parent / "lib" / f"monet_like_{part}.so"


def manifest() -> dict[str, str]:
    """The note beside the libraries: the torch they were built for, and whether CUDA's are there; empty if none are."""
    try:
        found = json.loads(library_path().with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_loadable() -> bool:
    """Whether the kernels that are built, if there are any, have the interface that `monet_like.ops` loads."""
    return manifest().get("interface") == _INTERFACE


def fits_this_torch(part: str) -> bool:
    """Whether a library that uses C++ classes of torch is there, and compiled for the torch that is installed."""
    import torch

    return library_path(part).exists() and manifest().get("torch") == torch.__version__


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
    tools = toolchain(cuda)
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
        made_for = {"interface": _INTERFACE, "torch": tools.torch_version, "cuda": str(bool(tools.nvcc))}
        note.write_text(json.dumps(made_for, indent=1) + "\n")
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
    """The text of one file that includes all that call ATen, whose headers and templates take a second."""
    return "".join(f'#include "{path.as_posix()}"\n' for path in sorted(source.glob("cpu/*.cpp")))


def _write_if_changed(path: Path, text: str) -> None:
    """Write a file unless it has this text already, so that its time stays and nothing is compiled anew."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _rules(tools: Toolchain, source: Path) -> str:
    """The text of ninja's build file. A new torch changes the commands of what is compiled for one torch."""
    from ninja import ninja_syntax

    text = io.StringIO()
    make: Any = ninja_syntax.Writer  # its type hints do not fit what it does
    writer = make(text)
    version = "-DMONET_LIKE_FOR_TORCH=" + re.sub(r"\W", "_", tools.torch_version)
    of_one_torch = (version, *tools.torch_flags, *tools.class_flags)
    nvcc = (str(tools.nvcc), "-ccbin", tools.cxx, *_NVCC_FLAGS)
    cudnn = ("-isystem", str(tools.cudnn.include)) if tools.cudnn else ()
    for rule, words in (
        ("cxx", (tools.cxx, *_COMMON_FLAGS, *_CXX_FLAGS, *tools.torch_flags)),
        ("operators", (tools.cxx, *_COMMON_FLAGS, *_CXX_FLAGS, *_OPERATOR_FLAGS, *tools.torch_flags)),
        ("plain", (tools.cxx, *_COMMON_FLAGS)),
        ("cxx_arena", (tools.cxx, *_COMMON_FLAGS, *of_one_torch, *_allocator_flags(tools.allocator))),
        ("nvcc", (*nvcc, *tools.torch_flags, *tools.architectures)),
        ("nvcc_cudnn", (*nvcc, *of_one_torch, *tools.architectures, *cudnn)),
    ):
        writer.rule(rule, _shell(words) + " -MMD -MF $out.d -c $in -o $out", "$out", "$out.d", deps="gcc")
    # A library is replaced, never overwritten: a running process may have the old one mapped.
    link = _shell([tools.cxx, "-shared"]) + " $in -o $out.partial $libraries && mv -f $out.partial $out"
    writer.rule("link", link, "$out")

    def library(
        part: str, patterns: Sequence[str], compile_with: str, flags: Sequence[str], objects: Sequence[str] = ()
    ) -> None:
        objects = list(objects)
        for path in sorted(path for pattern in patterns for path in source.glob(pattern)):
            objects += writer.build(f"{part}-{path.stem}.o", compile_with, str(path))
        writer.build(str(library_path(part)), "link", objects, variables={"libraries": _shell(flags)})

    operators = writer.build("kernels-operators.o", "operators", "operators.cpp")
    library("kernels", ("cpu/loops/*.cpp",), "cxx", tools.link_flags, operators)
    library("search", ("plan/*.cpp",), "plain", ())
    library("arena", ("arena/cpu.cpp",), "cxx_arena", (*tools.link_flags, "-lc10"))
    if tools.allocator:
        library("arena_cuda", ("arena/cuda.cpp",), "cxx_arena", (*tools.link_flags, "-lc10", "-lc10_cuda"))
    if tools.nvcc:
        library("kernels_cuda", ("cuda/*.cu",), "nvcc", tools.cuda_link_flags)
    if tools.cudnn:
        flags = (*tools.cuda_link_flags, "-lc10", "-lc10_cuda", "-Xlinker", str(tools.cudnn.library))
        library("kernels_cudnn", ("cudnn/*.cpp",), "nvcc_cudnn", flags)
    return text.getvalue()


def _allocator_flags(found: CudaAllocator | None) -> tuple[str, ...]:
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
