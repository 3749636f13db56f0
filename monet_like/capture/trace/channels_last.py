"""Convolutions in channels-last layout: a traced forward whose images change their layout where they are convolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ..precision import LAYOUTS, layout_of

#: The functions of convolutions, and how many dimensions their inputs have.
_CONVOLUTIONS = {
    torch.conv2d: 4,
    torch.conv3d: 5,
    torch.conv_transpose2d: 4,
    torch.conv_transpose3d: 5,
}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class ChannelsLast(TorchFunctionMode):
    """Gives the convolutions of a forward their inputs in channels-last layout, which their results then have, too.

    What follows keeps it, as it does of images that a caller gives so. An input that has it already is not copied.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _CONVOLUTIONS:
            images = args[0] if args else given["input"]
            if images.dim() == _CONVOLUTIONS[func]:
                images = images.contiguous(memory_format=_FORMATS[images.dim()])
                args, given = ((images, *args[1:]), given) if args else (args, {**given, "input": images})
        return func(*args, **given)


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A result of the forward, with the layout that it has without the mode."""
    return tensor.contiguous() if layout_of(tensor) else tensor


def check_layouts(graph: fx.Graph) -> None:
    """Raise where a graph would compute something else because of its tensors' layout.

    Random numbers are drawn in the order of memory, ``as_strided`` reads by it, and operators from outside PyTorch may.

    Raises:
        CaptureError: it names the operator.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        tensors = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
        if not any(isinstance(each, torch.Tensor) and layout_of(each) in LAYOUTS for each in tensors):
            continue
        tags = node.target.tags
        if (
            torch.Tag.nondeterministic_seeded in tags
            or node.target.namespace != "aten"
            or node.target is torch.ops.aten.as_strided.default
        ):
            raise CaptureError(
                f"{node.target} depends on the order of a tensor's elements in memory, which the mode word nhwc changes"
            )
