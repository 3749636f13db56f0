"""Importing is light, and the machine that only trains needs no solver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

#: One process for all: after what each imports by itself, it is forked.
_CODE = """
import os, sys
common, *modules = sys.argv[1:]
if common:
    __import__(common)
    if not os.fork():
        import monet_like, random, types
        before = random.getstate()
        hidden = [name for name in dir(monet_like) if isinstance(getattr(monet_like, name), types.ModuleType)]
        print("public", *dir(monet_like), flush=True)
        print("hidden", *hidden, flush=True)
        print("drawn", *(["python"] if random.getstate() != before else []), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, "public names"
for module in modules:
    if not os.fork():
        __import__(module)
        print(module, *sorted(sys.modules), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
"""


def printed(modules: Sequence[str], common: str = "") -> dict[str, list[str]]:
    """All modules that are there after importing each of ``modules``, with ``common`` before it and nothing else.

    With ``common`` also the ``public`` names of the package, the ``hidden`` ones, which are modules, and the random
    generators that are ``drawn`` from meanwhile.
    """
    command = [sys.executable, "-c", _CODE, common, *modules]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines())}


def imported_by(modules: Sequence[str]) -> dict[str, set[str]]:
    """The packages that are there after importing each of the modules and nothing else."""
    found = printed(modules)
    assert list(found) == list(modules)
    return {module: {name.partition(".")[0] for name in there} for module, there in found.items()}


def unwanted_in(found: dict[str, set[str]], unwanted: set[str]) -> dict[str, set[str]]:
    return {module: there & unwanted for module, there in found.items() if there & unwanted}


PURE = (
    "ir.program",
    "ir.schedule",
    "ir.simulate",
    "ir.profile_file",
    "files",
    "ir.mode",
    "ir.units",
    "errors",
    "ir.schedule_file",
    "plan",
)
#: Other modules of these packages are imported by them.
TORCH = ("replay.wrapper", "profile.profiler", "profile.roofline", "compiler.pipeline")


def test_pure_modules_import_neither_torch_nor_a_solver() -> None:
    found = imported_by([f"monet_like.{module}" for module in PURE])
    assert unwanted_in(found, {"torch", "cvxpy", "highspy", "numpy", "scipy"}) == {}


@pytest.fixture(scope="module")
def after_torch() -> dict[str, list[str]]:
    """What each of `TORCH` imports, and the names of the package, in one process that has imported PyTorch once."""
    return printed([f"monet_like.{module}" for module in TORCH], "torch._functorch.aot_autograd")


def test_training_and_profiling_need_no_solver(after_torch: dict[str, list[str]]) -> None:
    found = {f"monet_like.{m}": {name.partition(".")[0] for name in after_torch[f"monet_like.{m}"]} for m in TORCH}
    assert all("torch" in there for there in found.values())
    assert unwanted_in(found, {"cvxpy", "highspy", "pulp"}) == {}


def test_the_package_itself_imports_nothing_heavy() -> None:
    assert unwanted_in(imported_by(["monet_like"]), {"torch", "cvxpy", "numpy"}) == {}


def test_imports_draw_no_random_numbers(after_torch: dict[str, list[str]]) -> None:
    """A seed that stands between ``import monet_like`` and the first use of one of its names is kept."""
    assert not after_torch["drawn"]


def test_dir_shows_the_public_names_and_each_is_there(after_torch: dict[str, list[str]]) -> None:
    """Also after the modules that hold them were imported: none has the name of a module that would hide it."""
    shown = {*after_torch["public"]}
    assert {"ScheduleWrapper", "auto_schedule", "to_dropit"} <= shown
    assert not {"Any", "TYPE_CHECKING", "annotations"} & shown
    assert after_torch["hidden"] == []
