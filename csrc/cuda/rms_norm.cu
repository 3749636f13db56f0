// RMS norm on the GPU: forward, the same from the saved reciprocal roots, and the gradient.
//
// A block processes one row at a time and holds it in the registers of its threads between the sum over it and its use, so
// every tensor is read once. Rows that do not fit, or do not start at multiples of 16 bytes, and rare mixtures of dtypes
// take kernels that read twice and look up dtypes at run time.

#include <limits>
#include <tuple>

#include "common.cuh"

namespace monet_like {
namespace {

constexpr int kMostThreads = 512;

// ---- rows of any width, tensors of any dtype ----

// The sum over all threads of a block, for all of them. Turns alternate between two places, so that one barrier is enough.
template <typename O>
__device__ __forceinline__ O block_sum(O value, int turn) {
  __shared__ O shared[2][kMostThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  const int warps = static_cast<int>(blockDim.x / 32);
  if (warps == 1) {
    return value;
  }
  if (threadIdx.x % 32 == 0) {
    shared[turn % 2][threadIdx.x / 32] = value;
  }
  __syncthreads();
  O total = 0;
  for (int warp = 0; warp < warps; ++warp) {
    total += shared[turn % 2][warp];
  }
  return total;
}

template <typename O>
__global__ void forward_kernel(
    Floats x, Floats weight, O* rstd, bool given_rstd, Floats y, int64_t rows, int64_t width, O eps, bool rounded) {
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t start = row * width;
    O r = 0;
    if (given_rstd) {
      r = rstd[row];
    } else {
      O squares = 0;
      for (int64_t i = threadIdx.x; i < width; i += kThreads) {
        const O value = x.at<O>(start + i);
        squares += value * value;
      }
      r = O(1) / sqrt(block_sum(squares, turn++) / static_cast<O>(width) + eps);
      if (threadIdx.x == 0) {
        rstd[row] = r;
      }
    }
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      O value = x.at<O>(start + i) * r;
      value = rounded ? x.rounded(value) : value;
      y.put(start + i, weight.data == nullptr ? value : value * weight.at<O>(i));
    }
  }
}

// partial[block, i] sums what the block's rows add to the weight's gradient; each thread has columns of its own.
template <typename O>
__global__ void backward_kernel(
    Floats grad, Floats x, Floats weight, const O* rstd, Floats residual, Floats grad_x, O* partial, int64_t rows,
    int64_t width) {
  O* mine = partial == nullptr ? nullptr : partial + blockIdx.x * width;
  for (int64_t i = threadIdx.x; mine != nullptr && i < width; i += kThreads) {
    mine[i] = 0;
  }
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t start = row * width;
    const O r = rstd[row];
    O dot = 0;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const O w = weight.data == nullptr ? O(1) : weight.at<O>(i);
      dot += grad.at<O>(start + i) * w * x.at<O>(start + i);
    }
    const O slope = block_sum(dot, turn++) / static_cast<O>(width) * r * r * r;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const O g = grad.at<O>(start + i), value = x.at<O>(start + i);
      const O w = weight.data == nullptr ? O(1) : weight.at<O>(i);
      const O before = residual.data == nullptr ? O(0) : residual.at<O>(start + i);
      if (mine != nullptr) {
        mine[i] += g * (value * r);
      }
      grad_x.put(start + i, before + (g * w * r - value * slope));
    }
  }
}

// ---- rows in registers ----

// The `Count` vectors of a row that this thread holds; zeros past the end of the row.
template <typename T, int Count>
struct Held {
  Words words[Count];

  Held() = default;
  __device__ __forceinline__ Held(const T* row, int width) {
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int i = (static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x)) * kVector<T>;
      words[k] = row != nullptr && i < width ? load_words(row + i) : Words{};
    }
  }
};

// The same of elements whose vectors are cut as those of T are; T itself or wider.
template <typename T, typename G, int Count>
struct HeldAs {
  static constexpr int kParts = sizeof(G) / sizeof(T);
  Words words[Count][kParts];

