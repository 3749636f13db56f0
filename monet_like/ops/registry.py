"""The operator schemas, for a machine without the compiled library.

With the library, csrc/ops.cpp defines the operators; a test compares the two lists.
"""

from __future__ import annotations

NAMESPACE = "monet_like"

_POOL = "int[2] kernel, int[2] stride, int[2] padding, int[2] dilation"
_NORM = "Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd"
_CONVOLUTION = (
    "int[2] stride, int[2] padding, int[2] dilation, int groups, bool channels_last, str algorithm) -> Tensor"
)

SCHEMAS: dict[str, str] = {
    "pack_sign": "(Tensor x) -> Tensor",
    "keep_where": "(Tensor x, Tensor mask, int[] stride=[]) -> Tensor",
    "keep_where_": "(Tensor(a!) x, Tensor mask, int[] stride=[]) -> Tensor(a!)",
    "pack_range": "(Tensor x, float lo, float hi) -> Tensor",
    "pack_bool": "(Tensor mask) -> Tensor",
    "unpack_bool": "(Tensor packed, SymInt[] size, SymInt[] stride=[]) -> Tensor",
    "masked_scale": "(Tensor x, Tensor packed, float scale, int[] stride=[], float otherwise=0.0) -> Tensor",
    "pack_nibbles": "(Tensor x) -> Tensor",
    "unpack_nibbles": "(Tensor packed, SymInt[] size, SymInt[] stride=[]) -> Tensor",
    "pack_largest": "(Tensor x, int keep) -> Tensor",
    "unpack_largest": "(Tensor packed, int keep, SymInt[] size, ScalarType dtype, SymInt[] stride=[]) -> Tensor",
    "mm_largest": "(Tensor grad, Tensor packed, int keep, SymInt columns, bool transposed=False) -> Tensor",
    "pack_int8": "(Tensor x) -> Tensor",
    "unpack_int8": "(Tensor packed, SymInt[] size, ScalarType dtype, SymInt[] stride=[]) -> Tensor",
    "max_pool2d_with_offsets": f"(Tensor x, {_POOL}, bool ceil_mode) -> (Tensor, Tensor)",
    "max_pool2d_offsets": f"(Tensor indices, SymInt[] input_size, {_POOL}) -> Tensor",
    "max_pool2d_offsets_to_indices": f"(Tensor offsets, SymInt[] input_size, {_POOL}) -> Tensor",
    "max_pool2d_offsets_backward": f"(Tensor grad, Tensor offsets, SymInt[] input_size, {_POOL}) -> Tensor",
    "batch_norm_apply": f"(Tensor x, {_NORM}, Tensor? residual, str activation, float lo, float hi) -> Tensor",
    "batch_norm_train": (
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
        "float momentum, float eps, Tensor? residual, str activation, float lo, float hi, bool exact) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "batch_norm_activation_backward": (
        f"(Tensor grad, Tensor x, {_NORM}, str activation, float lo, float hi, bool[3] mask, Tensor? residual=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "batch_norm_apply_joined": f"(Tensor[] parts, {_NORM}, str activation, float lo, float hi) -> Tensor",
    "batch_norm_train_joined": (
        "(Tensor[] parts, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
        "float momentum, float eps, str activation, float lo, float hi, bool exact) -> (Tensor, Tensor, Tensor)"
    ),
    "batch_norm_activation_backward_joined": (
        f"(Tensor grad, Tensor[] parts, {_NORM}, str activation, float lo, float hi, bool[3] mask, "
        "Tensor? residual=None) -> (Tensor, Tensor, Tensor)"
    ),
    "rms_norm": ("(Tensor x, Tensor? weight, int dims, float eps, bool rounded, ScalarType dtype) -> (Tensor, Tensor)"),
    "rms_norm_apply": "(Tensor x, Tensor? weight, Tensor rstd, int dims, bool rounded, ScalarType dtype) -> Tensor",
    "rms_norm_backward": (
        "(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? residual, int dims) -> (Tensor, Tensor)"
    ),
    "cudnn_convolution": f"(Tensor x, Tensor weight, Tensor? bias, {_CONVOLUTION}",
    "cudnn_convolution_backward_input": f"(Tensor grad, Tensor weight, SymInt[4] input_size, {_CONVOLUTION}",
    "cudnn_convolution_backward_weight": f"(Tensor grad, Tensor x, SymInt[4] weight_size, {_CONVOLUTION}",
}

#: Compiled for CUDA alone, and only where cuDNN's headers are.
CUDNN = frozenset(name for name in SCHEMAS if name.startswith("cudnn_"))
