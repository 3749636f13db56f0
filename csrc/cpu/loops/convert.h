// Blocks of 16-bit floats to float32 and back. Loops that compute on such blocks are compiled for float32 alone.

#pragma once

#include "loops.h"

namespace monet_like {

void widen(const c10::Half* in, float* out, int64_t n);
void widen(const c10::BFloat16* in, float* out, int64_t n);
void narrow(const float* in, c10::Half* out, int64_t n);
void narrow(const float* in, c10::BFloat16* out, int64_t n);

// The values that y has after it was stored in 16 bits and loaded again.
void round_as(c10::Half, float* y, int64_t n);
void round_as(c10::BFloat16, float* y, int64_t n);

// Types that are computed in themselves.
template <typename O>
void widen(const O* in, O* out, int64_t n) {
  std::copy_n(in, n, out);
}
template <typename O>
void narrow(const O* in, O* out, int64_t n) {
  std::copy_n(in, n, out);
}
inline void round_as(float, float*, int64_t) {}
inline void round_as(double, double*, int64_t) {}

}  // namespace monet_like
