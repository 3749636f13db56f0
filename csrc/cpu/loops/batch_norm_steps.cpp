// Single steps of batch norm on blocks of float32, each in place.

#include "batch_norm.h"

namespace monet_like::batch_norm {
namespace {

template <Formula F>
MONET_BODY void run_body(float* y, int64_t n, const Channel<float>* channel) {
  const Channel<float> k = *channel;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    y[i] = normalised<F>(y[i], k.a, k.b, k.mean, k.invstd);
  }
}
MONET_FOR_EACH_ISA(run)

template <Formula F>
MONET_BODY void rows_body(
    float* y, int64_t rows, int64_t channels, const float* a, const float* b, const float* mean, const float* invstd) {
  for (int64_t r = 0; r < rows; ++r, y += channels) {
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      y[c] = normalised<F>(y[c], a[c], b[c], mean[c], invstd[c]);
    }
  }
}
MONET_FOR_EACH_ISA(rows)

template <auto...>
MONET_BODY void sum_body(float* y, const float* other, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    y[i] += other[i];
  }
}
MONET_FOR_EACH_ISA(sum)

// The formula is that of the multiplications and additions in an activation.
template <Activation A, Formula F>
MONET_BODY void activation_body(float* y, int64_t n, float lo, float hi) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    y[i] = activated<A, F>(y[i], lo, hi);
  }
}
MONET_FOR_EACH_ISA(activation)

template <auto...>
MONET_BODY void gradient_body(float* grad, const float* y, int64_t n, float lo, float hi) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    grad[i] = activation_gradient<Activation::Clamp>(grad[i], y[i], lo, hi);
  }
}
MONET_FOR_EACH_ISA(gradient)

}  // namespace

void normalise_run(Formula formula, float* y, int64_t n, const Channel<float>& channel) {
  with_formula(formula, [&](auto chosen) { run<decltype(chosen)::value>(y, n, &channel); });
}

void normalise_rows(
    Formula formula, float* y, int64_t n, int64_t channels, const float* a, const float* b, const float* mean,
    const float* invstd) {
  with_formula(formula, [&](auto chosen) { rows<decltype(chosen)::value>(y, n, channels, a, b, mean, invstd); });
}

void add(float* y, const float* other, int64_t n) {
  sum(y, other, n);
}

void activate(Activation which, float* y, int64_t n, float lo, float hi) {
  with_activation(which, [&](auto chosen) {
    constexpr Activation A = decltype(chosen)::value;
    if constexpr (A == Activation::Clamp) {
      activation<A, Formula::Plain>(y, n, lo, hi);
    } else {
      activation<A, Formula::FoldedFma>(y, n, lo, hi);
    }
  });
}

void clamp_gradients(float* grad, const float* y, int64_t n, float lo, float hi) {
  gradient(grad, y, n, lo, hi);
}

}  // namespace monet_like::batch_norm
