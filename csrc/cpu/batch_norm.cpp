// Training-mode batch norm on the CPU, alone or with what follows it, and the gradient of batch norm and clamp.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/native_batch_norm.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "../checks.h"
#include "isa.h"

namespace monet_like {
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

Formula formula_for(NormLayout layout) {
  return layout == NormLayout::Strided ? Formula::Plain : dense_formula();
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
std::vector<O> to_vector(const std::optional<at::Tensor>& t, int64_t n, O otherwise) {
  return t.has_value() && t->defined() ? to_vector<O>(*t) : std::vector<O>(n, otherwise);
}

template <typename O>
Constants<O> constants(
    Formula formula, int64_t channels, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
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

// ---- forward ----

// What follows the normalisation: each step sees what the one before would have stored.
template <typename T, bool Residual>
MONET_BODY op_type<T> finished(op_type<T> y, const T& residual, op_type<T> lo, op_type<T> hi) {
  y = as_stored<T>(y);
  if constexpr (Residual) {
    y = as_stored<T>(y + load(residual));
  }
  return clamped(y, lo, hi);
}

// n elements of one channel.
template <Formula F, bool Residual, typename T>
MONET_BODY void apply_run_body(
    const T* in, const T* residual, T* out, int64_t n, const Channel<op_type<T>>* channel, op_type<T> lo,
    op_type<T> hi) {
  const Channel<op_type<T>> k = *channel;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const auto y = normalised<F>(load(in[i]), k.a, k.b, k.mean, k.invstd);
    store(out[i], finished<T, Residual>(y, residual[Residual ? i : 0], lo, hi));
  }
}
MONET_FOR_EACH_ISA(apply_run)

// Rows of `channels` adjacent elements.
template <Formula F, bool Residual, typename T, typename O>
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
      store(to[c], finished<T, Residual>(y, other[Residual ? c : 0], lo, hi));
    }
  }
}
MONET_FOR_EACH_ISA(apply_rows)

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
  }
}

bool by_rows(NormLayout layout, const NormShape& shape) {
  return layout == NormLayout::ChannelsLast || shape.image == 1;
}

// Everything a channel's elements go through.
struct Forward {
  std::optional<at::Tensor> weight, bias;
  at::Tensor mean, invstd;
  std::optional<at::Tensor> residual;
  double lo, hi;
};

template <Formula F, bool Residual, typename T>
void apply_with(const T* from, const T* residual, T* to, bool rows_first, const NormShape& shape,
                const Constants<op_type<T>>& k, op_type<T> lo, op_type<T> hi) {
  const int64_t channels = shape.channels, image = shape.image;
  // Without a residual its pointer stands still; it is then the input's, which can be read.
  const auto at = [&](int64_t i) { return residual + (Residual ? i : 0); };
  if (rows_first) {
    const int64_t grain = std::max<int64_t>(1, 32768 / channels);
    at::parallel_for(0, shape.batch * image, grain, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * channels;
      apply_rows<F, Residual>(
          from + first, at(first), to + first, end - begin, channels, k.a.data(), k.b.data(), k.mean.data(),
          k.invstd.data(), lo, hi);
    });
  } else {
    const int64_t grain = std::max<int64_t>(1, 32768 / image);
    at::parallel_for(0, shape.batch * channels, grain, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t c = p % channels;
        const Channel<op_type<T>> channel{k.a[c], k.b[c], k.mean[c], k.invstd[c]};
        apply_run<F, Residual>(from + p * image, at(p * image), to + p * image, image, &channel, lo, hi);
      }
    });
  }
}

at::Tensor apply(const at::Tensor& x, const NormShape& shape, const Forward& forward) {
  const Formula formula = formula_for(norm_layout(x));
  const auto format = norm_format(x);
  const at::Tensor in = x.contiguous(format);
  at::Tensor out = at::empty(x.sizes(), x.options().memory_format(format));
  if (x.numel() == 0) {
    return out;
  }
  const bool has_residual = given(forward.residual), rows_first = by_rows(norm_layout(in), shape);
  const at::Tensor residual = has_residual ? forward.residual->contiguous(format) : in;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_apply", [&] {
    using O = op_type<scalar_t>;
    const Constants<O> k =
        constants<O>(formula, shape.channels, forward.weight, forward.bias, forward.mean, forward.invstd);
    // Bounds that the element type cannot hold are rounded to it, as ATen does.
    const O lo = load(static_cast<scalar_t>(forward.lo)), hi = load(static_cast<scalar_t>(forward.hi));
    with_formula(formula, [&](auto chosen) {
      constexpr Formula F = decltype(chosen)::value;
      const auto run = has_residual ? &apply_with<F, true, scalar_t> : &apply_with<F, false, scalar_t>;
      run(in.const_data_ptr<scalar_t>(), residual.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(),
          rows_first, shape, k, lo, hi);
    });
  });
  return out;
}

