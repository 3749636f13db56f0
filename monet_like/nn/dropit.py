"""DropIT without a planner: layers that save only a part of their input for the weight's gradient.

`to_dropit` changes the layers of a model in place. Forward, input gradients and bias gradients are plain PyTorch's; the
weight's gradient takes for zero what was dropped (DropIT, Chen et al., ICLR 2023). Unlike a plan in a mode with
``dropit<share>`` this drops everywhere, also where another operator keeps the same tensor anyhow: in conv, batch norm,
ReLU nets that costs memory.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..errors import UsageError
from ..ops.caches import kept_of_block

_aten = torch.ops.aten


@dataclass
class Dropped:
    """A changed layer drops ``share`` of its input's elements, those of smallest magnitude among each 16,384.

    Attributes:
        freed_bytes: by how much the last forward's cache was smaller than its input.
    """

    share: float
    freed_bytes: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A changed model may be unpickled in a process that has changed none, and so has not loaded the operators."""
        self.__dict__.update(state)
        ops.load()

    def pack(self, ctx: Any, x: Tensor) -> Tensor:
        """What to save instead of ``x``; ``ctx`` notes how to restore it."""
        ctx.keep, ctx.layout = kept_of_block(self.share), (x.shape, x.dtype, x.stride())
        kept: Tensor = torch.ops.monet_like.pack_largest(x, ctx.keep)
        self.freed_bytes = x.nbytes - kept.nbytes
        return kept


def _unpack(ctx: Any, kept: Tensor) -> Tensor:
    x: Tensor = torch.ops.monet_like.unpack_largest(kept, ctx.keep, *ctx.layout)
    return x


class _Linear(torch.autograd.Function):
    """x [N, D] times a matrix, plus bias [V]: the transpose of weight [V, D], or with ``turned`` weight
    [D, V] itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, dropped: Dropped) -> Tensor:
        ctx.turned = turned
        ctx.save_for_backward(weight, dropped.pack(ctx, x))
        matrix = weight if turned else weight.t()
        return x @ matrix if bias is None else torch.addmm(bias, x, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight, kept = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            turned = weight.t() if ctx.turned else weight
            # For an input that lies the other way round PyTorch multiplies the other way round.
            (shape, _, stride) = ctx.layout
            across = stride == (1, shape[0])
            of_x = (turned.t() @ grad.t()).t() if across else grad @ turned
        if ctx.needs_input_grad[1]:
            x = _unpack(ctx, kept)
            of_weight = x.t() @ grad if ctx.turned else grad.t() @ x
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        return of_x, of_weight, of_bias, None, None


class _Convolution(torch.autograd.Function):
    """A 2-d convolution; ``options`` are stride, padding, dilation and groups."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...], dropped: Dropped
    ) -> Tensor:
        ctx.options, ctx.bias_sizes = options, None if bias is None else bias.shape
        ctx.save_for_backward(weight, dropped.pack(ctx, x))
        return F.conv2d(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, kept = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        rest = (ctx.bias_sizes, stride, padding, dilation, False, [0, 0], groups, ctx.needs_input_grad[:3])
        # The input's gradient reads only the shape of what is in the input's place.
        found = _aten.convolution_backward(grads[0], _unpack(ctx, kept), weight, *rest)
        return *found, None, None


def _as_autocast(tensor: Any) -> Any:
    """A layer's tensor as autocast would give it to the operator; None stays None."""
    if tensor is None or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _drops(layer: nn.Module) -> bool:
    """Whether a call of a changed layer will need the weight's gradient."""
    return torch.is_grad_enabled() and bool(layer.weight.requires_grad)


def _matrix_layer(layer: Any, x: Tensor, turned: bool) -> Tensor:
    x, weight, bias = map(_as_autocast, (x, layer.weight, layer.bias))
    out: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, turned, layer.dropped)
    return out.view(*x.shape[:-1], out.shape[-1])


