"""DropIT without a planner: layers that save only a part of their input for the weight's gradient.

`to_dropit` changes the layers of a model in place. Forward, input gradients and bias gradients are plain PyTorch's; the
weight's gradient takes for zero what was dropped (DropIT, Chen et al., ICLR 2023). Unlike a plan in a mode with
``dropit<share>`` this drops everywhere, also where another operator keeps the same tensor anyhow: in conv, batch norm,
ReLU nets that costs memory.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..errors import UsageError
from ..ops.caches import kept_of_block

_aten = torch.ops.aten


@dataclass(frozen=True)
class Layout:
    """Shape, dtype and layout of a dropped tensor: enough to restore it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """A tensor of this kind, of zeros; row-major if the tensor had gaps."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


@dataclass(frozen=True)
class Strategy:
    """A way to drop elements: packs a tensor into what is kept, and unpacks that into a tensor with zeros."""

    pack: Callable[[Tensor, float, int], tuple[Tensor, ...]]
    unpack: Callable[[tuple[Tensor, ...], float, int, Layout], Tensor]


def _pack_block(x: Tensor, share: float, _: int) -> tuple[Tensor, ...]:
    return (torch.ops.monet_like.pack_largest(x, kept_of_block(share)),)


def _unpack_block(kept: tuple[Tensor, ...], share: float, _: int, like: Layout) -> Tensor:
    keep = kept_of_block(share)
    made: Tensor = torch.ops.monet_like.unpack_largest(kept[0], keep, like.shape, like.dtype, like.stride)
    return made


def _by_mask(choose: Callable[[Tensor, float], Tensor]) -> Strategy:
    """Keep the elements that ``choose`` marks: their values in row-major order, and a bit for each element."""

    def pack(x: Tensor, share: float, _: int) -> tuple[Tensor, ...]:
        mask = choose(x, share).contiguous()
        return x[mask], torch.ops.monet_like.pack_bool(mask)

    def unpack(kept: tuple[Tensor, ...], share: float, _: int, like: Layout) -> Tensor:
        mask: Tensor = torch.ops.monet_like.unpack_bool(kept[1], like.shape)
        return like.zeros().masked_scatter_(mask, kept[0])

    return Strategy(pack, unpack)


def _highest(scores: Tensor, share: float) -> Tensor:
    """A mask of the elements of highest score, all but ``share`` of them."""
    flat = scores.reshape(-1)
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.topk(_kept(flat.numel(), share), sorted=False).indices] = True
    return mask.view(scores.shape)


def _kept(count: int, share: float) -> int:
    return min(count, max(1, count - round(share * count)))


def _random(x: Tensor, share: float) -> Tensor:
    scores = torch.rand(x.shape, device=x.device, generator=_generator(x.device))
    return _highest(scores, share)


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    """A random generator of its own, so that dropout masks stay those of the plain model."""
    return torch.Generator(device).manual_seed(torch.initial_seed())


def _beyond_sigma(x: Tensor, share: float) -> Tensor:
    """Further from the mean than so many deviations that a normal distribution has ``share`` within them."""
    wide = x if x.dtype == torch.float64 else x.float()
    deviations = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(share, dtype=torch.float64)))
    return (wide - wide.mean()).abs() > deviations * wide.std(correction=0)


def _pack_channels(x: Tensor, share: float, dim: int) -> tuple[Tensor, ...]:
    """The channels of largest 2-norm."""
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    norms = torch.linalg.vector_norm(x, dim=others, dtype=torch.promote_types(x.dtype, torch.float32))
    kept = norms.topk(_kept(len(norms), share)).indices.sort().values
    return x.index_select(dim, kept), kept


def _unpack_channels(kept: tuple[Tensor, ...], share: float, dim: int, like: Layout) -> Tensor:
    return like.zeros().index_copy_(dim, kept[1], kept[0])


#: ``block``: the largest of every 16,384 elements; ``largest``: of the whole tensor; ``random``: whichever; ``channel``:
#: whole channels, of largest norm; ``sigma``: those far from the mean, about as many as asked for.
STRATEGIES: Mapping[str, Strategy] = {
    "block": Strategy(_pack_block, _unpack_block),
    "largest": _by_mask(lambda x, share: _highest(x.abs(), share)),
    "random": _by_mask(_random),
    "channel": Strategy(_pack_channels, _unpack_channels),
    "sigma": _by_mask(_beyond_sigma),
}


@dataclass
class Dropped:
    """The elements that a changed layer drops: ``share`` of its input, chosen by a named strategy.

    Attributes:
        freed_bytes: by how much the last forward's cache was smaller than its input.
    """

    strategy: str
    share: float
    freed_bytes: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A changed model may be unpickled in a process that has changed none, and so has not loaded the operators."""
        self.__dict__.update(state)
        ops.load()

    def pack(self, ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The tensors to save instead of ``x``; ``ctx`` notes how to restore it."""
        ctx.dropped, ctx.dim, ctx.layout = self, dim, Layout(x.shape, x.stride(), x.dtype, x.device)
        kept = STRATEGIES[self.strategy].pack(x, self.share, dim)
        self.freed_bytes = x.nbytes - sum(tensor.nbytes for tensor in kept)
        return kept


def _unpack(ctx: Any, kept: tuple[Tensor, ...]) -> Tensor:
    return STRATEGIES[ctx.dropped.strategy].unpack(kept, ctx.dropped.share, ctx.dim, ctx.layout)


class _Linear(torch.autograd.Function):
    """x [N, D] times a matrix, plus bias [V]: the transpose of weight [V, D], or with ``turned`` weight [D, V] itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, dropped: Dropped) -> Tensor:
        ctx.turned = turned
        ctx.save_for_backward(weight, *dropped.pack(ctx, x, -1))
        matrix = weight if turned else weight.t()
        return x @ matrix if bias is None else torch.addmm(bias, x, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight, *kept = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            turned = weight.t() if ctx.turned else weight
            # For an input that lies the other way round PyTorch multiplies the other way round.
            across = ctx.layout.stride == (1, ctx.layout.shape[0])
            of_x = (turned.t() @ grad.t()).t() if across else grad @ turned
        if ctx.needs_input_grad[1]:
            x = _unpack(ctx, tuple(kept))
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
        ctx.save_for_backward(weight, *dropped.pack(ctx, x, 1))
        return F.conv2d(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, *kept = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        rest = (ctx.bias_sizes, stride, padding, dilation, False, [0, 0], groups, ctx.needs_input_grad[:3])
        # The input's gradient reads only the shape of what is in the input's place.
        found = _aten.convolution_backward(grads[0], _unpack(ctx, tuple(kept)), weight, *rest)
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


def to_dropit(model: nn.Module, strategy: str = "block", gamma: float = 0.9) -> nn.Module:
    """Change the layers of ``model`` in place so that they drop a share ``gamma`` of their saved input's elements.

    Changed are `nn.Linear`, `nn.Conv2d` and Hugging Face's `Conv1D`, but no subclasses of theirs, whose forward may be
    another, and nothing in modules with a true attribute ``no_dropit``. Names, parameters and ``state_dict`` stay. In
    evaluation and without gradients the layers run as before. `freed_bytes` tells what each of them saved.

    Args:
        strategy: one of `STRATEGIES`.
        gamma: share of the elements to drop, at least 0 and below 1; with 0 the model stays as it is.

    Returns:
        the model.

    Raises:
        UsageError: an unknown strategy, a share out of range, or a model without such layers.
    """
    if strategy not in STRATEGIES:
        raise UsageError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    if not 0 <= gamma < 1:
        raise UsageError(f"gamma {gamma!r} is the share of elements to drop; give a number of at least 0 and below 1")
    found = [(layer, kind) for layer in _allowed(model) if (kind := _kind(layer)) is not None]
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no layer to drop for; these are nn.Linear, nn.Conv2d and Hugging Face's Conv1D "
            "without the attribute no_dropit"
        )
    if gamma > 0:
        ops.load()
        for layer, kind in found:
            layer.__class__ = kind
            layer.dropped = Dropped(strategy, float(gamma))  # type: ignore[assignment]
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
