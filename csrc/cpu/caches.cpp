// Lossy caches of a tensor on the CPU: its largest elements, or all elements in 8 bits.

#include "../caches.h"
#include "loops/caches.h"

namespace monet_like::caches {
namespace {

Tensor pack_largest(const Tensor& x, int64_t keep) {
  check_floating(x, "pack_largest", "x");
  const Largest layout = largest(x, keep, x.scalar_type(), "pack_largest");
  const Tensor dense = in_packing_order(x);
  Tensor out = empty_cache(layout.bytes(), x);
  pack_largest_loops(layout, dense.const_data_ptr(), out.mutable_data_ptr<uint8_t>());
  return out;
}

Tensor unpack_largest(
    const Tensor& packed, int64_t keep, IntArrayRef size, ScalarType dtype, IntArrayRef stride) {
  Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(dtype), "unpack_largest");
  check_floating(out, "unpack_largest", "the result");
  const Largest layout = largest(out, keep, dtype, "unpack_largest");
  check_cache(packed, layout.bytes(), layout.itemsize, "unpack_largest");
  unpack_largest_loops(layout, packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr());
  return out;
}

Tensor pack_int8(const Tensor& x) {
  check_floating(x, "pack_int8", "x");
  const Tensor dense = in_packing_order(x);
  Tensor out = empty_cache(int8_bytes(x.numel()), x);
  pack_int8_loops(x.scalar_type(), dense.const_data_ptr(), out.mutable_data_ptr<uint8_t>(), x.numel());
  return out;
}

Tensor unpack_int8(
    const Tensor& packed, IntArrayRef size, ScalarType dtype, IntArrayRef stride) {
  Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(dtype), "unpack_int8");
  check_floating(out, "unpack_int8", "the result");
  check_cache(packed, int8_bytes(out.numel()), sizeof(float), "unpack_int8");
  unpack_int8_loops(dtype, packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr(), out.numel());
  return out;
}

}  // namespace

MONET_KERNELS(CPU, m) {
  m.add<&pack_largest>("pack_largest");
  m.add<&unpack_largest>("unpack_largest");
  m.add<&pack_int8>("pack_int8");
  m.add<&unpack_int8>("unpack_int8");
}

}  // namespace monet_like::caches
