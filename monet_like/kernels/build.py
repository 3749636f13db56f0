"""Compile csrc/ into two shared libraries: `python -m monet_like.kernels.build [--cuda | --no-cuda] [--force] [-v]`.

The compilers are called directly, one object file per source, in parallel; an object is reused while its source, the
headers, the flags and torch stay the same. The libraries are `lib/monet_like_kernels.so` beside this file, and
`lib/monet_like_search.so`, the planner's local search, which knows nothing of torch.

Environment:
    MONET_LIKE_CUDA       1: compile the CUDA sources too, 0: do not; unset: if there is a GPU, nvcc and a CUDA torch
    TORCH_CUDA_ARCH_LIST  compute capabilities, default those of the visible GPUs, or 8.0;9.0 without one
    CXX, CUDA_HOME        where to find the compilers
    MAX_JOBS              compilers run at the same time
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from monet_like.errors import MonetError

LIBRARY_NAME = "monet_like_kernels.so"
SEARCH_LIBRARY_NAME = "monet_like_search.so"

# Products and sums must stay apart where the code keeps them apart: bit-equality with ATen depends on it.
_CXX_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_SEARCH_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-shared")
_NVCC_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xcompiler", "-fPIC")


class KernelBuildError(MonetError):
    """The kernels could not be compiled; the package works without them, slower."""


def library_path() -> Path:
    """Where the compiled library is, or would be."""
    return Path(__file__).resolve().parent / "lib" / LIBRARY_NAME


def search_library_path() -> Path:
    """Where the compiled local search is, or would be."""
    return library_path().with_name(SEARCH_LIBRARY_NAME)


def manifest() -> dict[str, str]:
    """What the compiled library was made from; empty if there is none."""
    try:
        found = json.loads(library_path().with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def source_directory() -> Path:
    """csrc/, in a checkout or beside the installed package."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package.parent / "csrc", package / "csrc"):
        if (candidate / "ops.cpp").exists():
            return candidate
    raise KernelBuildError(f"the C++ sources (csrc/) are neither in {package.parent} nor in {package}")


@dataclass(frozen=True)
class _Toolchain:
    """Compilers and flags of one build."""

    torch_version: str
    cxx: str
    cxx_flags: tuple[str, ...]
    nvcc: str | None
    nvcc_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def build(*, cuda: bool | None = None, force: bool = False, verbose: bool = False) -> Path:
    """Compile what is out of date and return the library's path.

    Args:
        cuda: also compile the CUDA sources; None decides as described at the top of this file.
        force: compile everything anew.
        verbose: print each command.

    Raises:
        KernelBuildError: no compiler or no torch was found, or compiling failed.
    """
    tools = _toolchain(cuda)
    source = source_directory()
    target = library_path()
    objects_directory = target.parent / "objects"
    objects_directory.mkdir(parents=True, exist_ok=True)

    patterns = ["ops.cpp", "cpu/*.cpp"] + (["cuda/*.cu"] if tools.nvcc else [])
    sources = [path for pattern in patterns for path in sorted(source.glob(pattern))]
    headers = sorted(path for suffix in ("*.h", "*.cuh") for path in source.rglob(suffix))
    header_bytes = b"\0".join(path.name.encode() + path.read_bytes() for path in headers)

    objects = {path: objects_directory / _object_name(path, header_bytes, tools) for path in sources}
    digest = hashlib.sha256(" ".join([*sorted(o.name for o in objects.values()), *tools.link_flags]).encode())
    search = source / "plan" / "search.cpp"
    digest.update(search.read_bytes() + " ".join(_SEARCH_FLAGS).encode())
    wanted = {"torch": tools.torch_version, "cuda": str(bool(tools.nvcc)), "digest": digest.hexdigest()}
    if not force and target.exists() and search_library_path().exists() and manifest() == wanted:
        return target
    _replace(search_library_path(), lambda partial: [tools.cxx, *_SEARCH_FLAGS, str(search), "-o", partial], verbose)

    todo = [path for path in sources if force or not objects[path].exists()]
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        list(pool.map(lambda path: _compile(path, objects[path], tools, verbose), todo))

    linker = [tools.nvcc, "-shared", "-cudart=shared", "-ccbin", tools.cxx] if tools.nvcc else [tools.cxx, "-shared"]
    inputs = [*linker, *map(str, objects.values())]
    _replace(target, lambda partial: [*inputs, "-o", partial, *tools.link_flags], verbose)
    target.with_suffix(".json").write_text(json.dumps(wanted, indent=1) + "\n")
    for stale in set(objects_directory.glob("*.o")) - set(objects.values()):
        stale.unlink(missing_ok=True)
    return target


