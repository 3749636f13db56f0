// Training-mode batch norm on the CPU, alone or with what follows it, and the gradient of both.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
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
template <typename T, bool Residual, Activation A, Formula F>
MONET_BODY op_type<T> finished(op_type<T> y, const T& residual, op_type<T> lo, op_type<T> hi) {
  y = as_stored<T>(y);
  if constexpr (Residual) {
    y = as_stored<T>(y + load(residual));
  }
  return activated<A, F>(y, lo, hi);
}

// n elements of one channel.
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

// Rows of `channels` adjacent elements.
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

// n elements that are normalised and stored already, in place.
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

// Clamps are compiled for everything, other activations in one loop with the batch norm where that is common: what is
// compiled for every dtype, formula and instruction set adds up. The rest is done by ATen's operators one by one.
template <Activation A, Formula F, typename T, bool Residual = false>
constexpr bool kCompiled =
    A == Activation::Clamp ||
    (!Residual && F != Formula::Plain && (std::is_same_v<T, float> || std::is_same_v<T, c10::BFloat16>));

bool is_compiled(Activation activation, Formula formula, at::ScalarType type, bool residual) {
  return activation == Activation::Clamp ||
         (!residual && formula != Formula::Plain && (type == at::kFloat || type == at::kBFloat16));
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The gradient through an exponential is worth storing, where the result will be, rather than found twice. In 2-byte
// types that rounds it, as ATen does.
template <Activation A>
constexpr bool kCostly = A == Activation::Silu;

constexpr int64_t kShortImage = 256;  // elements below which what is left over of its vectors is felt

// What follows, by ATen's own operators.
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

bool by_rows(NormLayout layout, const NormShape& shape) {
  return layout == NormLayout::ChannelsLast || shape.image == 1;
}

// Everything a channel's elements go through.
struct Forward {
  std::optional<at::Tensor> weight, bias;
  at::Tensor mean, invstd;
  std::optional<at::Tensor> residual;
  Activation activation;
  double lo, hi;
};

// `pitch` elements from one image of `to` to the next, if images are contiguous.
template <Formula F, bool Residual, Activation A, typename T>
void apply_with(const T* from, const T* residual, T* to, int64_t pitch, bool rows_first, const NormShape& shape,
                const Constants<op_type<T>>& k, op_type<T> lo, op_type<T> hi) {
  const int64_t channels = shape.channels, image = shape.image;
  // Without a residual its pointer stands still; it is then the input's, which can be read.
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
    // Images whose ends would leave vectors half full: several channels at once, their constants written out for each
    // element, which serve the whole batch.
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
          apply_rows<F, Residual, A>(from + i, at(i), into, 1, count * image, each_a, each_b, each_a, each_b, lo, hi);
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

// Into `out`: a tensor laid out as batch norm's result is, or channels of one that is contiguous.
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
    // In the type of the computation, as ATen has them in its gradients: of the activated value that is rounded later they
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

std::optional<at::Tensor> channels_of(const std::optional<at::Tensor>& t, int64_t first, int64_t count) {
  return given(t) ? std::make_optional(t->narrow(0, first, count)) : std::nullopt;
}

// What is known of these channels; of what is joined nothing is added.
Forward channels_of(const Forward& all, int64_t first, int64_t count) {
  return {channels_of(all.weight, first, count), channels_of(all.bias, first, count), all.mean.narrow(0, first, count),
          all.invstd.narrow(0, first, count), std::nullopt, all.activation, all.lo, all.hi};
}

at::Tensor apply_joined(at::TensorList parts, const NormShape& shape, const Forward& forward) {
  at::Tensor out = at::empty(joined_sizes(parts), parts[0].options().memory_format(at::MemoryFormat::Contiguous));
  int64_t first = 0;
  for (const at::Tensor& part : parts) {
    const int64_t count = part.size(1);
    apply_to(part, {shape.batch, count, shape.image}, channels_of(forward, first, count), out.narrow(1, first, count));
    first += count;
  }
  return out;
}

at::Tensor batch_norm_apply(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& invstd, const std::optional<at::Tensor>& residual,
    c10::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_residual(op, x, residual);
  return apply(x, shape, {weight, bias, mean, invstd, residual, check_activation(op, activation), lo, hi});
}

at::Tensor batch_norm_apply_joined(
    at::TensorList parts, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& invstd, c10::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_apply(at::cat(parts, 1), weight, bias, mean, invstd, std::nullopt, activation, lo, hi);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  return apply_joined(
      parts, shape, {weight, bias, mean, invstd, std::nullopt, check_activation(op, activation), lo, hi});
}

// ---- training forward ----

// Images of one channel, `pitch` elements apart, one after the other and widened.
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

// Whether sums over a channel are taken over its images brought together, so that no vector is cut short.
bool gathers_images(const NormShape& shape) {
  return shape.image < kShortImage && shape.batch > 1 && shape.batch * shape.image <= (1 << 16);
}

constexpr int64_t kBlock = 4096;  // elements summed in single precision before they are added in double

// Adds the sum of n elements less `shift`, and of their squares.
template <typename T>
MONET_BODY void moments_run_body(const T* in, int64_t n, op_type<T> shift, double* sums) {
  using O = op_type<T>;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    O sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
    for (int64_t i = first; i < last; ++i) {
      const O value = load(in[i]) - shift;
      sum += value;
      squares += value * value;
    }
    sums[0] += sum;
    sums[1] += squares;
  }
}
MONET_FOR_EACH_ISA(moments_run)

// The same for rows of adjacent channels; sum and squares are scratch, flushed to sums[0..C) and sums[C..2C).
template <typename T, typename O>
MONET_BODY void moments_rows_body(
    const T* in, int64_t rows, int64_t channels, const O* shift, O* sum, O* squares, double* sums) {
  for (int64_t first = 0; first < rows; first += 64) {
    const int64_t last = std::min(rows, first + 64);
    std::fill_n(sum, channels, O(0));
    std::fill_n(squares, channels, O(0));
    for (int64_t r = first; r < last; ++r) {
      const T* row = in + r * channels;
#pragma GCC ivdep
      for (int64_t c = 0; c < channels; ++c) {
        const O value = load(row[c]) - shift[c];
        sum[c] += value;
        squares[c] += value * value;
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      sums[c] += sum[c];
      sums[channels + c] += squares[c];
    }
  }
}
MONET_FOR_EACH_ISA(moments_rows)

double inverse_std(double variance, double eps) {
  return variance == 0 && eps == 0 ? 0 : 1 / std::sqrt(variance + eps);
}

// Mean and variance of one channel from sums about `shift`.
struct Moments {
  double mean, variance;
  bool good;  // the shift was so near to the mean that the difference of squares lost no digits to speak of

  Moments(double sum, double squares, double shift, double count) {
    const double off = sum / count;
    mean = shift + off;
    variance = std::max(0.0, squares / count - off * off);
    good = off * off <= 4 * variance;
  }
};

// Of all channels: about the first element, and once more about the mean where that was far off.
template <typename T>
void moments(const at::Tensor& in, const NormShape& shape, double* mean, double* variance) {
  using O = op_type<T>;
  const T* x = in.const_data_ptr<T>();
  const int64_t C = shape.channels, image = shape.image, rows = shape.batch * image;
  if (!by_rows(norm_layout(in), shape)) {
    const bool gathers = gathers_images(shape);
    at::parallel_for(0, C, std::max<int64_t>(1, 8192 / rows), [&](int64_t begin, int64_t end) {
      std::vector<O> scratch(gathers ? rows : 0);
      for (int64_t c = begin; c < end; ++c) {
        O shift = load(x[c * image]);
        if (gathers) {
          gather_images(x + c * image, scratch.data(), shape.batch, image, C * image);
        }
        for (int64_t pass = 0; pass < 2; ++pass) {
          double sums[2] = {0, 0};
          if (gathers) {
            moments_run(static_cast<const O*>(scratch.data()), rows, shift, &sums[0]);
          } else {
            for (int64_t n = 0; n < shape.batch; ++n) {
              moments_run(x + (n * C + c) * image, image, shift, &sums[0]);
            }
          }
          const Moments found(sums[0], sums[1], shift, static_cast<double>(rows));
          mean[c] = found.mean;
          variance[c] = found.variance;
          if (found.good) {
            break;
          }
          shift = static_cast<O>(found.mean);
        }
      }
    });
    return;
  }
  const int64_t grain = std::max<int64_t>(1, 32768 / C);
  const int64_t chunks = std::min<int64_t>(at::get_num_threads(), (rows + grain - 1) / grain);
  const int64_t per_chunk = (rows + chunks - 1) / chunks;
  std::vector<O> shift(C);
  for (int64_t c = 0; c < C; ++c) {
    shift[c] = load(x[c]);
  }
  bool good = false;
  for (int64_t pass = 0; pass < 2 && !good; ++pass) {
    std::vector<double> partial(chunks * 2 * C, 0.0);
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      std::vector<O> scratch(2 * C);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = std::min(rows, chunk * per_chunk), last = std::min(rows, first + per_chunk);
        moments_rows(
            x + first * C, last - first, C, static_cast<const O*>(shift.data()), scratch.data(), scratch.data() + C,
            partial.data() + chunk * 2 * C);
      }
    });
    good = true;
    for (int64_t c = 0; c < C; ++c) {
      double sum = 0, squares = 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        sum += partial[chunk * 2 * C + c];
        squares += partial[chunk * 2 * C + C + c];
      }
      const Moments found(sum, squares, shift[c], static_cast<double>(rows));
      mean[c] = found.mean;
      variance[c] = found.variance;
      good &= found.good;
      shift[c] = static_cast<O>(found.mean);
    }
  }
}