at::Tensor batch_norm_apply(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& invstd, const std::optional<at::Tensor>& residual, double lo, double hi) {
  const NormShape shape = check_norm("batch_norm_apply", x, weight, bias, &mean, &invstd);
  check_residual("batch_norm_apply", x, residual);
  return apply(x, shape, {weight, bias, mean, invstd, residual, lo, hi});
}

// ---- training forward ----

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_train(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps, const std::optional<at::Tensor>& residual, double lo, double hi) {
  const NormShape shape = check_norm("batch_norm_train", x, weight, bias, nullptr, nullptr);
  check_residual("batch_norm_train", x, residual);
  const bool full_precision = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
  if (x.numel() == 0 || !full_precision || norm_layout(x) == NormLayout::Strided) {
    // ATen derives invstd from a variance it does not round; only its own operator can repeat that here.
    auto [y, mean, invstd] = at::native_batch_norm(x, weight, bias, running_mean, running_var, true, momentum, eps);
    if (given(residual)) {
      y.add_(*residual);
    }
    return {y.clamp_(lo, hi), mean, invstd};
  }
  auto [mean, invstd] = at::batch_norm_update_stats(x, running_mean, running_var, momentum);
  // `invstd` still holds the variance. ATen computes its inverse root in double and rounds once.
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "batch_norm_train", [&] {
    scalar_t* value = invstd.template mutable_data_ptr<scalar_t>();
    for (int64_t c = 0; c < invstd.numel(); ++c) {
      const double var = value[c];
      value[c] = var == 0 && eps == 0 ? scalar_t(0) : static_cast<scalar_t>(1 / std::sqrt(var + eps));
    }
  });
  return {apply(x, shape, {weight, bias, mean, invstd, residual, lo, hi}), mean, invstd};
}

// ---- backward ----
//
// With y = a x + b, g = grad where lo < y < hi (else 0), N = elements per channel, m and s the saved mean and invstd:
//   grad_bias   = sum g                      grad_weight = s * sum (x - m) g
//   grad_input  = (g - mean(g) - (x - m) s^2 mean((x - m) g)) * s * weight
// y is recomputed with the formula of the forward pass, so it is the forward pass's y.

template <typename O>
struct Gradient {
  O mean_g, slope, scale;  // grad_input = (g - mean_g - (x - m) * slope) * scale
};

template <Formula F, typename T, typename O = op_type<T>>
MONET_BODY O gradient_through(T grad, O x, O a, O b, O mean, O invstd, O lo, O hi) {
  return passes_clamp(as_stored<T>(normalised<F>(x, a, b, mean, invstd)), lo, hi) ? load(grad) : O(0);
}

constexpr int64_t kBlock = 4096;  // elements summed in single precision before they are added in double

template <Formula F, typename T>
MONET_BODY void reduce_run_body(
    const T* grad, const T* x, int64_t n, const Channel<op_type<T>>* channel, op_type<T> lo, op_type<T> hi,
    double* sums) {
  using O = op_type<T>;
  const Channel<O> k = *channel;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    O sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t i = first; i < last; ++i) {
      const O value = load(x[i]);
      const O g = gradient_through<F>(grad[i], value, k.a, k.b, k.mean, k.invstd, lo, hi);
      sum += g;
      dot += (value - k.mean) * g;
    }
    sums[0] += sum;
    sums[1] += dot;
  }
}
MONET_FOR_EACH_ISA(reduce_run)

