// RMS norm on the CPU: the forward, the forward from saved reciprocal roots, and the gradient.
//
// A row is widened once into scratch that stays in the first-level cache, so the loops are compiled for float and double
// alone; only what widens and narrows is compiled for every dtype, and every tensor may have one of its own.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "../checks.h"
#include "isa.h"

namespace monet_like {
namespace {

constexpr int64_t kBlock = 4096;  // elements summed in single precision before they are added in double
constexpr int64_t kGrain = 32768;  // fewer elements are not worth a thread

template <typename T, typename O>
MONET_BODY void widen_body(const T* in, O* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<O>(load(in[i]));
  }
}
MONET_FOR_EACH_ISA(widen)

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
MONET_BODY void normalise_rounded_body(const R*, const O* x, O rstd, O* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<O>(as_stored<R>(static_cast<op_type<R>>(x[i] * rstd)));
  }
}
MONET_FOR_EACH_ISA(normalise_rounded)

template <typename O, typename Y>
MONET_BODY void scale_row_body(const O* x, O rstd, const O* weight, Y* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(y[i], static_cast<op_type<Y>>((x[i] * rstd) * weight[i]));
  }
}
MONET_FOR_EACH_ISA(scale_row)

// out = residual + rstd (g w) - x slope, and sums += g (x rstd).
template <bool Residual, typename O, typename Y>
MONET_BODY void gradient_row_body(
    const O* grad, const O* x, const O* weight, const O* residual, O rstd, O slope, Y* out, O* sums, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const O g = grad[i], value = x[i], before = Residual ? residual[i] : O(0);
    sums[i] += g * (value * rstd);
    store(out[i], static_cast<op_type<Y>>(before + (g * weight[i] * rstd - value * slope)));
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

template <typename F>
void with_dtype(at::ScalarType type, const F& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "rms_norm", [&] { f(scalar_t()); });
}

// Row `row` of a contiguous tensor in type O: its own memory if it has that dtype, else a copy in `scratch`.
template <typename O>
const O* row_of(const at::Tensor& t, int64_t row, int64_t width, O* scratch) {
  const char* data = static_cast<const char*>(t.const_data_ptr()) + row * width * t.element_size();
  if (t.scalar_type() == c10::CppTypeToScalarType<O>::value) {
    return reinterpret_cast<const O*>(data);
  }
  with_dtype(t.scalar_type(), [&](auto zero) {
    widen(reinterpret_cast<const decltype(zero)*>(data), scratch, width);
  });
  return scratch;
}

// The weight in the type of the computation; ones if there is no weight.
template <typename O>
std::vector<O> weights(const std::optional<at::Tensor>& weight, int64_t width) {
  std::vector<O> found(width, O(1));
  if (given(weight)) {
    const at::Tensor dense = weight->contiguous();
    const O* row = row_of(dense, 0, width, found.data());
    if (row != found.data()) {
      std::copy_n(row, width, found.data());
    }
  }
  return found;
}

int64_t grain_of(int64_t width) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
}

// Computes y, and rstd if it is not given.
template <typename O>
void forward(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const RowShape& shape, double eps, bool rounded,
    O* rstd, bool given_rstd, at::Tensor& y) {
  const int64_t width = shape.width;
  const std::vector<O> w = weights<O>(weight, width);
  with_dtype(y.scalar_type(), [&](auto zero) {
    using Y = decltype(zero);
    Y* out = y.mutable_data_ptr<Y>();
    at::parallel_for(0, shape.rows, grain_of(width), [&](int64_t begin, int64_t end) {
      std::vector<O> wide(width), normalised(rounded ? width : 0);
      for (int64_t row = begin; row < end; ++row) {
        const O* in = row_of(x, row, width, wide.data());
        if (!given_rstd) {
          double squares = 0;
          sum_of_squares(in, width, &squares);
          rstd[row] = static_cast<O>(1 / std::sqrt(squares / width + eps));
        }
        O scale = rstd[row];
        if (rounded) {
          with_dtype(x.scalar_type(), [&](auto as) {
            normalise_rounded(static_cast<const decltype(as)*>(nullptr), in, scale, normalised.data(), width);
          });
          in = normalised.data();
          scale = 1;
        }
        scale_row(in, scale, w.data(), out + row * width, width);
      }
    });
  });
}

