// The gradient of training-mode batch norm and of the activation that follows it.
//
// With y = a x + b, g = grad through the activation at y, N = elements per channel, m and s the saved mean and invstd:
//   grad_bias   = sum g                      grad_weight = s * sum (x - m) g
//   grad_input  = (g - mean(g) - (x - m) s^2 mean((x - m) g)) * s * weight
// y is recomputed with the formula of the forward pass, so it is the forward pass's y.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/silu_backward.h>

#include "batch_norm.h"

namespace monet_like::batch_norm {

namespace {

// Whether the gradient through an activation is stored, where the result will be, because computing it twice would cost
// more. In 2-byte types storing rounds it, as ATen does.
template <Activation A>
constexpr bool kCostly = A == Activation::Silu;

template <typename O>
struct Gradient {
  O mean_g, slope, scale;  // grad_input = (g - mean_g - (x - m) * slope) * scale
};

template <Formula F, Activation A, typename T, typename O = op_type<T>>
MONET_BODY O gradient_through(O grad, O x, O a, O b, O mean, O invstd, O lo, O hi) {
  return activation_gradient<A, F>(grad, as_stored<T>(normalised<F>(x, a, b, mean, invstd)), lo, hi);
}

// Adds sum g and sum (x - m) g of n elements to `sums`. grad and x have the tensor's type T or the type of the
// computation. With `Keep`, g is stored in `kept`, which may be grad.
template <Formula F, Activation A, bool Keep, typename T, typename S>
MONET_BODY void reduce_run_body(
    const T*, const S* grad, const S* x, S* kept, int64_t n, const Channel<op_type<T>>* channel, op_type<T> lo,
    op_type<T> hi, double* sums) {
  using O = op_type<T>;
  const Channel<O> k = *channel;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    O sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t i = first; i < last; ++i) {
      const O value = load(x[i]);
      const O g = gradient_through<F, A, T>(load(grad[i]), value, k.a, k.b, k.mean, k.invstd, lo, hi);
      if constexpr (Keep) {
        store(kept[i], g);
      }
      sum += g;
      dot = fused_or_not<F>(value - k.mean, g, dot);
    }
    sums[0] += sum;
    sums[1] += dot;
  }
}
MONET_FOR_EACH_ISA(reduce_run)

// grad_input of n elements of one channel.
template <Formula F, Activation A, typename T>
MONET_BODY void input_grad_run_body(
    const T* grad, const T* x, T* out, int64_t n, const Channel<op_type<T>>* channel,
    const Gradient<op_type<T>>* gradient, op_type<T> lo, op_type<T> hi) {
  using O = op_type<T>;
  const Channel<O> k = *channel;
  const Gradient<O> d = *gradient;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const O value = load(x[i]);
    const O g = gradient_through<F, A, T>(load(grad[i]), value, k.a, k.b, k.mean, k.invstd, lo, hi);
    store(out[i], (g - d.mean_g - (value - k.mean) * d.slope) * d.scale);
  }
}
MONET_FOR_EACH_ISA(input_grad_run)

// grad_input from a g that `reduce_run` has kept.
template <typename T, typename S, typename O>
MONET_BODY void input_grad_kept_body(
    const S* kept, const S* x, T* out, int64_t n, O mean, const Gradient<O>* gradient) {
  const Gradient<O> d = *gradient;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(out[i], (load(kept[i]) - d.mean_g - (load(x[i]) - mean) * d.slope) * d.scale);
  }
}
MONET_FOR_EACH_ISA(input_grad_kept)

// As `reduce_run` for rows of adjacent channels: sum[c] and dot[c] are scratch in the type of the computation, added to
// sums[0..C) and sums[C..2C) every 64 rows.
template <Formula F, Activation A, bool Keep, typename T, typename O>
MONET_BODY void reduce_rows_body(
    const T* grad, const T* x, T* kept, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
    const O* invstd, O lo, O hi, O* sum, O* dot, double* sums) {
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
        const O g = gradient_through<F, A, T>(load(grad_row[c]), value, a[c], b[c], mean[c], invstd[c], lo, hi);
        if constexpr (Keep) {
          store(kept[r * channels + c], g);
        }
        sum[c] += g;
        dot[c] = fused_or_not<F>(value - mean[c], g, dot[c]);
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      sums[c] += sum[c];
      sums[channels + c] += dot[c];
    }
  }
}
MONET_FOR_EACH_ISA(reduce_rows)

