// Max pooling on the GPU that remembers one byte per output instead of ATen's int64 index.

#include <torch/library.h>

#include <limits>
#include <tuple>

#include "../max_pool.h"
#include "common.cuh"

namespace monet_like {
namespace {

// Where an element of a plane-by-plane or channels-last tensor lies.
struct Place {
  int64_t plane_base, h, w, lane_pitch;
};

// Splits a memory position of a [.., height, width] tensor; `base_area` is the plane area of the tensor to address.
__device__ __forceinline__ Place place_of(
    int64_t i, int64_t height, int64_t width, int64_t channels, bool channels_last, int64_t base_area) {
  if (channels_last) {
    const int64_t c = i % channels, pixel = i / channels;
    const int64_t n = pixel / (height * width);
    return {n * base_area * channels + c, pixel / width % height, pixel % width, channels};
  }
  return {i / (height * width) * base_area, i / width % height, i % width, 1};
}

// One thread per output. Cells in ATen's order: of equal maxima the first wins, of NaNs the last.
template <typename T>
__global__ void pool_kernel(
    const T* in, T* y, uint8_t* offsets, Window w, int64_t channels, bool channels_last, int64_t numel) {
  using O = op_type<T>;
  MONET_GRID_STRIDE(i, numel) {
    const Place at = place_of(i, w.out_h, w.out_w, channels, channels_last, w.in_h * w.in_w);
    const T* plane = in + at.plane_base;
    const int64_t h0 = w.start_h(at.h), w0 = w.start_w(at.w);
    const int64_t first_h = Window::first_step(h0, w.dilation_h), first_w = Window::first_step(w0, w.dilation_w);
    O best = -std::numeric_limits<O>::infinity();
    int64_t cell = first_h * w.kernel_w + first_w;
    for (int64_t kh = first_h; kh < w.kernel_h && h0 + kh * w.dilation_h < w.in_h; ++kh) {
      for (int64_t kw = first_w; kw < w.kernel_w && w0 + kw * w.dilation_w < w.in_w; ++kw) {
        const int64_t pixel = (h0 + kh * w.dilation_h) * w.in_w + w0 + kw * w.dilation_w;
        const O value = static_cast<O>(plane[pixel * at.lane_pitch]);
        if (value > best || value != value) {
          best = value;
          cell = kh * w.kernel_w + kw;
        }
      }
    }
    y[i] = static_cast<T>(best);
    offsets[i] = static_cast<uint8_t>(cell);
  }
}

// One thread per input: it gathers from the windows that chose it, in the order of the outputs (no atomics, so the
// result never varies), summing in at least float32 and rounding once.
template <typename T>
__global__ void pool_backward_kernel(
    const T* grad, const uint8_t* offsets, T* out, Window w, int64_t channels, bool channels_last, int64_t numel) {
  using O = op_type<T>;
  MONET_GRID_STRIDE(i, numel) {
    const Place at = place_of(i, w.in_h, w.in_w, channels, channels_last, w.out_h * w.out_w);
    // Windows that may reach this pixel: start <= position <= start + (kernel - 1) * dilation.
    const int64_t top = at.h + w.pad_h - (w.kernel_h - 1) * w.dilation_h;
    const int64_t left = at.w + w.pad_w - (w.kernel_w - 1) * w.dilation_w;
    const int64_t oh0 = top <= 0 ? 0 : (top + w.stride_h - 1) / w.stride_h;
    const int64_t ow0 = left <= 0 ? 0 : (left + w.stride_w - 1) / w.stride_w;
    const int64_t oh1 = min((at.h + w.pad_h) / w.stride_h + 1, w.out_h);
    const int64_t ow1 = min((at.w + w.pad_w) / w.stride_w + 1, w.out_w);
    O sum = 0;
    for (int64_t oh = oh0; oh < oh1; ++oh) {
      const int64_t dh = at.h - w.start_h(oh);
      if (dh % w.dilation_h != 0) {
        continue;
      }
      for (int64_t ow = ow0; ow < ow1; ++ow) {
        const int64_t dw = at.w - w.start_w(ow);
        if (dw % w.dilation_w != 0) {
          continue;
        }
        const int64_t cell = dh / w.dilation_h * w.kernel_w + dw / w.dilation_w;
        const int64_t pooled = at.plane_base + (oh * w.out_w + ow) * at.lane_pitch;
        if (offsets[pooled] == cell) {
          sum += static_cast<O>(grad[pooled]);
        }
      }
    }
    out[i] = static_cast<T>(sum);
  }
}

__global__ void to_indices_kernel(
    const uint8_t* offsets, int64_t* indices, Window w, int64_t channels, bool channels_last, int64_t numel) {
  MONET_GRID_STRIDE(i, numel) {
    const Place at = place_of(i, w.out_h, w.out_w, channels, channels_last, 0);
    indices[i] = w.index_of(at.h, at.w, offsets[i]);
  }
}

__global__ void to_offsets_kernel(
    const int64_t* indices, uint8_t* offsets, Window w, int64_t channels, bool channels_last, int64_t numel) {
  MONET_GRID_STRIDE(i, numel) {
    const Place at = place_of(i, w.out_h, w.out_w, channels, channels_last, 0);
    const int64_t cell = w.offset_of(at.h, at.w, indices[i]);
    CUDA_KERNEL_ASSERT(cell >= 0 && "monet_like::max_pool2d_offsets: an index lies outside its window");
    offsets[i] = static_cast<uint8_t>(cell);
  }
}

std::tuple<at::Tensor, at::Tensor> max_pool2d_with_offsets(
    const at::Tensor& x, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool ceil_mode) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Pooling call = pooling_forward("max_pool2d_with_offsets", x, kernel, stride, padding, dilation, ceil_mode);
  const at::Tensor& y = call.out;
  if (y.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "max_pool2d_with_offsets", [&] {
      pool_kernel<scalar_t><<<blocks_for(y.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          call.in.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(), call.cells.mutable_data_ptr<uint8_t>(),
          call.pool.window, call.pool.channels, call.channels_last, y.numel());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  return {y, call.cells};
}

at::Tensor max_pool2d_offsets(
    const at::Tensor& indices, at::IntArrayRef input_size, at::IntArrayRef kernel, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation) {
  const c10::cuda::CUDAGuard guard(indices.device());
  const Pooling call = pooling_cells(
      "max_pool2d_offsets", indices, "indices", at::kLong, at::kByte, input_size, kernel, stride, padding, dilation);
  const at::Tensor& offsets = call.out;
  if (offsets.numel() > 0) {
    to_offsets_kernel<<<blocks_for(offsets.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        call.in.const_data_ptr<int64_t>(), offsets.mutable_data_ptr<uint8_t>(), call.pool.window, call.pool.channels,
        call.channels_last, offsets.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return offsets;
}

at::Tensor max_pool2d_offsets_to_indices(
    const at::Tensor& offsets, at::IntArrayRef input_size, at::IntArrayRef kernel, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation) {
  const c10::cuda::CUDAGuard guard(offsets.device());
  const Pooling call = pooling_cells(
      "max_pool2d_offsets_to_indices", offsets, "offsets", at::kByte, at::kLong, input_size, kernel, stride, padding,
      dilation);
  const at::Tensor& indices = call.out;
  if (indices.numel() > 0) {
    to_indices_kernel<<<blocks_for(indices.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        call.in.const_data_ptr<uint8_t>(), indices.mutable_data_ptr<int64_t>(), call.pool.window, call.pool.channels,
        call.channels_last, indices.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return indices;
}

at::Tensor max_pool2d_offsets_backward(
    const at::Tensor& grad, const at::Tensor& offsets, at::IntArrayRef input_size, at::IntArrayRef kernel,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  const c10::cuda::CUDAGuard guard(grad.device());
  const Pooling call = pooling_backward(
      "max_pool2d_offsets_backward", grad, offsets, input_size, kernel, stride, padding, dilation);
  const at::Tensor& out = call.out;
  if (out.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "max_pool2d_offsets_backward", [&] {
      pool_backward_kernel<scalar_t><<<blocks_for(out.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          call.in.const_data_ptr<scalar_t>(), call.cells.const_data_ptr<uint8_t>(), out.mutable_data_ptr<scalar_t>(),
          call.pool.window, call.pool.channels, call.channels_last, out.numel());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CUDA, m) {
  m.impl("max_pool2d_with_offsets", &max_pool2d_with_offsets);
  m.impl("max_pool2d_offsets", &max_pool2d_offsets);
  m.impl("max_pool2d_offsets_to_indices", &max_pool2d_offsets_to_indices);
  m.impl("max_pool2d_offsets_backward", &max_pool2d_offsets_backward);
}

}  // namespace monet_like
