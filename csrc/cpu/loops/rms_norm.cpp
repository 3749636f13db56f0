// The loops of RMS norm: the forward, the forward from saved reciprocal roots, and the gradient.
//
// A row is widened once into scratch that stays in the first-level cache, so the loops are compiled for float and double
// alone, and the forward's for bfloat16; only what widens and narrows is compiled for every dtype, and every tensor may have
// one of its own.

#include "rms_norm.h"

#include <cmath>

#include "convert.h"

namespace monet_like::rms_norm {
namespace {

constexpr int64_t kBlock = 4096;  // elements summed in single precision before they are added in double
constexpr int64_t kGrain = 32768;  // fewer elements are not worth a thread

template <typename O>
MONET_BODY void sum_of_products_body(const O* x, const O* y, const O* z, int64_t n, double* sum) {
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    O some = 0;
#pragma omp simd reduction(+ : some)
    for (int64_t i = first; i < last; ++i) {
      some += (x[i] * y[i]) * z[i];
    }
    *sum += some;
  }
}
MONET_FOR_EACH_ISA(sum_of_products)

template <typename O>
MONET_BODY void sum_of_squares_body(const O* x, int64_t n, double* sum) {
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    O some = 0;
#pragma omp simd reduction(+ : some)
    for (int64_t i = first; i < last; ++i) {
      some += x[i] * x[i];
    }
    *sum += some;
  }
}
MONET_FOR_EACH_ISA(sum_of_squares)

// The normalised row as a dtype R stores it.
template <typename R, typename O>
MONET_BODY void normalise_row_body(const R*, const O* x, O rstd, O* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = as_stored<R>(x[i] * rstd);
  }
}
MONET_FOR_EACH_ISA(normalise_row)

template <typename Y, typename O>
MONET_BODY void scale_row_body(const O* x, O rstd, const O* weight, Y* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(y[i], (x[i] * rstd) * weight[i]);
  }
}
MONET_FOR_EACH_ISA(scale_row)

// out = residual + rstd (g w) - x slope, and sums += g (x rstd).
template <bool Residual, typename O>
MONET_BODY void gradient_row_body(
    const O* grad, const O* x, const O* weight, const O* residual, O rstd, O slope, O* out, O* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const O g = grad[i], value = x[i], before = Residual ? residual[i] : O(0);
    sums[i] += g * (value * rstd);
    out[i] = before + (g * weight[i] * rstd - value * slope);
  }
}
MONET_FOR_EACH_ISA(gradient_row)

template <typename O>
MONET_BODY void flush_body(O* some, double* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    sums[i] += some[i];
    some[i] = 0;
  }
}
MONET_FOR_EACH_ISA(flush)

// From and to a dtype other than that of the computation. Pairs with float64 are rare.
template <typename T, typename O>
void widen_row(const T* in, O* out, int64_t n) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<O, float>) {
    widen(in, out, n);
  } else {
    std::transform(in, in + n, out, [](T value) { return static_cast<O>(load(value)); });
  }
}

template <typename T, typename O>
void narrow_row(const O* in, T* out, int64_t n) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<O, float>) {
    narrow(in, out, n);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      store(out[i], static_cast<op_type<T>>(in[i]));
    }
  }
}

template <typename O>
constexpr c10::ScalarType kDtype = sizeof(O) == 8 ? c10::ScalarType::Double : c10::ScalarType::Float;

// A row in type O: its own memory if it has that dtype, else a copy in `scratch`.
template <typename O>
const O* row_of(const Rows& t, int64_t row, int64_t width, O* scratch) {
  if (t.dtype == kDtype<O>) {
    return static_cast<const O*>(t.data) + row * width;
  }
  with_dtype(t.dtype, [&](auto zero) {
    widen_row(static_cast<const decltype(zero)*>(t.data) + row * width, scratch, width);
  });
  return scratch;
}

// A row of the result: where it is computed, and its way from there into the result.
template <typename O>
class RowResult {
 public:
  RowResult(c10::ScalarType dtype, void* data, int64_t width)
      : dtype_(dtype), data_(data), width_(width), scratch_(dtype == kDtype<O> ? 0 : width) {}

  O* begin(int64_t row) {
    return dtype_ == kDtype<O> ? static_cast<O*>(data_) + row * width_ : scratch_.data();
  }
  void end(int64_t row) {
    if (dtype_ != kDtype<O>) {
      with_dtype(dtype_, [&](auto zero) {
        narrow_row(static_cast<const O*>(scratch_.data()), static_cast<decltype(zero)*>(data_) + row * width_, width_);
      });
    }
  }

 private:
  c10::ScalarType dtype_;
  void* data_;
  int64_t width_;
  std::vector<O> scratch_;
};

// The weight in the type of the computation; ones if there is no weight.
template <typename O>
std::vector<O> weights(const Rows& weight, int64_t width) {
  std::vector<O> found(width, O(1));
  if (weight.data != nullptr) {
    const O* row = row_of(weight, 0, width, found.data());
    if (row != found.data()) {
      std::copy_n(row, width, found.data());
    }
  }
  return found;
}

int64_t grain_of(int64_t width) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
}