// A number for each channel, rounded to a dtype.
at::Tensor per_channel(const std::vector<double>& values, const at::TensorOptions& options) {
  const int64_t channels = static_cast<int64_t>(values.size());
  at::Tensor t = at::empty({channels}, options.memory_format(at::MemoryFormat::Contiguous));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, t.scalar_type(), "per_channel", [&] {
    scalar_t* to = t.mutable_data_ptr<scalar_t>();
    for (int64_t c = 0; c < channels; ++c) {
      to[c] = static_cast<scalar_t>(values[c]);
    }
  });
  return t;
}

// Moves a running statistic towards new values.
void move(const at::Tensor& running, const std::vector<double>& values, double factor, double momentum) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, running.scalar_type(), "move", [&] {
    scalar_t* data = running.mutable_data_ptr<scalar_t>();
    const int64_t stride = running.stride(0);
    for (size_t c = 0; c < values.size(); ++c) {
      scalar_t& value = data[static_cast<int64_t>(c) * stride];
      value = static_cast<scalar_t>((1 - momentum) * static_cast<double>(value) + momentum * (factor * values[c]));
    }
  });
  running.unsafeGetTensorImpl()->bump_version();
}

// Mean and invstd of our own, which ATen's agree with to rounding; its loop over a channel does not vectorise.
std::tuple<at::Tensor, at::Tensor> own_statistics(
    const at::Tensor& x, const NormShape& shape, const at::TensorOptions& options,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps) {
  const at::Tensor in = x.contiguous(norm_format(x));
  std::vector<double> mean(shape.channels), variance(shape.channels);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_train", [&] {
    moments<scalar_t>(in, shape, mean.data(), variance.data());
  });
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