// grad_input of rows of adjacent channels.
template <Formula F, Activation A, typename T, typename O>
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
      const O g = gradient_through<F, A, T>(load(grad_row[c]), value, a[c], b[c], mean[c], invstd[c], lo, hi);
      store(out_row[c], (g - mean_g[c] - (value - mean[c]) * slope[c]) * scale[c]);
    }
  }
}
MONET_FOR_EACH_ISA(input_grad_rows)

// grad_input from a g that `reduce_rows` has kept in `out`.
template <typename T, typename O>
MONET_BODY void input_grad_kept_rows_body(
    const T* x, T* out, int64_t rows, int64_t channels, const O* mean, const O* mean_g, const O* slope,
    const O* scale) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* x_row = x + r * channels;
    T* out_row = out + r * channels;
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      store(out_row[c], (load(out_row[c]) - mean_g[c] - (load(x_row[c]) - mean[c]) * slope[c]) * scale[c]);
    }
  }
}
MONET_FOR_EACH_ISA(input_grad_kept_rows)

// Adds another gradient to n elements of grad_input.
template <typename T>
MONET_BODY void add_run_body(T* to, const T* other, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(to[i], load(to[i]) + load(other[i]));
  }
}
MONET_FOR_EACH_ISA(add_run)

// A tensor or some of its channels, or nothing: `pitch` elements from one image, or one row, to the next.
template <typename T>
struct Pitched {
  T* data;
  int64_t pitch;
};

template <typename O>
Gradient<O> gradient_of(double sum, double dot, int64_t count, O invstd, O weight) {
  const double s = invstd, w = weight;
  return {static_cast<O>(sum / count), static_cast<O>(dot / count * s * s), static_cast<O>(s * w)};
}

// The gradients of a tensor whose channels are images; sums[0..C) and sums[C..2C) receive sum g and sum (x - m) g.
template <Formula F, Activation A, typename T>
void backward_planes(
    Pitched<const T> grad, const T* x, Pitched<T> out, Pitched<const T> residual, const NormShape& shape,
    const Constants<op_type<T>>& k, op_type<T> lo, op_type<T> hi, double* sums) {
  using O = op_type<T>;
  const int64_t image = shape.image, pitch = shape.channels * image;
  const int64_t count = shape.batch * image;
  // One thread does both passes of a channel, the second over what the first left in its cache.
  const bool gathers = gathers_images(shape);
  const T* tag = nullptr;
  at::parallel_for(0, shape.channels, std::max<int64_t>(1, 8192 / count), [&](int64_t begin, int64_t end) {
    std::vector<O> scratch(gathers ? 2 * count : 0);
    O *g = scratch.data(), *values = g + (gathers ? count : 0);
    for (int64_t c = begin; c < end; ++c) {
      const Channel<O> channel{k.a[c], k.b[c], k.mean[c], k.invstd[c]};
      const T *of_x = x + c * image, *of_grad = grad.data + c * image;
      T* to = out.data + (out.data == nullptr ? 0 : c * image);
      double totals[2] = {0, 0};
      const auto reduce = [&](auto keep, const auto* upstream, const auto* in, auto* kept, int64_t n) {
        reduce_run<F, A, decltype(keep)::value>(tag, upstream, in, kept, n, &channel, lo, hi, &totals[0]);
      };
      if (gathers) {
        gather_images(of_grad, g, shape.batch, image, grad.pitch);
        gather_images(of_x, values, shape.batch, image, pitch);
        reduce(std::true_type{}, static_cast<const O*>(g), static_cast<const O*>(values), g, count);
      } else {
        for (int64_t n = 0; n < shape.batch; ++n) {
          if constexpr (kCostly<A>) {
            if (out.data != nullptr) {
              reduce(std::true_type{}, of_grad + n * grad.pitch, of_x + n * pitch, to + n * out.pitch, image);
              continue;
            }
          }
          reduce(std::false_type{}, of_grad + n * grad.pitch, of_x + n * pitch, static_cast<T*>(nullptr), image);
        }
      }
      sums[c] = totals[0];
      sums[shape.channels + c] = totals[1];
      if (out.data == nullptr) {
        continue;
      }
      const Gradient<O> gradient = gradient_of(totals[0], totals[1], count, k.invstd[c], k.weight[c]);
      for (int64_t n = 0; n < shape.batch; ++n) {
        T* into = to + n * out.pitch;
        if (gathers) {
          const O *kept = g + n * image, *in = values + n * image;
          input_grad_kept(kept, in, into, image, channel.mean, &gradient);
        } else if constexpr (kCostly<A>) {
          input_grad_kept(static_cast<const T*>(into), of_x + n * pitch, into, image, channel.mean, &gradient);
        } else {
          input_grad_run<F, A>(of_grad + n * grad.pitch, of_x + n * pitch, into, image, &channel, &gradient, lo, hi);
        }
        if (residual.data != nullptr) {
          add_run(into, residual.data + n * residual.pitch + c * image, image);
        }
      }
    }
  });
}

