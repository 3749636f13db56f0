// The gradient of training-mode batch norm and of the activation that follows it.

#include "batch_norm.h"

namespace monet_like::batch_norm {

namespace {

// The gradient through an activation that is not compiled into the loop of the batch norm, by ATen.
Tensor through(const Tensor& grad, const Tensor& y, Activation activation, double slope) {
  switch (activation) {
    case Activation::LeakyRelu:
      return leaky_relu_gradient(grad, y, slope);
    case Activation::Hardswish:
      return call("aten::hardswish_backward", "", grad, y);
    case Activation::Silu:
      return call("aten::silu_backward", "", grad, y);
    case Activation::Clamp:
      break;
  }
  return grad;
}

}  // namespace

void backward_to(
    const Tensor& grad, const Tensor& x, const NormShape& shape, const Backward& b,
    const Tensor& grad_input, const Tensor& residual, double* sums) {
  const Input memory = memory_of(x, shape);
  const LayerMemory layer(
      x.scalar_type(), b.formula, b.weight, b.bias, b.mean, b.invstd, b.activation, b.lo, b.hi);
  const auto pitch = [&](const Tensor& t) { return t.defined() ? pitch_of(t, memory.by_rows) : 0; };
  // The loops keep the gradient through a costly activation where the result will be.
  const Tensor out = !grad_input.defined() && is_costly(b.activation) ? empty_like(x) : grad_input;
  backward_loops(
      memory, layer.layer, {grad.const_data_ptr(), pitch(grad)},
      {out.defined() ? out.mutable_data_ptr() : nullptr, pitch(out)},
      {residual.defined() ? residual.const_data_ptr() : nullptr, pitch(residual)}, sums);
}

std::tuple<Tensor, Tensor> parameter_gradients(
    std::vector<double> sums, const MaybeTensor& weight, const Tensor& mean, const Tensor& invstd,
    std::array<bool, 3> mask) {
  const int64_t channels = static_cast<int64_t>(sums.size()) / 2;
  const TensorOptions options = given(weight) ? weight->options() : mean.options();
  Tensor grad_weight, grad_bias;
  if (mask[1]) {
    const Tensor wide = invstd.to(kDouble).contiguous();
    std::vector<double> dots(wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + channels);
    for (int64_t c = 0; c < channels; ++c) {
      dots[c] *= sums[channels + c];
    }
    grad_weight = per_channel(dots, options);
  }
  if (mask[2]) {
    sums.resize(channels);
    grad_bias = per_channel(sums, options);
  }
  return {grad_weight, grad_bias};
}

Tensor added(const MaybeTensor& residual, const Tensor& x, const NormShape& shape) {
  if (!given(residual)) {
    return Tensor();
  }
  const bool fits = pitch_of(*residual, by_rows(norm_layout(x), shape)) >= 0;
  return fits ? *residual : residual->contiguous(norm_format(x));
}

Three batch_norm_activation_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& invstd,
    std::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const MaybeTensor& residual) {
  const char* op = "batch_norm_activation_backward";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_gradient(op, grad, x.sizes(), x.scalar_type());
  check_residual(op, x, residual);
  const Activation follows = check_activation(op, activation);
  const auto format = norm_format(x);
  const Formula formula = formula_for(norm_layout(x));
  if (!is_compiled(follows, formula, x.scalar_type(), false)) {
    const Forward plain{weight, bias, mean, invstd, std::nullopt, Activation::Clamp, -kInfinity, kInfinity};
    const Tensor y = apply(x, shape, plain);
    return batch_norm_activation_backward(
        through(grad, y, follows, lo), x, weight, bias, mean, invstd, "clamp", -kInfinity, kInfinity, mask, residual);
  }
  Tensor grad_input;
  if (mask[0]) {
    grad_input = empty(x.sizes(), x.options().memory_format(format));
  }
  std::vector<double> sums(2 * shape.channels, 0.0);
  if (x.numel() > 0) {
    const Tensor in = x.contiguous(format);
    backward_to(
        grad.contiguous(format), in, shape, {formula, weight, bias, mean, invstd, follows, lo, hi}, grad_input,
        mask[0] ? added(residual, in, shape) : Tensor(), sums.data());
  }
  const auto [grad_weight, grad_bias] = parameter_gradients(std::move(sums), weight, mean, invstd, mask);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace monet_like::batch_norm
