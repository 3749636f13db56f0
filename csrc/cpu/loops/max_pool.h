// The loops of max pooling.

#pragma once

#include <limits>

#include "convert.h"

// Attributes of a lambda that is compiled for the instruction set of the function around it.
#define MONET_INLINE_LAMBDA __attribute__((always_inline))

namespace monet_like::max_pool {

// The maxima of windows and their cells, by dtype.
void pool_loops(
    c10::ScalarType dtype, const void* in, void* y, uint8_t* offsets, const PoolArguments& pool, bool channels_last);

// From ATen's indices to cells, and back. False: an index lies outside its window.
bool offsets_loops(const int64_t* indices, uint8_t* offsets, const PoolArguments& pool, bool channels_last);
void indices_loops(const uint8_t* offsets, int64_t* indices, const PoolArguments& pool, bool channels_last);

// The gradient of the input from that of the maxima.
void scatter_loops(
    c10::ScalarType dtype, const void* grad, const uint8_t* offsets, void* out, const PoolArguments& pool,
    bool channels_last);

// Distance in the input plane from a window's (unclipped) start to each of its cells; beyond the window: far outside.
inline std::vector<int64_t> cell_distances(const Window& w) {
  std::vector<int64_t> distance(256, std::numeric_limits<int64_t>::max() / 4);
  for (int64_t k = 0; k < w.kernel_h * w.kernel_w; ++k) {
    distance[k] = k / w.kernel_w * w.dilation_h * w.in_w + k % w.kernel_w * w.dilation_w;
  }
  return distance;
}

inline int64_t grain_of(int64_t elements) {
  constexpr int64_t kGrain = 8192;  // fewer elements are not worth a thread
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements));
}

// Integers as wide as the compute type, so that value and cell are selected by one vector mask.
template <typename O>
using cell_type = std::conditional_t<sizeof(O) == 8, int64_t, int32_t>;

// Calls f(size known when compiling or 0, first channel, number of channels) for blocks that cover all channels. The
// last block moves back to be whole: channels that two blocks share are done twice, which costs less than a remainder.
// Blocks are no smaller than 32, because loops of up to 16 are unrolled before they could be vectorised.
template <typename F>
MONET_BODY void for_channel_blocks(int64_t channels, const F& f) {
  if (channels < 32) {
    f(std::integral_constant<int, 0>{}, int64_t(0), channels);
    return;
  }
  int64_t c = 0;
  for (; c + 64 <= channels; c += 64) {
    f(std::integral_constant<int, 64>{}, c, int64_t(64));
  }
  for (; c < channels; c += 32) {
    f(std::integral_constant<int, 32>{}, std::min(c, channels - 32), int64_t(32));
  }
}

}  // namespace monet_like::max_pool
