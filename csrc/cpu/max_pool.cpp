// Max pooling on the CPU that keeps one byte for each output, where ATen keeps an int64 index.

#include <tuple>

#include "../max_pool.h"
#include "loops/max_pool.h"

namespace monet_like::max_pool {
namespace {

std::tuple<Tensor, Tensor> max_pool2d_with_offsets(
    const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool ceil_mode) {
  const Pooling call = pooling_forward("max_pool2d_with_offsets", x, kernel, stride, padding, dilation, ceil_mode);
  if (call.out.numel() > 0) {
    pool_loops(
        x.scalar_type(), call.in.const_data_ptr(), call.out.mutable_data_ptr(),
        call.cells.mutable_data_ptr<uint8_t>(), call.pool, call.channels_last);
  }
  return {call.out, call.cells};
}

Tensor max_pool2d_offsets(
    const Tensor& indices, IntArrayRef input_size, IntArrayRef kernel, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation) {
  const char* op = "max_pool2d_offsets";
  const Pooling call =
      pooling_cells(op, indices, "indices", kLong, kByte, input_size, kernel, stride, padding, dilation);
  const bool good = offsets_loops(
      call.in.const_data_ptr<int64_t>(), call.out.mutable_data_ptr<uint8_t>(), call.pool, call.channels_last);
  MONET_CHECK(good, "monet_like::", op, ": an index lies outside its window; wrong window or indices");
  return call.out;
}

Tensor max_pool2d_offsets_to_indices(
    const Tensor& offsets, IntArrayRef input_size, IntArrayRef kernel, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation) {
  const Pooling call = pooling_cells(
      "max_pool2d_offsets_to_indices", offsets, "offsets", kByte, kLong, input_size, kernel, stride, padding,
      dilation);
  indices_loops(
      call.in.const_data_ptr<uint8_t>(), call.out.mutable_data_ptr<int64_t>(), call.pool, call.channels_last);
  return call.out;
}

Tensor max_pool2d_offsets_backward(
    const Tensor& grad, const Tensor& offsets, IntArrayRef input_size, IntArrayRef kernel,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  const Pooling call = pooling_backward(
      "max_pool2d_offsets_backward", grad, offsets, input_size, kernel, stride, padding, dilation);
  if (call.out.numel() > 0) {
    scatter_loops(
        grad.scalar_type(), call.in.const_data_ptr(), call.cells.const_data_ptr<uint8_t>(),
        call.out.mutable_data_ptr(), call.pool, call.channels_last);
  }
  return call.out;
}

}  // namespace

MONET_KERNELS(CPU, m) {
  m.add<&max_pool2d_with_offsets>("max_pool2d_with_offsets");
  m.add<&max_pool2d_offsets>("max_pool2d_offsets");
  m.add<&max_pool2d_offsets_to_indices>("max_pool2d_offsets_to_indices");
  m.add<&max_pool2d_offsets_backward>("max_pool2d_offsets_backward");
}

}  // namespace monet_like::max_pool
