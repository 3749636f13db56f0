// Batch norm from saved statistics, with the addition and the activation that follow it.

#include "batch_norm.h"

namespace monet_like::batch_norm {
namespace {

// The addition and the activation after the normalisation: each step sees what the one before would have stored.
template <typename T, bool Residual, Activation A, Formula F>
MONET_BODY op_type<T> finished(op_type<T> y, const T& residual, op_type<T> lo, op_type<T> hi) {
  y = as_stored<T>(y);
  if constexpr (Residual) {
    y = as_stored<T>(y + load(residual));
  }
  return activated<A, F>(y, lo, hi);
}

// Normalises n elements of one channel. Without a residual its pointer is not read.
template <Formula F, bool Residual, Activation A, typename T>
MONET_BODY void apply_run_body(
    const T* in, const T* residual, T* out, int64_t n, const Channel<op_type<T>>* channel, op_type<T> lo,
    op_type<T> hi) {
  const Channel<op_type<T>> k = *channel;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const auto y = normalised<F>(load(in[i]), k.a, k.b, k.mean, k.invstd);
    store(out[i], finished<T, Residual, A, F>(y, (Residual ? residual : in)[i], lo, hi));
  }
}
MONET_FOR_EACH_ISA(apply_run)

// Normalises rows of `channels` adjacent elements.
template <Formula F, bool Residual, Activation A, typename T, typename O>
MONET_BODY void apply_rows_body(
    const T* in, const T* residual, T* out, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
    const O* invstd, O lo, O hi) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = in + r * channels;
    const T* other = Residual ? residual + r * channels : from;
    T* to = out + r * channels;
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      const O y = normalised<F>(load(from[c]), a[c], b[c], mean[c], invstd[c]);
      store(to[c], finished<T, Residual, A, F>(y, other[c], lo, hi));
    }
  }
}
MONET_FOR_EACH_ISA(apply_rows)

// The two loops of a formula and an activation; null where it is computed step by step.
template <typename T, typename O = op_type<T>>
struct Loops {
  void (*run)(const T*, const T*, T*, int64_t, const Channel<O>*, O, O) = nullptr;
  void (*rows)(
      const T*, const T*, T*, int64_t, int64_t, const O*, const O*, const O*, const O*, O, O) = nullptr;
};

template <typename T>
Loops<T> choose_loops(const Layer& layer, bool residual) {
  using O = op_type<T>;
  Loops<T> found;
  const auto choose = [&](auto formula, auto with, auto activation) {
    constexpr Formula F = decltype(formula)::value;
    constexpr bool R = decltype(with)::value;
    constexpr Activation A = decltype(activation)::value;
    found.run = [](const T* in, const T* other, T* out, int64_t n, const Channel<O>* channel, O lo, O hi) {
      apply_run<F, R, A>(in, other, out, n, channel, lo, hi);
    };
    found.rows = [](const T* in, const T* other, T* out, int64_t rows, int64_t channels, const O* a, const O* b,
                    const O* mean, const O* invstd, O lo, O hi) {
      apply_rows<F, R, A>(in, other, out, rows, channels, a, b, mean, invstd, lo, hi);
    };
  };
  with_formula(layer.formula, [&](auto formula) {
    constexpr Formula F = decltype(formula)::value;
    // float16 is converted faster in blocks, and so is bfloat16 unless a residual is added.
    if constexpr (!std::is_same_v<T, c10::Half>) {
      if (residual) {
        choose(formula, std::true_type{}, std::integral_constant<Activation, Activation::Clamp>{});
      } else if constexpr (std::is_same_v<T, O>) {
        with_activation(layer.activation, [&](auto activation) {
          if constexpr (kHasLoop<F, decltype(activation)::value, T>) {
            choose(formula, std::false_type{}, activation);
          }
        });
      }
    }
  });
  return found;
}

// Normalises, adds and activates elements of one channel, or rows of channels, by one loop or step by step.
template <typename T>
class Normaliser {
 public:
  using O = op_type<T>;

  Normaliser(const Layer& layer, bool residual)
      : formula_(layer.formula),
        activation_(layer.activation),
        // Bounds are in the type of the computation, as in ATen's gradients: the activated value is rounded after them.
        lo_(static_cast<O>(layer.lo)),
        hi_(static_cast<O>(layer.hi)),
        activates_(layer.activation != Activation::Clamp || layer.lo != -kInfinity || layer.hi != kInfinity),
        loops_(choose_loops<T>(layer, residual)) {}

  void run(const T* in, const T* residual, T* out, int64_t n, const Channel<O>& channel) const {
    if (loops_.run != nullptr) {
      return loops_.run(in, residual, out, n, &channel, lo_, hi_);
    }
    if constexpr (!std::is_same_v<T, O>) {
      O y[kStep];
      for (int64_t i = 0; i < n; i += kStep) {
        const int64_t count = std::min(kStep, n - i);
        widen(in + i, y, count);
        normalise_run(formula_, y, count, channel);
        finish(y, residual == nullptr ? nullptr : residual + i, out + i, count);
      }
    }
  }

