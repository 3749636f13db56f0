// The loops of lossy caches. A tensor's elements are given in packing order.

#pragma once

#include "../../cache_layout.h"
#include "loops.h"

namespace monet_like::caches {

void pack_largest_loops(const Largest& layout, const void* x, uint8_t* cache);
void unpack_largest_loops(const Largest& layout, const uint8_t* cache, void* out);
void pack_int8_loops(c10::ScalarType dtype, const void* x, uint8_t* cache, int64_t numel);
void unpack_int8_loops(c10::ScalarType dtype, const uint8_t* cache, void* out, int64_t numel);

}  // namespace monet_like::caches
