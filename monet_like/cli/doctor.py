"""The doctor command: reports packages, solvers, kernels, GPUs and memory. It changes and downloads nothing."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

from ..files import cache_folder
from ..ir.units import format_bytes
from ..torch_versions import untested

State = Literal["ok", "absent", "broken"]

#: Packages that must be importable, and what for.
REQUIRED = {
    "torch": "everything",
    "networkx": "variants",
    "msgspec": "files",
    "click": "the command line",
    "rich": "the command line",
    "psutil": "memory of the machine",
    "pandas": "tables",
}
#: What is installed with this package, but a machine that only trains can do without.
EXPECTED = {
    "torchvision": "its models by name",
    "numpy": "plans by a solver",
    "scipy": "plans by a solver",
    "cvxpy": "solvers other than HiGHS",
    "ninja": "compiling kernels",
    "packaging": "checking versions",
    "requests": "downloads of the zoo",
}
#: Packages that something asks for when it is used: what, and how to install it.
OPTIONAL = {
    "matplotlib": ("--plot", "pip install 'monet_like[plots]'"),
    "vl_convert": ("reports", "pip install 'monet_like[plots]'"),
    "timm": ("its models by name", "pip install timm"),
    "transformers": ("its models by name", "pip install transformers"),
    "accelerate": ("its training loops", "pip install accelerate"),
    "liger_kernel": ("its kernels as ways on a GPU", "pip install 'monet_like[liger]'"),
    "lightning": ("its training loops", "pip install lightning"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        group: machine, packages, solvers, kernels, gpu or files.
        name: what was looked at.
        state: ``ok``; ``absent``: not there and not needed; ``broken``: needed, and missing or faulty.
        text: what was found, for people.
        advice: what to do about it; "" where there is nothing to do.
        data: the same for programs: versions as text, sizes in bytes, paths.
    """

    group: str
    name: str
    state: State
    text: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def examine() -> list[Finding]:
    """Examine everything. A check that fails is a finding, never an error."""
    found = [*_machine(), *_packages(), *_solvers(), *_compilers()]
    if any(finding.name == "torch" and finding.state == "ok" for finding in found):
        found += [*_kernels(), *_gpus()]
    return [*found, _cache()]


