// Batch norm in training mode: mean and inverse standard deviation of every channel, ATen's or computed here.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/native_batch_norm.h>

#include <cmath>

#include "batch_norm.h"

namespace monet_like::batch_norm {

namespace {

// Adds to `sums` the sum of n elements less `shift`, and the sum of the squares of these differences.
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

// The same for rows of adjacent channels; `sum` and `squares` are scratch, added to sums[0..C) and sums[C..2C).
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
  bool good;  // the shift was near enough to the mean: the difference of squares lost almost no digits

  Moments(double sum, double squares, double shift, double count) {
    const double off = sum / count;
    mean = shift + off;
    variance = std::max(0.0, squares / count - off * off);
    good = off * off <= 4 * variance;
  }
};

// Mean and variance of every channel: sums about the first element, and once more about the mean if that was far off.
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

// Updates a running statistic with new values times `factor`.
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

}  // namespace

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

Statistics own_statistics(
    const at::Tensor& x, const NormShape& shape, const at::TensorOptions& options,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
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

Statistics statistics_of_aten(
    const at::Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var,
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

Three batch_norm_train(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
    double eps, const MaybeTensor& residual, c10::string_view activation, double lo, double hi,
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

}  // namespace monet_like::batch_norm