// The same of a tensor in rows of adjacent channels.
template <Formula F, Activation A, typename T>
void backward_rows(
    Pitched<const T> upstream, const T* x, Pitched<T> result, Pitched<const T> residual, const NormShape& shape,
    const Constants<op_type<T>>& k, op_type<T> lo, op_type<T> hi, double* sums) {
  using O = op_type<T>;
  const T* grad = upstream.data;  // grad and grad_input are whole tensors here
  T* out = result.data;
  const int64_t C = shape.channels, rows = shape.batch * shape.image;
  const int64_t grain = std::max<int64_t>(1, 32768 / C);
  const int64_t chunks = std::min<int64_t>(at::get_num_threads(), (rows + grain - 1) / grain);
  const int64_t per_chunk = (rows + chunks - 1) / chunks;
  std::vector<double> partial(chunks * 2 * C, 0.0);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<O> scratch(2 * C);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = std::min(rows, chunk * per_chunk), last = std::min(rows, first + per_chunk);
      const auto reduce = [&](auto keep, T* kept) {
        reduce_rows<F, A, decltype(keep)::value>(
            grad + first * C, x + first * C, kept, last - first, C, k.a.data(), k.b.data(), k.mean.data(),
            k.invstd.data(), lo, hi, scratch.data(), scratch.data() + C, partial.data() + chunk * 2 * C);
      };
      if constexpr (kCostly<A>) {
        if (out != nullptr) {
          reduce(std::true_type{}, out + first * C);
          continue;
        }
      }
      reduce(std::false_type{}, nullptr);
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
    if constexpr (kCostly<A>) {
      input_grad_kept_rows(
          x + begin * C, out + begin * C, end - begin, C, k.mean.data(), static_cast<const O*>(mean_g.data()),
          static_cast<const O*>(slope.data()), static_cast<const O*>(scale.data()));
    } else {
      input_grad_rows<F, A>(
          grad + begin * C, x + begin * C, out + begin * C, end - begin, C, k.a.data(), k.b.data(), k.mean.data(),
          k.invstd.data(), mean_g.data(), slope.data(), scale.data(), lo, hi);
    }
    for (int64_t row = begin; residual.data != nullptr && row < end; ++row) {
      add_run(out + row * C, residual.data + row * residual.pitch, C);
    }
  });
}

// The gradient through an activation that is not compiled into the loop of the batch norm, by ATen.
at::Tensor through(const at::Tensor& grad, const at::Tensor& y, Activation activation, double slope) {
  switch (activation) {
    case Activation::LeakyRelu:
      return at::leaky_relu_backward(grad, y, slope, false);
    case Activation::Hardswish:
      return at::hardswish_backward(grad, y);
    case Activation::Silu:
      return at::silu_backward(grad, y);
    case Activation::Clamp:
      break;
  }
  return grad;
}

}  // namespace

