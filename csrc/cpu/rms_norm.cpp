// RMS norm on the CPU: the forward, the forward from saved reciprocal roots, and the gradient.

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "../checks.h"
#include "loops/rms_norm.h"

namespace monet_like::rms_norm {
namespace {

Rows rows_of(const at::Tensor& t) {
  return {t.defined() ? t.scalar_type() : at::kFloat, t.defined() ? t.const_data_ptr() : nullptr};
}

at::Tensor contiguous(const std::optional<at::Tensor>& t) {
  return given(t) ? t->contiguous() : at::Tensor();
}

std::tuple<at::Tensor, at::Tensor> rms_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, int64_t dims, double eps, bool rounded,
    at::ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm", x, weight, nullptr, dims);
  const at::Tensor in = x.contiguous(), by = contiguous(weight);
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  check_floating(y, "rms_norm", "the result");
  at::Tensor rstd = at::empty(shape.statistics, row_statistics_options(x));
  forward_loops(
      rows_of(in), rows_of(by), shape.rows, shape.width, eps, rounded, rstd.mutable_data_ptr(), false,
      dtype, y.mutable_data_ptr());
  return {y, rstd};
}

at::Tensor rms_norm_apply(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& rstd, int64_t dims, bool rounded,
    at::ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm_apply", x, weight, &rstd, dims);
  const at::Tensor in = x.contiguous(), known = rstd.contiguous(), by = contiguous(weight);
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  check_floating(y, "rms_norm_apply", "the result");
  forward_loops(
      rows_of(in), rows_of(by), shape.rows, shape.width, 0, rounded,
      const_cast<void*>(known.const_data_ptr()), true, dtype, y.mutable_data_ptr());
  return y;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& rstd,
    const std::optional<at::Tensor>& residual, int64_t dims) {
  const char* op = "rms_norm_backward";
  const RowShape shape = check_rows(op, x, weight, &rstd, dims);
  check_row_gradients(op, x, grad, residual);
  at::Tensor grad_x = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  const at::Tensor sums =
      at::zeros({shape.width}, x.options().dtype(at::kDouble).memory_format(at::MemoryFormat::Contiguous));
  const at::Tensor in = x.contiguous(), upstream = grad.contiguous(), known = rstd.contiguous();
  const at::Tensor before = contiguous(residual), by = contiguous(weight);
  backward_loops(
      rows_of(upstream), rows_of(in), rows_of(by), known.const_data_ptr(), rows_of(before), shape.rows, shape.width,
      grad_x.mutable_data_ptr(), sums.mutable_data_ptr<double>());
  return {grad_x, given(weight) ? sums.to(weight->scalar_type()).view(weight->sizes()) : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_apply", &rms_norm_apply);
  m.impl("rms_norm_backward", &rms_norm_backward);
}

}  // namespace monet_like::rms_norm