// What follows y, written over it: in one pass where that has the bits of ATen's operators one by one.
at::Tensor finish_(
    at::Tensor y, const std::optional<at::Tensor>& residual, Activation activation, double lo, double hi) {
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

// Mean and invstd of ATen's own, of dense float32 or float64.
std::tuple<at::Tensor, at::Tensor> statistics_of_aten(
    const at::Tensor& x, const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var,
    double momentum, double eps) {
  auto [mean, invstd] = at::batch_norm_update_stats(x, running_mean, running_var, momentum);
  // `invstd` still holds the variance. ATen computes its inverse root in double and rounds once.
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "batch_norm_train", [&] {
    scalar_t* value = invstd.template mutable_data_ptr<scalar_t>();
    for (int64_t c = 0; c < invstd.numel(); ++c) {
      value[c] = static_cast<scalar_t>(inverse_std(value[c], eps));
    }
  });
  return {mean, invstd};
}

bool is_full_precision(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_train(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps, const std::optional<at::Tensor>& residual, c10::string_view activation, double lo, double hi,
    bool exact) {
  const char* op = "batch_norm_train";
  const NormShape shape = check_norm(op, x, weight, bias, nullptr, nullptr);
  check_residual(op, x, residual);
  const Activation follows = check_activation(op, activation);
  const auto finish = [&](const at::Tensor& mean, const at::Tensor& invstd) {
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
    auto [y, mean, invstd] = at::native_batch_norm(x, weight, bias, running_mean, running_var, true, momentum, eps);
    return {finish_(y, residual, follows, lo, hi), mean, invstd};
  }
  const auto [mean, invstd] = statistics_of_aten(x, running_mean, running_var, momentum, eps);
  return {finish(mean, invstd), mean, invstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_train_joined(
    at::TensorList parts, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps, c10::string_view activation, double lo, double hi, bool exact) {
  const char* op = "batch_norm_train_joined";
  if (!check_parts(op, parts) || (exact && !is_full_precision(parts[0]))) {
    return batch_norm_train(
        at::cat(parts, 1), weight, bias, running_mean, running_var, momentum, eps, std::nullopt, activation, lo, hi,
        exact);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, nullptr, nullptr);
  const Activation follows = check_activation(op, activation);
  std::vector<at::Tensor> means, invstds;
  int64_t first = 0;
  for (const at::Tensor& part : parts) {
    const int64_t count = part.size(1);
    const auto channels = [&](const std::optional<at::Tensor>& t) { return channels_of(t, first, count); };
    const auto [mean, invstd] =
        exact ? statistics_of_aten(part, channels(running_mean), channels(running_var), momentum, eps)
              : own_statistics(
                    part, {shape.batch, count, shape.image},
                    statistics_options(part, {weight, bias, running_mean, running_var}), channels(running_mean),
                    channels(running_var), momentum, eps);
    means.push_back(mean);
    invstds.push_back(invstd);
    first += count;
  }
  const at::Tensor mean = at::cat(means), invstd = at::cat(invstds);
  return {
      apply_joined(parts, shape, {weight, bias, mean, invstd, std::nullopt, follows, lo, hi}), mean, invstd};
}

// ---- backward ----
//
// With y = a x + b, g = grad through the activation at y, N = elements per channel, m and s the saved mean and invstd:
//   grad_bias   = sum g                      grad_weight = s * sum (x - m) g
//   grad_input  = (g - mean(g) - (x - m) s^2 mean((x - m) g)) * s * weight
// y is recomputed with the formula of the forward pass, so it is the forward pass's y.

template <typename O>
struct Gradient {
  O mean_g, slope, scale;  // grad_input = (g - mean_g - (x - m) * slope) * scale
};

template <Formula F, Activation A, typename T, typename O = op_type<T>>
MONET_BODY O gradient_through(O grad, O x, O a, O b, O mean, O invstd, O lo, O hi) {
  return activation_gradient<A, F>(grad, as_stored<T>(normalised<F>(x, a, b, mean, invstd)), lo, hi);
}

// grad and x are of the tensor's type T, or widened. With `Keep` the g that was found is left in `kept`, which may be
// grad.
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

// The same from a g that was kept.
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

// sum[c], dot[c] are scratch in compute precision, flushed to sums[0..C) and sums[C..2C) every 64 rows.
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

// The same from a g that was kept in `out`.
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

// Adds another gradient to n elements that were just stored.
template <typename T>
MONET_BODY void add_run_body(T* to, const T* other, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(to[i], load(to[i]) + load(other[i]));
  }
}
MONET_FOR_EACH_ISA(add_run)

// A tensor, or none, or channels of one: `pitch` elements from one image to the next, or one row.
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

// sums[0..C) and sums[C..2C) receive sum g and sum (x - m) g.
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

template <Formula F, Activation A, typename T>
void backward_rows(
    Pitched<const T> upstream, const T* x, Pitched<T> result, Pitched<const T> residual, const NormShape& shape,
    const Constants<op_type<T>>& k, op_type<T> lo, op_type<T> hi, double* sums) {
  using O = op_type<T>;
  const T* grad = upstream.data;  // here they are whole
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

// The gradient through an activation that is not compiled with the batch norm.
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

// A batch norm with what follows it, as its gradient sees it.
struct Backward {
  Formula formula;
  std::optional<at::Tensor> weight, bias;
  at::Tensor mean, invstd;
  Activation activation;
  double lo, hi;
};

// Into `grad_input`, if it is defined, and `sums`. Tensors are laid out as x is for batch norm, or channels of contiguous
// ones if x is contiguous; the activation is compiled with the batch norm.
void backward_to(
    const at::Tensor& grad, const at::Tensor& x, const NormShape& shape, const Backward& b, const at::Tensor& grad_input,
    const at::Tensor& residual, double* sums) {
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

// Gradients by weight and bias from the sums over g.
std::tuple<at::Tensor, at::Tensor> parameter_gradients(
    std::vector<double> sums, const std::optional<at::Tensor>& weight, const at::Tensor& mean, const at::Tensor& invstd,
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

// A gradient to be added, copied if it is neither laid out as x nor channels of what is; undefined if there is none.
at::Tensor added(const std::optional<at::Tensor>& residual, const at::Tensor& x, const NormShape& shape) {
  if (!given(residual)) {
    return at::Tensor();
  }
  const bool fits = pitch_of(*residual, by_rows(norm_layout(x), shape)) >= 0;
  return fits ? *residual : residual->contiguous(norm_format(x));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_activation_backward(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd,
    c10::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const std::optional<at::Tensor>& residual) {
  const char* op = "batch_norm_activation_backward";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_gradient(op, grad, x.sizes(), x.scalar_type());
  check_residual(op, x, residual);
  const Activation follows = check_activation(op, activation);
  const auto format = norm_format(x);
  const Formula formula = formula_for(norm_layout(x));
  if (!is_compiled(follows, formula, x.scalar_type(), false)) {
    const at::Tensor y = apply(x, shape, {weight, bias, mean, invstd, std::nullopt, Activation::Clamp, -kInfinity, kInfinity});
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

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_activation_backward_joined(
    const at::Tensor& grad, at::TensorList parts, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd,
    c10::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const std::optional<at::Tensor>& residual) {
  const char* op = "batch_norm_activation_backward_joined";
  const bool apart = check_parts(op, parts);
  const Activation follows = check_activation(op, activation);
  const Formula formula = formula_for(norm_layout(parts[0]));
  if (!apart || !is_compiled(follows, formula, parts[0].scalar_type(), false)) {
    return batch_norm_activation_backward(
        grad, at::cat(parts, 1), weight, bias, mean, invstd, activation, lo, hi, mask, residual);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  const std::vector<int64_t> sizes = joined_sizes(parts);
  check_gradient(op, grad, sizes, parts[0].scalar_type());
  const at::Tensor upstream = grad.contiguous();
  at::Tensor grad_input, other;
  if (mask[0]) {
    grad_input = at::empty(sizes, parts[0].options().memory_format(at::MemoryFormat::Contiguous));
    check_residual(op, grad_input, residual);
    other = added(residual, grad_input, shape);
  }
  const auto channels = [](const at::Tensor& t, int64_t first, int64_t count) {
    return t.defined() ? t.narrow(1, first, count) : t;
  };
  std::vector<double> sums(2 * shape.channels, 0.0);
  int64_t first = 0;
  for (const at::Tensor& part : parts) {
    const int64_t count = part.size(1);
    std::vector<double> own(2 * count, 0.0);
    const Forward known = channels_of({weight, bias, mean, invstd, std::nullopt, follows, lo, hi}, first, count);
    backward_to(
        channels(upstream, first, count), part, {shape.batch, count, shape.image},
        {formula, known.weight, known.bias, known.mean, known.invstd, follows, lo, hi}, channels(grad_input, first, count),
        channels(other, first, count), own.data());
    std::copy_n(own.data(), count, sums.data() + first);
    std::copy_n(own.data() + count, count, sums.data() + shape.channels + first);
    first += count;
  }
  const auto [grad_weight, grad_bias] = parameter_gradients(std::move(sums), weight, mean, invstd, mask);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("batch_norm_apply", &batch_norm_apply);
  m.impl("batch_norm_train", &batch_norm_train);
  m.impl("batch_norm_activation_backward", &batch_norm_activation_backward);
  m.impl("batch_norm_train_joined", &batch_norm_train_joined);
  m.impl("batch_norm_apply_joined", &batch_norm_apply_joined);
  m.impl("batch_norm_activation_backward_joined", &batch_norm_activation_backward_joined);
}

}  // namespace monet_like