  HeldAs() = default;
  __device__ __forceinline__ HeldAs(const G* row, int width) {
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int i = (static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x)) * kVector<T>;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        words[k][part] = i < width ? load_words(row + i + part * kVector<G>) : Words{};
      }
    }
  }
  __device__ __forceinline__ op_type<T> at(int k, int j) const {
    return widened<G>(words[k][j / kVector<G>], j % kVector<G>);
  }
};

// N elements at a multiple of 16 bytes, in the type that they are computed in.
template <int N, typename W>
__device__ __forceinline__ Vector<op_type<W>, N> load_widened(const W* p) {
  Vector<op_type<W>, N> values;
#pragma unroll
  for (int part = 0; part < N / kVector<W>; ++part) {
    const Words words = load_words(p + part * kVector<W>);
#pragma unroll
    for (int j = 0; j < kVector<W>; ++j) {
      values.at[part * kVector<W> + j] = widened<W>(words, j);
    }
  }
  return values;
}

// Vectors of a row that a thread holds in the forward. In the backward they are two, of wide rows four.
constexpr int kForward = 4;

template <typename T, typename W, typename Y>
__global__ void __launch_bounds__(kMostThreads) forward_row_kernel(
    const T* __restrict__ x, const W* __restrict__ weight, op_type<T>* __restrict__ rstd, bool given_rstd,
    Y* __restrict__ y, int64_t rows, int width, op_type<T> eps, bool rounded) {
  using O = op_type<T>;
  constexpr int N = kVector<T>;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Held<T, kForward> held(x + row * width, width);
    O r = 0;
    if (given_rstd) {
      r = rstd[row];
    } else {
      O squares = 0;
#pragma unroll
      for (int k = 0; k < kForward; ++k) {
        const Vector<T> values = elements<T>(held.words[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          squares += static_cast<O>(values.at[j]) * static_cast<O>(values.at[j]);
        }
      }
      r = O(1) / sqrt(block_sum(squares, turn++) / static_cast<O>(width) + eps);
      if (threadIdx.x == 0) {
        rstd[row] = r;
      }
    }
#pragma unroll
    for (int k = 0; k < kForward; ++k) {
      const int i = (static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x)) * N;
      if (i < width) {
        const Vector<T> values = elements<T>(held.words[k]);
        Vector<O, N> made;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const O value = static_cast<O>(values.at[j]) * r;
          made.at[j] = rounded ? static_cast<O>(static_cast<T>(value)) : value;
        }
        if (weight != nullptr) {
          const Vector<W, N> w = load<N>(weight + i);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            made.at[j] *= static_cast<O>(w.at[j]);
          }
        }
        Vector<Y, N> stored;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          stored.at[j] = static_cast<Y>(made.at[j]);
        }
        store(y + row * width + i, stored);
      }
    }
  }
}

// What the gradient of a row is computed from, besides the weight.
template <typename T, typename G, int Count>
struct HeldRow {
  Held<T, Count> x;
  HeldAs<T, G, Count> grad;
  op_type<T> rstd;
};

