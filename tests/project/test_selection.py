"""Which tests run: the essential ones, or all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monet_like.plan.local_search import searcher

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest
@pytest.mark.slow
def test_slow(): ...
@pytest.mark.slow(but=["two"])
@pytest.mark.parametrize("x", ["one", "two"])
def test_but(x): ...
@pytest.mark.slow(every=3)
@pytest.mark.parametrize("x", range(7))
def test_every(x): ...
@pytest.mark.slow(but=["one"], rare=["two"])
@pytest.mark.parametrize("x", ["one", "two", "three"])
def test_named(x): ...
@pytest.mark.slow(rare=2)
@pytest.mark.parametrize("x", range(3))
def test_second(x): ...
@pytest.mark.slow(rare=1)
def test_rare(): ...
def test_quick(): ...
"""

#: Each call prints the collected tests, then the line "end".
CALLS = """
import pytest
for which in ("", " --all", " -m slow", "::test_rare", " --each 2", " --all --each 3"):
    pytest.main(["-n0", "--co", "-p", "no:cacheprovider", "--strict-markers", *f"test_it.py{which}".split()])
    print("end")
"""


@pytest.mark.slow
def test_slow_tests_run_where_they_are_asked_for(tmp_path: Path) -> None:
    for name in ("conftest.py", "helpers"):
        source = ROOT / "tests" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-c", CALLS], cwd=tmp_path, capture_output=True, text=True)
    outputs = done.stdout.split("end\n")[:-1]
    found = [sorted(line.split("::")[1] for line in o.splitlines() if line.startswith("test_it.py::")) for o in outputs]
    quick = ["test_but[two]", "test_every[0]", "test_every[3]", "test_every[6]", "test_named[one]", "test_quick"]
    slow = ["test_but[one]", "test_every[1]", "test_every[2]", "test_every[4]", "test_every[5]", "test_named[three]"]
    slow += ["test_second[0]", "test_second[2]", "test_slow"]
    rare = ["test_named[two]", "test_rare", "test_second[1]"]
    halved = ["test_but[two]", "test_every[0]", "test_every[6]", "test_named[one]", "test_quick"]
    thirds = ["test_but[one]", "test_every[0]", "test_every[3]", "test_every[6]", "test_named[one]", "test_quick"]
    thirds += ["test_rare", "test_second[0]", "test_slow"]
    expected = [quick, sorted(quick + slow + rare), slow, ["test_rare"], halved, thirds]
    assert found == expected, done.stderr[-2000:]
    assert ["left out" in output for output in outputs] == [True, False, True, False, True, False]


@pytest.mark.slow(full=True)
def test_a_full_slow_test_searches_as_many_schedules_as_a_users_plan() -> None:
    assert searcher.EVALUATIONS == 120_000


@pytest.mark.slow
def test_a_slow_test_searches_few() -> None:
    assert searcher.EVALUATIONS == 3000


def test_an_essential_test_searches_few() -> None:
    assert searcher.EVALUATIONS == 3000
