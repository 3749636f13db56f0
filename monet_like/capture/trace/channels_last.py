"""Convolutions in channels-last layout: a traced forward whose images change their layout where they are convolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..precision import in_layout, layout_of

#: The functions of convolutions, and the layouts that they give their inputs.
_CONVOLUTIONS = {
    torch.conv2d: "channels_last",
    torch.conv3d: "channels_last_3d",
    torch.conv_transpose2d: "channels_last",
    torch.conv_transpose3d: "channels_last_3d",
}


class ChannelsLast(TorchFunctionMode):
    """Gives the convolutions of a forward their inputs in channels-last layout, which their results then have, too.

    What follows keeps it, as it does of images that a caller gives so. An input that has it already is not copied.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _CONVOLUTIONS:
            if args:
                args = (in_layout(args[0], _CONVOLUTIONS[func]), *args[1:])
            else:
                given["input"] = in_layout(given["input"], _CONVOLUTIONS[func])
        return func(*args, **given)


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A result of the forward, with the layout that it has without the mode."""
    return tensor.contiguous() if layout_of(tensor) else tensor
