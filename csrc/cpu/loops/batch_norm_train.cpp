// Mean and variance of every channel.

#include "batch_norm.h"

namespace monet_like::batch_norm {
namespace {

// Adds to `sums` the sum of n elements less `shift`, and the sum of the squares of these differences.
template <typename O>
MONET_BODY void moments_run_body(const O* in, int64_t n, O shift, double* sums) {
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    O sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
    for (int64_t i = first; i < last; ++i) {
      const O value = in[i] - shift;
      sum += value;
      squares += value * value;
    }
    sums[0] += sum;
    sums[1] += squares;
  }
}
MONET_FOR_EACH_ISA(moments_run)

// The same for rows of adjacent channels, which are added to sum[c] and squares[c].
template <typename O>
MONET_BODY void moments_rows_body(
    const O* in, int64_t rows, int64_t channels, const O* shift, O* sum, O* squares) {
  for (int64_t r = 0; r < rows; ++r, in += channels) {
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      const O value = in[c] - shift[c];
      sum[c] += value;
      squares[c] += value * value;
    }
  }
}
MONET_FOR_EACH_ISA(moments_rows)

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

// Both for all dtypes: 16-bit floats are widened block by block.
template <typename T>
void sum_run(const T* in, int64_t n, op_type<T> shift, double* sums) {
  if constexpr (std::is_same_v<T, op_type<T>>) {
    moments_run(in, n, shift, sums);
  } else {
    float block[kBlock];
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      widen(in + i, static_cast<float*>(block), count);
      moments_run(static_cast<const float*>(block), count, shift, sums);
    }
  }
}

template <typename T, typename O>
void sum_rows(const T* in, int64_t rows, int64_t channels, const O* shift, O* sum, O* squares) {
  if constexpr (std::is_same_v<T, O>) {
    moments_rows(in, rows, channels, shift, sum, squares);
  } else {
    O block[kStep];
    for_row_blocks(rows, channels, [&](int64_t r, int64_t c, int64_t high, int64_t wide) {
      widen(in + r * channels + c, static_cast<O*>(block), high * wide);
      moments_rows(static_cast<const O*>(block), high, wide, shift + c, sum + c, squares + c);
    });
  }
}

// Mean and variance of every channel: sums about the first element, and once more about the mean if that was far off.
template <typename T>
void moments(const T* x, const NormShape& shape, bool by_rows, double* mean, double* variance) {
  using O = op_type<T>;
  const int64_t C = shape.channels, image = shape.image, rows = shape.batch * image;
  if (!by_rows) {
    const bool gathers = gathers_images(shape);
    parallel_for(0, C, std::max<int64_t>(1, 8192 / rows), [&](int64_t begin, int64_t end) {
      std::vector<O> scratch(gathers ? rows : 0);
      for (int64_t c = begin; c < end; ++c) {
        O shift = load(x[c * image]);
        if (gathers) {
          for (int64_t n = 0; n < shape.batch; ++n) {
            widen(x + (n * C + c) * image, scratch.data() + n * image, image);
          }
        }
        for (int64_t pass = 0; pass < 2; ++pass) {
          double sums[2] = {0, 0};
          if (gathers) {
            sum_run(static_cast<const O*>(scratch.data()), rows, shift, &sums[0]);
          } else {
            for (int64_t n = 0; n < shape.batch; ++n) {
              sum_run(x + (n * C + c) * image, image, shift, &sums[0]);
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
  std::vector<O> shift(C);
  for (int64_t c = 0; c < C; ++c) {
    shift[c] = load(x[c]);
  }
  bool good = false;
  for (int64_t pass = 0; pass < 2 && !good; ++pass) {
    const std::vector<double> sums = sums_of_rows<O>(rows, C, [&](int64_t first, int64_t count, O* into) {
      sum_rows(x + first * C, count, C, static_cast<const O*>(shift.data()), into, into + C);
    });
    good = true;
    for (int64_t c = 0; c < C; ++c) {
      const Moments found(sums[c], sums[C + c], shift[c], static_cast<double>(rows));
      mean[c] = found.mean;
      variance[c] = found.variance;
      good &= found.good;
      shift[c] = static_cast<O>(found.mean);
    }
  }
}

}  // namespace

void moments_loops(const Input& x, double* mean, double* variance) {
  with_dtype(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    moments(static_cast<const T*>(x.data), x.shape, x.by_rows, mean, variance);
  });
}

}  // namespace monet_like::batch_norm
