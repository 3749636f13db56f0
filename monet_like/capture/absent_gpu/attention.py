"""Which operator PyTorch takes for attention on a GPU, and attention by that operator on fake tensors of the CPU.

PyTorch asks the kinds of fused attention in an order, and takes the first that accepts the arguments
(``select_sdp_backend``, ``priority_order`` and ``can_use_*_attention`` in ``sdp_utils.cpp`` of PyTorch 2.14):

* cuDNN's first on cards of compute capability 9.0, 10.0 and 10.3 with cuDNN above 9.15, else last;
* flash, memory-efficient, and matrix products, which accept everything.

The answer depends on the card. Where the card is not known, all that are sold are asked; if they differ, the user has
to name the kind, which `torch.nn.attention.sdpa_kernel` then pins where the step is captured on the GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import CaptureError, UsageError
from ...torch_versions import release
from ..replaced import replaced

#: Kinds of attention by the names that users give.
KINDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
#: Compute capabilities that are asked where the card is not known.
CAPABILITIES = ((6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
#: Whether the memory-efficient kind takes grouped heads.
_GROUPED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
_own = nn.functional.scaled_dot_product_attention
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Absent:
    """A device to capture for, which need not be here.

    Attributes:
        device: of the program.
        capability: the card's compute capability; None: not known.
        attention: a name of `KINDS`; "": what PyTorch takes there.
    """

    device: torch.device
    capability: tuple[int, int] | None = None
    attention: str = ""


def check_attention(name: str) -> None:
    """Check a kind's name; "" is PyTorch's own choice.

    Raises:
        UsageError: it is unknown.
    """
    if name and name not in KINDS:
        raise UsageError(f"attention {name!r} is unknown; give {', '.join(list(KINDS)[:-1])} or {list(KINDS)[-1]}")


def attention_as(name: str) -> contextlib.AbstractContextManager[None]:
    """Have PyTorch take this kind of attention on the device at hand; "": its own choice.

    Raises:
        UsageError: there is no such kind.
    """
    check_attention(name)
    return sdpa_kernel(KINDS[name]) if name else contextlib.nullcontext()


def attention(target: Absent) -> contextlib.AbstractContextManager[None]:
    """Have PyTorch's function for attention take the operator that it takes on a GPU."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if torch.is_autocast_enabled("cpu"):
            call = call.cast(torch.get_autocast_dtype("cpu"))
        with torch._C._DisableAutocast():
            return _attended(call, _kind(call, target))

    return replaced(nn.functional, scaled_dot_product_attention=attend)


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of ``scaled_dot_product_attention``; tensors are [N, heads, length, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def cast(self, dtype: torch.dtype) -> AttentionCall:
        """As autocast casts the arguments: floats to its dtype, but for float64."""

        def lower(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

        mask = None if self.mask is None else lower(self.mask)
        query, key, value = map(lower, self.tensors)
        return replace(self, query=query, key=key, value=value, mask=mask)

    @property
    def fusible(self) -> bool:
        """Whether any fused kind takes tensors of these shapes and layouts."""
        q, k, v = self.tensors
        if any(t.dim() != 4 or not t.numel() for t in self.tensors):
            return False
        same_batch = q.shape[0] == k.shape[0] == v.shape[0]
        in_rows = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in self.tensors)
        return same_batch and in_rows and k.shape[1] == v.shape[1] and q.dtype == k.dtype == v.dtype

    @property
    def heads_fit(self) -> bool:
        """Whether the numbers of heads fit: equal, or grouped where that is asked for."""
        q, k = self.query.shape[1], self.key.shape[1]
        return q == k or (self.grouped and q % k == 0)


def choice(call: AttentionCall, capability: tuple[int, int]) -> str:
    """The kind of attention that PyTorch takes on a card of this compute capability.

    Raises:
        CaptureError: it depends on a version of cuDNN that is not known here.
    """
    for kind in _order(capability):
        if _ENABLED[kind]() and _ACCEPTS[kind](call, capability):
            return kind
    raise CaptureError(
        "no kind of attention that is enabled takes these arguments on the GPU; enable "
        "torch.backends.cuda.enable_math_sdp(True)"
    )


def _order(capability: tuple[int, int]) -> list[str]:
    """The kinds in the order in which they are asked: the user's, else PyTorch's for the card."""
    names = {int(backend.value): name for name, backend in KINDS.items()}
    order = [names[number] for number in map(int, torch._C._get_sdp_priority_order()) if number in names]
    if order == ["flash", "efficient", "math", "cudnn"] and capability in ((9, 0), (10, 0), (10, 3)):
        version = torch.backends.cudnn.version() if torch._C._has_cudnn else None
        if version is None:
            raise CaptureError(
                "whether this GPU takes cuDNN's attention depends on cuDNN's version, and this PyTorch is built "
                "without it; name it with --attention (attention= in Python): flash, efficient, cudnn or math"
            )
        if version > 91500:
            return ["cudnn", "flash", "efficient", "math"]
    return order


def _flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    width, narrow = call.query.shape[-1], (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    widths = all(t.shape[-1] == width for t in call.tensors) and width <= 256
    if narrow and (192 < width <= 224 or (width > 224 and call.dropout > 0)):
        return False  # no gradient there
    square = not call.causal or call.query.shape[-2] == call.key.shape[-2]
    half = call.query.dtype in HALF and (8, 0) <= capability <= (12, 1)
    return call.fusible and call.heads_fit and call.mask is None and widths and square and half


def _efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    q, k, v = (t.shape[-1] for t in call.tensors)
    half = call.query.dtype in HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = max(4 if capability >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)
    widths = q == k and q % alignment == 0 and v % alignment == 0
    dtypes = (torch.float16, torch.float32, *([torch.bfloat16] if capability >= (8, 0) else []))
    heads = call.heads_fit if _GROUPED else call.query.shape[1] == call.key.shape[1]
    return call.fusible and heads and widths and call.query.dtype in dtypes and (5, 0) <= capability <= (12, 1)


def _cudnn(call: AttentionCall, capability: tuple[int, int]) -> bool:
    version = (torch.backends.cudnn.version() if torch._C._has_cudnn else None) or 0
    q, k, v = (t.shape[-1] for t in call.tensors)
    most = 256 if capability == (9, 0) and release() <= (2, 11) else 128
    if capability[0] == 10 and (q, v) == (192, 128) and version >= 91100:
        most = 192
    lengths = call.key.shape[-2] > 1 and not (call.query.shape[-2] == 1 and call.dropout)
    widths = q == k and max(q, v) <= most and q % 8 == 0 and v % 8 == 0
    dropout = not (call.dropout and 91100 < version < 91400)
    half = call.query.dtype in HALF and (8, 0) <= capability <= (12, 1)
    repeatable = (
        not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return call.fusible and call.heads_fit and lengths and widths and dropout and half and repeatable


_ACCEPTS: dict[str, Callable[[AttentionCall, tuple[int, int]], bool]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": lambda call, capability: True,
}
_ENABLED: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


def _kind(call: AttentionCall, target: Absent) -> str:
    """The kind that is named, or PyTorch's choice where that is certain without the GPU.

    Raises:
        CaptureError: it is not, or the named kind does not take these arguments.
    """
    cards = CAPABILITIES if target.capability is None else (target.capability,)
    if target.attention:
        if not any(_ACCEPTS[target.attention](call, card) for card in cards):
            raise CaptureError(
                f"{target.attention} attention does not take these arguments on the GPU: {_told(call)}; name another "
                "kind with --attention (attention= in Python)"
            )
        return _certain(call, target.attention)
    found = sorted({choice(call, card) for card in cards})
    if len(found) > 1:
        raise CaptureError(
            f"which attention operator a GPU takes for {_told(call)} depends on the card ({' or '.join(found)}); plan "
            "for a known card (--profile roofline:h100), or name it with --attention (attention= in Python)"
        )
    return _certain(call, found[0])


def _certain(call: AttentionCall, kind: str) -> str:
    """``kind``, where what PyTorch does before that operator is known: masks are converted and padded in several ways.

    Raises:
        CaptureError: it is not known.
    """
    if kind != "math" and call.mask is not None:
        raise CaptureError(
            f"how PyTorch prepares a mask for {kind} attention is known only on the GPU; use is_causal=True instead of "
            "the mask, or name it with --attention math (attention= in Python)"
        )
    if kind == "math" and call.dropout:
        raise CaptureError(
            "how a GPU draws the dropout of attention by matrix products is known only there; set the attention's "
            "dropout to 0, or capture this model on the GPU"
        )
    if kind == "flash" and call.query.shape[-1] % 8:
        raise CaptureError(
            "flash attention pads widths that are no multiple of 8, which is known only on the GPU; name it with "
            "--attention math (attention= in Python), or capture this model on the GPU"
        )
    return kind


def _told(call: AttentionCall) -> str:
    """Dtype and shapes of the arguments, for messages."""
    q, k, v = call.tensors
    shapes = " and ".join(dict.fromkeys(str(list(t.shape)) for t in (q, k, v)))
    extra = [", with a mask" if call.mask is not None else "", ", grouped heads" if call.grouped else ""]
    return f"{str(q.dtype).removeprefix('torch.')} {shapes}{''.join(extra)}"


# The operators ------------------------------------------------------------------------------------------------------


def _attended(call: AttentionCall, kind: str) -> torch.Tensor:
    if kind == "math":
        with sdpa_kernel(SDPBackend.MATH):  # the same on all devices
            return _own(*call.tensors, call.mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.grouped)
    scale = call.scale
    if kind == "flash" and scale is None:
        scale = 1 / math.sqrt(call.query.shape[-1])  # PyTorch gives it a number
    without_mask = () if kind == "flash" else (None, True)
    without_debugging = () if kind == "efficient" else (False,)
    attend = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    given = (*call.tensors, *without_mask, call.dropout, call.causal, *without_debugging)
    result: torch.Tensor = attend(*given, scale=scale)[0]
    return result