std::tuple<at::Tensor, at::Tensor> rms_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, int64_t dims, double eps, bool rounded,
    at::ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm", x, weight, nullptr, dims);
  const at::Tensor in = x.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  check_floating(y, "rms_norm", "the result");
  at::Tensor rstd = at::empty(shape.statistics, row_statistics_options(x));
  with_opmath(x, [&](auto zero) {
    using O = decltype(zero);
    forward<O>(in, weight, shape, eps, rounded, rstd.mutable_data_ptr<O>(), false, y);
  });
  return {y, rstd};
}

at::Tensor rms_norm_apply(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& rstd, int64_t dims, bool rounded,
    at::ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm_apply", x, weight, &rstd, dims);
  const at::Tensor in = x.contiguous(), known = rstd.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  check_floating(y, "rms_norm_apply", "the result");
  with_opmath(x, [&](auto zero) {
    using O = decltype(zero);
    forward<O>(in, weight, shape, 0, rounded, const_cast<O*>(known.const_data_ptr<O>()), true, y);
  });
  return y;
}

// With g = grad, w = weight, r = rstd and N elements in a row:
//   grad_x = r g w - x r^3 sum(g w x) / N      grad_weight = sum over rows of g x r
template <typename O>
void backward(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& weight, const O* rstd,
    const at::Tensor& residual, const RowShape& shape, at::Tensor& grad_x, double* grad_weight) {
  const int64_t width = shape.width, grain = grain_of(width);
  const std::vector<O> w = weights<O>(weight, width);
  const int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), shape.rows / grain));
  const int64_t per_chunk = (shape.rows + chunks - 1) / chunks;
  std::vector<double> partial((chunks - 1) * width, 0.0);
  with_dtype(grad_x.scalar_type(), [&](auto zero) {
    using Y = decltype(zero);
    Y* out = grad_x.mutable_data_ptr<Y>();
    at::parallel_for(0, chunks, 1, [&](int64_t first_chunk, int64_t last_chunk) {
      std::vector<O> wide_x(width), wide_grad(width), wide_residual(residual.defined() ? width : 0), some(width, O(0));
      for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
        const int64_t first = std::min(shape.rows, chunk * per_chunk), last = std::min(shape.rows, first + per_chunk);
        double* sums = chunk == 0 ? grad_weight : partial.data() + (chunk - 1) * width;
        for (int64_t row = first; row < last; ++row) {
          const O* g = row_of(grad, row, width, wide_grad.data());
          const O* in = row_of(x, row, width, wide_x.data());
          double dot = 0;
          sum_of_products(g, w.data(), in, width, &dot);
          const O r = rstd[row];
          const O slope = static_cast<O>(dot / width * r * r * r);
          if (residual.defined()) {
            const O* before = row_of(residual, row, width, wide_residual.data());
            gradient_row<true>(g, in, w.data(), before, r, slope, out + row * width, some.data(), width);
          } else {
            gradient_row<false>(g, in, w.data(), g, r, slope, out + row * width, some.data(), width);
          }
          if ((row - first) % 64 == 63 || row + 1 == last) {
            flush(some.data(), sums, width);
          }
        }
      }
    });
  });
  for (int64_t chunk = 0; chunk + 1 < chunks; ++chunk) {
    for (int64_t i = 0; i < width; ++i) {
      grad_weight[i] += partial[chunk * width + i];
    }
  }
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& rstd,
    const std::optional<at::Tensor>& residual, int64_t dims) {
  const char* op = "rms_norm_backward";
  const RowShape shape = check_rows(op, x, weight, &rstd, dims);
  check_row_gradients(op, x, grad, residual);
  at::Tensor grad_x = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  const at::Tensor sums =
      at::zeros({shape.width}, x.options().dtype(at::kDouble).memory_format(at::MemoryFormat::Contiguous));
  const at::Tensor in = x.contiguous(), upstream = grad.contiguous(), known = rstd.contiguous();
  const at::Tensor before = given(residual) ? residual->contiguous() : at::Tensor();
  with_opmath(x, [&](auto zero) {
    using O = decltype(zero);
    backward<O>(
        upstream, in, weight, known.const_data_ptr<O>(), before, shape, grad_x, sums.mutable_data_ptr<double>());
  });
  return {grad_x, given(weight) ? sums.to(weight->scalar_type()).view(weight->sizes()) : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_apply", &rms_norm_apply);
  m.impl("rms_norm_backward", &rms_norm_backward);
}

}  // namespace monet_like
