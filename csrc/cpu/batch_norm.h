// Declarations that the files of batch norm on the CPU share. batch_norm_apply.cpp normalises, adds and activates,
// batch_norm_train.cpp computes the statistics, batch_norm_backward.cpp the gradients; batch_norm_joined.cpp does all
// three on tensors joined along the channels.

#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "../checks.h"
#include "loops/batch_norm.h"

namespace monet_like::batch_norm {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Statistics = std::tuple<Tensor, Tensor>;  // mean and invstd, one number for each channel
using MaybeTensor = MaybeTensor;

// A batch norm from its saved statistics, and the addition and the activation that follow it.
struct Forward {
  MaybeTensor weight, bias;
  Tensor mean, invstd;
  MaybeTensor residual;
  Activation activation;
  double lo, hi;
};

// A batch norm and its activation, as the gradient needs them.
struct Backward {
  Formula formula;
  MaybeTensor weight, bias;
  Tensor mean, invstd;
  Activation activation;
  double lo, hi;
};

// ---- batch_norm_apply.cpp ----

// The formula by which ATen normalises a tensor of this layout, so that our y has the bits of its y.
Formula formula_for(NormLayout layout);
// Normalise x into `out`: a tensor laid out as batch norm's result is, or channels of one that is contiguous.
void apply_to(const Tensor& x, const NormShape& shape, const Forward& forward, Tensor out);
Tensor apply(const Tensor& x, const NormShape& shape, const Forward& forward);
// Add the residual and apply the activation to y, in place.
Tensor finish_(Tensor y, const MaybeTensor& residual, Activation activation, double lo, double hi);
Tensor batch_norm_apply(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean,
    const Tensor& invstd, const MaybeTensor& residual, std::string_view activation, double lo, double hi);

// ---- batch_norm_train.cpp ----

// Mean and invstd computed here, equal to ATen's up to rounding and faster: ATen's loop over a channel has no vectors.
// This and the next function update the running statistics.
Statistics own_statistics(
    const Tensor& x, const NormShape& shape, const TensorOptions& options, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, double momentum, double eps);
// Mean and invstd computed by ATen, of a dense float32 or float64 tensor.
Statistics statistics_of_aten(
    const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum, double eps);
// One number for each channel, rounded to the dtype of the options.
Tensor per_channel(const std::vector<double>& values, const TensorOptions& options);
Three batch_norm_train(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, double momentum, double eps, const MaybeTensor& residual,
    std::string_view activation, double lo, double hi, bool exact);

// ---- batch_norm_backward.cpp ----

// Write the gradient of x into `grad_input`, if it is defined, and sum g and sum (x - m) g of each channel into `sums`.
// Tensors are laid out as x is for batch norm, or are channels of contiguous ones if x is contiguous; the activation is
// compiled with the batch norm.
void backward_to(
    const Tensor& grad, const Tensor& x, const NormShape& shape, const Backward& b,
    const Tensor& grad_input, const Tensor& residual, double* sums);
// Gradients for weight and bias from the sums of `backward_to`; undefined where `mask` is false.
std::tuple<Tensor, Tensor> parameter_gradients(
    std::vector<double> sums, const MaybeTensor& weight, const Tensor& mean, const Tensor& invstd,
    std::array<bool, 3> mask);
// The gradient to be added, as `backward_to` can read it: copied if it is neither laid out as x nor channels of such a
// tensor; undefined if there is none.
Tensor added(const MaybeTensor& residual, const Tensor& x, const NormShape& shape);
Three batch_norm_activation_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor& mean, const Tensor& invstd, std::string_view activation, double lo, double hi,
    std::array<bool, 3> mask, const MaybeTensor& residual);

// ---- for all of them ----

// Whether a loop runs over rows of adjacent channels instead of over the images of one channel.
inline bool by_rows(NormLayout layout, const NormShape& shape) {
  return layout == NormLayout::ChannelsLast || shape.image == 1;
}

// The gradient through leaky ReLU of y; with y as the gradient, leaky ReLU itself. Both have ATen's bits.
inline Tensor leaky_relu_gradient(const Tensor& grad, const Tensor& y, double slope) {
  const Tensor positive = call("aten::gt", "Tensor", y, number(0));
  return call("aten::where", "self", positive, grad, call("aten::mul", "Tensor", grad, number(slope)));
}

inline bool is_full_precision(const Tensor& x) {
  return x.scalar_type() == kFloat || x.scalar_type() == kDouble;
}

// The memory of a tensor that is laid out as batch norm reads it.
inline Input memory_of(const Tensor& x, const NormShape& shape) {
  return {x.scalar_type(), shape, by_rows(norm_layout(x), shape), x.const_data_ptr()};
}

// A batch norm as its loops take it. It holds the tensors that the loops read.
struct LayerMemory {
  Tensor weight, bias, mean, invstd;
  Layer layer;

  LayerMemory(
      ScalarType x, Formula formula, const MaybeTensor& w, const MaybeTensor& b, const Tensor& m,
      const Tensor& s, Activation activation, double lo, double hi) {
    const auto computed = [&](const MaybeTensor& t) {
      return given(t) ? t->to(x == kDouble ? kDouble : kFloat).contiguous() : Tensor();
    };
    const auto data = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
    weight = computed(w);
    bias = computed(b);
    mean = computed(m);
    invstd = computed(s);
    layer = {formula, activation, lo, hi, data(weight), data(bias), data(mean), data(invstd),
             m.scalar_type() == kHalf};
  }
};

}  // namespace monet_like::batch_norm