template <Formula F, typename T>
MONET_BODY void input_grad_run_body(
    const T* grad, const T* x, T* out, int64_t n, const Channel<op_type<T>>* channel,
    const Gradient<op_type<T>>* gradient, op_type<T> lo, op_type<T> hi) {
  using O = op_type<T>;
  const Channel<O> k = *channel;
  const Gradient<O> d = *gradient;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const O value = load(x[i]);
    const O g = gradient_through<F>(grad[i], value, k.a, k.b, k.mean, k.invstd, lo, hi);
    store(out[i], (g - d.mean_g - (value - k.mean) * d.slope) * d.scale);
  }
}
MONET_FOR_EACH_ISA(input_grad_run)

// sum[c], dot[c] are scratch in compute precision, flushed to sums[0..C) and sums[C..2C) every 64 rows.
template <Formula F, typename T, typename O>
MONET_BODY void reduce_rows_body(
    const T* grad, const T* x, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean, const O* invstd,
    O lo, O hi, O* sum, O* dot, double* sums) {
  for (int64_t first = 0; first < rows; first += 64) {
    const int64_t last = std::min(rows, first + 64);
    std::fill_n(sum, channels, O(0));
    std::fill_n(dot, channels, O(0));
    for (int64_t r = first; r < last; ++r) {
      const T* grad_row = grad + r * channels;
      const T* x_row = x + r * channels;
#pragma GCC ivdep
      for (int64_t c = 0; c < channels; ++c) {
        const O value = load(x_row[c]);
        const O g = gradient_through<F>(grad_row[c], value, a[c], b[c], mean[c], invstd[c], lo, hi);
        sum[c] += g;
        dot[c] += (value - mean[c]) * g;
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      sums[c] += sum[c];
      sums[channels + c] += dot[c];
    }
  }
}
MONET_FOR_EACH_ISA(reduce_rows)

template <Formula F, typename T, typename O>
MONET_BODY void input_grad_rows_body(
    const T* grad, const T* x, T* out, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
    const O* invstd, const O* mean_g, const O* slope, const O* scale, O lo, O hi) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* grad_row = grad + r * channels;
    const T* x_row = x + r * channels;
    T* out_row = out + r * channels;
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      const O value = load(x_row[c]);
      const O g = gradient_through<F>(grad_row[c], value, a[c], b[c], mean[c], invstd[c], lo, hi);
      store(out_row[c], (g - mean_g[c] - (value - mean[c]) * slope[c]) * scale[c]);
    }
  }
}
MONET_FOR_EACH_ISA(input_grad_rows)

template <typename O>
Gradient<O> gradient_of(double sum, double dot, int64_t count, O invstd, O weight) {
  const double s = invstd, w = weight;
  return {static_cast<O>(sum / count), static_cast<O>(dot / count * s * s), static_cast<O>(s * w)};
}

// sums[0..C) and sums[C..2C) receive sum g and sum (x - m) g.
template <Formula F, typename T>
void backward_planes(
    const T* grad, const T* x, T* out, const NormShape& shape, const Constants<op_type<T>>& k, op_type<T> lo,
    op_type<T> hi, double* sums) {
  using O = op_type<T>;
  const int64_t image = shape.image, pitch = shape.channels * image;
  // One thread does both passes of a channel, the second over what the first left in its cache.
  at::parallel_for(0, shape.channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Channel<O> channel{k.a[c], k.b[c], k.mean[c], k.invstd[c]};
      double totals[2] = {0, 0};
      for (int64_t n = 0; n < shape.batch; ++n) {
        const int64_t at = n * pitch + c * image;
        reduce_run<F>(grad + at, x + at, image, &channel, lo, hi, &totals[0]);
      }
      sums[c] = totals[0];
      sums[shape.channels + c] = totals[1];
      if (out == nullptr) {
        continue;
      }
      const Gradient<O> gradient =
          gradient_of(totals[0], totals[1], shape.batch * image, k.invstd[c], k.weight[c]);
      for (int64_t n = 0; n < shape.batch; ++n) {
        const int64_t at = n * pitch + c * image;
        input_grad_run<F>(grad + at, x + at, out + at, image, &channel, &gradient, lo, hi);
      }
    }
  });
}

