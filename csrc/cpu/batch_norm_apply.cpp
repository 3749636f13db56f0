// Batch norm from saved statistics, with the addition and the activation that follow it.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include "batch_norm.h"

namespace monet_like::batch_norm {

namespace {

// ATen's dense CPU kernel computes x * alpha + beta. Whether its compiler fused the product into the sum depends
// on the instruction set ATen runs with, so ask ATen once: the answer makes our y equal to its y, bit for bit.
Formula dense_formula() {
  static const Formula found = [] {
    constexpr int64_t kChannels = 8, kRows = 64;
    at::Tensor x = at::empty({kRows, kChannels}, at::kFloat), weight = at::empty({kChannels}, at::kFloat);
    at::Tensor bias = at::empty({kChannels}, at::kFloat);
    uint32_t state = 1;
    const auto draw = [&] { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f; };
    for (at::Tensor* t : {&x, &weight, &bias}) {
      std::generate_n(t->mutable_data_ptr<float>(), t->numel(), draw);
    }
    const auto [y, mean, invstd] =
        at::native_batch_norm(x, weight, bias, std::nullopt, std::nullopt, true, 0.1, 1e-5);
    const float* in = x.const_data_ptr<float>();
    const float* out = y.const_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) {
      const int64_t c = i % kChannels;
      const Channel<float> k = channel_constants<Formula::Folded>(
          weight.const_data_ptr<float>()[c], bias.const_data_ptr<float>()[c], mean.const_data_ptr<float>()[c],
          invstd.const_data_ptr<float>()[c]);
      if (normalised<Formula::Folded>(in[i], k.a, k.b, k.mean, k.invstd) != out[i]) {
        return Formula::FoldedFma;
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

// The addition and the activation after the normalisation: each step sees what the one before would have stored.
template <typename T, bool Residual, Activation A, Formula F>
MONET_BODY op_type<T> finished(op_type<T> y, const T& residual, op_type<T> lo, op_type<T> hi) {
  y = as_stored<T>(y);
  if constexpr (Residual) {
    y = as_stored<T>(y + load(residual));
  }
  return activated<A, F>(y, lo, hi);
}

// Normalises n elements of one channel.
template <Formula F, bool Residual, Activation A, typename T>
MONET_BODY void apply_run_body(
    const T* in, const T* residual, T* out, int64_t n, const Channel<op_type<T>>* channel, op_type<T> lo,
    op_type<T> hi) {
  const Channel<op_type<T>> k = *channel;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const auto y = normalised<F>(load(in[i]), k.a, k.b, k.mean, k.invstd);
    store(out[i], finished<T, Residual, A, F>(y, residual[Residual ? i : 0], lo, hi));
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
    const T* other = residual + (Residual ? r * channels : 0);
    T* to = out + r * channels;
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      const O y = normalised<F>(load(from[c]), a[c], b[c], mean[c], invstd[c]);
      store(to[c], finished<T, Residual, A, F>(y, other[Residual ? c : 0], lo, hi));
    }
  }
}
MONET_FOR_EACH_ISA(apply_rows)

// Adds and activates n elements that are normalised and stored already, in place.
template <bool Residual, typename T>
MONET_BODY void finish_run_body(T* y, const T* residual, int64_t n, op_type<T> lo, op_type<T> hi) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(
        y[i], finished<T, Residual, Activation::Clamp, Formula::Folded>(
                  load(y[i]), residual[Residual ? i : 0], lo, hi));
  }
}
MONET_FOR_EACH_ISA(finish_run)

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

// The activation by ATen's own operators, in place.
at::Tensor activate_(at::Tensor y, Activation activation, double lo, double hi) {
  switch (activation) {
    case Activation::Clamp:
      return lo == 0 && hi == kInfinity ? at::relu_(y) : y.clamp_(lo, hi);
    case Activation::LeakyRelu:
      return at::leaky_relu_(y, lo);
    case Activation::Hardswish:
      return at::hardswish_(y);
    case Activation::Silu:
      return at::silu_(y);
  }
  return y;
}

// Normalises a whole tensor. `pitch` is the number of elements from one image of `to` to the next, if images are
// contiguous.
template <Formula F, bool Residual, Activation A, typename T>
void apply_with(const T* from, const T* residual, T* to, int64_t pitch, bool rows_first, const NormShape& shape,
                const Constants<op_type<T>>& k, op_type<T> lo, op_type<T> hi) {
  const int64_t channels = shape.channels, image = shape.image;
  // Without a residual its pointer does not move; it is then the input's, which can be read.
  const auto at = [&](int64_t i) { return residual + (Residual ? i : 0); };
  if (rows_first) {
    const int64_t grain = std::max<int64_t>(1, 32768 / channels);
    at::parallel_for(0, shape.batch * image, grain, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * channels;
      apply_rows<F, Residual, A>(
          from + first, at(first), to + first, end - begin, channels, k.a.data(), k.b.data(), k.mean.data(),
          k.invstd.data(), lo, hi);
    });
  } else if (F != Formula::Plain && image < kShortImage && shape.batch >= 4) {
    // The ends of short images would leave vectors half full. So several channels are normalised at once, with their
    // constants written out for each element; the whole batch uses these.
    const int64_t most = std::max<int64_t>(1, 2048 / image), groups = (channels + most - 1) / most;
    const int64_t parts = std::clamp<int64_t>(at::get_num_threads() / groups, 1, shape.batch / 4);
    const int64_t part = (shape.batch + parts - 1) / parts;
    const int64_t grain = std::max<int64_t>(1, 32768 / (most * image * part));
    at::parallel_for(0, groups * parts, grain, [&](int64_t begin, int64_t end) {
      std::vector<op_type<T>> a(most * image), b(most * image);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % groups * most, count = std::min(most, channels - first);
        for (int64_t c = 0; c < count; ++c) {
          std::fill_n(a.data() + c * image, image, k.a[first + c]);
          std::fill_n(b.data() + c * image, image, k.b[first + c]);
        }
        const int64_t start = task / groups * part;
        for (int64_t n = start; n < std::min(shape.batch, start + part); ++n) {
          const int64_t i = (n * channels + first) * image;
          const op_type<T>*each_a = a.data(), *each_b = b.data();
          T* into = to + n * pitch + first * image;
          const int64_t one = 1;  // with the type of the number of rows above, so that both calls run the same code
          apply_rows<F, Residual, A>(
              from + i, at(i), into, one, count * image, each_a, each_b, each_a, each_b, lo, hi);
        }
      }
    });
  } else {
    const int64_t grain = std::max<int64_t>(1, 32768 / image);
    at::parallel_for(0, shape.batch * channels, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t c = p % channels;
        const Channel<op_type<T>> channel{k.a[c], k.b[c], k.mean[c], k.invstd[c]};
        T* into = to + p / channels * pitch + c * image;
        apply_run<F, Residual, A>(from + p * image, at(p * image), into, image, &channel, lo, hi);
      }
    });
  }
}

}  // namespace

