"""Pieces of schedules that nobody compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def uncompiled(function: Callable[..., Any], *_: Any) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """In the place of `monet_like.replay.fusion.compile_function`: runs the function as it is."""

    def run(tensors: list[Any]) -> Sequence[torch.Tensor]:
        given = list(tensors)
        tensors.clear()
        results: Sequence[torch.Tensor] = function(*given)
        return results

    return run
