"""Compiles CUDA sources for a CPU: a library whose operators run the emulated kernels in place of the CPU's."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from monet_like import build as kernels_build
from monet_like import toolchain

from .transform import Sources, transform_tree, transformed, write_if_changed

HERE = Path(__file__).resolve().parent
#: Where libraries and objects are kept; git ignores it.
FOLDER = HERE.parents[1] / "build" / "cuda_emulator"
#: Names that several sources have for functions and types of their own. All sources are compiled as one unit, since
#: PyTorch's headers take as long as what follows them, and there each source has its own names.
OWN_NAMES = ("data_of", "Gradients")
#: Compilers that run at the same time.
JOBS = int(os.environ.get("MAX_JOBS") or 2)


def missing_compiler() -> str:
    """Why the emulator cannot be built here; empty if it can: it takes g++ 11 or newer."""
    try:
        cxx = toolchain.find_cxx()
        toolchain.find_ninja()
    except toolchain.KernelBuildError as error:
        return str(error)
    shown = subprocess.run([cxx, "--version"], check=False, capture_output=True, text=True).stdout
    macros = subprocess.run([cxx, "-dM", "-E", "-x", "c++", "/dev/null"], check=False, capture_output=True, text=True)
    version = re.search(r"#define __GNUC__ (\d+)", macros.stdout)
    if version is None or "__clang__" in macros.stdout or int(version[1]) < 11:
        return f"the emulator needs g++ 11 or newer; {cxx} is {shown.splitlines()[0] if shown else 'something else'}"
    return ""


def build_kernels(csrc: Path | None = None, name: str = "kernels", only: Collection[str] = ()) -> Path:
    """Compiles csrc/cuda; what is up to date stays.

    Args:
        csrc: the sources, default: the checkout's.
        name: the folder in `FOLDER` for everything that is made.
        only: files of csrc/cuda, as ``masks.cu``, default: all. Operators of the others have no kernels then.

    Returns:
        The folder of the library, under the name of the compiled CPU kernels, with `sources.json`.
    """
    csrc = csrc or toolchain.source_directory()
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        sources = transform_tree(csrc, folder / "src", only)
        _compile(folder, sources)
    return folder


def build_single(source: Path) -> Path:
    """Compiles one .cu file, which may include csrc/cuda's headers, into a library of its own; its folder."""
    folder = FOLDER / source.stem
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        transform_tree(toolchain.source_directory(), folder / "src")  # for the headers
        text, kernels, mutants = transformed(source.read_text(), source.name)
        out = folder / "src" / "cuda" / f"{source.stem}.cpp"
        write_if_changed(out, text)
        _compile(folder, Sources((out,), tuple((source.name, k) for k in kernels), (), tuple(mutants)))
    return folder


def _compile(folder: Path, sources: Sources) -> None:
    (folder / "sources.json").write_text(json.dumps(dataclasses.asdict(sources), default=str, indent=1) + "\n")
    library = folder / kernels_build.library_path().name
    emulator = _emulator()
    write_if_changed(folder / "build.ninja", _rules(folder, sources, library, emulator))
    _run_ninja(folder)
    library.with_suffix(".json").write_text(json.dumps({"torch": torch.__version__, "cuda": "False"}) + "\n")


def _emulator() -> Path:
    """The object of the emulator itself, which all libraries take."""
    folder = FOLDER / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        text = io.StringIO()
        writer = _writer(text)
        writer.build("emulator.o", "host", str(HERE / "emulator.cpp"))
        write_if_changed(folder / "build.ninja", text.getvalue())
        _run_ninja(folder)
    return folder / "emulator.o"


def _run_ninja(folder: Path) -> None:
    command = [toolchain.find_ninja(), "-C", str(folder), "-j", str(JOBS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling the emulated kernels failed:\n{done.stdout[-5000:]}{done.stderr[-1000:]}")


def _writer(text: io.StringIO) -> Any:
    """A writer of a build that ninja reads, with rules for objects: ``kernels``, and ``host`` for code that is not
    checked.
    """
    from ninja import ninja_syntax

    root = Path(torch.__file__).resolve().parent
    common = [toolchain.find_cxx(), "-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden", "-isystem", root / "include"]
    common += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    common += [f"-DMONET_LIKE_FOR_TORCH={re.sub(r'[^0-9A-Za-z]', '_', torch.__version__)}"]  # another torch: all anew
    # Kernels read memory as vectors of other types, which nvcc allows; a vector must stay one access. Accesses call the
    # functions that -fsanitize would take from its own libraries and emulator.cpp defines.
    kernels = ["-O1", "-DEMU_CUDA=800", "-include", HERE / "cuda_emulator.h", "-fno-math-errno", "-ffp-contract=off"]
    kernels += ["-fno-strict-aliasing", "-fno-tree-sra", "-fsanitize=thread", "-fsanitize=alignment"]
    kernels += ["--param=tsan-instrument-func-entry-exit=0"]
    ours = [f"-I{HERE / 'include'}", f"-I{HERE}"]
    make: Any = ninja_syntax.Writer  # its type hints do not fit what it does
    writer = make(text)
    for rule, words in (
        ("kernels", [*common[:1], *ours, *common[1:], *kernels]),
        ("host", [*common[:1], *ours, *common[1:], "-O2"]),
    ):
        writer.rule(rule, _shell(words) + " -MMD -MF $out.d -c $in -o $out", "$out", "$out.d", deps="gcc")
    return writer


def _rules(folder: Path, sources: Sources, library: Path, emulator: Path) -> str:
    """The build of a library as ninja reads it."""
    text = io.StringIO()
    writer = _writer(text)
    root = Path(torch.__file__).resolve().parent
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-Wl,-z,defs"]
    link = _shell([toolchain.find_cxx(), "-shared"])
    writer.rule("link", f"{link} $in -o $out.partial {_shell(libraries)} && mv -f $out.partial $out", "$out")
    joined = folder / "src" / "joined.cpp"
    write_if_changed(joined, "".join(map(_included, sources.files)))
    # Of inline functions that several objects have, the linker takes the first object's: it must be the emulator's,
    # whose accesses are not checked.
    objects = [str(emulator), *writer.build(f"{joined.stem}.o", "kernels", str(joined))]
    writer.build(str(library), "link", objects)
    return text.getvalue()


def _included(path: Path) -> str:
    """Lines that include a source under names of its own."""
    names = [f"#define {name} {name}_of_{path.stem}\n" for name in OWN_NAMES]
    return "".join([*names, f'#include "{path}"\n', *(f"#undef {name}\n" for name in OWN_NAMES)])


def _shell(words: list[Any]) -> str:
    """Words of a command as ninja and the shell read them."""
    return kernels_build._shell([str(word) for word in words])
