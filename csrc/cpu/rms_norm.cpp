// RMS norm on the CPU: the forward, the forward from saved reciprocal roots, and the gradient.

#include <tuple>

#include "../checks.h"
#include "loops/rms_norm.h"

namespace monet_like::rms_norm {
namespace {

Rows rows_of(const Tensor& t) {
  return {t.defined() ? t.scalar_type() : kFloat, t.defined() ? t.const_data_ptr() : nullptr};
}

Tensor contiguous(const MaybeTensor& t) {
  return given(t) ? t->contiguous() : Tensor();
}

std::tuple<Tensor, Tensor> rms_norm(
    const Tensor& x, const MaybeTensor& weight, int64_t dims, double eps, bool rounded,
    ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm", x, weight, nullptr, dims);
  const Tensor in = x.contiguous(), by = contiguous(weight);
  Tensor y = empty(x.sizes(), x.options().dtype(dtype));
  check_floating(y, "rms_norm", "the result");
  Tensor rstd = empty(shape.statistics, row_statistics_options(x));
  forward_loops(
      rows_of(in), rows_of(by), shape.rows, shape.width, eps, rounded, rstd.mutable_data_ptr(), false,
      dtype, y.mutable_data_ptr());
  return {y, rstd};
}

Tensor rms_norm_apply(
    const Tensor& x, const MaybeTensor& weight, const Tensor& rstd, int64_t dims, bool rounded,
    ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm_apply", x, weight, &rstd, dims);
  const Tensor in = x.contiguous(), known = rstd.contiguous(), by = contiguous(weight);
  Tensor y = empty(x.sizes(), x.options().dtype(dtype));
  check_floating(y, "rms_norm_apply", "the result");
  forward_loops(
      rows_of(in), rows_of(by), shape.rows, shape.width, 0, rounded,
      const_cast<void*>(known.const_data_ptr()), true, dtype, y.mutable_data_ptr());
  return y;
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight, const Tensor& rstd,
    const MaybeTensor& residual, int64_t dims) {
  const char* op = "rms_norm_backward";
  const RowShape shape = check_rows(op, x, weight, &rstd, dims);
  check_row_gradients(op, x, grad, residual);
  Tensor grad_x = empty(x.sizes(), x.options());
  const Tensor sums =
      empty({shape.width}, x.options().dtype(kDouble)).zero_();
  const Tensor in = x.contiguous(), upstream = grad.contiguous(), known = rstd.contiguous();
  const Tensor before = contiguous(residual), by = contiguous(weight);
  backward_loops(
      rows_of(upstream), rows_of(in), rows_of(by), known.const_data_ptr(), rows_of(before), shape.rows, shape.width,
      grad_x.mutable_data_ptr(), sums.mutable_data_ptr<double>());
  return {grad_x, given(weight) ? sums.to(weight->scalar_type()).view(weight->sizes()) : Tensor()};
}

}  // namespace

MONET_KERNELS(CPU, m) {
  m.add<&rms_norm>("rms_norm");
  m.add<&rms_norm_apply>("rms_norm_apply");
  m.add<&rms_norm_backward>("rms_norm_backward");
}

}  // namespace monet_like::rms_norm
