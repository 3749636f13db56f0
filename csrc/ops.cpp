// Operator schemas, once for every device. Device files register kernels under the same names, and
// monet_like/ops/registry.py repeats the strings for a machine without this library (a test compares them).
//
// All operators run below autograd and are functional, except those whose name ends in `_` and batch_norm_train(_joined),
// which moves the running statistics as training-mode batch norm does.

#include <torch/library.h>

TORCH_LIBRARY(monet_like, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  // One bit per element. `stride` is the stride of the tensor that was packed; [] means "as this tensor".
  m.def("pack_sign(Tensor x) -> Tensor", tags);
  m.def("keep_where(Tensor x, Tensor mask, int[] stride=[]) -> Tensor", tags);
  m.def("keep_where_(Tensor(a!) x, Tensor mask, int[] stride=[]) -> Tensor(a!)", tags);
  m.def("pack_range(Tensor x, float lo, float hi) -> Tensor", tags);
  m.def("pack_bool(Tensor mask) -> Tensor", tags);
  m.def("unpack_bool(Tensor packed, SymInt[] size, SymInt[] stride=[]) -> Tensor", tags);
  m.def(
      "masked_scale(Tensor x, Tensor packed, float scale, int[] stride=[], float otherwise=0.0) -> Tensor", tags);

  // Two numbers below 16 to the byte, the first one in the low half.
  m.def("pack_nibbles(Tensor x) -> Tensor", tags);
  m.def("unpack_nibbles(Tensor packed, SymInt[] size, SymInt[] stride=[]) -> Tensor", tags);

  // Lossy caches, bytes whose layout is in caches.h: the `keep` largest of every 16,384 elements, or 8 bits for each.
  m.def("pack_largest(Tensor x, int keep) -> Tensor", tags);
  m.def("unpack_largest(Tensor packed, int keep, SymInt[] size, ScalarType dtype, SymInt[] stride=[]) -> Tensor", tags);
  m.def("mm_largest(Tensor grad, Tensor packed, int keep, SymInt columns, bool transposed=False) -> Tensor", tags);
  m.def("pack_int8(Tensor x) -> Tensor", tags);
  m.def("unpack_int8(Tensor packed, SymInt[] size, ScalarType dtype, SymInt[] stride=[]) -> Tensor", tags);

  // Max pooling with one byte per output: the cell inside its window, kernel row * kernel width + kernel column.
  m.def(
      "max_pool2d_with_offsets(Tensor x, int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, "
      "bool ceil_mode) -> (Tensor, Tensor)",
      tags);
  m.def(
      "max_pool2d_offsets(Tensor indices, SymInt[] input_size, int[2] kernel, int[2] stride, int[2] padding, "
      "int[2] dilation) -> Tensor",
      tags);
  m.def(
      "max_pool2d_offsets_to_indices(Tensor offsets, SymInt[] input_size, int[2] kernel, int[2] stride, "
      "int[2] padding, int[2] dilation) -> Tensor",
      tags);
  m.def(
      "max_pool2d_offsets_backward(Tensor grad, Tensor offsets, SymInt[] input_size, int[2] kernel, int[2] stride, "
      "int[2] padding, int[2] dilation) -> Tensor",
      tags);

  // Training-mode batch norm, plus a residual if there is one, and an activation: "clamp" to lo and hi ((0, inf) is
  // ReLU, (-inf, inf) nothing), "leaky_relu" of slope lo, "hardswish" or "silu". Without `exact` the mean and variance
  // agree with ATen's to rounding. To the gradient of x another one may be added, `residual`, which may be channels of a
  // larger tensor.
  m.def(
      "batch_norm_apply(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor? residual, "
      "str activation, float lo, float hi) -> Tensor",
      tags);
  m.def(
      "batch_norm_train(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "float momentum, float eps, Tensor? residual, str activation, float lo, float hi, bool exact) "
      "-> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "batch_norm_activation_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
      "str activation, float lo, float hi, bool[3] mask, Tensor? residual=None) -> (Tensor, Tensor, Tensor)",
      tags);

  // The same operators for tensors joined along the channels; each tensor is read in place, without concatenation.
  m.def(
      "batch_norm_apply_joined(Tensor[] parts, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, "
      "str activation, float lo, float hi) -> Tensor",
      tags);
  m.def(
      "batch_norm_train_joined(Tensor[] parts, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, float momentum, float eps, str activation, float lo, float hi, bool exact) "
      "-> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "batch_norm_activation_backward_joined(Tensor grad, Tensor[] parts, Tensor? weight, Tensor? bias, Tensor mean, "
      "Tensor invstd, str activation, float lo, float hi, bool[3] mask, Tensor? residual=None) "
      "-> (Tensor, Tensor, Tensor)",
      tags);

  // RMS norm over the last `dims` dimensions: the result in a dtype, and the reciprocal root of each row. `rounded` is
  // for a result of the normalisation that is stored like x before it meets the weight. The gradient may be added to
  // another one, `residual`; that of the weight is none without a weight.
  m.def(
      "rms_norm(Tensor x, Tensor? weight, int dims, float eps, bool rounded, ScalarType dtype) -> (Tensor, Tensor)",
      tags);
  m.def(
      "rms_norm_apply(Tensor x, Tensor? weight, Tensor rstd, int dims, bool rounded, ScalarType dtype) -> Tensor", tags);
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? residual, int dims) "
      "-> (Tensor, Tensor)",
      tags);

  // silu(gate) * up, and both of its gradients: the gate's first.
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor", tags);
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", tags);

  // Convolutions [N, C, H, W] by one of cuDNN's algorithms (cudnn/convolution.cpp), and their two gradients.
  m.def(
      "cudnn_convolution(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, int[2] dilation, "
      "int groups, bool channels_last, str algorithm) -> Tensor",
      tags);
  m.def(
      "cudnn_convolution_backward_input(Tensor grad, Tensor weight, SymInt[4] input_size, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups, bool channels_last, str algorithm) -> Tensor",
      tags);
  m.def(
      "cudnn_convolution_backward_weight(Tensor grad, Tensor x, SymInt[4] weight_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, bool channels_last, str algorithm) -> Tensor",
      tags);
}