void apply_to(const at::Tensor& x, const NormShape& shape, const Forward& forward, at::Tensor out) {
  const Formula formula = formula_for(norm_layout(x));
  const auto format = norm_format(x);
  const at::Tensor in = x.contiguous(format);
  if (x.numel() == 0) {
    return;
  }
  const bool has_residual = given(forward.residual), rows_first = by_rows(norm_layout(in), shape);
  if (!is_compiled(forward.activation, formula, x.scalar_type(), has_residual)) {
    Forward before = forward;
    before.activation = Activation::Clamp;
    before.lo = -kInfinity;
    before.hi = kInfinity;
    apply_to(x, shape, before, out);
    activate_(out, forward.activation, forward.lo, forward.hi);
    return;
  }
  const at::Tensor residual = has_residual ? forward.residual->contiguous(format) : in;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_apply", [&] {
    using O = op_type<scalar_t>;
    const Constants<O> k =
        constants<O>(formula, shape.channels, forward.weight, forward.bias, forward.mean, forward.invstd);
    // Bounds are in the type of the computation, as in ATen's gradients: the activated value is rounded after them.
    const O lo = static_cast<O>(forward.lo), hi = static_cast<O>(forward.hi);
    with_formula(formula, [&](auto chosen) {
      with_activation(forward.activation, [&](auto followed) {
        constexpr Formula F = decltype(chosen)::value;
        constexpr Activation A = decltype(followed)::value;
        const auto run = [&](auto with) {
          constexpr bool R = decltype(with)::value;
          if constexpr (kCompiled<A, F, scalar_t, R>) {
            apply_with<F, R, A, scalar_t>(
                in.const_data_ptr<scalar_t>(), residual.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(),
                out.stride(0), rows_first, shape, k, lo, hi);
          }
        };
        has_residual ? run(std::true_type{}) : run(std::false_type{});
      });
    });
  });
}

at::Tensor apply(const at::Tensor& x, const NormShape& shape, const Forward& forward) {
  at::Tensor out = at::empty(x.sizes(), x.options().memory_format(norm_format(x)));
  apply_to(x, shape, forward, out);
  return out;
}

// One pass does both if that gives the bits of ATen's operators.
at::Tensor finish_(
    at::Tensor y, const MaybeTensor& residual, Activation activation, double lo, double hi) {
  const bool half = y.scalar_type() == at::kHalf || y.scalar_type() == at::kBFloat16;
  const bool dense = half && activation == Activation::Clamp && is_dense(y.sizes(), y.strides());
  if (!dense || (given(residual) && residual->strides() != y.strides())) {
    if (given(residual)) {
      y.add_(*residual);
    }
    return activate_(y, activation, lo, hi);
  }
  if (!given(residual) && lo == -kInfinity && hi == kInfinity) {
    return y;
  }
  AT_DISPATCH_REDUCED_FLOATING_TYPES(y.scalar_type(), "batch_norm_train", [&] {
    scalar_t* to = y.mutable_data_ptr<scalar_t>();
    const scalar_t* other = given(residual) ? residual->const_data_ptr<scalar_t>() : to;
    const float low = static_cast<float>(lo), high = static_cast<float>(hi);
    at::parallel_for(0, y.numel(), 32768, [&](int64_t begin, int64_t end) {
      if (!given(residual) && lo == 0 && hi == kInfinity) {
        constexpr uint16_t kInf = std::is_same_v<scalar_t, c10::Half> ? 0x7c00 : 0x7f80;
        relu_bits(reinterpret_cast<uint16_t*>(to) + begin, end - begin, kInf);
      } else if (given(residual)) {
        finish_run<true>(to + begin, other + begin, end - begin, low, high);
      } else {
        finish_run<false>(to + begin, other, end - begin, low, high);
      }
    });
  });
  return y;
}

at::Tensor batch_norm_apply(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const at::Tensor& mean, const at::Tensor& invstd, const MaybeTensor& residual,
    c10::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_residual(op, x, residual);
  return apply(x, shape, {weight, bias, mean, invstd, residual, check_activation(op, activation), lo, hi});
}

}  // namespace monet_like::batch_norm
