"""Importing is light, and the machine that only trains needs no solver."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


PURE = ("program", "schedule", "simulate", "profile_data", "files", "mode", "units", "errors", "schedule_file", "plan")


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_neither_torch_nor_a_solver(module: str) -> None:
    assert imported_by(f"import monet_like.{module}").isdisjoint({"torch", "cvxpy", "highspy", "numpy", "scipy"})


@pytest.mark.parametrize("module", ["replay", "profiler", "capture", "kernels", "roofline", "measure", "compiler"])
def test_training_and_profiling_need_no_solver(module: str) -> None:
    assert imported_by(f"import monet_like.{module}").isdisjoint({"cvxpy", "highspy", "cylp"})


def test_the_package_itself_imports_nothing_heavy() -> None:
    assert imported_by("import monet_like").isdisjoint({"torch", "cvxpy", "numpy"})