// partial[block, i] sums what the block's rows add to the weight's gradient; a thread's columns are the same in all rows. The
// next row is loaded before this one is used, unless its gradients are wider than x. Products with the weight are computed
// twice, because there are no registers for them.
template <typename T, typename W, typename G, int Count>
__global__ void __launch_bounds__(kMostThreads) backward_row_kernel(
    const G* __restrict__ grad, const T* __restrict__ x, const W* __restrict__ weight,
    const op_type<T>* __restrict__ rstd, const T* __restrict__ residual, T* __restrict__ grad_x,
    op_type<T>* __restrict__ partial, int64_t rows, int width) {
  using O = op_type<T>;
  constexpr int N = kVector<T>;
  O sums[Count][N] = {};
  const auto first_element = [](int k) {
    return (static_cast<int>(threadIdx.x) + k * static_cast<int>(blockDim.x)) * N;
  };
  // Gradients times weights; those past the end of the row are zeros.
  const auto through = [&](const HeldAs<T, G, Count>& upstream, int k) {
    const int i = first_element(k);
    Vector<O, N> values;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values.at[j] = upstream.at(k, j);
    }
    if (weight != nullptr && i < width) {
      const Vector<O, N> w = load_widened<N>(weight + i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values.at[j] *= w.at[j];
      }
    }
    return values;
  };
  const auto load_row = [&](int64_t row) {
    return HeldRow<T, G, Count>{
        Held<T, Count>(x + row * width, width), HeldAs<T, G, Count>(grad + row * width, width), rstd[row]};
  };
  constexpr bool kAhead = sizeof(G) == sizeof(T);
  HeldRow<T, G, Count> next;
  if (kAhead) {
    next = load_row(blockIdx.x);
  }
  int turn = 0;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const HeldRow<T, G, Count> held = kAhead ? next : load_row(row);
    if (kAhead && row + gridDim.x < rows) {
      next = load_row(row + gridDim.x);
    }
    const O r = held.rstd;
    O dot = 0;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const Vector<O, N> values = widened<T>(held.x.words[k]), gradients = through(held.grad, k);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[k][j] += held.grad.at(k, j) * (values.at[j] * r);
        dot += gradients.at[j] * values.at[j];
      }
    }
    const O slope = block_sum(dot, turn++) / static_cast<O>(width) * r * r * r;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int i = first_element(k);
      if (i < width) {
        const Vector<O, N> values = widened<T>(held.x.words[k]), gradients = through(held.grad, k);
        const Words before = residual == nullptr ? Words{} : load_words(residual + row * width + i);
        Vector<O, N> made;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const O own = gradients.at[j] * r - values.at[j] * slope;
          made.at[j] = widened<T>(before, j) + own;
        }
        store(grad_x + row * width + i, narrowed<T>(made));
      }
    }
  }
  if (partial == nullptr) {
    return;
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) {
    const int i = first_element(k);
    if (i < width) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        partial[static_cast<int64_t>(blockIdx.x) * width + i + j] = sums[k][j];
      }
    }
  }
}

// ---- the weight's gradient ----

constexpr int kSummers = 16;  // warps of a block

