"""The order of the packages: no circle of imports, none against the arrow, no torch in what plans; and no long file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import house

#: Imported by a machine that plans, and by the process that solves: neither torch nor what needs it.
WITHOUT_TORCH = ("ir", "solvers", "plan")
MOST_LINES = 400


def faults(root: Path) -> list[str]:
    """What is wrong with the imports of the package in ``root``, or with a file's length, in words."""
    graph, files = house.arrows(root), house.modules(root)
    found = [f"circle: {', '.join(circle)}" for circle in house.circles(graph)]
    found += [f"{one} imports {other}" for one, other in house.upward(graph)]
    for name, path in files.items():
        if house.box(name) in WITHOUT_TORCH and "torch" in house.libraries(path):
            found.append(f"{name} imports torch")
        if (count := len(path.read_text().splitlines())) > MOST_LINES:
            found.append(f"{name} has {count} lines")
    return found


def test_imports_follow_the_arrow_and_files_are_short() -> None:
    assert faults(house.ROOT) == []


def test_the_order_names_every_box() -> None:
    assert {name for line in house.ORDER for name in line} == set(house.boxes(house.arrows()))


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("ir/program.py", "from ..compiler import pipeline", "ir.program imports compiler.pipeline"),
        ("profile/measure.py", "def late():\n    from ..replay.wrapper import ScheduleWrapper",
        "profile.measure imports replay.wrapper"),
        ("capture/constants.py", "import monet_like.cli.solve", "capture.constants imports cli.solve"),
        ("capture/captured.py", "from .lower.step import capture", "circle: capture.captured"),
        ("plan/analysis.py", "import torch", "plan.analysis imports torch"),
        ("solvers/worker.py", "from torch.utils import data", "solvers.worker imports torch"),
        ("ir/units.py", "\n" * MOST_LINES, "ir.units has "),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(tmp_path: Path, module: str, line: str, fault: str) -> None:
    shutil.copytree(
        house.ROOT / house.PACKAGE, tmp_path / house.PACKAGE, ignore=lambda _, names: [n for n in names if n == "lib"]
    )
    planted = tmp_path / house.PACKAGE / module
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    assert any(fault in found for found in faults(tmp_path)), faults(tmp_path)
