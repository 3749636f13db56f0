"""The command line: ``monet-like solve | schedule | ...``, also as ``solve.py`` and ``scripts/schedule.py``."""

from .commands import benchmark_command, schedule_command, solve_command
from .export_commands import export_command
from .fits_commands import fits_command
from .group import main
from .zoo_commands import zoo_group

__all__ = [
    "benchmark_command",
    "export_command",
    "fits_command",
    "main",
    "schedule_command",
    "solve_command",
    "zoo_group",
]
