// The memory layout of lossy caches, shared by the loops of all devices.

#pragma once

#include <algorithm>
#include <cstring>

#include "elementwise.h"

namespace monet_like {

// The largest elements of each block of `kBlock`, in packing order: their values, then an index of their places. The
// index has one bit for every element of the block. Where fewer than a 16th are kept, it has two bytes for each kept one:
// its place in the block.
struct Largest {
  static constexpr int64_t kBlock = 16384;

  int64_t numel, keep, itemsize;

  // The number of kept ones among the first n elements; n is a multiple of kBlock, or all. A shorter last block keeps the
  // same share, rounded up.
  MONET_HD int64_t kept(int64_t n) const { return n / kBlock * keep + (n % kBlock * keep + kBlock - 1) / kBlock; }
  MONET_HD bool places() const { return 16 * keep < kBlock; }
  MONET_HD int64_t value_bytes() const { return kept(numel) * itemsize; }
  MONET_HD int64_t bytes() const { return value_bytes() + (places() ? 2 * kept(numel) : packed_bytes(numel)); }
  int64_t blocks() const { return (numel + kBlock - 1) / kBlock; }
  // Where the index of the block that starts at element n starts.
  MONET_HD int64_t index_at(int64_t n) const { return value_bytes() + (places() ? 2 * kept(n) : n / 8); }
};

// Calls f(a zero of an unsigned integer as wide as the elements).
template <typename F>
void with_bits(int64_t itemsize, const F& f) {
  switch (itemsize) {
    case 2:
      return f(uint16_t(0));
    case 4:
      return f(uint32_t(0));
    default:
      return f(uint64_t(0));
  }
}

// Eight bits for each element and a scale for each `kScaled` of them, in packing order: the scales (float32), then the
// bytes. A block that holds an infinity or a NaN has a NaN for its scale.
constexpr int64_t kScaled = 256;

inline int64_t scale_count(int64_t numel) {
  return (numel + kScaled - 1) / kScaled;
}

inline int64_t int8_bytes(int64_t numel) {
  return scale_count(numel) * static_cast<int64_t>(sizeof(float)) + numel;
}

// The unit of a block whose largest magnitude is `top`.
template <typename O>
MONET_HD float int8_scale(O top) {
  constexpr float kLeast = 1.17549435e-38f;  // the smallest normal number: below it division loses its precision
  const float scale = static_cast<float>(top / O(127));
  return scale - scale != 0 ? __builtin_nanf("") : scale < kLeast ? kLeast : scale;
}

// The number of units in one; none where there is no scale.
MONET_HD float units_in_one(float scale) {
  return scale != scale ? 0.0f : 1.0f / scale;
}

// x in units, to the nearest; nothing but zero becomes zero, so that every sign stays. Zero in a block without a scale.
template <typename O>
MONET_HD int8_t int8_of(O x, float units_in_one) {
  constexpr O kRound = sizeof(O) == 8 ? O(6755399441055744.0) : O(12582912.0);  // 1.5 * 2^(digits - 1)
  const O rounded = (x * static_cast<O>(units_in_one) + kRound) - kRound;
  const O sign = static_cast<O>(x > O(0)) - static_cast<O>(x < O(0));
  const O units = rounded == O(0) ? sign : rounded;
  return units_in_one == 0.0f ? int8_t(0) : static_cast<int8_t>(units);
}

// Calls f(place in the block, number among the kept ones) for every kept element of a block of n. A damaged index leads to
// no place outside the block.
template <typename F>
void for_kept(const uint8_t* index, int64_t n, int64_t keep, bool places, const F& f) {
  if (places) {
    for (int64_t k = 0; k < keep; ++k) {
      uint16_t place;
      std::memcpy(&place, index + k * sizeof(place), sizeof(place));
      if (place < n) {
        f(static_cast<int64_t>(place), k);
      }
    }
    return;
  }
  constexpr int64_t kWord = 64;
  int64_t used = 0;
  for (int64_t start = 0; start < n; start += kWord) {
    uint64_t bits = 0;
    std::memcpy(&bits, index + start / 8, packed_bytes(std::min(kWord, n - start)));
    for (; bits != 0 && used < keep; bits &= bits - 1) {
      const int64_t place = start + __builtin_ctzll(bits);
      if (place < n) {
        f(place, used++);
      }
    }
  }
}

}  // namespace monet_like