def _replace(target: Path, command: Callable[[str], Sequence[str]], verbose: bool) -> None:
    """Make ``target`` by a command; replaced, never overwritten: a running process may have the old one mapped."""
    partial = target.with_suffix(f".{os.getpid()}.partial")
    _run(command(str(partial)), verbose)
    os.replace(partial, target)


def _object_name(path: Path, header_bytes: bytes, tools: _Toolchain) -> str:
    flags = tools.nvcc_flags if path.suffix == ".cu" else tools.cxx_flags
    parts = [path.read_bytes(), header_bytes, " ".join(flags).encode(), tools.torch_version.encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return f"{path.parent.name}-{path.stem}-{digest}.o"


def _compile(path: Path, target: Path, tools: _Toolchain, verbose: bool) -> None:
    if path.suffix == ".cu":
        assert tools.nvcc is not None
        compiler, flags = [tools.nvcc, "-ccbin", tools.cxx], tools.nvcc_flags
    else:
        compiler, flags = [tools.cxx], tools.cxx_flags
    _replace(target, lambda partial: [*compiler, *flags, "-c", str(path), "-o", partial], verbose)


def _run(command: Sequence[str], verbose: bool) -> None:
    if verbose:
        print(" ".join(command), flush=True)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if verbose and done.stderr:
        print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-30:])
        raise KernelBuildError(f"compiling failed (exit code {done.returncode}): {' '.join(command)}\n{tail}")


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
        "python -m monet_like.kernels.build. Without it the plain-torch twins are used."
    )


def find_nvcc() -> str | None:
    """The CUDA compiler: $CUDA_HOME/bin/nvcc, else from the PATH, else from the usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _toolchain(cuda: bool | None) -> _Toolchain:
    cxx = find_cxx()
    try:
        import torch
    except ImportError as error:
        raise KernelBuildError(
            f"torch cannot be imported ({error}); install torch >= 2.11 first, then run "
            "python -m monet_like.kernels.build"
        ) from error
    torch_root = Path(torch.__file__).resolve().parent
    includes = ["-isystem", str(torch_root / "include")]
    defines = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    nvcc = _cuda_compiler(cuda)

    # Link the very OpenMP runtime torch runs on: with a second one, torch.set_num_threads would not reach us.
    bundled = sorted([*torch_root.glob("lib/libgomp*.so*"), *torch_root.parent.glob("torch.libs/libgomp*.so*")])
    openmp = ["-Xlinker", str(bundled[0])] if bundled else ["-lgomp"]
    libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    if nvcc:
        libraries.append("-lc10_cuda")
    return _Toolchain(
        torch_version=torch.__version__,
        cxx=cxx,
        cxx_flags=(*_CXX_FLAGS, *defines, *includes),
        nvcc=nvcc,
        nvcc_flags=(*_NVCC_FLAGS, *defines, *includes, *(_architectures() if nvcc else ())),
        link_flags=(*libraries, *openmp),
    )


def _cuda_compiler(cuda: bool | None) -> str | None:
    """nvcc if the CUDA sources are to be compiled, else None."""
    import torch

    asked: bool | None = cuda
    if asked is None and os.environ.get("MONET_LIKE_CUDA", "") != "":
        asked = os.environ["MONET_LIKE_CUDA"].lower() not in ("0", "off", "false", "no")
    if asked is None:
        asked_by_user, asked = False, torch.cuda.is_available()
    else:
        asked_by_user = asked
    if not asked:
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
    if asked_by_user:
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
    parser = argparse.ArgumentParser(prog="python -m monet_like.kernels.build", description="Compile the kernels.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cuda", action="store_true", default=None, help="compile the CUDA sources too")
    which.add_argument("--no-cuda", dest="cuda", action="store_false", help="compile the CPU sources only")
    parser.add_argument("--force", action="store_true", help="compile everything anew")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the compilers' commands")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        path = build(cuda=options.cuda, force=options.force, verbose=options.verbose)
    except KernelBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with_cuda = "CPU and CUDA" if manifest().get("cuda") == "True" else "CPU"
    print(f"{with_cuda} kernels ready in {time.perf_counter() - started:.1f} s: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
