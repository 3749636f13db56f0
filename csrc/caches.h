// Checks and allocations of lossy caches, shared by all devices.

#pragma once

#include "cache_layout.h"
#include "checks.h"

namespace monet_like {

inline Largest largest(const Tensor& t, int64_t keep, ScalarType dtype, const char* op) {
  MONET_CHECK(
      keep > 0 && keep <= Largest::kBlock, "monet_like::", op, ": keep is of ", Largest::kBlock,
      " elements and between 1 and that, got ", keep);
  return {t.numel(), keep, static_cast<int64_t>(element_size(dtype))};
}

// Elements of `alignment` bytes are read from the cache's first byte on: a view of other bytes may start anywhere.
inline void check_cache(const Tensor& packed, int64_t bytes, int64_t alignment, const char* op) {
  MONET_CHECK(
      packed.scalar_type() == kByte, "monet_like::", op, ": the cache must be uint8, got ", packed.scalar_type());
  MONET_CHECK(
      packed.dim() == 1 && packed.is_contiguous() && packed.numel() == bytes, "monet_like::", op,
      ": the cache of such a tensor has shape [", bytes, "] and is contiguous, got shape ", packed.sizes());
  const auto address = reinterpret_cast<uintptr_t>(packed.const_data_ptr());
  MONET_CHECK(
      address % static_cast<uintptr_t>(alignment) == 0, "monet_like::", op, ": the cache must start at a multiple of ",
      alignment, " bytes in memory, got a view that starts at byte ", packed.storage_offset(),
      " of its storage; pass packed.clone()");
}

// The layout of x, [grad's rows, columns], of which `packed` holds the largest elements.
inline Largest check_mm_largest(const Tensor& grad, const Tensor& packed, int64_t keep, int64_t columns) {
  check_floating(grad, "mm_largest", "grad");
  MONET_CHECK(grad.dim() == 2, "monet_like::mm_largest: grad must have two dimensions, got shape ", grad.sizes());
  MONET_CHECK(
      columns >= 0 && columns < (int64_t(1) << 31), "monet_like::mm_largest: columns must be from 0 to 2^31, got ",
      columns);
  Largest layout = largest(grad, keep, grad.scalar_type(), "mm_largest");
  layout.numel = grad.size(0) * columns;
  check_cache(packed, layout.bytes(), layout.itemsize, "mm_largest");
  return layout;
}

inline Tensor empty_cache(int64_t bytes, const Tensor& x) {
  return empty({bytes}, x.options().dtype(kByte));
}

}  // namespace monet_like
