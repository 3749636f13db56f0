"""Autocast for CUDA on fake tensors of the CPU, which a capture for an absent GPU is traced with."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.amp import autocast_mode

from ...errors import CaptureError
from ...runtime.operators import overload
from ..replaced import replaced

_CPU, _CUDA = "AutocastCPU", "AutocastCUDA"
#: Autocast casts to its 16-bit dtype, to float32, or to the widest dtype among the arguments.
_LOWER, _FLOAT32, _WIDEST = "lower", "float32", "widest"
#: Autocast asks for a float32 result, by the argument ``dtype`` or by an overload that has it.
_FLOAT32_RESULT, _FLOAT32_OVERLOAD = "float32 result", "float32 overload"
_REFUSED = "refused"
_NAMES = {
    _LOWER: """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr
        matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention""",
    _FLOAT32: """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
        _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth""",
    _FLOAT32_RESULT: """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    _FLOAT32_OVERLOAD: "norm.Scalar norm.ScalarOpt_dim",
    _WIDEST: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    _REFUSED: "binary_cross_entropy",
}
#: How autocast on CUDA casts the arguments of an operator.
POLICIES: Mapping[str, str] = {name: policy for policy, names in _NAMES.items() for name in names.split()}
#: Operators that take the dtype of the result as an argument.
_WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}


@functools.cache
def registered(key: str) -> Set[str]:
    """Names of ATen's operators that PyTorch's autocast acts on, by dispatch key.

    To look takes as long as a layer's trace.
    """
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(n.removeprefix("aten::") for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key))


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Have autocast act on tensors of the CPU as on a GPU's: on the same operators, with the same casts."""
    cuda = registered(_CUDA)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library = torch.library.Library("aten", "IMPL", _CPU)
        for name in sorted(registered(_CPU) - cuda):
            library.impl(name, torch.library.fallthrough_kernel, allow_override=True)
        for name in sorted(cuda):
            library.impl(name, _kernel(name, POLICIES.get(name, "")), allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _kernel(name: str, policy: str) -> Callable[..., Any]:
    """The autocast kernel of an operator with this policy, as ``WrapFunction`` in autocast_mode.h makes it."""
    called = _WITH_DTYPE.get(name, name)
    op = overload(f"aten.{called}" if "." in called else f"aten.{called}.default")
    declared = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lower = torch.get_autocast_dtype("cpu")
        # Autocast is off below, and functions are called as from C++: no mode sees them.
        off = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
        with off, torch._C.DisableTorchFunction():
            if policy == _REFUSED:
                raise CaptureError(
                    f"PyTorch refuses {name} (BCELoss) under autocast on a GPU; use "
                    "binary_cross_entropy_with_logits (BCEWithLogitsLoss), which it computes in float32"
                )
            if not policy:
                raise CaptureError(
                    f"what autocast does with aten.{name} on a GPU is known only to this version of PyTorch; capture "
                    "this model on the GPU"
                )
            if policy in (_FLOAT32_RESULT, _FLOAT32_OVERLOAD):
                eligible = _eligible(args[0])
                if policy == _FLOAT32_OVERLOAD:
                    kwargs["dtype"] = torch.float32 if eligible else args[0].dtype
                elif eligible:
                    args, kwargs = _with_dtype(args, kwargs, declared.index("dtype"))
                return op(*args, **kwargs)
            wanted = {_LOWER: lower, _FLOAT32: torch.float32}.get(policy) or _widest((args, kwargs), lower)
            # C++ evaluates the arguments of a call from the last to the first: so it casts them.
            named = {n: _cast(kwargs[n], wanted) for n in reversed(declared) if n in kwargs}
            return op(*[_cast(arg, wanted) for arg in reversed(args)][::-1], **named)

    return kernel


def _eligible(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, list | tuple):
        return [_cast(part, dtype) for part in leaf]
    return torch.ops.aten.to.dtype(leaf, dtype) if _eligible(leaf) and leaf.dtype != dtype else leaf


def _widest(tree: Any, lower: torch.dtype) -> torch.dtype:
    found = {leaf.dtype for leaf in pytree.tree_leaves(tree) if _eligible(leaf)}
    if not found <= {lower, torch.float32}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")  # PyTorch's own words
    return torch.float32 if torch.float32 in found else lower


def _with_dtype(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with float32 as ``dtype``, which is declared at ``place``, where they have none."""
    if place < len(args):
        return (*args[:place], args[place] or torch.float32, *args[place + 1 :]), kwargs
    return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}


@contextlib.contextmanager
def cuda_regions() -> Iterator[None]:
    """Have regions of autocast for ``cuda`` act on the tensors of the trace, with a GPU's default dtype."""
    region, enabled, dtype_of = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype
    cast_of_custom_fwd = autocast_mode._cast

    def here(device: str | None = None) -> str:
        return "cpu" if device in (None, "cuda") else device

    def init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        region(self, here(device_type), dtype or dtype_of(here(device_type)), enabled, cache_enabled)

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast_of_custom_fwd(value, here(device_type), dtype)

    before = dtype_of("cpu")
    if not enabled("cpu"):
        torch.set_autocast_dtype("cpu", dtype_of("cuda"))
    try:
        with (
            replaced(torch.autocast, __init__=init),
            replaced(autocast_mode, _cast=cast),
            replaced(
                torch,
                is_autocast_enabled=lambda device_type=None: enabled(here(device_type)),
                get_autocast_dtype=lambda device_type: dtype_of(here(device_type)),
            ),
        ):
            yield
    finally:
        torch.set_autocast_dtype("cpu", before)
