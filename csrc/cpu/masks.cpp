// Masks of one bit an element on the CPU, for the gradients of ReLU and hardtanh and for dropout; numbers of four bits.

#include <torch/library.h>

#include "../checks.h"
#include "loops/masks.h"

namespace monet_like::masks {
namespace {

at::Tensor empty_mask(const at::Tensor& dense) {
  return at::empty(
      {packed_bytes(dense.numel())},
      dense.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor pack_sign(const at::Tensor& x) {
  check_floating(x, "pack_sign", "x");
  const at::Tensor dense = in_packing_order(x);
  at::Tensor out = empty_mask(dense);
  pack_sign_loops(x.scalar_type(), dense.const_data_ptr(), out.mutable_data_ptr<uint8_t>(), x.numel());
  return out;
}

at::Tensor pack_range(const at::Tensor& x, double lo, double hi) {
  check_floating(x, "pack_range", "x");
  const at::Tensor dense = in_packing_order(x);
  at::Tensor out = empty_mask(dense);
  pack_range_loops(x.scalar_type(), dense.const_data_ptr(), out.mutable_data_ptr<uint8_t>(), x.numel(), lo, hi);
  return out;
}

at::Tensor pack_bool(const at::Tensor& mask) {
  TORCH_CHECK_TYPE(
      mask.scalar_type() == at::kBool, "monet_like::pack_bool: mask must be bool, got ", mask.scalar_type());
  const at::Tensor dense = in_packing_order(mask);
  at::Tensor out = empty_mask(dense);
  pack_bool_loops(
      static_cast<const uint8_t*>(dense.const_data_ptr()), out.mutable_data_ptr<uint8_t>(), mask.numel());
  return out;
}

void keep_where_dense(const at::Tensor& in, const at::Tensor& mask, const at::Tensor& out) {
  keep_where_loops(
      in.element_size(), in.const_data_ptr(), mask.const_data_ptr<uint8_t>(), out.mutable_data_ptr(), in.numel());
}

// to_packing_order without its search, if the tensor already has the packing order.
at::Tensor in_order(const at::Tensor& t, at::IntArrayRef stride, const char* op) {
  const bool same = t.is_contiguous() && (stride.empty() || stride == t.strides());
  return same ? t : to_packing_order(t, stride, op);
}

at::Tensor keep_where(const at::Tensor& x, const at::Tensor& mask, at::IntArrayRef stride) {
  check_floating(x, "keep_where", "x");
  check_packed(mask, x.numel(), x, "keep_where");
  const at::Tensor dense = in_order(x, stride, "keep_where");
  // A copy that was made for the layout can be overwritten.
  const at::Tensor out = dense.is_same(x) ? at::empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  keep_where_dense(dense, mask, out);
  return out;
}

at::Tensor& keep_where_(at::Tensor& x, const at::Tensor& mask, at::IntArrayRef stride) {
  check_floating(x, "keep_where_", "x");
  check_packed(mask, x.numel(), x, "keep_where_");
  const at::Tensor dense = in_order(x, stride, "keep_where_");
  keep_where_dense(dense, mask, dense);
  if (!dense.is_same(x)) {
    x.copy_(dense);
  }
  return x;
}

at::Tensor unpack_bool(const at::Tensor& packed, at::IntArrayRef size, at::IntArrayRef stride) {
  at::Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(at::kBool), "unpack_bool");
  check_packed(packed, out.numel(), out, "unpack_bool");
  unpack_bool_loops(
      packed.const_data_ptr<uint8_t>(), static_cast<uint8_t*>(out.mutable_data_ptr()), out.numel());
  return out;
}

at::Tensor masked_scale(
    const at::Tensor& x, const at::Tensor& packed, double scale, at::IntArrayRef stride, double otherwise) {
  check_floating(x, "masked_scale", "x");
  check_packed(packed, x.numel(), x, "masked_scale");
  const at::Tensor dense = in_order(x, stride, "masked_scale");
  const at::Tensor out = dense.is_same(x) ? at::empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  masked_scale_loops(
      x.scalar_type(), dense.const_data_ptr(), packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr(), x.numel(),
      scale, otherwise);
  return out;
}

at::Tensor pack_nibbles(const at::Tensor& x) {
  check_bytes(x, "pack_nibbles");
  const at::Tensor dense = in_packing_order(x);
  const int64_t whole = x.numel() / 2;
  at::Tensor out = at::empty({(x.numel() + 1) / 2}, x.options().memory_format(at::MemoryFormat::Contiguous));
  const uint8_t* from = dense.const_data_ptr<uint8_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  pack_nibbles_loops(from, to, whole);
  if (x.numel() % 2) {
    to[whole] = from[2 * whole] & 15;
  }
  return out;
}

at::Tensor unpack_nibbles(const at::Tensor& packed, at::IntArrayRef size, at::IntArrayRef stride) {
  at::Tensor out = empty_in_packing_order(size, stride, packed.options(), "unpack_nibbles");
  check_nibbles(packed, out.numel());
  const int64_t whole = out.numel() / 2;
  const uint8_t* from = packed.const_data_ptr<uint8_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  unpack_nibbles_loops(from, to, whole);
  if (out.numel() % 2) {
    to[2 * whole] = from[whole] & 15;
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("pack_sign", &pack_sign);
  m.impl("pack_range", &pack_range);
  m.impl("pack_bool", &pack_bool);
  m.impl("keep_where", &keep_where);
  m.impl("keep_where_", &keep_where_);
  m.impl("unpack_bool", &unpack_bool);
  m.impl("masked_scale", &masked_scale);
  m.impl("pack_nibbles", &pack_nibbles);
  m.impl("unpack_nibbles", &unpack_nibbles);
}

}  // namespace monet_like::masks