// sums[i] = partial[0, i] + partial[1, i] + ...: each warp of a block has some rows of 32 columns.
template <typename O>
__global__ void __launch_bounds__(kSummers * 32) column_sums_kernel(
    const O* __restrict__ partial, Floats sums, int rows, int64_t width) {
  __shared__ O shared[kSummers][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  O sum = 0;
  if (column < width) {
#pragma unroll 8
    for (int row = warp; row < rows; row += kSummers) {
      sum += partial[row * width + column];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && column < width) {
#pragma unroll
    for (int other = 1; other < kSummers; ++other) {
      sum += shared[other][lane];
    }
    sums.put(column, sum);
  }
}

// ---- launches ----

unsigned int blocks_for_rows(int64_t rows, int64_t most) {
  return static_cast<unsigned int>(std::clamp<int64_t>(rows, 1, most));
}

// Contiguous, and where 16 bytes can be read at a time; undefined if it is not given.
Tensor dense(const MaybeTensor& t) {
  return given(t) ? aligned(t->contiguous()) : Tensor();
}

template <typename T>
const T* data_of(const Tensor& t) {
  return t.defined() ? static_cast<const T*>(t.const_data_ptr()) : nullptr;
}

// Threads that hold a row of `width` elements of type T, each Count vectors; 0 if it is held in no registers.
template <typename T, int Count>
int threads_for(int64_t width) {
  const int64_t each = Count * kVector<T>, threads = (width + each * 32 - 1) / (each * 32) * 32;
  return width % kVector<T> == 0 && threads <= kMostThreads ? static_cast<int>(threads) : 0;
}

// Calls f(zero of the type of `a`, zero of the type of `b`) where each is T or the type that T is computed in, and says
// whether it did; undefined tensors count as T.
template <typename T, typename F>
bool with_types(const Tensor& a, const Tensor& b, const F& f) {
  using O = op_type<T>;
  constexpr auto own = c10::CppTypeToScalarType<T>::value, wide = c10::CppTypeToScalarType<O>::value;
  const auto type_a = a.defined() ? a.scalar_type() : own, type_b = b.defined() ? b.scalar_type() : own;
  if ((type_a != own && type_a != wide) || (type_b != own && type_b != wide)) {
    return false;
  }
  if (type_a == own) {
    type_b == own ? f(T{}, T{}) : f(T{}, O{});
  } else {
    type_b == own ? f(O{}, T{}) : f(O{}, O{});
  }
  return true;
}

// y, and rstd where it is not given.
void forward(
    const Tensor& x, const MaybeTensor& weight, const RowShape& shape, double eps, bool rounded,
    const Tensor& rstd, bool given_rstd, const Tensor& y) {
  if (shape.rows == 0 || shape.width == 0) {
    if (!given_rstd) {
      MONET_TORCH(aoti_torch_aten_fill__Scalar, rstd.get(), std::numeric_limits<double>::quiet_NaN());  // the mean of no elements
    }
    return;
  }
  const Tensor in = dense(x), w = dense(weight);
  const auto stream = current_stream();
  bool done = false;
  MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
    using O = op_type<scalar_t>;
    const int threads = threads_for<scalar_t, kForward>(shape.width);
    done = threads > 0 && with_types<scalar_t>(w, y, [&](auto of_weight, auto of_y) {
      using W = decltype(of_weight);
      using Y = decltype(of_y);
      forward_row_kernel<scalar_t, W, Y>
          <<<blocks_for_rows(shape.rows, std::numeric_limits<int>::max()), threads, 0, stream>>>(
              data_of<scalar_t>(in), data_of<W>(w), static_cast<O*>(const_cast<void*>(rstd.const_data_ptr())),
              given_rstd, y.mutable_data_ptr<Y>(), shape.rows, static_cast<int>(shape.width), static_cast<O>(eps),
              rounded);
      MONET_CUDA(cudaGetLastError());
    });
  });
  if (done) {
    return;
  }
  with_opmath(x, [&](auto zero) {
    using O = decltype(zero);
    forward_kernel<O><<<blocks_for_rows(shape.rows, 65535), kThreads, 0, stream>>>(
        Floats(in), Floats(w), static_cast<O*>(const_cast<void*>(rstd.const_data_ptr())), given_rstd, Floats(y),
        shape.rows, shape.width, static_cast<O>(eps), rounded);
    MONET_CUDA(cudaGetLastError());
  });
}

std::tuple<Tensor, Tensor> rms_norm(
    const Tensor& x, const MaybeTensor& weight, int64_t dims, double eps, bool rounded,
    ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm", x, weight, nullptr, dims);
  const DeviceGuard guard(x.device());
  Tensor y = empty(x.sizes(), x.options().dtype(dtype));
  check_floating(y, "rms_norm", "the result");
  Tensor rstd = empty(shape.statistics, row_statistics_options(x));
  forward(x, weight, shape, eps, rounded, rstd, false, y);
  return {y, rstd};
}

