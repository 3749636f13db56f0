// Batch norm from saved statistics, with the addition and the activation that follow it.

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
    const TensorOptions options{kFloat, {aoti_torch_device_type_cpu(), 0}};
    const Tensor x = empty({kRows, kChannels}, options), weight = empty({kChannels}, options);
    const Tensor bias = empty({kChannels}, options);
    uint32_t state = 1;
    const auto draw = [&] { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f; };
    for (const Tensor* t : {&x, &weight, &bias}) {
      std::generate_n(t->mutable_data_ptr<float>(), t->numel(), draw);
    }
    const auto [y, mean, invstd] =
        native_batch_norm(x, weight, bias, std::nullopt, std::nullopt, 0.1, 1e-5);
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
Tensor activate_(const Tensor& y, Activation activation, double lo, double hi) {
  switch (activation) {
    case Activation::Clamp:
      return lo == 0 && hi == kInfinity ? call("aten::relu_", "", y)
                                          : call("aten::clamp_", "Tensor", y, MaybeTensor(number(lo)), MaybeTensor(number(hi)));
    case Activation::LeakyRelu:
      return y.copy_(leaky_relu_gradient(y, y, lo));
    case Activation::Hardswish:
      return call("aten::hardswish_", "", y);
    case Activation::Silu:
      return call("aten::silu_", "", y);
  }
  return y;
}

}  // namespace

void apply_to(const Tensor& x, const NormShape& shape, const Forward& forward, Tensor out) {
  const Formula formula = formula_for(norm_layout(x));
  const auto format = norm_format(x);
  const Tensor in = x.contiguous(format);
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
  const Tensor residual = has_residual ? forward.residual->contiguous(format) : Tensor();
  const LayerMemory memory(
      x.scalar_type(), formula, forward.weight, forward.bias, forward.mean, forward.invstd, forward.activation,
      forward.lo, forward.hi);
  apply_loops(
      memory_of(in, shape), memory.layer, has_residual ? residual.const_data_ptr() : nullptr,
      {out.mutable_data_ptr(), out.stride(0)});
}

Tensor apply(const Tensor& x, const NormShape& shape, const Forward& forward) {
  Tensor out = empty(x.sizes(), x.options().memory_format(norm_format(x)));
  apply_to(x, shape, forward, out);
  return out;
}

// One pass does both if that gives the bits of ATen's operators.
Tensor finish_(
    Tensor y, const MaybeTensor& residual, Activation activation, double lo, double hi) {
  const bool half = y.scalar_type() == kHalf || y.scalar_type() == kBFloat16;
  const bool dense = half && activation == Activation::Clamp && is_dense(y.sizes(), y.strides());
  if (!dense || (given(residual) && residual->strides() != y.strides())) {
    if (given(residual)) {
      AtenTensorHandle sum = nullptr;
      MONET_TORCH(aoti_torch_aten_subtract_Tensor, y.get(), residual->get(), -1.0, &sum);
      y = Tensor(sum);
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

Tensor batch_norm_apply(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor& mean, const Tensor& invstd, const MaybeTensor& residual,
    std::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_residual(op, x, residual);
  return apply(x, shape, {weight, bias, mean, invstd, residual, check_activation(op, activation), lo, hi});
}

}  // namespace monet_like::batch_norm