def doctor(*, as_json: bool) -> int:
    """Print the report; the exit status is 1 if something required is broken, else 0."""
    found = examine()
    broken = [finding.name for finding in found if finding.state == "broken"]
    if as_json:
        print(json.dumps({"ok": not broken, "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        _show(found, broken)
    return 1 if broken else 0


def _show(found: list[Finding], broken: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    from .terminal import aligned_table

    console = Console(highlight=False, markup=False)
    styles = {"ok": "green", "absent": "yellow", "broken": "bold red"}
    table = aligned_table(texts=4)
    group = ""
    for finding in found:
        text = finding.text + (f"; {finding.advice}" if finding.advice else "")
        state = Text(finding.state, style=styles[finding.state])
        table.add_row(finding.group if finding.group != group else "", finding.name, state, text)
        group = finding.group
    console.print(table)
    console.print(f"broken: {', '.join(broken)}" if broken else "nothing that is required is broken")


def _machine() -> Iterator[Finding]:
    version = platform.python_version()
    python = {"version": version, "executable": sys.executable}
    yield Finding("machine", "python", "ok", f"{version} ({sys.executable})", data=python)
    yield Finding("machine", "system", "ok", platform.platform(), data={"platform": platform.platform()})
    cores = len(os.sched_getaffinity(0))
    yield Finding("machine", "cores", "ok", f"{cores} for this process", data={"cores": cores})
    try:
        import psutil
    except ImportError:
        return  # said among the packages
    memory = psutil.virtual_memory()
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} available"
    data = {"total_bytes": memory.total, "available_bytes": memory.available}
    yield Finding("machine", "memory", "ok", text, data=data)


def _packages() -> Iterator[Finding]:
    bounds = _bounds()
    for name, purpose in (*REQUIRED.items(), *EXPECTED.items()):
        wanted = f"'{name}{bounds.get(name, '')}'"
        if name in EXPECTED and find_spec(name) is None:
            yield Finding("packages", name, "absent", f"not installed (for {purpose})", f"pip install {wanted}")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a damaged package raises is what the user must see
            reason = str(error).strip().splitlines()
            text = f"{type(error).__name__}: {reason[0] if reason else 'no message'} (for {purpose})"
            yield Finding("packages", name, "broken", text, f"pip install --force-reinstall {wanted}")
            continue
        version = _version(name)
        if not _within(version, bounds.get(name, "")):
            text = f"{version}, but {bounds[name]} is needed (for {purpose})"
            data = {"version": version, "needed": bounds[name]}
            yield Finding("packages", name, "broken", text, f"pip install {wanted}", data)
            continue
        text = untested() if name == "torch" else ""
        yield Finding("packages", name, "ok", "; ".join(filter(None, (version, text))), data={"version": version})
    for name, (purpose, command) in OPTIONAL.items():
        if find_spec(name) is None:
            yield Finding("packages", name, "absent", f"not installed (for {purpose})", command)
        else:
            yield Finding("packages", name, "ok", _version(name), data={"version": _version(name)})


def _version(package: str) -> str:
    """The version of a package as its installer recorded it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(package)
        return metadata.version(names[0]) if names else "unknown version"  # importable, but not installed


def _bounds() -> dict[str, str]:
    """Required versions by package, without extras, such as ``torch`` -> ``<3,>=2.11``."""
    try:
        from packaging.requirements import Requirement

        parsed = map(Requirement, metadata.requires("monet_like") or ())
    except (ImportError, metadata.PackageNotFoundError):  # a checkout that was never installed
        return {}
    return {r.name: str(r.specifier) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})}


def _within(version: str, bounds: str) -> bool:
    if not bounds:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(bounds).contains(version, prereleases=True)
    except InvalidVersion:
        return True  # unknown, or a build of one's own, whose name says nothing


def _solvers() -> Iterator[Finding]:
    from ..solvers.dialects import DIALECTS
    from ..solvers.interface import installed_solvers

    installed = installed_solvers()
    for name, dialect in DIALECTS.items():
        if name in installed:
            version = _version(dialect.package)
            yield Finding("solvers", name, "ok", f"{dialect.package} {version}", data={"version": version})
        else:
            yield Finding("solvers", name, "absent", "not installed", f"pip install {dialect.package}")
    if not installed:
        text = "no solver is installed: plans by --strategy heuristic only"
        yield Finding("solvers", "any", "absent", text, "pip install highspy pulp")


def _compilers() -> Iterator[Finding]:
    from .. import toolchain

    try:
        yield _program("c++", toolchain.find_cxx(), r"(\d+\.\d+[.\d]*)")
    except toolchain.KernelBuildError as error:
        yield Finding("kernels", "c++", "absent", str(error).partition(".")[0], "install g++ 11 or newer, or set CXX")
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        yield Finding("kernels", "nvcc", "absent", toolchain.NO_NVCC)
    else:
        yield _program("nvcc", nvcc, r"release ([\d.]+)")


def _program(name: str, command: str, pattern: str) -> Finding:
    """The path and version of a compiler."""
    path = shutil.which(command) or command
    try:
        shown = subprocess.run([path, "--version"], check=False, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("kernels", name, "absent", f"{path} does not run: {error}", data={"path": path})
    match = re.search(pattern, shown)
    version = match.group(1) if match else "unknown version"
    return Finding("kernels", name, "ok", f"{version} ({path})", data={"version": version, "path": path})


def _kernels() -> Iterator[Finding]:
    from .. import build, ops

    status = ops.status()
    compiled = [device for device in ("cpu", "cuda") if ops.available(device)]
    yield Finding("kernels", "operators", "ok" if compiled else "absent", status, data={"compiled_for": compiled})
    for name, part, there, without in (
        ("local search", "search", build.library_path("search").exists(), "plans without a solver stay at their start"),
        ("memory placement", "arena", build.fits_this_torch("arena"), "place_memory is refused"),
    ):
        if there:
            yield Finding("kernels", name, "ok", "compiled", data={"path": str(build.library_path(part))})
        else:
            known = "not compiled" + (" for this torch" if part == "arena" else "")
            yield Finding("kernels", name, "absent", f"{known}: {without}", "python -m monet_like.build")


def _gpus() -> Iterator[Finding]:
    import torch

    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    if not torch.cuda.is_available():
        yield Finding("gpu", "cuda", "absent", f"no GPU is visible; {built}", data={"cuda": torch.version.cuda})
        return
    yield Finding("gpu", "cuda", "ok", built, data={"cuda": torch.version.cuda})
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            yield Finding("gpu", f"cuda:{index}", "broken", f"{name}: {error}", "restart what holds it, or the driver")
            continue
        text = f"{name}, sm_{capability[0]}{capability[1]}, {format_bytes(free)} of {format_bytes(total)} free"
        data = {"name": name, "capability": list(capability), "free_bytes": free, "total_bytes": total}
        yield Finding("gpu", f"cuda:{index}", "ok", text, data=data)


def _cache() -> Finding:
    folder = cache_folder()
    try:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # a file went away meanwhile, or a folder cannot be read
        size = 0
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    data = {"path": str(folder), "bytes": size}
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        text = f"{folder}: {nearest} cannot be written to"
        return Finding("files", "cache", "broken", text, "set MONET_LIKE_CACHE to a folder that can be", data)
    return Finding("files", "cache", "ok", f"{folder}, {format_bytes(size)}", data=data)
