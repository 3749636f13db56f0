// RMS norm on the GPU: forward, the same from the saved reciprocal roots, and the gradient.
//
// A block has one row at a time. Every tensor may have a dtype of its own, looked up at run time: all threads take the same
// branch, and only float and double are compiled.

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "common.cuh"

namespace monet_like {
namespace {

// A tensor of any floating dtype; null if there is none.
struct Floats {
  void* data;
  at::ScalarType type;

  explicit Floats(const at::Tensor& t)
      : data(t.defined() ? const_cast<void*>(t.const_data_ptr()) : nullptr),
        type(t.defined() ? t.scalar_type() : at::kFloat) {}

  template <typename O>
  __device__ __forceinline__ O at(int64_t i) const {
    switch (type) {
      case at::kFloat:
        return static_cast<O>(static_cast<const float*>(data)[i]);
      case at::kDouble:
        return static_cast<O>(static_cast<const double*>(data)[i]);
      case at::kHalf:
        return static_cast<O>(static_cast<float>(static_cast<const c10::Half*>(data)[i]));
      default:
        return static_cast<O>(static_cast<float>(static_cast<const c10::BFloat16*>(data)[i]));
    }
  }

  template <typename O>
  __device__ __forceinline__ void put(int64_t i, O value) const {
    switch (type) {
      case at::kFloat:
        static_cast<float*>(data)[i] = static_cast<float>(value);
        return;
      case at::kDouble:
        static_cast<double*>(data)[i] = static_cast<double>(value);
        return;
      case at::kHalf:
        static_cast<c10::Half*>(data)[i] = static_cast<float>(value);
        return;
      default:
        static_cast<c10::BFloat16*>(data)[i] = static_cast<float>(value);
    }
  }

  // What a stored value reads back as.
  template <typename O>
  __device__ __forceinline__ O rounded(O value) const {
    switch (type) {
      case at::kHalf:
        return static_cast<O>(static_cast<float>(static_cast<c10::Half>(static_cast<float>(value))));
      case at::kBFloat16:
        return static_cast<O>(static_cast<float>(static_cast<c10::BFloat16>(static_cast<float>(value))));
      default:
        return value;
    }
  }
};

// The sum over all threads of a block, for all of them.
template <typename O>
__device__ __forceinline__ O block_sum(O value) {
  __shared__ O shared[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, step);
  }
  __syncthreads();  // the sum of the row before has been read
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  O total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    total += shared[warp];
  }
  return total;
}

template <typename O>
__global__ void forward_kernel(
    Floats x, Floats weight, O* rstd, bool given_rstd, Floats y, int64_t rows, int64_t width, O eps, bool rounded) {
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
      r = O(1) / sqrt(block_sum(squares) / static_cast<O>(width) + eps);
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
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t start = row * width;
    const O r = rstd[row];
    O dot = 0;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const O w = weight.data == nullptr ? O(1) : weight.at<O>(i);
      dot += grad.at<O>(start + i) * w * x.at<O>(start + i);
    }
    const O slope = block_sum(dot) / static_cast<O>(width) * r * r * r;
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

unsigned int blocks_for_rows(int64_t rows, int64_t most) {
  return static_cast<unsigned int>(std::clamp<int64_t>(rows, 1, most));
}

at::Tensor dense(const std::optional<at::Tensor>& t) {
  return given(t) ? t->contiguous() : at::Tensor();
}

// y, and rstd where it is not given.
void forward(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const RowShape& shape, double eps, bool rounded,
    const at::Tensor& rstd, bool given_rstd, const at::Tensor& y) {
  if (shape.rows == 0) {
    return;
  }
  const at::Tensor in = x.contiguous(), w = dense(weight);
  with_opmath(x, [&](auto zero) {
    using O = decltype(zero);
    forward_kernel<O>
        <<<blocks_for_rows(shape.rows, 65535), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            Floats(in), Floats(w), static_cast<O*>(const_cast<void*>(rstd.const_data_ptr())), given_rstd, Floats(y),
            shape.rows, shape.width, static_cast<O>(eps), rounded);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

std::tuple<at::Tensor, at::Tensor> rms_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, int64_t dims, double eps, bool rounded,
    at::ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm", x, weight, nullptr, dims);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  check_floating(y, "rms_norm", "the result");
  at::Tensor rstd = at::empty(shape.statistics, row_statistics_options(x));
  forward(x, weight, shape, eps, rounded, rstd, false, y);
  return {y, rstd};
}

at::Tensor rms_norm_apply(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& rstd, int64_t dims, bool rounded,
    at::ScalarType dtype) {
  const RowShape shape = check_rows("rms_norm_apply", x, weight, &rstd, dims);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  check_floating(y, "rms_norm_apply", "the result");
  forward(x, weight, shape, 0, rounded, rstd.contiguous(), true, y);
  return y;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& rstd,
    const std::optional<at::Tensor>& residual, int64_t dims) {
  const char* op = "rms_norm_backward";
  const RowShape shape = check_rows(op, x, weight, &rstd, dims);
  check_row_gradients(op, x, grad, residual);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor grad_x = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  // Enough blocks to fill a GPU, few enough that their partial sums are small beside the gradient.
  const unsigned int blocks = blocks_for_rows((shape.rows + 7) / 8, 1024);
  at::Tensor partial;
  if (given(weight)) {
    partial = at::zeros({static_cast<int64_t>(blocks), shape.width}, row_statistics_options(x));
  }
  if (shape.rows > 0) {
    const at::Tensor upstream = grad.contiguous(), in = x.contiguous(), w = dense(weight), known = rstd.contiguous();
    const at::Tensor before = dense(residual);
    with_opmath(x, [&](auto zero) {
      using O = decltype(zero);
      backward_kernel<O><<<blocks, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          Floats(upstream), Floats(in), Floats(w), known.const_data_ptr<O>(), Floats(before), Floats(grad_x),
          partial.defined() ? partial.mutable_data_ptr<O>() : nullptr, shape.rows, shape.width);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  at::Tensor grad_weight;
  if (given(weight)) {
    grad_weight = partial.sum(0).to(weight->scalar_type()).view(weight->sizes());
  }
  return {grad_x, grad_weight};
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CUDA, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_apply", &rms_norm_apply);
  m.impl("rms_norm_backward", &rms_norm_backward);
}

}  // namespace monet_like
