// Element maths shared by the host and the device kernels, so that both decide every tie, NaN and zero alike.

#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define MONET_HD __host__ __device__ __forceinline__
#else
#define MONET_HD inline __attribute__((always_inline))
#endif

namespace monet_like {

// Of a mask of one bit an element.
MONET_HD int64_t packed_bytes(int64_t numel) {
  return (numel + 7) / 8;
}

// aten.threshold_backward lets the gradient through where NOT (x <= 0): a NaN lets it through.
template <typename O>
MONET_HD bool passes_threshold(O x) {
  return !(x <= O(0));
}

// The same on the bits of a 2-byte float; `infinity` is the bit pattern of +inf in that format.
MONET_HD bool passes_threshold_bits(uint16_t bits, uint16_t infinity) {
  return static_cast<int16_t>(bits) > 0 || bits > (infinity | 0x8000u);
}

// ReLU, ReLU6, hardtanh, and none with infinite bounds: NaN and minus zero pass, as in ATen.
template <typename O>
MONET_HD O clamped(O y, O lo, O hi) {
  y = y < lo ? lo : y;
  return y > hi ? hi : y;
}

// Whether the gradient passes through `clamped`. A NaN as bound means no bound. ReLU follows aten.threshold_backward.
template <typename O>
MONET_HD bool passes_clamp(O y, O lo, O hi) {
  return !(y <= lo) && !(y >= hi);
}

// Turns a bound of a clamp into one for passes_clamp: no number lies beyond infinity, and infinity itself passes.
MONET_HD double open_bound(double bound) {
  return bound - bound == 0 ? bound : __builtin_nan("");
}

// x * a + b, rounded once. The compilers fuse no product with a sum by themselves (-ffp-contract=off, -fmad=false), so a
// product that ATen's kernels fuse is fused here by this function.
template <typename O>
MONET_HD O fused(O x, O a, O b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(O) == 4) {
    return __fmaf_rn(x, a, b);
  } else {
    return __fma_rn(x, a, b);
  }
#else
  if constexpr (sizeof(O) == 4) {
    return __builtin_fmaf(x, a, b);
  } else {
    return __builtin_fma(x, a, b);
  }
#endif
}

// The formula that computes y from x in training-mode batch norm. The four round differently. ATen's CPU kernels use
// Folded (baseline x86) and FoldedFma (AVX2, AVX-512) for dense tensors, Plain for strided ones; its CUDA kernels use Cuda.
enum class Formula : int { Folded, FoldedFma, Plain, Cuda };

template <Formula F, typename O>
MONET_HD O fused_or_not(O x, O a, O b) {
  if constexpr (F == Formula::FoldedFma || F == Formula::Cuda) {
    return fused(x, a, b);
  } else {
    return x * a + b;
  }
}

// The activation after a batch norm. Its parameters are `lo` and `hi`: the bounds of a clamp, or in `lo` leaky ReLU's slope.
enum class Activation : int { Clamp, LeakyRelu, Hardswish, Silu };

// e^x within 2 units in the last place, without a branch or a call, so that loops around it vectorise. x is limited to
// [-88, 88], where the result of -88 is 0; a NaN counts as 88 or -88, by its sign.
template <Formula F>
MONET_HD float exponential(float x) {
#if defined(__CUDA_ARCH__)
  return expf(x);
#else
  // x is limited by its bits: a comparison of floats would become a second path, whose results are discarded. On that
  // path denormal numbers would arise, at a hundred cycles each.
  uint32_t word;
  __builtin_memcpy(&word, &x, sizeof(word));
  const uint32_t magnitude = word & 0x7fffffffu, bounded = magnitude < 0x42b00000u ? magnitude : 0x42b00000u;  // 88
  word = (word & 0x80000000u) | bounded;
  __builtin_memcpy(&x, &word, sizeof(x));
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float n = fused_or_not<F>(x, 1.44269504f, kRound) - kRound;
  // ln 2 in two parts, the first one exact.
  const float r = fused_or_not<F>(n, 2.12194440e-4f, fused_or_not<F>(n, -0.693359375f, x));
  float p = 1.0f / 5040;
  p = fused_or_not<F>(p, r, 1.0f / 720);
  p = fused_or_not<F>(p, r, 1.0f / 120);
  p = fused_or_not<F>(p, r, 1.0f / 24);
  p = fused_or_not<F>(p, r, 1.0f / 6);
  p = fused_or_not<F>(p, r, 0.5f);
  p = fused_or_not<F>(p, r, 1.0f);
  p = fused_or_not<F>(p, r, 1.0f);
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  return p * scale;
#endif
}

template <Formula F>
MONET_HD double exponential(double x) {
#if defined(__CUDA_ARCH__)
  return exp(x);
#else
  return __builtin_exp(x);
#endif
}

