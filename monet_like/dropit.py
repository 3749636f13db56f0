"""The old place of `monet_like.nn.dropit`: pickles of models that `to_dropit` changed before the move name their layers here."""

from __future__ import annotations

from typing import Any

from .nn import dropit


def __getattr__(name: str) -> Any:
    return getattr(dropit, name)