Tensor rms_norm_apply(
    const Tensor& x, const MaybeTensor& weight, const Tensor& rstd, int64_t dims, bool rounded,
    ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm_apply", x, weight, &rstd, dims);
  const DeviceGuard guard(x.device());
  Tensor y = empty(x.sizes(), x.options().dtype(dtype));
  check_floating(y, "rms_norm_apply", "the result");
  forward(x, weight, shape, 0, rounded, rstd.contiguous(), true, y);
  return y;
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight, const Tensor& rstd,
    const MaybeTensor& residual, int64_t dims) {
  const char* op = "rms_norm_backward";
  const RowShape shape = check_rows(op, x, weight, &rstd, dims);
  check_row_gradients(op, x, grad, residual);
  const DeviceGuard guard(x.device());
  Tensor grad_x = empty(x.sizes(), x.options());
  // Enough blocks to fill a GPU, few enough that their partial sums are small beside the gradient.
  const int64_t wanted = std::max((shape.rows + 31) / 32, std::min<int64_t>((shape.rows + 3) / 4, 256));
  const auto stream = current_stream();
  Tensor partial;
  const auto partial_for = [&](unsigned int blocks) {
    if (given(weight)) {
      partial = empty({static_cast<int64_t>(blocks), shape.width}, row_statistics_options(x));
    }
    return partial;
  };
  if (shape.rows == 0 || shape.width == 0) {
    if (partial_for(1).defined()) {
      partial.zero_();
    }
  } else {
    const Tensor upstream = dense(grad), in = dense(x), w = dense(weight), known = rstd.contiguous();
    const Tensor before = dense(residual);
    bool done = false;
    MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
      using O = op_type<scalar_t>;
      const bool adds_own = !before.defined() || before.scalar_type() == x.scalar_type();
      const auto held = [&](auto count) {
        constexpr int kCount = decltype(count)::value;
        const int threads = threads_for<scalar_t, kCount>(shape.width);
        return threads > 0 && adds_own && with_types<scalar_t>(w, upstream, [&](auto of_weight, auto of_grad) {
          using W = decltype(of_weight);
          using G = decltype(of_grad);
          constexpr auto kernel = backward_row_kernel<scalar_t, W, G, kCount>;
          const unsigned int blocks = resident_grid<kernel>(wanted, threads);
          O* sums = const_cast<O*>(data_of<O>(partial_for(blocks)));
          kernel<<<blocks, threads, 0, stream>>>(
              data_of<G>(upstream), data_of<scalar_t>(in), data_of<W>(w), known.const_data_ptr<O>(),
              data_of<scalar_t>(before), grad_x.mutable_data_ptr<scalar_t>(), sums, shape.rows,
              static_cast<int>(shape.width));
          MONET_CUDA(cudaGetLastError());
        });
      };
      done = held(std::integral_constant<int, 2>()) || held(std::integral_constant<int, 4>());
    });
    if (!done) {
      const unsigned int blocks = blocks_for_rows(wanted, 1024);
      with_opmath(x, [&](auto zero) {
        using O = decltype(zero);
        O* sums = const_cast<O*>(data_of<O>(partial_for(blocks)));
        backward_kernel<O><<<blocks, kThreads, 0, stream>>>(
            Floats(upstream), Floats(in), Floats(w), known.const_data_ptr<O>(), Floats(before), Floats(grad_x), sums,
            shape.rows, shape.width);
        MONET_CUDA(cudaGetLastError());
      });
    }
  }
  Tensor grad_weight;
  if (given(weight)) {
    grad_weight = empty(weight->sizes(), weight->options());
    with_opmath(x, [&](auto zero) {
      using O = decltype(zero);
      if (shape.width > 0) {
        column_sums_kernel<O><<<static_cast<unsigned int>((shape.width + 31) / 32), kSummers * 32, 0, stream>>>(
            partial.const_data_ptr<O>(), Floats(grad_weight), static_cast<int>(partial.size(0)), shape.width);
        MONET_CUDA(cudaGetLastError());
      }
    });
  }
  return {grad_x, grad_weight};
}

}  // namespace

MONET_KERNELS(CUDA, m) {
  m.add<&rms_norm>("rms_norm");
  m.add<&rms_norm_apply>("rms_norm_apply");
  m.add<&rms_norm_backward>("rms_norm_backward");
}

}  // namespace monet_like
