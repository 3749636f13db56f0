// The loops of masks of one bit an element, and of numbers of four bits. x, in and out have `numel` elements.

#pragma once

#include "loops.h"

namespace monet_like::masks {

void pack_sign_loops(c10::ScalarType dtype, const void* x, uint8_t* mask, int64_t numel);
void pack_range_loops(c10::ScalarType dtype, const void* x, uint8_t* mask, int64_t numel, double lo, double hi);
void pack_bool_loops(const uint8_t* x, uint8_t* mask, int64_t numel);
void unpack_bool_loops(const uint8_t* mask, uint8_t* out, int64_t numel);
void keep_where_loops(int64_t itemsize, const void* in, const uint8_t* mask, void* out, int64_t numel);
void masked_scale_loops(
    c10::ScalarType dtype, const void* in, const uint8_t* mask, void* out, int64_t numel, double scale,
    double otherwise);

// `bytes` bytes of two numbers each.
void pack_nibbles_loops(const uint8_t* in, uint8_t* out, int64_t bytes);
void unpack_nibbles_loops(const uint8_t* in, uint8_t* out, int64_t bytes);

}  // namespace monet_like::masks
