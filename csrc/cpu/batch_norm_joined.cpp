// Batch norm of tensors joined along the channels, which are read where they are if their layouts allow it.

#include "batch_norm.h"

namespace monet_like::batch_norm {

namespace {

// Some entries of a tensor with one number for each channel.
MaybeTensor channels_of(const MaybeTensor& t, int64_t first, int64_t count) {
  return given(t) ? std::make_optional(t->narrow(0, first, count)) : std::nullopt;
}

// The same batch norm for some of its channels, without a residual.
Forward channels_of(const Forward& all, int64_t first, int64_t count) {
  return {channels_of(all.weight, first, count), channels_of(all.bias, first, count), all.mean.narrow(0, first, count),
          all.invstd.narrow(0, first, count), std::nullopt, all.activation, all.lo, all.hi};
}

Tensor apply_joined(TensorList parts, const NormShape& shape, const Forward& forward) {
  Tensor out = empty(joined_sizes(parts), parts[0].options());
  int64_t first = 0;
  for (const Tensor& part : parts) {
    const int64_t count = part.size(1);
    apply_to(part, {shape.batch, count, shape.image}, channels_of(forward, first, count), out.narrow(1, first, count));
    first += count;
  }
  return out;
}

Tensor batch_norm_apply_joined(
    TensorList parts, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor& mean, const Tensor& invstd, std::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_apply(cat(parts, 1), weight, bias, mean, invstd, std::nullopt, activation, lo, hi);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  return apply_joined(
      parts, shape, {weight, bias, mean, invstd, std::nullopt, check_activation(op, activation), lo, hi});
}

Three batch_norm_train_joined(
    TensorList parts, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
    double eps, std::string_view activation, double lo, double hi, bool exact) {
  const char* op = "batch_norm_train_joined";
  if (!check_parts(op, parts) || (exact && !is_full_precision(parts[0]))) {
    return batch_norm_train(
        cat(parts, 1), weight, bias, running_mean, running_var, momentum, eps, std::nullopt, activation, lo, hi,
        exact);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, nullptr, nullptr);
  const Activation follows = check_activation(op, activation);
  std::vector<Tensor> means, invstds;
  int64_t first = 0;
  for (const Tensor& part : parts) {
    const int64_t count = part.size(1);
    const auto channels = [&](const MaybeTensor& t) { return channels_of(t, first, count); };
    const auto [mean, invstd] =
        exact ? statistics_of_aten(part, channels(running_mean), channels(running_var), momentum, eps)
              : own_statistics(
                    part, {shape.batch, count, shape.image},
                    statistics_options(part, {weight, bias, running_mean, running_var}), channels(running_mean),
                    channels(running_var), momentum, eps);
    means.push_back(mean);
    invstds.push_back(invstd);
    first += count;
  }
  const Tensor mean = cat(means), invstd = cat(invstds);
  return {
      apply_joined(parts, shape, {weight, bias, mean, invstd, std::nullopt, follows, lo, hi}), mean, invstd};
}

Three batch_norm_activation_backward_joined(
    const Tensor& grad, TensorList parts, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& invstd,
    std::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const MaybeTensor& residual) {
  const char* op = "batch_norm_activation_backward_joined";
  const bool apart = check_parts(op, parts);
  const Activation follows = check_activation(op, activation);
  const Formula formula = formula_for(norm_layout(parts[0]));
  if (!apart || !is_compiled(follows, formula, parts[0].scalar_type(), false)) {
    return batch_norm_activation_backward(
        grad, cat(parts, 1), weight, bias, mean, invstd, activation, lo, hi, mask, residual);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  const std::vector<int64_t> sizes = joined_sizes(parts);
  check_gradient(op, grad, sizes, parts[0].scalar_type());
  const Tensor upstream = grad.contiguous();
  Tensor grad_input, other;
  if (mask[0]) {
    grad_input = empty(sizes, parts[0].options());
    check_residual(op, grad_input, residual);
    other = added(residual, grad_input, shape);
  }
  const auto channels = [](const Tensor& t, int64_t first, int64_t count) {
    return t.defined() ? t.narrow(1, first, count) : t;
  };
  std::vector<double> sums(2 * shape.channels, 0.0);
  int64_t first = 0;
  for (const Tensor& part : parts) {
    const int64_t count = part.size(1);
    std::vector<double> own(2 * count, 0.0);
    const Forward known = channels_of({weight, bias, mean, invstd, std::nullopt, follows, lo, hi}, first, count);
    backward_to(
        channels(upstream, first, count), part, {shape.batch, count, shape.image},
        {formula, known.weight, known.bias, known.mean, known.invstd, follows, lo, hi},
        channels(grad_input, first, count), channels(other, first, count), own.data());
    std::copy_n(own.data(), count, sums.data() + first);
    std::copy_n(own.data() + count, count, sums.data() + shape.channels + first);
    first += count;
  }
  const auto [grad_weight, grad_bias] = parameter_gradients(std::move(sums), weight, mean, invstd, mask);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

}  // namespace monet_like::batch_norm

// All operators of batch norm are registered here: torch/library.h takes long to compile.
MONET_KERNELS(CPU, m) {
  m.add<&monet_like::batch_norm::batch_norm_apply>("batch_norm_apply");
  m.add<&monet_like::batch_norm::batch_norm_train>("batch_norm_train");
  m.add<&monet_like::batch_norm::batch_norm_activation_backward>("batch_norm_activation_backward");
  m.add<&monet_like::batch_norm::batch_norm_apply_joined>("batch_norm_apply_joined");
  m.add<&monet_like::batch_norm::batch_norm_train_joined>("batch_norm_train_joined");
  m.add<&monet_like::batch_norm::batch_norm_activation_backward_joined>("batch_norm_activation_backward_joined");
}
