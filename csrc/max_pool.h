// Checks and allocations of max pooling before it computes, shared by all devices.

#pragma once

#include <vector>

#include "checks.h"

namespace monet_like {

inline int64_t pooled_extent(
    int64_t in, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation, bool ceil_mode) {
  const int64_t span = in + 2 * pad - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0);
  int64_t out = (span >= 0 ? span / stride : -((-span + stride - 1) / stride)) + 1;
  // In ceil mode the last window must start inside the image or its left padding.
  if (ceil_mode && (out - 1) * stride >= in + pad) {
    --out;
  }
  return out;
}

inline PoolArguments check_pool(
    const char* op, IntArrayRef input_size, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation) {
  MONET_CHECK(
      input_size.size() == 3 || input_size.size() == 4, "monet_like::", op,
      ": the input must be [C, H, W] or [N, C, H, W], got ", input_size);
  MONET_CHECK(
      kernel.size() == 2 && padding.size() == 2 && dilation.size() == 2 && (stride.size() == 2 || stride.empty()),
      "monet_like::", op, ": kernel, stride, padding and dilation have two entries each");
  const IntArrayRef step = stride.empty() ? kernel : stride;
  for (const int axis : {0, 1}) {
    MONET_CHECK(
        kernel[axis] > 0 && step[axis] > 0 && dilation[axis] > 0, "monet_like::", op,
        ": kernel, stride and dilation must be positive");
    MONET_CHECK(
        padding[axis] >= 0 && padding[axis] <= ((kernel[axis] - 1) * dilation[axis] + 1) / 2, "monet_like::", op,
        ": padding must lie between 0 and half of the dilated kernel, got ", padding);
  }
  MONET_CHECK(
      kernel[0] * kernel[1] <= 256, "monet_like::", op, ": a window may have at most 256 cells, got ",
      kernel[0] * kernel[1]);
  const size_t n = input_size.size();
  const int64_t batch = n == 4 ? input_size[0] : 1, channels = input_size[n - 3];
  return {
      {kernel[0], kernel[1], step[0], step[1], padding[0], padding[1], dilation[0], dilation[1], input_size[n - 2],
       input_size[n - 1], 0, 0},
      batch * channels,
      batch,
      channels};
}

// Fills in the output extents from a tensor shaped like the pooled output and checks the rest of its shape.
inline void check_pooled(const char* op, PoolArguments& pool, IntArrayRef input_size, const Tensor& pooled) {
  MONET_CHECK(
      pooled.dim() == static_cast<int64_t>(input_size.size()) &&
          pooled.sizes().slice(0, pooled.dim() - 2) == input_size.slice(0, input_size.size() - 2),
      "monet_like::", op, ": pooled shape ", pooled.sizes(), " does not belong to input shape ", input_size);
  Window& w = pool.window;
  w.out_h = pooled.size(-2);
  w.out_w = pooled.size(-1);
  const auto fits = [](int64_t out, int64_t in, int64_t k, int64_t s, int64_t p, int64_t d) {
    return out == pooled_extent(in, k, s, p, d, false) || out == pooled_extent(in, k, s, p, d, true);
  };
  MONET_CHECK(
      fits(w.out_h, w.in_h, w.kernel_h, w.stride_h, w.pad_h, w.dilation_h) &&
          fits(w.out_w, w.in_w, w.kernel_w, w.stride_w, w.pad_w, w.dilation_w),
      "monet_like::", op, ": this window does not turn ", input_size, " into ", pooled.sizes());
}

// A call of one of the operators: its window, its arguments in one layout, and its results, not yet written.
struct Pooling {
  PoolArguments pool;
  bool channels_last;
  Tensor in, cells, out;  // `cells`: of the windows, as int64 indices or 8-bit offsets
};

inline Pooling pooling_forward(
    const char* op, const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool ceil_mode) {
  check_floating(x, op, "x");
  PoolArguments pool = check_pool(op, x.sizes(), kernel, stride, padding, dilation);
  Window& w = pool.window;
  w.out_h = pooled_extent(w.in_h, w.kernel_h, w.stride_h, w.pad_h, w.dilation_h, ceil_mode);
  w.out_w = pooled_extent(w.in_w, w.kernel_w, w.stride_w, w.pad_w, w.dilation_w, ceil_mode);
  MONET_CHECK(
      w.out_h > 0 && w.out_w > 0, "monet_like::", op, ": the output of input ", x.sizes(), " would be empty");
  const auto format = x.suggest_memory_format();
  std::vector<int64_t> size = x.sizes().vec();
  size[size.size() - 2] = w.out_h;
  size[size.size() - 1] = w.out_w;
  return {
      pool, format == MemoryFormat::ChannelsLast, x.contiguous(format),
      empty(size, x.options().dtype(kByte).memory_format(format)),
      empty(size, x.options().memory_format(format))};
}

// From indices to offsets or back: `in` has the type `from`, `out` the type `to`.
inline Pooling pooling_cells(
    const char* op, const Tensor& in, const char* name, ScalarType from, ScalarType to,
    IntArrayRef input_size, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation) {
  MONET_CHECK(
      in.scalar_type() == from, "monet_like::", op, ": ", name, " must be ", from == kLong ? "int64" : "uint8");
  PoolArguments pool = check_pool(op, input_size, kernel, stride, padding, dilation);
  check_pooled(op, pool, input_size, in);
  const auto format = in.suggest_memory_format();
  const Tensor cells = in.contiguous(format);
  return {
      pool, format == MemoryFormat::ChannelsLast, cells, cells,
      empty(in.sizes(), in.options().dtype(to).memory_format(format))};
}

inline Pooling pooling_backward(
    const char* op, const Tensor& grad, const Tensor& offsets, IntArrayRef input_size,
    IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  check_floating(grad, op, "grad");
  MONET_CHECK(offsets.scalar_type() == kByte, "monet_like::", op, ": offsets must be uint8");
  PoolArguments pool = check_pool(op, input_size, kernel, stride, padding, dilation);
  check_pooled(op, pool, input_size, offsets);
  MONET_CHECK(
      grad.sizes() == offsets.sizes(), "monet_like::", op, ": grad ", grad.sizes(), " and offsets ", offsets.sizes(),
      " differ in shape");
  // The offsets carry the layout of the forward input, which the gradient of that input takes too.
  const auto format = offsets.suggest_memory_format();
  return {
      pool, format == MemoryFormat::ChannelsLast, grad.contiguous(format), offsets.contiguous(format),
      empty(input_size, grad.options().memory_format(format))};
}

}  // namespace monet_like
