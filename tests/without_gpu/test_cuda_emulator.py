"""The CUDA kernels, executed on a CPU by an emulator that checks every access to memory (tests/cuda_emulator)."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_emulator import build, session

_REASON = build.missing_compiler()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)


@pytest.fixture(scope="session")
def emulated() -> Path:
    """Folder of the emulated kernels, compiled where a source is newer."""
    return build.build_kernels()


CHECKS = "tests/cuda_emulator/check_kernels.py"


def assert_passes(library: Path, *arguments: str) -> None:
    code, output = session.run_checks(library, arguments, timeout=500)
    assert code == 0, output


def test_kernels_of_masks_equal_their_twins() -> None:
    """The smallest file by itself: compiling all takes minutes. At the end each of its kernels has been launched."""
    library = build.build_kernels(name="masks", only=["masks.cu"])
    assert_passes(library, CHECKS, "-k", "test_masks or test_every_kernel")


@pytest.mark.slow
def test_kernels_equal_their_twins(emulated: Path) -> None:
    """Every operator with random arguments; at the end every kernel has been launched."""
    assert_passes(emulated, CHECKS)


@pytest.mark.slow
def test_mistakes_in_the_kernels_are_noticed(emulated: Path) -> None:
    assert_passes(emulated, str(session.HERE / "check_mistakes.py"))


@pytest.mark.slow
def test_planted_mistakes_are_found() -> None:
    """By the emulator itself, in small kernels; it objects to none that are right."""
    assert_passes(build.build_single(session.HERE / "cases.cu"), str(session.HERE / "check_emulator.py"))