// The row normalised, as x's dtype stores it.
template <typename O>
void normalise_rounded(c10::ScalarType x, const O* in, O rstd, O* out, int64_t n) {
  if constexpr (std::is_same_v<O, float>) {
    if (x == c10::ScalarType::BFloat16) {
      return normalise_row(static_cast<const c10::BFloat16*>(nullptr), in, rstd, out, n);
    }
  }
  normalise_row(static_cast<const O*>(nullptr), in, rstd, out, n);
  if constexpr (std::is_same_v<O, float>) {
    if (x == c10::ScalarType::Half) {
      round_as(c10::Half(), out, n);
    }
  }
}

template <typename O>
void forward_in(
    const Rows& x, const Rows& weight, int64_t rows, int64_t width, double eps, bool rounded, O* rstd,
    bool given_rstd, c10::ScalarType dtype, void* y) {
  const std::vector<O> w = weights<O>(weight, width);
  parallel_for(0, rows, grain_of(width), [&](int64_t begin, int64_t end) {
    std::vector<O> wide(width), normalised(rounded ? width : 0);
    RowResult<O> result(dtype, y, width);
    for (int64_t row = begin; row < end; ++row) {
      const O* in = row_of(x, row, width, wide.data());
      if (!given_rstd) {
        double squares = 0;
        sum_of_squares(in, width, &squares);
        rstd[row] = static_cast<O>(1 / std::sqrt(squares / width + eps));
      }
      O scale = rstd[row];
      if (rounded) {
        normalise_rounded(x.dtype, in, scale, normalised.data(), width);
        in = normalised.data();
        scale = 1;
      }
      if constexpr (std::is_same_v<O, float>) {
        if (dtype == c10::ScalarType::BFloat16) {
          scale_row(in, scale, w.data(), static_cast<c10::BFloat16*>(y) + row * width, width);
          continue;
        }
      }
      scale_row(in, scale, w.data(), result.begin(row), width);
      result.end(row);
    }
  });
}

// With g = grad, w = weight, r = rstd and N elements in a row:
//   grad_x = r g w - x r^3 sum(g w x) / N      grad_weight = sum over rows of g x r
template <typename O>
void backward_in(
    const Rows& grad, const Rows& x, const Rows& weight, const O* rstd, const Rows& residual, int64_t rows,
    int64_t width, void* grad_x, double* grad_weight) {
  const int64_t grain = grain_of(width);
  const bool adds = residual.data != nullptr;
  const std::vector<O> w = weights<O>(weight, width);
  const int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(thread_count(), rows / grain));
  const int64_t per_chunk = (rows + chunks - 1) / chunks;
  std::vector<double> partial((chunks - 1) * width, 0.0);
  parallel_for(0, chunks, 1, [&](int64_t first_chunk, int64_t last_chunk) {
    std::vector<O> wide_x(width), wide_grad(width), wide_residual(adds ? width : 0), some(width, O(0));
    RowResult<O> result(x.dtype, grad_x, width);
    for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      const int64_t first = std::min(rows, chunk * per_chunk), last = std::min(rows, first + per_chunk);
      double* sums = chunk == 0 ? grad_weight : partial.data() + (chunk - 1) * width;
      for (int64_t row = first; row < last; ++row) {
        const O* g = row_of(grad, row, width, wide_grad.data());
        const O* in = row_of(x, row, width, wide_x.data());
        double dot = 0;
        sum_of_products(g, w.data(), in, width, &dot);
        const O r = rstd[row];
        const O slope = static_cast<O>(dot / width * r * r * r);
        if (adds) {
          const O* before = row_of(residual, row, width, wide_residual.data());
          gradient_row<true>(g, in, w.data(), before, r, slope, result.begin(row), some.data(), width);
        } else {
          gradient_row<false>(g, in, w.data(), g, r, slope, result.begin(row), some.data(), width);
        }
        result.end(row);
        if ((row - first) % 64 == 63 || row + 1 == last) {
          flush(some.data(), sums, width);
        }
      }
    }
  });
  for (int64_t chunk = 0; chunk + 1 < chunks; ++chunk) {
    for (int64_t i = 0; i < width; ++i) {
      grad_weight[i] += partial[chunk * width + i];
    }
  }
}

}  // namespace

void forward_loops(
    const Rows& x, const Rows& weight, int64_t rows, int64_t width, double eps, bool rounded, void* rstd,
    bool given_rstd, c10::ScalarType dtype, void* y) {
  if (x.dtype == c10::ScalarType::Double) {
    forward_in(x, weight, rows, width, eps, rounded, static_cast<double*>(rstd), given_rstd, dtype, y);
  } else {
    forward_in(x, weight, rows, width, eps, rounded, static_cast<float*>(rstd), given_rstd, dtype, y);
  }
}

void backward_loops(
    const Rows& grad, const Rows& x, const Rows& weight, const void* rstd, const Rows& residual, int64_t rows,
    int64_t width, void* grad_x, double* grad_weight) {
  if (x.dtype == c10::ScalarType::Double) {
    backward_in(grad, x, weight, static_cast<const double*>(rstd), residual, rows, width, grad_x, grad_weight);
  } else {
    backward_in(grad, x, weight, static_cast<const float*>(rstd), residual, rows, width, grad_x, grad_weight);
  }
}

}  // namespace monet_like::rms_norm
