// Masks of one bit an element on the CPU, for the gradients of ReLU and hardtanh and for dropout; numbers of four bits.

#include "../checks.h"
#include "loops/masks.h"

namespace monet_like::masks {
namespace {

Tensor empty_mask(const Tensor& dense) {
  return empty(
      {packed_bytes(dense.numel())},
      dense.options().dtype(kByte));
}

Tensor pack_sign(const Tensor& x) {
  check_floating(x, "pack_sign", "x");
  const Tensor dense = in_packing_order(x);
  Tensor out = empty_mask(dense);
  pack_sign_loops(x.scalar_type(), dense.const_data_ptr(), out.mutable_data_ptr<uint8_t>(), x.numel());
  return out;
}

Tensor pack_range(const Tensor& x, double lo, double hi) {
  check_floating(x, "pack_range", "x");
  const Tensor dense = in_packing_order(x);
  Tensor out = empty_mask(dense);
  pack_range_loops(x.scalar_type(), dense.const_data_ptr(), out.mutable_data_ptr<uint8_t>(), x.numel(), lo, hi);
  return out;
}

Tensor pack_bool(const Tensor& mask) {
  MONET_CHECK(
      mask.scalar_type() == kBool, "monet_like::pack_bool: mask must be bool, got ", mask.scalar_type());
  const Tensor dense = in_packing_order(mask);
  Tensor out = empty_mask(dense);
  pack_bool_loops(
      static_cast<const uint8_t*>(dense.const_data_ptr()), out.mutable_data_ptr<uint8_t>(), mask.numel());
  return out;
}

void keep_where_dense(const Tensor& in, const Tensor& mask, const Tensor& out) {
  keep_where_loops(
      in.element_size(), in.const_data_ptr(), mask.const_data_ptr<uint8_t>(), out.mutable_data_ptr(), in.numel());
}

// to_packing_order without its search, if the tensor already has the packing order.
Tensor in_order(const Tensor& t, IntArrayRef stride, const char* op) {
  const bool same = t.is_contiguous() && (stride.empty() || stride == t.strides());
  return same ? t : to_packing_order(t, stride, op);
}

Tensor keep_where(const Tensor& x, const Tensor& mask, IntArrayRef stride) {
  check_floating(x, "keep_where", "x");
  check_packed(mask, x.numel(), x, "keep_where");
  const Tensor dense = in_order(x, stride, "keep_where");
  // A copy that was made for the layout can be overwritten.
  const Tensor out = dense.is_same(x) ? empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  keep_where_dense(dense, mask, out);
  return out;
}

Tensor& keep_where_(Tensor& x, const Tensor& mask, IntArrayRef stride) {
  check_floating(x, "keep_where_", "x");
  check_packed(mask, x.numel(), x, "keep_where_");
  const Tensor dense = in_order(x, stride, "keep_where_");
  keep_where_dense(dense, mask, dense);
  if (!dense.is_same(x)) {
    x.copy_(dense);
  }
  return x;
}

Tensor unpack_bool(const Tensor& packed, IntArrayRef size, IntArrayRef stride) {
  Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(kBool), "unpack_bool");
  check_packed(packed, out.numel(), out, "unpack_bool");
  unpack_bool_loops(
      packed.const_data_ptr<uint8_t>(), static_cast<uint8_t*>(out.mutable_data_ptr()), out.numel());
  return out;
}

Tensor masked_scale(
    const Tensor& x, const Tensor& packed, double scale, IntArrayRef stride, double otherwise) {
  check_floating(x, "masked_scale", "x");
  check_packed(packed, x.numel(), x, "masked_scale");
  const Tensor dense = in_order(x, stride, "masked_scale");
  const Tensor out = dense.is_same(x) ? empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  masked_scale_loops(
      x.scalar_type(), dense.const_data_ptr(), packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr(), x.numel(),
      scale, otherwise);
  return out;
}

Tensor pack_nibbles(const Tensor& x) {
  check_bytes(x, "pack_nibbles");
  const Tensor dense = in_packing_order(x);
  const int64_t whole = x.numel() / 2;
  Tensor out = empty({(x.numel() + 1) / 2}, x.options());
  const uint8_t* from = dense.const_data_ptr<uint8_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  pack_nibbles_loops(from, to, whole);
  if (x.numel() % 2) {
    to[whole] = from[2 * whole] & 15;
  }
  return out;
}

Tensor unpack_nibbles(const Tensor& packed, IntArrayRef size, IntArrayRef stride) {
  Tensor out = empty_in_packing_order(size, stride, packed.options(), "unpack_nibbles");
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

MONET_KERNELS(CPU, m) {
  m.add<&pack_sign>("pack_sign");
  m.add<&pack_range>("pack_range");
  m.add<&pack_bool>("pack_bool");
  m.add<&keep_where>("keep_where");
  m.add<&keep_where_>("keep_where_");
  m.add<&unpack_bool>("unpack_bool");
  m.add<&masked_scale>("masked_scale");
  m.add<&pack_nibbles>("pack_nibbles");
  m.add<&unpack_nibbles>("unpack_nibbles");
}

}  // namespace monet_like::masks