template <Formula F, typename T>
void backward_rows(
    const T* grad, const T* x, T* out, const NormShape& shape, const Constants<op_type<T>>& k, op_type<T> lo,
    op_type<T> hi, double* sums) {
  using O = op_type<T>;
  const int64_t C = shape.channels, rows = shape.batch * shape.image;
  const int64_t grain = std::max<int64_t>(1, 32768 / C);
  const int64_t chunks = std::min<int64_t>(at::get_num_threads(), (rows + grain - 1) / grain);
  const int64_t per_chunk = (rows + chunks - 1) / chunks;
  std::vector<double> partial(chunks * 2 * C, 0.0);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<O> scratch(2 * C);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = std::min(rows, chunk * per_chunk), last = std::min(rows, first + per_chunk);
      reduce_rows<F>(
          grad + first * C, x + first * C, last - first, C, k.a.data(), k.b.data(), k.mean.data(), k.invstd.data(), lo,
          hi, scratch.data(), scratch.data() + C, partial.data() + chunk * 2 * C);
    }
  });
  std::fill_n(sums, 2 * C, 0.0);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int64_t i = 0; i < 2 * C; ++i) {
      sums[i] += partial[chunk * 2 * C + i];
    }
  }
  if (out == nullptr) {
    return;
  }
  std::vector<O> mean_g(C), slope(C), scale(C);
  for (int64_t c = 0; c < C; ++c) {
    const Gradient<O> d = gradient_of(sums[c], sums[C + c], rows, k.invstd[c], k.weight[c]);
    mean_g[c] = d.mean_g;
    slope[c] = d.slope;
    scale[c] = d.scale;
  }
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    input_grad_rows<F>(
        grad + begin * C, x + begin * C, out + begin * C, end - begin, C, k.a.data(), k.b.data(), k.mean.data(),
        k.invstd.data(), mean_g.data(), slope.data(), scale.data(), lo, hi);
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_clamp_backward(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd, double lo, double hi,
    std::array<bool, 3> mask) {
  const char* op = "batch_norm_clamp_backward";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  TORCH_CHECK_VALUE(
      grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type(), "monet_like::", op, ": grad (", grad.sizes(),
      ", ", grad.scalar_type(), ") must match x (", x.sizes(), ", ", x.scalar_type(), ")");
  const auto format = norm_format(x);
  const Formula formula = formula_for(norm_layout(x));
  const at::Tensor in = x.contiguous(format), upstream = grad.contiguous(format);
  const bool has_weight = weight.has_value() && weight->defined();
  const at::TensorOptions parameter = has_weight ? weight->options() : mean.options();
  at::Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) {
    grad_input = at::empty(x.sizes(), x.options().memory_format(format));
  }
  std::vector<double> sums(2 * shape.channels, 0.0);
  if (x.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_clamp_backward", [&] {
      using O = op_type<scalar_t>;
      const Constants<O> k = constants<O>(formula, shape.channels, weight, bias, mean, invstd);
      const O below = load(static_cast<scalar_t>(open_bound(lo))), above = load(static_cast<scalar_t>(open_bound(hi)));
      with_formula(formula, [&](auto chosen) {
        constexpr Formula F = decltype(chosen)::value;
        const auto run =
            by_rows(norm_layout(in), shape) ? &backward_rows<F, scalar_t> : &backward_planes<F, scalar_t>;
        run(upstream.const_data_ptr<scalar_t>(), in.const_data_ptr<scalar_t>(),
            mask[0] ? grad_input.mutable_data_ptr<scalar_t>() : nullptr, shape, k, below, above, sums.data());
      });
    });
  }
  const at::TensorOptions doubles = parameter.dtype(at::kDouble).memory_format(at::MemoryFormat::Contiguous);
  const auto parameter_gradient = [&](const auto& value) {
    at::Tensor t = at::empty({shape.channels}, doubles);
    for (int64_t c = 0; c < shape.channels; ++c) {
      t.mutable_data_ptr<double>()[c] = value(c);
    }
    return t.to(parameter.dtype());
  };
  if (mask[1]) {
    const std::vector<double> scale = to_vector<double>(invstd);
    grad_weight = parameter_gradient([&](int64_t c) { return sums[shape.channels + c] * scale[c]; });
  }
  if (mask[2]) {
    grad_bias = parameter_gradient([&](int64_t c) { return sums[c]; });
  }
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("batch_norm_apply", &batch_norm_apply);
  m.impl("batch_norm_train", &batch_norm_train);
  m.impl("batch_norm_clamp_backward", &batch_norm_clamp_backward);
}

}  // namespace monet_like
