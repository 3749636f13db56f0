"""Plants faults in the package, one at a time, and sees the test that is named for each fail.

    python -m scripts.mutants                 # all of them
    python -m scripts.mutants call_keys Held  # those with one of these words in their file, text or test
    python -m scripts.mutants --every 20      # each twentieth

A fault is a replaced text, mostly a check that is left out: a part of a step's key, a guard, a refusal.
`scripts/mutants_list.py` has them. They are planted in a copy of the checkout, so that the processes that a test starts
have them, too. Every test is run once without a fault, and must pass.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from scripts.mutants_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]

#: Imported once, by the process that the others are forks of. Not this package.
HEAVY = (
    "numpy",
    "pandas",
    "networkx",
    "scipy.sparse",
    "pytest",
    "torch",
    "torch._functorch.aot_autograd",
    "torchvision",
)
#: A test that takes longer hangs.
SECONDS = 300


class Outcome(NamedTuple):
    """What a test did: pytest's exit code (0: passed, 1: failed), its last lines and its duration."""

    code: int
    told: str
    seconds: float


def source(mutant: Mutant) -> Path:
    """The file that a mutant changes."""
    return ROOT / "monet_like" / mutant.file


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout: of the package and the tests; all else by links."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name).resolve()
        for path in ROOT.iterdir():
            if path.name in ("monet_like", "tests"):
                shutil.copytree(path, copy / path.name)
            elif path.is_dir():
                (copy / path.name).symlink_to(path)
            else:
                shutil.copy2(path, copy)
        yield copy


@contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The fault is in the copy."""
    path = copy / source(mutant).relative_to(ROOT)
    path.write_text(path.read_text().replace(mutant.text, mutant.instead))
    try:
        yield
    finally:
        shutil.copy2(source(mutant), path)


def run(test: str, copy: Path) -> Outcome:
    """Run a test of a copy of the checkout in a fork of this process."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            _run_here(test, copy, output.fileno())
        code = _waited(child)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith(("E  ", "ERROR", "ImportError"))]
    return Outcome(code, lines[0][1:].strip()[:110] if lines else "", time.monotonic() - began)


def _run_here(test: str, copy: Path, output: int) -> None:
    """Run a test in this process, and end it with pytest's exit code."""
    os.setsid()  # so that a test that hangs ends with its own processes
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A fault may be as long as what it replaces, and written in the same second: no compiled file tells them apart.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.chdir(copy)
    import pytest

    code = pytest.main(["-n", "0", "-x", "--no-header", "-p", "no:cacheprovider", f"tests/{test}"])
    sys.stdout.flush()
    os._exit(int(code))


def _waited(child: int) -> int:
    """The exit code of a child process, which is ended if it takes too long."""
    began = time.monotonic()
    while time.monotonic() - began < SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def faults(mutants: Sequence[Mutant]) -> Iterator[str]:
    """Run mutants; what is wrong with them, in words. Prints a line for each."""
    for name in HEAVY:
        importlib.import_module(name)
    passing: dict[str, Outcome] = {}
    with copied() as copy:
        for mutant in mutants:
            if mutant.test not in passing:
                passing[mutant.test] = run(mutant.test, copy)
            if passing[mutant.test].code != 0:
                yield f"{mutant.test} does not pass without a fault: {passing[mutant.test].told}"
                continue
            with planted(mutant, copy):
                outcome = run(mutant.test, copy)
            word = {0: "SURVIVES", 1: "killed"}.get(outcome.code, f"NOT RUN, exit code {outcome.code}")
            print(f"{word:9} {outcome.seconds:5.1f} s  {mutant}  [{outcome.told}]", flush=True)
            if outcome.code != 1:
                yield f"{word}: {mutant} ({mutant.test})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Plant faults one at a time and see a test fail for each.")
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their file, text or test")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin with the Kth of them")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.words or any(word in " ".join(m) for word in options.words)]
    found = list(faults(chosen[options.first :: options.every]))
    print("\n".join(found) or "Every test that is named fails with its fault, and passes without.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
