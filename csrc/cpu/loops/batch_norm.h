// The loops of batch norm. batch_norm_apply.cpp normalises, adds and activates, batch_norm_train.cpp computes the
// statistics, batch_norm_backward.cpp the gradients. batch_norm_steps.cpp has single steps on blocks of float32 that stay in the cache:
// float16 is computed step by step, so that no loop is compiled for it alone, and bfloat16 where that is as fast.

#pragma once

#include <limits>

#include "convert.h"

namespace monet_like::batch_norm {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Images of fewer elements are slow one by one: too large a part of them does not fill a vector.
inline constexpr int64_t kShortImage = 256;

// Elements that are summed in single precision before their sum is added in double.
inline constexpr int64_t kBlock = 4096;

// Elements that are computed step by step at a time: a few such blocks fit into a first-level cache.
inline constexpr int64_t kStep = 1024;

// ---- what the operators call ----

// Whether an activation is computed together with the batch norm: clamps always are, others only for common dtypes and
// layouts. Elsewhere ATen's operators activate.
inline bool is_compiled(Activation activation, Formula formula, c10::ScalarType type, bool residual) {
  return activation == Activation::Clamp || (!residual && formula == Formula::FoldedFma &&
                                             (type == c10::ScalarType::Float || type == c10::ScalarType::BFloat16));
}

// Whether such a loop is compiled: `is_compiled` when compiling.
template <Formula F, Activation A, typename T>
constexpr bool kHasLoop = A == Activation::Clamp ||
                          (F == Formula::FoldedFma && (std::is_same_v<T, float> || std::is_same_v<T, c10::BFloat16>));

// A batch norm and the activation that follows it. One number for each channel, in the type of the computation (float64 for
// float64, float32 for the other dtypes); weight and bias may be null.
struct Layer {
  Formula formula;
  Activation activation;
  double lo, hi;
  const void *weight, *bias, *mean, *invstd;
  bool half_statistics;  // mean and invstd were float16
};

// A tensor's memory.
struct Input {
  c10::ScalarType dtype;
  NormShape shape;
  bool by_rows;  // rows of adjacent channels instead of the images of each channel
  const void* data;
};

// A tensor or some of its channels, or nothing: `pitch` elements from one image, or one row, to the next.
template <typename T>
struct Pitched {
  T* data;
  int64_t pitch;
};

// Normalises x into `out`, adds `residual`, which may be null and is laid out as x, and activates. `out` is a whole tensor
// if x has rows.
void apply_loops(const Input& x, const Layer& layer, const void* residual, Pitched<void> out);

// Adds and clamps n elements of a 16-bit dtype in place; `residual` may be null.
void finish_loops(c10::ScalarType dtype, void* y, const void* residual, int64_t n, double lo, double hi);

// Writes the gradient of x into `out`, plus `residual`; both may be null, `out` only if the activation is not costly. Adds
// sum g and sum (x - m) g of each channel to sums[0..C) and sums[C..2C).
void backward_loops(
    const Input& x, const Layer& layer, Pitched<const void> grad, Pitched<void> out, Pitched<const void> residual,
    double* sums);

// Mean and variance of every channel.
void moments_loops(const Input& x, double* mean, double* variance);

// Whether the gradient through an activation is stored, where the result will be, because computing it twice would cost
// more. In 2-byte types storing rounds it, as ATen does.
constexpr bool is_costly(Activation activation) {
  return activation == Activation::Silu;
}

// ---- what the files of the loops share ----

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

// Steps in place on n elements of one channel, or on rows of `channels` adjacent ones.
void normalise_run(Formula formula, float* y, int64_t n, const Channel<float>& channel);
void normalise_rows(
    Formula formula, float* y, int64_t rows, int64_t channels, const float* a, const float* b, const float* mean,
    const float* invstd);
void add(float* y, const float* other, int64_t n);
void activate(Activation activation, float* y, int64_t n, float lo, float hi);
// Replaces a gradient by that through a clamp of y.
void clamp_gradients(float* grad, const float* y, int64_t n, float lo, float hi);

// Per-channel constants as arrays, in the type of the computation.
template <typename O>
struct Constants {
  std::vector<O> a, b, mean, invstd, weight;

