// Batch norm in training mode: mean and inverse standard deviation of every channel, ATen's or computed here.

#include <cmath>

#include "batch_norm.h"

namespace monet_like::batch_norm {

namespace {

double inverse_std(double variance, double eps) {
  return variance == 0 && eps == 0 ? 0 : 1 / std::sqrt(variance + eps);
}

// Updates a running statistic with new values times `factor`. As by ATen's batch norm, its version is not counted.
void move(const Tensor& running, const std::vector<double>& values, double factor, double momentum) {
  with_dtype(running.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    T* data = running.mutable_data_ptr<T>();
    const int64_t stride = running.stride(0);
    for (size_t c = 0; c < values.size(); ++c) {
      T& value = data[static_cast<int64_t>(c) * stride];
      value = static_cast<T>((1 - momentum) * static_cast<double>(value) + momentum * (factor * values[c]));
    }
  });
}

}  // namespace

Tensor per_channel(const std::vector<double>& values, const TensorOptions& options) {
  const int64_t channels = static_cast<int64_t>(values.size());
  Tensor t = empty({channels}, options);
  with_dtype(t.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    T* to = t.mutable_data_ptr<T>();
    for (int64_t c = 0; c < channels; ++c) {
      to[c] = static_cast<T>(values[c]);
    }
  });
  return t;
}

Statistics own_statistics(
    const Tensor& x, const NormShape& shape, const TensorOptions& options,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
    double eps) {
  const Tensor in = x.contiguous(norm_format(x));
  std::vector<double> mean(shape.channels), variance(shape.channels);
  moments_loops(memory_of(in, shape), mean.data(), variance.data());
  if (given(running_mean)) {
    move(*running_mean, mean, 1, momentum);
  }
  if (given(running_var)) {
    const double count = static_cast<double>(shape.batch * shape.image);
    move(*running_var, variance, count / (count - 1), momentum);
  }
  for (double& value : variance) {
    value = inverse_std(value, eps);
  }
  return {per_channel(mean, options), per_channel(variance, options)};
}

Statistics statistics_of_aten(
    const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var,
    double momentum, double eps) {
  auto [mean, invstd] = batch_norm_update_stats(x, running_mean, running_var, momentum);
  // `invstd` still holds the variance. ATen computes its inverse root in double and rounds once.
  with_dtype(x.scalar_type(), [&, &invstd = invstd](auto zero) {
    using T = decltype(zero);
    T* value = invstd.mutable_data_ptr<T>();
    for (int64_t c = 0; c < invstd.numel(); ++c) {
      value[c] = static_cast<T>(inverse_std(static_cast<double>(value[c]), eps));
    }
  });
  return {mean, invstd};
}

Three batch_norm_train(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
    double eps, const MaybeTensor& residual, std::string_view activation, double lo, double hi,
    bool exact) {
  const char* op = "batch_norm_train";
  const NormShape shape = check_norm(op, x, weight, bias, nullptr, nullptr);
  check_residual(op, x, residual);
  const Activation follows = check_activation(op, activation);
  const auto finish = [&](const Tensor& mean, const Tensor& invstd) {
    return apply(x, shape, {weight, bias, mean, invstd, residual, follows, lo, hi});
  };
  if (!exact && x.numel() > 0) {
    const auto [mean, invstd] = own_statistics(
        x, shape, statistics_options(x, {weight, bias, running_mean, running_var}), running_mean, running_var, momentum,
        eps);
    return {finish(mean, invstd), mean, invstd};
  }
  if (x.numel() == 0 || !is_full_precision(x) || norm_layout(x) == NormLayout::Strided) {
    // ATen derives invstd from a variance it does not round; only its own operator can repeat that here.
    auto [y, mean, invstd] = native_batch_norm(x, weight, bias, running_mean, running_var, momentum, eps);
    return {finish_(y, residual, follows, lo, hi), mean, invstd};
  }
  const auto [mean, invstd] = statistics_of_aten(x, running_mean, running_var, momentum, eps);
  return {finish(mean, invstd), mean, invstd};
}

}  // namespace monet_like::batch_norm
