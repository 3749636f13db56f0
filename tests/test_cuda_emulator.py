"""The CUDA kernels, executed on a CPU by an emulator that checks every access to memory (tests/cuda_emulator)."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_emulator import build, session

REASON = build.missing_compiler()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
HERE = Path(build.__file__).resolve().parent


@pytest.fixture(scope="session")
def emulated() -> Path:
    """The emulated kernels, compiled where a source is newer."""
    return build.build_kernels()


def test_kernels_equal_their_twins(emulated: Path) -> None:
    code, output = session.run_checks(emulated, [str(HERE / "check_kernels.py")])
    assert code == 0, output


def test_the_emulator_finds_planted_mistakes() -> None:
    code, output = session.run_checks(build.build_single(HERE / "cases.cu"), [str(HERE / "check_emulator.py")])
    assert code == 0, output
