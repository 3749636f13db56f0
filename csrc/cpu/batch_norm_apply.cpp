// Batch norm from saved statistics, with the addition and the activation that follow it.

#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include "batch_norm.h"

namespace monet_like::batch_norm {

namespace {

// Whether the processor can run the loops with fused products.
bool can_fuse() {
#if MONET_HAS_ISA
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

// ATen's dense CPU kernel computes x * alpha + beta. Whether its compiler fused the product into the sum depends
// on the instruction set ATen runs with, so ask ATen once: the answer makes our y equal to its y, bit for bit.
Formula dense_formula() {
  static const Formula found = [] {
    constexpr int64_t kChannels = 8, kRows = 64;
    at::Tensor x = at::empty({kRows, kChannels}, at::kFloat), weight = at::empty({kChannels}, at::kFloat);
    at::Tensor bias = at::empty({kChannels}, at::kFloat);
    uint32_t state = 1;
    const auto draw = [&] { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f; };
    for (at::Tensor* t : {&x, &weight, &bias}) {
      std::generate_n(t->mutable_data_ptr<float>(), t->numel(), draw);
    }
    const auto [y, mean, invstd] =
        at::native_batch_norm(x, weight, bias, std::nullopt, std::nullopt, true, 0.1, 1e-5);
    const float* in = x.const_data_ptr<float>();
    const float* out = y.const_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) {
      const int64_t c = i % kChannels;
      const Channel<float> k = channel_constants<Formula::Folded>(
          weight.const_data_ptr<float>()[c], bias.const_data_ptr<float>()[c], mean.const_data_ptr<float>()[c],
          invstd.const_data_ptr<float>()[c]);
      if (normalised<Formula::Folded>(in[i], k.a, k.b, k.mean, k.invstd) != out[i]) {
        return can_fuse() ? Formula::FoldedFma : Formula::Folded;
      }
    }
    return Formula::Folded;
  }();
  return found;
}

}  // namespace

Formula formula_for(NormLayout layout) {
  return layout == NormLayout::Strided ? Formula::Plain : dense_formula();
}

namespace {

// The activation by ATen's own operators, in place.
at::Tensor activate_(at::Tensor y, Activation activation, double lo, double hi) {
  switch (activation) {
    case Activation::Clamp:
      return lo == 0 && hi == kInfinity ? at::relu_(y) : y.clamp_(lo, hi);
    case Activation::LeakyRelu:
      return at::leaky_relu_(y, lo);
    case Activation::Hardswish:
      return at::hardswish_(y);
    case Activation::Silu:
      return at::silu_(y);
  }
  return y;
}

}  // namespace

void apply_to(const at::Tensor& x, const NormShape& shape, const Forward& forward, at::Tensor out) {
  const Formula formula = formula_for(norm_layout(x));
  const auto format = norm_format(x);
  const at::Tensor in = x.contiguous(format);
  if (x.numel() == 0) {
    return;
  }
  const bool has_residual = given(forward.residual);
  if (!is_compiled(forward.activation, formula, x.scalar_type(), has_residual)) {
    Forward before = forward;
    before.activation = Activation::Clamp;
    before.lo = -kInfinity;
    before.hi = kInfinity;
    apply_to(x, shape, before, out);
    activate_(out, forward.activation, forward.lo, forward.hi);
    return;
  }
  const at::Tensor residual = has_residual ? forward.residual->contiguous(format) : at::Tensor();
  const LayerMemory memory(
      x.scalar_type(), formula, forward.weight, forward.bias, forward.mean, forward.invstd, forward.activation,
      forward.lo, forward.hi);
  apply_loops(
      memory_of(in, shape), memory.layer, has_residual ? residual.const_data_ptr() : nullptr,
      {out.mutable_data_ptr(), out.stride(0)});
}

at::Tensor apply(const at::Tensor& x, const NormShape& shape, const Forward& forward) {
  at::Tensor out = at::empty(x.sizes(), x.options().memory_format(norm_format(x)));
  apply_to(x, shape, forward, out);
  return out;
}

// One pass does both if that gives the bits of ATen's operators.
at::Tensor finish_(
    at::Tensor y, const MaybeTensor& residual, Activation activation, double lo, double hi) {
  const bool half = y.scalar_type() == at::kHalf || y.scalar_type() == at::kBFloat16;
  const bool dense = half && activation == Activation::Clamp && is_dense(y.sizes(), y.strides());
  if (!dense || (given(residual) && residual->strides() != y.strides())) {
    if (given(residual)) {
      y.add_(*residual);
    }
    return activate_(y, activation, lo, hi);
  }
  if (!given(residual) && lo == -kInfinity && hi == kInfinity) {
    return y;
  }
  finish_loops(
      y.scalar_type(), y.mutable_data_ptr(), given(residual) ? residual->const_data_ptr() : nullptr, y.numel(), lo, hi);
  return y;
}

at::Tensor batch_norm_apply(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const at::Tensor& mean, const at::Tensor& invstd, const MaybeTensor& residual,
    c10::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_residual(op, x, residual);
  return apply(x, shape, {weight, bias, mean, invstd, residual, check_activation(op, activation), lo, hi});
}

}  // namespace monet_like::batch_norm
