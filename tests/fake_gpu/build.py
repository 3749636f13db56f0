"""Compiles the fake GPU, a stub of the CUDA runtime, of cuBLAS and of the driver under the real PyTorch, and of those
functions of cuDNN that convolutions by named algorithms call.

`run` starts Python as if an NVIDIA H100 were here. PyTorch, its dispatcher, its caching allocator, streams, events and
launch limits are real; kernels do nothing, so values and times mean nothing. What PyTorch's own operators call of cuDNN
is not faked: it must be off where they execute (``torch.backends.cudnn.enabled = False``), and on for captures alone,
which then trace what a GPU would run; ``startup`` turns it off at Python's start. The heads of the sources tell more:
``runtime.c``, ``graphs.c``, ``cublas.c``, ``cudnn.c`` and ``driver.c``.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
LIBRARIES = Path(torch.__file__).parent / "lib"
#: Name of the library in the folder that it is compiled into.
RUNTIME = "libfake_gpu.so"


def missing() -> str:
    """Why there can be no fake GPU here; "" if there can."""
    if torch.version.cuda is None:
        return "PyTorch is built without CUDA"
    if sys.platform != "linux" or shutil.which("gcc") is None or shutil.which("nm") is None:
        return "gcc and nm on Linux are needed to compile the fake GPU"
    return "" if headers() else "the CUDA headers are needed to compile the fake GPU"


@functools.cache
def headers() -> Path | None:
    """The folder of the CUDA headers, of the toolkit or of the wheels that PyTorch comes with."""
    wheels = Path(torch.__file__).parents[1].glob("nvidia/cu*")
    toolkits = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *Path("/usr/local").glob("cuda*"), *wheels]
    found = (toolkit / "include" for toolkit in toolkits)
    return next((f for f in found if (f / "crt/host_defines.h").exists()), None)


def symbols(path: Path, *options: str) -> set[str]:
    """Names in a library's table of dynamic symbols, without versions."""
    listed = subprocess.run(["nm", "-D", *options, str(path)], capture_output=True, text=True, check=False).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if line}


def build(folder: Path) -> Path:
    """Compile into a folder.

    Returns:
        The library to preload; the driver's stub lies beside it in ``driver``.
    """
    (folder / "driver").mkdir(parents=True, exist_ok=True)
    wanted = set[str]().union(*(symbols(path, "--undefined-only") for path in LIBRARIES.glob("lib*.so*")))
    runtime = folder / RUNTIME
    sources = [HERE / name for name in ("runtime.c", "graphs.c", "cublas.c", "cudnn.c")]
    common = ["gcc", "-shared", "-fPIC", "-O1"]
    compiled = [*common, f"-I{headers()}", *map(str, sources), "-o", str(runtime)]
    subprocess.run(compiled, check=True)
    others = {name for name in wanted if re.match(r"cu(da|blas)[A-Z]|cublasLt", name)} - symbols(
        runtime, "--defined-only"
    )
    subprocess.run([*compiled, str(_stubs(folder / "others.c", others))], check=True)
    # The libraries that PyTorch loads ask the driver for more than PyTorch does, but not before a kernel runs.
    driver = {name for name in wanted | _of_triton() if re.match(r"cu[A-Z]", name)}
    driver |= {"cuInit", "cuDriverGetVersion", "cuGetErrorString"}
    stub = str(_stubs(folder / "driver_others.c", driver - {"cuDevicePrimaryCtxGetState"}))
    library = str(folder / "driver" / "libcuda.so.1")
    subprocess.run([*common, str(HERE / "driver.c"), stub, "-Wl,-soname,libcuda.so.1", "-o", library], check=True)
    return runtime


def _of_triton() -> set[str]:
    """Words of the source that Triton compiles when it is first asked for a GPU, functions of the driver among them."""
    found = find_spec("triton")
    source = Path(found.origin).parent / "backends/nvidia/driver.c" if found is not None and found.origin else None
    return set(re.findall(r"\w+", source.read_text())) if source is not None and source.exists() else set()


def _stubs(path: Path, names: set[str]) -> Path:
    path.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    return path


def environment(library: Path, **others: str) -> dict[str, str]:
    """The environment of a process that has the fake GPU, imports from here and ``tests/helpers``, and ``others``."""

    def first(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])

    tests = HERE.parent
    own = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": first("LD_LIBRARY_PATH", library.parent / "driver"),
        "PYTHONPATH": first("PYTHONPATH", tests.parent, HERE / "startup", tests / "helpers"),
    }
    return {**os.environ, **others, **own}


def run(library: Path, command: Sequence[str], **others: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this `environment`; its output is text."""
    return subprocess.run(command, env=environment(library, **others), capture_output=True, text=True, check=False)