template <Activation A, Formula F = Formula::Folded, typename O>
MONET_HD O activated(O y, O lo, O hi) {
  if constexpr (A == Activation::Clamp) {
    return clamped(y, lo, hi);
  } else if constexpr (A == Activation::LeakyRelu) {
    return y > O(0) ? y : y * lo;
  } else if constexpr (A == Activation::Hardswish) {
    const O bounded = y * clamped(y + O(3), O(0), O(6));
    return F == Formula::Cuda ? bounded * static_cast<O>(1.0f / 6.0f) : bounded / O(6);
  } else {
    return y / (O(1) + exponential<F>(-y));
  }
}

// Turns an activation known at run time into a template argument.
template <typename F>
void with_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::Clamp:
      return f(std::integral_constant<Activation, Activation::Clamp>{});
    case Activation::LeakyRelu:
      return f(std::integral_constant<Activation, Activation::LeakyRelu>{});
    case Activation::Hardswish:
      return f(std::integral_constant<Activation, Activation::Hardswish>{});
    case Activation::Silu:
      return f(std::integral_constant<Activation, Activation::Silu>{});
  }
}

// The gradient through `activated`. The bounds of a clamp are in the form for passes_clamp.
template <Activation A, Formula F = Formula::Folded, typename O>
MONET_HD O activation_gradient(O grad, O y, O lo, O hi) {
  if constexpr (A == Activation::Clamp) {
    return passes_clamp(y, lo, hi) ? grad : O(0);
  } else if constexpr (A == Activation::LeakyRelu) {
    return y > O(0) ? grad : grad * lo;
  } else if constexpr (A == Activation::Hardswish) {
    const O inside = y < O(3) ? grad * (y / O(3) + O(0.5)) : grad;
    return y <= O(-3) ? O(0) : inside;
  } else {
    const O s = O(1) / (O(1) + exponential<F>(-y));
    return grad * s * fused_or_not<F>(y, O(1) - s, O(1));
  }
}

// A tensor as batch norm sees it: `image` elements for each channel of each sample.
struct NormShape {
  int64_t batch, channels, image;
};

// Per-channel constants. Folded: a = weight * invstd, b = bias - mean * a. Plain, Cuda: a = weight, b = bias.
template <typename O>
struct Channel {
  O a, b, mean, invstd;
};

template <Formula F, typename O>
MONET_HD O normalised(O x, O a, O b, O mean, O invstd) {
  if constexpr (F == Formula::Plain) {
    return ((x - mean) * invstd) * a + b;
  } else if constexpr (F == Formula::Cuda) {
    return fused((x - mean) * a, invstd, b);
  } else {
    return fused_or_not<F>(x, a, b);
  }
}

template <Formula F, typename O>
MONET_HD Channel<O> channel_constants(O weight, O bias, O mean, O invstd) {
  if constexpr (F == Formula::Plain || F == Formula::Cuda) {
    return {weight, bias, mean, invstd};
  } else {
    const O a = invstd * weight;
    return {a, fused_or_not<F>(-mean, a, bias), mean, invstd};
  }
}

// Geometry of a 2-D pooling window. Cells outside the image do not take part; the scan is row by row.
struct Window {
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t in_h, in_w, out_h, out_w;

  // First kernel step along one axis that lies inside the image (it may lie past its far end).
  MONET_HD static int64_t first_step(int64_t start, int64_t dilation) {
    return start >= 0 ? 0 : (-start + dilation - 1) / dilation;
  }
  MONET_HD int64_t start_h(int64_t oh) const { return oh * stride_h - pad_h; }
  MONET_HD int64_t start_w(int64_t ow) const { return ow * stride_w - pad_w; }

  // Flat index into the input plane of cell `offset` of window (oh, ow).
  MONET_HD int64_t index_of(int64_t oh, int64_t ow, int64_t offset) const {
    const int64_t h = start_h(oh) + (offset / kernel_w) * dilation_h;
    const int64_t w = start_w(ow) + (offset % kernel_w) * dilation_w;
    return h * in_w + w;
  }

  // The inverse of index_of; -1 if `index` is no cell of the window.
  MONET_HD int64_t offset_of(int64_t oh, int64_t ow, int64_t index) const {
    // A window wholly in the padding (dilation beyond the image) has no cell: ATen then names the first step.
    const int64_t step_h = first_step(start_h(oh), dilation_h), step_w = first_step(start_w(ow), dilation_w);
    const int64_t first = step_h * kernel_w + step_w;
    if (index == index_of(oh, ow, first)) {
      return first;
    }
    const int64_t dh = index / in_w - start_h(oh), dw = index % in_w - start_w(ow);
    if (index < 0 || index >= in_h * in_w || dh < 0 || dw < 0 || dh % dilation_h != 0 || dw % dilation_w != 0 ||
        dh / dilation_h >= kernel_h || dw / dilation_w >= kernel_w) {
      return -1;
    }
    return (dh / dilation_h) * kernel_w + dw / dilation_w;
  }
};

struct PoolArguments {
  Window window;
  int64_t planes;    // batch * channels
  int64_t batch;     // 1 for a 3-D input
  int64_t channels;
};

}  // namespace monet_like
