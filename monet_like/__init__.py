"""monet_like: training steps that fit the memory you have.

A compiler from (model, input shape, device, memory budget) to the fastest training step that fits, and the
runtime that replays it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .allocator import reserve
    from .api import auto_schedule
    from .dropit import to_dropit
    from .marks import mark
    from .replay import ScheduleWrapper
    from .sync_batch_norm import convert_sync_batchnorm

__all__ = [
    "ScheduleWrapper",
    "__version__",
    "auto_schedule",
    "convert_sync_batchnorm",
    "mark",
    "reserve",
    "to_dropit",
]

_LAZY = {
    "ScheduleWrapper": "replay",
    "auto_schedule": "api",
    "convert_sync_batchnorm": "sync_batch_norm",
    "mark": "marks",
    "reserve": "allocator",
    "to_dropit": "dropit",
}


def __getattr__(name: str) -> Any:
    """Import lazily: ``import monet_like`` needs neither torch nor a solver."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
