"""Runs checks against the emulated kernels, in a process of their own: they replace the CPU's kernels and its
allocator.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run_checks(
    library: Path, arguments: Sequence[str], *, rounds: int | None = None, timeout: float = 3600
) -> tuple[int, str]:
    """Runs pytest in a process that has the emulated kernels.

    Args:
        library: folder of the library, from `build`.
        arguments: pytest's: files and options.
        rounds: calls of each kind, with random arguments, default 2 (see check_kernels.py).
        timeout: seconds after which the process is ended.

    Returns:
        Its exit code and what it printed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "cuda_emulator.control"]
    environment = {**os.environ, "MONET_LIKE_EMULATED": str(library), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if rounds is not None:
        environment["MONET_LIKE_EMULATED_ROUNDS"] = str(rounds)
    for name in list(environment):
        if name.startswith("PYTEST_") or name == "MONET_LIKE_KERNELS":  # the process is no worker of an outer pytest
            del environment[name]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
    )
    return done.returncode, done.stdout


def main(arguments: Sequence[str]) -> int:
    """Command line of ``python -m tests.cuda_emulator``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_emulator",
        description=(
            "Run the CUDA kernels on a CPU, against their twins and ATen. Other arguments are pytest's: -k masks."
        ),
    )
    parser.add_argument("--rounds", type=int, help="calls of each kind with random arguments, default 2")
    parser.add_argument("--mistakes", action="store_true", help="put mistakes into the kernels: are they noticed?")
    parser.add_argument("--csrc", type=Path, help="folder of the sources, default: the checkout's")
    options, rest = parser.parse_known_args(arguments)
    if reason := build.missing_compiler():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    library = build.build_kernels(options.csrc, "others" if options.csrc else "kernels")
    if options.mistakes:
        os.environ["MONET_LIKE_EMULATED_MISTAKES"] = "all"
    file = "check_mistakes.py" if options.mistakes else "check_kernels.py"
    show = ["-s"] if options.mistakes else []
    code, output = run_checks(library, [str(HERE / file), *show, *rest], rounds=options.rounds)
    print(output)
    return code
