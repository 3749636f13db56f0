"""Entry points of the commands, also ``python -m monet_like``.

Ctrl-C ends them without a traceback, even during imports.
"""

from __future__ import annotations

from .interrupts import die_silently


def _run(command: str, name: str) -> None:
    die_silently()
    from . import cli

    getattr(cli, command)(prog_name=name)


def main() -> None:
    """``monet-like``."""
    _run("main", "monet-like")


def solve_main() -> None:
    """``python solve.py``: the solve command."""
    _run("solve_command", "solve.py")


def schedule_main() -> None:
    """``python scripts/schedule.py``: the schedule command."""
    _run("schedule_command", "scripts/schedule.py")


def benchmark_main() -> None:
    """``python scripts/benchmark.py``: the benchmark command."""
    _run("benchmark_command", "scripts/benchmark.py")


if __name__ == "__main__":
    main()