void backward_to(
    const at::Tensor& grad, const at::Tensor& x, const NormShape& shape, const Backward& b,
    const at::Tensor& grad_input, const at::Tensor& residual, double* sums) {
  const bool rows_first = by_rows(norm_layout(x), shape);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_activation_backward", [&] {
    using O = op_type<scalar_t>;
    const Constants<O> k = constants<O>(b.formula, shape.channels, b.weight, b.bias, b.mean, b.invstd);
    const bool clamps = b.activation == Activation::Clamp;
    const O low = static_cast<O>(clamps ? open_bound(b.lo) : b.lo);
    const O high = static_cast<O>(clamps ? open_bound(b.hi) : b.hi);
    const auto read = [&](const at::Tensor& t) -> Pitched<const scalar_t> {
      return t.defined() ? Pitched<const scalar_t>{t.const_data_ptr<scalar_t>(), pitch_of(t, rows_first)}
                         : Pitched<const scalar_t>{nullptr, 0};
    };
    Pitched<scalar_t> out{nullptr, 0};
    if (grad_input.defined()) {
      out = {grad_input.mutable_data_ptr<scalar_t>(), pitch_of(grad_input, rows_first)};
    }
    with_formula(b.formula, [&](auto chosen) {
      with_activation(b.activation, [&](auto followed) {
        constexpr Formula F = decltype(chosen)::value;
        constexpr Activation A = decltype(followed)::value;
        if constexpr (kCompiled<A, F, scalar_t>) {
          const auto run = rows_first ? &backward_rows<F, A, scalar_t> : &backward_planes<F, A, scalar_t>;
          run(read(grad), x.const_data_ptr<scalar_t>(), out, read(residual), shape, k, low, high, sums);
        }
      });
    });
  });
}

std::tuple<at::Tensor, at::Tensor> parameter_gradients(
    std::vector<double> sums, const MaybeTensor& weight, const at::Tensor& mean, const at::Tensor& invstd,
    std::array<bool, 3> mask) {
  const int64_t channels = static_cast<int64_t>(sums.size()) / 2;
  const at::TensorOptions options = given(weight) ? weight->options() : mean.options();
  at::Tensor grad_weight, grad_bias;
  if (mask[1]) {
    std::vector<double> dots = to_vector<double>(invstd);
    for (int64_t c = 0; c < channels; ++c) {
      dots[c] *= sums[channels + c];
    }
    grad_weight = per_channel(dots, options);
  }
  if (mask[2]) {
    sums.resize(channels);
    grad_bias = per_channel(sums, options);
  }
  return {grad_weight, grad_bias};
}

at::Tensor added(const MaybeTensor& residual, const at::Tensor& x, const NormShape& shape) {
  if (!given(residual)) {
    return at::Tensor();
  }
  const bool fits = pitch_of(*residual, by_rows(norm_layout(x), shape)) >= 0;
  return fits ? *residual : residual->contiguous(norm_format(x));
}

Three batch_norm_activation_backward(
    const at::Tensor& grad, const at::Tensor& x, const MaybeTensor& weight,
    const MaybeTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
    c10::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const MaybeTensor& residual) {
  const char* op = "batch_norm_activation_backward";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_gradient(op, grad, x.sizes(), x.scalar_type());
  check_residual(op, x, residual);
  const Activation follows = check_activation(op, activation);
  const auto format = norm_format(x);
  const Formula formula = formula_for(norm_layout(x));
  if (!is_compiled(follows, formula, x.scalar_type(), false)) {
    const Forward plain{weight, bias, mean, invstd, std::nullopt, Activation::Clamp, -kInfinity, kInfinity};
    const at::Tensor y = apply(x, shape, plain);
    return batch_norm_activation_backward(
        through(grad, y, follows, lo), x, weight, bias, mean, invstd, "clamp", -kInfinity, kInfinity, mask, residual);
  }
  at::Tensor grad_input;
  if (mask[0]) {
    grad_input = at::empty(x.sizes(), x.options().memory_format(format));
  }
  std::vector<double> sums(2 * shape.channels, 0.0);
  if (x.numel() > 0) {
    const at::Tensor in = x.contiguous(format);
    backward_to(
        grad.contiguous(format), in, shape, {formula, weight, bias, mean, invstd, follows, lo, hi}, grad_input,
        mask[0] ? added(residual, in, shape) : at::Tensor(), sums.data());
  }
  const auto [grad_weight, grad_bias] = parameter_gradients(std::move(sums), weight, mean, invstd, mask);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace monet_like::batch_norm
