"""monet_like: training steps that fit the memory you have.

A compiler from (model, input shape, device, memory budget) to the fastest training step that fits, and the
runtime that replays it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .auto.auto_schedule import auto_schedule
    from .auto.blocks import block_plan, plan_step, unwrap
    from .auto.fits.fits import fits
    from .auto.planning import Planning
    from .capture.annotations import mark
    from .export.selective import checkpoint_policy
    from .inductor.options import compile_options
    from .job.start import problem
    from .nn.dropit import to_dropit
    from .nn.sync_batch_norm import convert_sync_batchnorm
    from .plan.strategies import register_strategy
    from .replay.memory.allocator import place_memory, reserve
    from .replay.wrapper import ScheduleWrapper
    from .report.kept_memory import memory_report
    from .variants import register_variant

__all__ = [
    "Planning",
    "ScheduleWrapper",
    "__version__",
    "auto_schedule",
    "block_plan",
    "checkpoint_policy",
    "compile_options",
    "convert_sync_batchnorm",
    "fits",
    "mark",
    "memory_report",
    "place_memory",
    "plan_step",
    "problem",
    "register_strategy",
    "register_variant",
    "reserve",
    "to_dropit",
    "unwrap",
]

_LAZY = {
    "Planning": "auto.planning",
    "ScheduleWrapper": "replay.wrapper",
    "auto_schedule": "auto.auto_schedule",
    "block_plan": "auto.blocks",
    "checkpoint_policy": "export.selective",
    "compile_options": "inductor.options",
    "convert_sync_batchnorm": "nn.sync_batch_norm",
    "fits": "auto.fits.fits",
    "mark": "capture.annotations",
    "memory_report": "report.kept_memory",
    "place_memory": "replay.memory.allocator",
    "plan_step": "auto.blocks",
    "problem": "job.start",
    "register_strategy": "plan.strategies",
    "register_variant": "variants",
    "reserve": "replay.memory.allocator",
    "to_dropit": "nn.dropit",
    "unwrap": "auto.blocks",
}


def __getattr__(name: str) -> Any:
    """Import lazily: ``import monet_like`` needs neither torch nor a solver."""
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name == "testing":  # a module, which has PyTorch imported
        return importlib.import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, before they are imported, too."""
    return __all__
