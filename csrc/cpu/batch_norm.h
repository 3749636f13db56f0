// Declarations that the files of batch norm on the CPU share. batch_norm_apply.cpp normalises, adds and activates,
// batch_norm_train.cpp computes the statistics, batch_norm_backward.cpp the gradients; batch_norm_joined.cpp does all
// three on tensors joined along the channels.

#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../checks.h"
#include "isa.h"

namespace monet_like::batch_norm {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Images of fewer elements are slow one by one: too large a part of them does not fill a vector.
inline constexpr int64_t kShortImage = 256;

// Elements that are summed in single precision before their sum is added in double.
inline constexpr int64_t kBlock = 4096;

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Statistics = std::tuple<at::Tensor, at::Tensor>;  // mean and invstd, one number for each channel
using MaybeTensor = std::optional<at::Tensor>;

// A batch norm from its saved statistics, and the addition and the activation that follow it.
struct Forward {
  MaybeTensor weight, bias;
  at::Tensor mean, invstd;
  MaybeTensor residual;
  Activation activation;
  double lo, hi;
};

// A batch norm and its activation, as the gradient needs them.
struct Backward {
  Formula formula;
  MaybeTensor weight, bias;
  at::Tensor mean, invstd;
  Activation activation;
  double lo, hi;
};

// ---- batch_norm_apply.cpp ----

// The formula by which ATen normalises a tensor of this layout, so that our y has the bits of its y.
Formula formula_for(NormLayout layout);
// Normalise x into `out`: a tensor laid out as batch norm's result is, or channels of one that is contiguous.
void apply_to(const at::Tensor& x, const NormShape& shape, const Forward& forward, at::Tensor out);
at::Tensor apply(const at::Tensor& x, const NormShape& shape, const Forward& forward);
// Add the residual and apply the activation to y, in place.
at::Tensor finish_(at::Tensor y, const MaybeTensor& residual, Activation activation, double lo, double hi);
at::Tensor batch_norm_apply(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const at::Tensor& mean,
    const at::Tensor& invstd, const MaybeTensor& residual, c10::string_view activation, double lo, double hi);

// ---- batch_norm_train.cpp ----

// Mean and invstd computed here, equal to ATen's up to rounding and faster: ATen's loop over a channel has no vectors.
// This and the next function update the running statistics.
Statistics own_statistics(
    const at::Tensor& x, const NormShape& shape, const at::TensorOptions& options, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, double momentum, double eps);
// Mean and invstd computed by ATen, of a dense float32 or float64 tensor.
Statistics statistics_of_aten(
    const at::Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum, double eps);
// One number for each channel, rounded to the dtype of the options.
at::Tensor per_channel(const std::vector<double>& values, const at::TensorOptions& options);
Three batch_norm_train(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, double momentum, double eps, const MaybeTensor& residual,
    c10::string_view activation, double lo, double hi, bool exact);

// ---- batch_norm_backward.cpp ----

// Write the gradient of x into `grad_input`, if it is defined, and sum g and sum (x - m) g of each channel into `sums`.
// Tensors are laid out as x is for batch norm, or are channels of contiguous ones if x is contiguous; the activation is
// compiled with the batch norm.
void backward_to(
    const at::Tensor& grad, const at::Tensor& x, const NormShape& shape, const Backward& b,
    const at::Tensor& grad_input, const at::Tensor& residual, double* sums);
// Gradients for weight and bias from the sums of `backward_to`; undefined where `mask` is false.
std::tuple<at::Tensor, at::Tensor> parameter_gradients(
    std::vector<double> sums, const MaybeTensor& weight, const at::Tensor& mean, const at::Tensor& invstd,
    std::array<bool, 3> mask);
// The gradient to be added, as `backward_to` can read it: copied if it is neither laid out as x nor channels of such a
// tensor; undefined if there is none.
at::Tensor added(const MaybeTensor& residual, const at::Tensor& x, const NormShape& shape);
Three batch_norm_activation_backward(
    const at::Tensor& grad, const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const at::Tensor& mean, const at::Tensor& invstd, c10::string_view activation, double lo, double hi,
    std::array<bool, 3> mask, const MaybeTensor& residual);

// ---- for all of them ----

// Whether a loop runs over rows of adjacent channels instead of over the images of one channel.
inline bool by_rows(NormLayout layout, const NormShape& shape) {
  return layout == NormLayout::ChannelsLast || shape.image == 1;
}

inline bool is_full_precision(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
}

// Turns a formula known at run time into a template argument.
template <typename F>
void with_formula(Formula formula, const F& f) {
  switch (formula) {
    case Formula::Folded:
      return f(std::integral_constant<Formula, Formula::Folded>{});
    case Formula::FoldedFma:
      return f(std::integral_constant<Formula, Formula::FoldedFma>{});
    case Formula::Plain:
      return f(std::integral_constant<Formula, Formula::Plain>{});
    case Formula::Cuda:  // not on a CPU
      return;
  }
}

// Whether an activation is compiled into the loop of the batch norm. Clamps always are; other activations only for
// common dtypes and layouts, because each dtype, formula and instruction set is code of its own. Elsewhere ATen's
// operators activate.
template <Activation A, Formula F, typename T, bool Residual = false>
constexpr bool kCompiled =
    A == Activation::Clamp ||
    (!Residual && F != Formula::Plain && (std::is_same_v<T, float> || std::is_same_v<T, c10::BFloat16>));

inline bool is_compiled(Activation activation, Formula formula, at::ScalarType type, bool residual) {
  return activation == Activation::Clamp ||
         (!residual && formula != Formula::Plain && (type == at::kFloat || type == at::kBFloat16));
}

// Per-channel constants as arrays, in the type of the computation.
template <typename O>
struct Constants {
  std::vector<O> a, b, mean, invstd, weight;
};

template <typename O>
std::vector<O> to_vector(const at::Tensor& t) {
  const at::Tensor values = t.to(c10::CppTypeToScalarType<O>::value).contiguous();
  const O* data = values.template const_data_ptr<O>();
  return std::vector<O>(data, data + values.numel());
}

template <typename O>
std::vector<O> to_vector(const MaybeTensor& t, int64_t n, O otherwise) {
  return t.has_value() && t->defined() ? to_vector<O>(*t) : std::vector<O>(n, otherwise);
}

template <typename O>
Constants<O> constants(
    Formula formula, int64_t channels, const MaybeTensor& weight, const MaybeTensor& bias,
    const at::Tensor& mean, const at::Tensor& invstd) {
  Constants<O> k;
  k.weight = to_vector<O>(weight, channels, O(1));
  k.mean = to_vector<O>(mean);
  k.invstd = to_vector<O>(invstd);
  const std::vector<O> bias_values = to_vector<O>(bias, channels, O(0));
  k.a.resize(channels);
  k.b.resize(channels);
  // With float16 parameters ATen's constants come out unfused even where its loop is fused (bfloat16 cannot tell).
  if (formula == Formula::FoldedFma && mean.scalar_type() == at::kHalf) {
    formula = Formula::Folded;
  }
  for (int64_t c = 0; c < channels; ++c) {
    const O w = k.weight[c], b = bias_values[c], m = k.mean[c], s = k.invstd[c];
    const Channel<O> one = formula == Formula::Plain    ? channel_constants<Formula::Plain>(w, b, m, s)
                           : formula == Formula::Folded ? channel_constants<Formula::Folded>(w, b, m, s)
                                                        : channel_constants<Formula::FoldedFma>(w, b, m, s);
    k.a[c] = one.a;
    k.b[c] = one.b;
  }
  return k;
}

// Copies the images of one channel, `pitch` elements apart, one after the other, in the type of the computation.
template <typename T, typename O>
MONET_BODY void gather_images_body(const T* in, O* out, int64_t batch, int64_t image, int64_t pitch) {
  for (int64_t n = 0; n < batch; ++n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < image; ++i) {
      out[n * image + i] = load(in[n * pitch + i]);
    }
  }
}
MONET_FOR_EACH_ISA(gather_images)

// Whether sums over a channel read its images gathered in one place, so that no vector is cut short.
inline bool gathers_images(const NormShape& shape) {
  return shape.image < kShortImage && shape.batch > 1 && shape.batch * shape.image <= (1 << 16);
}

}  // namespace monet_like::batch_norm