  Channel<O> channel(int64_t c) const { return {a[c], b[c], mean[c], invstd[c]}; }
};

template <typename O>
Constants<O> constants(const Layer& layer, int64_t channels) {
  const auto copy = [&](const void* values, O otherwise) {
    const O* data = static_cast<const O*>(values);
    return data == nullptr ? std::vector<O>(channels, otherwise) : std::vector<O>(data, data + channels);
  };
  Constants<O> k{copy(nullptr, O(0)), copy(nullptr, O(0)), copy(layer.mean, O(0)), copy(layer.invstd, O(0)),
                 copy(layer.weight, O(1))};
  const std::vector<O> bias = copy(layer.bias, O(0));
  // With float16 parameters ATen's constants come out unfused even where its loop is fused (bfloat16 cannot tell).
  const Formula formula =
      layer.formula == Formula::FoldedFma && layer.half_statistics ? Formula::Folded : layer.formula;
  for (int64_t c = 0; c < channels; ++c) {
    const O w = k.weight[c], b = bias[c], m = k.mean[c], s = k.invstd[c];
    const Channel<O> one = formula == Formula::Plain    ? channel_constants<Formula::Plain>(w, b, m, s)
                           : formula == Formula::Folded ? channel_constants<Formula::Folded>(w, b, m, s)
                                                        : channel_constants<Formula::FoldedFma>(w, b, m, s);
    k.a[c] = one.a;
    k.b[c] = one.b;
  }
  return k;
}

// Calls f(first row, first channel, rows, channels) on blocks of at most kStep elements, which cover `rows` rows of
// adjacent channels.
template <typename F>
void for_row_blocks(int64_t rows, int64_t channels, const F& f) {
  const int64_t wide = std::min(channels, kStep), high = kStep / wide;
  for (int64_t r = 0; r < rows; r += wide == channels ? high : 1) {
    for (int64_t c = 0; c < channels; c += wide) {
      f(r, c, wide == channels ? std::min(high, rows - r) : 1, std::min(wide, channels - c));
    }
  }
}

// Rows of adjacent channels that are worth a thread of their own.
inline int64_t row_grain(int64_t channels) {
  return std::max<int64_t>(1, 32768 / channels);
}

// Two sums for each channel over rows of adjacent channels, [sums, other sums], in chunks that the threads share.
// add(first row, rows, into) adds those of at most 64 rows to `into`, in the type of the computation; these are added in double.
template <typename O, typename F>
std::vector<double> sums_of_rows(int64_t rows, int64_t channels, const F& add) {
  const int64_t grain = row_grain(channels), count = 2 * channels;
  const int64_t chunks = std::min<int64_t>(thread_count(), (rows + grain - 1) / grain);
  const int64_t per_chunk = (rows + chunks - 1) / chunks;
  std::vector<double> partial(chunks * count, 0.0), sums(count, 0.0);
  parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<O> scratch(count);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t last = std::min(rows, (chunk + 1) * per_chunk);
      for (int64_t first = chunk * per_chunk; first < last; first += 64) {
        std::fill(scratch.begin(), scratch.end(), O(0));
        add(first, std::min<int64_t>(64, last - first), scratch.data());
        for (int64_t i = 0; i < count; ++i) {
          partial[chunk * count + i] += scratch[i];
        }
      }
    }
  });
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int64_t i = 0; i < count; ++i) {
      sums[i] += partial[chunk * count + i];
    }
  }
  return sums;
}

// Whether sums over a channel read its images gathered in one place, so that no vector is cut short.
inline bool gathers_images(const NormShape& shape) {
  return shape.image < kShortImage && shape.batch > 1 && shape.batch * shape.image <= (1 << 16);
}

}  // namespace monet_like::batch_norm