  void rows(
      const T* in, const T* residual, T* out, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
      const O* invstd) const {
    if (loops_.rows != nullptr) {
      return loops_.rows(in, residual, out, rows, channels, a, b, mean, invstd, lo_, hi_);
    }
    if constexpr (!std::is_same_v<T, O>) {
      O y[kStep];
      for_row_blocks(rows, channels, [&](int64_t r, int64_t c, int64_t high, int64_t wide) {
        const int64_t i = r * channels + c, count = high * wide;
        widen(in + i, y, count);
        normalise_rows(formula_, y, high, wide, a + c, b + c, mean + c, invstd + c);
        finish(y, residual == nullptr ? nullptr : residual + i, out + i, count);
      });
    }
  }

  // The steps after the normalisation, as in `finished`.
  void finish(O* y, const T* residual, T* out, int64_t n) const {
    if (residual != nullptr) {
      O other[kStep];
      round_as(T(), y, n);
      widen(residual, other, n);
      add(y, other, n);
    }
    if (activates_) {
      round_as(T(), y, n);
      activate(activation_, y, n, lo_, hi_);
    }
    narrow(y, out, n);
  }

 private:
  Formula formula_;
  Activation activation_;
  O lo_, hi_;
  bool activates_;
  Loops<T> loops_;
};

template <typename T>
void apply_as(const Input& x, const Layer& layer, const T* residual, T* to, int64_t pitch) {
  using O = op_type<T>;
  const Constants<O> k = constants<O>(layer, x.shape.channels);
  const Normaliser<T> normaliser(layer, residual != nullptr);
  const T* from = static_cast<const T*>(x.data);
  const int64_t channels = x.shape.channels, image = x.shape.image, batch = x.shape.batch;
  const auto at = [&](int64_t i) { return residual == nullptr ? nullptr : residual + i; };
  if (x.by_rows) {
    const int64_t grain = std::max<int64_t>(1, 32768 / channels);
    parallel_for(0, batch * image, grain, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * channels;
      normaliser.rows(
          from + first, at(first), to + first, end - begin, channels, k.a.data(), k.b.data(), k.mean.data(),
          k.invstd.data());
    });
  } else if (layer.formula != Formula::Plain && image < kShortImage && batch >= 4) {
    // The ends of short images would leave vectors half full. So several channels are normalised at once, with their
    // constants written out for each element; the whole batch uses these.
    const int64_t most = std::max<int64_t>(1, 2048 / image), groups = (channels + most - 1) / most;
    const int64_t parts = std::clamp<int64_t>(thread_count() / groups, 1, batch / 4);
    const int64_t part = (batch + parts - 1) / parts;
    const int64_t grain = std::max<int64_t>(1, 32768 / (most * image * part));
    parallel_for(0, groups * parts, grain, [&](int64_t begin, int64_t end) {
      std::vector<O> a(most * image), b(most * image);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % groups * most, count = std::min(most, channels - first);
        for (int64_t c = 0; c < count; ++c) {
          std::fill_n(a.data() + c * image, image, k.a[first + c]);
          std::fill_n(b.data() + c * image, image, k.b[first + c]);
        }
        const int64_t start = task / groups * part;
        for (int64_t n = start; n < std::min(batch, start + part); ++n) {
          const int64_t i = (n * channels + first) * image;
          normaliser.rows(
              from + i, at(i), to + n * pitch + first * image, 1, count * image, a.data(), b.data(), a.data(),
              b.data());
        }
      }
    });
  } else {
    const int64_t grain = std::max<int64_t>(1, 32768 / image);
    parallel_for(0, batch * channels, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t c = p % channels;
        T* into = to + p / channels * pitch + c * image;
        normaliser.run(from + p * image, at(p * image), into, image, k.channel(c));
      }
    });
  }
}

// ReLU of 2-byte floats in place, on their bits: NaN and minus zero pass, as in `clamped`.
template <typename U>
MONET_BODY void relu_bits_body(U* y, int64_t n, U infinity) {
  const U least = static_cast<U>(infinity | 0x8000u);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const U bits = y[i];
    y[i] = bits > 0x8000u && bits <= least ? U(0) : bits;
  }
}
MONET_FOR_EACH_ISA(relu_bits)

}  // namespace

void apply_loops(const Input& x, const Layer& layer, const void* residual, Pitched<void> out) {
  with_dtype(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    apply_as<T>(x, layer, static_cast<const T*>(residual), static_cast<T*>(out.data), out.pitch);
  });
}

void finish_loops(c10::ScalarType dtype, void* y, const void* residual, int64_t n, double lo, double hi) {
  const Layer clamp{Formula::Folded, Activation::Clamp, lo, hi, nullptr, nullptr, nullptr, nullptr, false};
  const auto run = [&](auto zero, uint16_t infinity) {
    using T = decltype(zero);
    const Normaliser<T> normaliser(clamp, residual != nullptr);
    T* to = static_cast<T*>(y);
    const T* other = static_cast<const T*>(residual);
    parallel_for(0, n, 32768, [&](int64_t begin, int64_t end) {
      if (other == nullptr && lo == 0 && hi == kInfinity) {
        return relu_bits(static_cast<uint16_t*>(y) + begin, end - begin, infinity);
      }
      float block[kStep];
      for (int64_t i = begin; i < end; i += kStep) {
        const int64_t count = std::min(kStep, end - i);
        widen(to + i, block, count);
        normaliser.finish(block, other == nullptr ? nullptr : other + i, to + i, count);
      }
    });
  };
  dtype == c10::ScalarType::Half ? run(c10::Half(), 0x7c00) : run(c10::BFloat16(), 0x7f80);
}

}  // namespace monet_like::batch_norm
