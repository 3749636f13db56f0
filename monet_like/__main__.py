"""Entry points of the commands, also ``python -m monet_like``.

Ctrl-C ends them without a traceback, even during imports.
"""

from __future__ import annotations

from .interrupts import die_silently


def main() -> None:
    """``monet-like``."""
    die_silently()
    from . import cli

    cli.main(prog_name="monet-like")


def solve_main() -> None:
    """``python solve.py``: the solve command."""
    die_silently()
    from . import cli

    cli.solve_command(prog_name="solve.py")


def schedule_main() -> None:
    """``python scripts/schedule.py``: the schedule command."""
    die_silently()
    from . import cli

    cli.schedule_command(prog_name="scripts/schedule.py")


def benchmark_main() -> None:
    """``python scripts/benchmark.py``: the benchmark command."""
    die_silently()
    from . import cli

    cli.benchmark_command(prog_name="scripts/benchmark.py")


if __name__ == "__main__":
    main()