class DroppedLinear(nn.Linear):
    """A linear layer that keeps a part of its input for its weight's gradient."""

    dropped: Dropped

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer's."""
        return _matrix_layer(self, x, False) if _drops(self) else super().forward(x)


class DroppedConv2d(nn.Conv2d):
    """A convolution that keeps a part of its (padded) input for its weight's gradient."""

    dropped: Dropped

    def forward(self, x: Tensor) -> Tensor:
        """As the convolution's."""
        if not _drops(self):
            return super().forward(x)
        left, right, top, bottom = self._reversed_padding_repeated_twice
        padding: tuple[int, ...] = (top, left)
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0, 0)
        elif (left, top) != (right, bottom):  # "same" with an even kernel: one more at the far ends, as PyTorch does it
            x = F.pad(x, (0, right - left, 0, bottom - top))
        x, weight, bias = map(_as_autocast, (x, self.weight, self.bias))
        options = (self.stride, padding, self.dilation, self.groups)
        out: Tensor = _Convolution.apply(x, weight, bias, options, self.dropped)
        return out


@functools.cache
def _conv1d(original: type[nn.Module]) -> type[nn.Module]:
    """The same for Hugging Face's Conv1D, a linear layer with its weight the other way round."""

    class DroppedConv1D(original):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _matrix_layer(self, x, True) if _drops(self) else super().forward(x)
            return out

    DroppedConv1D.__qualname__ = "DroppedConv1D"
    return DroppedConv1D


def __getattr__(name: str) -> Any:
    """`DroppedConv1D`, for pickles of changed models: it exists where transformers does."""
    if name == "DroppedConv1D":
        from transformers.pytorch_utils import Conv1D

        return _conv1d(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def to_dropit(model: nn.Module, gamma: float = 0.9) -> nn.Module:
    """Change the layers of ``model`` in place so that they drop a share ``gamma`` of their saved input's elements.

    Changed are `nn.Linear`, `nn.Conv2d` and Hugging Face's `Conv1D`, but no subclasses of theirs, whose forward may be
    another, and nothing in modules with a true attribute ``no_dropit``. Names, parameters and ``state_dict`` stay. In
    evaluation and without gradients the layers run as before. `freed_bytes` tells what each of them saved.

    Args:
        gamma: share of the elements to drop, at least 0 and below 1; with 0 the model stays as it is.

    Returns:
        the model.

    Raises:
        UsageError: a share out of range, or a model without such layers.
    """
    if not 0 <= gamma < 1:
        raise UsageError(f"gamma {gamma!r} is the share of elements to drop; give a number of at least 0 and below 1")
    found = [(layer, kind) for layer in _allowed(model) if (kind := _kind(layer)) is not None]
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no layer to drop for; these are nn.Linear, nn.Conv2d and Hugging Face's "
            "Conv1D without the attribute no_dropit"
        )
    if gamma > 0:
        ops.load()
        for layer, kind in found:
            layer.__class__ = kind
            layer.dropped = Dropped(float(gamma))  # type: ignore[assignment]
    return model


def freed_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes saved in the last forward by every layer that drops, by name.

    Negative where indices take more than what was dropped. An input that another operator keeps anyway is not freed.
    """
    layers = ((name, getattr(layer, "dropped", None)) for name, layer in model.named_modules())
    return {name: dropped.freed_bytes for name, dropped in layers if isinstance(dropped, Dropped)}


def _allowed(module: nn.Module) -> list[nn.Module]:
    """A module and its submodules, without those that opted out."""
    if getattr(module, "no_dropit", False):
        return []
    return [module, *(found for child in module.children() for found in _allowed(child))]


def _kind(layer: nn.Module) -> type[nn.Module] | None:
    kind = type(layer)
    if kind in (nn.Linear, DroppedLinear):
        return DroppedLinear
    if kind in (nn.Conv2d, DroppedConv2d):
        return DroppedConv2d
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and kind in (transformers.Conv1D, _conv1d(transformers.Conv1D)):
        return _conv1d(transformers.Conv1D)
    return None
