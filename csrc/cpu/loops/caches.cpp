// The loops of lossy caches: the largest elements of a tensor, or all elements in 8 bits.

#include "caches.h"

#include "convert.h"

namespace monet_like::caches {
namespace {

// The bits of a magnitude as an integer: integers and magnitudes have the same order, with NaN above infinity.
template <typename U>
constexpr U kMagnitude = static_cast<U>(static_cast<U>(~U(0)) >> 1);

// Finds the least magnitude among the `wanted` largest of `count` elements; then sets `wanted` to the number of kept
// elements with exactly that magnitude.
// Radix selection: a histogram of the leading bits, then of the next ones among those that share them.
template <typename U>
MONET_BODY U select(const U* x, int64_t count, int64_t& wanted, U* scratch) {
  constexpr int kWidth = 11;
  U found = 0;
  for (int low = 8 * sizeof(U) - 1; low > 0;) {
    const int width = low < kWidth ? low : kWidth;
    low -= width;
    const U digit = static_cast<U>((1 << width) - 1);
    uint32_t bins[1 << kWidth] = {};
    for (int64_t i = 0; i < count; ++i) {
      ++bins[((x[i] & kMagnitude<U>) >> low) & digit];
    }
    U bin = digit;
    for (; bins[bin] < wanted; --bin) {
      wanted -= bins[bin];
    }
    found |= static_cast<U>(bin << low);
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      const U key = x[i] & kMagnitude<U>;
      scratch[left] = key;
      left += ((key >> low) & digit) == bin;
    }
    if (left == wanted) {
      break;  // all elements with these leading bits are kept
    }
    x = scratch;
    count = left;
  }
  return found;
}

constexpr int64_t kWord = 64;

// Two masks of the first n <= kWord elements: above the threshold, and equal to it.
template <typename U>
MONET_BODY void compare(const U* x, int64_t n, U threshold, uint64_t& above, uint64_t& at) {
  uint8_t more[kWord] = {}, same[kWord] = {};
  for (int64_t j = 0; j < n; ++j) {
    const U key = x[j] & kMagnitude<U>;
    more[j] = key > threshold;
    same[j] = key == threshold;
  }
  above = at = 0;
  for (int64_t b = 0; b < kWord / 8; ++b) {
    above |= static_cast<uint64_t>(gather_bits(more + 8 * b)) << (8 * b);
    at |= static_cast<uint64_t>(gather_bits(same + 8 * b)) << (8 * b);
  }
}

template <typename U>
MONET_BODY void pack_block_body(const U* x, int64_t n, int64_t keep, U* values, uint8_t* index, bool places, U* scratch) {
  int64_t ties = keep;
  const U threshold = select(x, n, ties, scratch);
  for (int64_t start = 0; start < n; start += kWord) {
    uint64_t bits, same;
    if (start + kWord <= n) {
      compare(x + start, kWord, threshold, bits, same);
    } else {
      compare(x + start, n - start, threshold, bits, same);
    }
    for (; same != 0 && ties > 0; same &= same - 1, --ties) {
      bits |= same & -same;
    }
    if (!places) {
      std::memcpy(index + start / 8, &bits, packed_bytes(std::min(kWord, n - start)));
    }
    for (; bits != 0; bits &= bits - 1) {
      const int64_t place = start + __builtin_ctzll(bits);
      *values++ = x[place];
      if (places) {
        const uint16_t short_place = static_cast<uint16_t>(place);
        std::memcpy(index, &short_place, sizeof(short_place));
        index += sizeof(short_place);
      }
    }
  }
}
MONET_FOR_EACH_ISA(pack_block)

template <typename U>
void unpack_block(const U* values, const uint8_t* index, int64_t n, int64_t keep, bool places, U* out) {
  std::memset(out, 0, n * sizeof(U));
  for_kept(index, n, keep, places, [&](int64_t place, int64_t k) { out[place] = values[k]; });
}

// Calls f(first element, number of elements, number kept) for every block, blocks in parallel.
template <typename F>
void for_blocks(const Largest& layout, const F& f) {
  parallel_for(0, layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * Largest::kBlock, n = std::min(Largest::kBlock, layout.numel - first);
      f(first, n, layout.kept(n));
    }
  });
}

// The bits of the largest magnitude: a maximum of integers vectorises, and a NaN stays the largest.
template <typename T>
MONET_BODY op_type<T> top_of(const T* x, int64_t n) {
  using O = op_type<T>;
  using U = std::conditional_t<sizeof(O) == 8, uint64_t, uint32_t>;
  U top = 0;
  for (int64_t i = 0; i < n; ++i) {
    const O value = load(x[i]);
    U bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits &= kMagnitude<U>;
    top = bits > top ? bits : top;
  }
  O result;
  std::memcpy(&result, &top, sizeof(result));
  return result;
}

template <typename T>
MONET_BODY void to_int8_body(const T* x, int64_t numel, float* scales, int8_t* out) {
  for (int64_t first = 0; first < numel; first += kScaled) {
    const int64_t n = std::min(kScaled, numel - first);
    const float units = units_in_one(*scales++ = int8_scale(top_of(x + first, n)));
#pragma GCC ivdep
    for (int64_t i = first; i < first + n; ++i) {
      out[i] = int8_of(load(x[i]), units);
    }
  }
}
MONET_FOR_EACH_ISA(to_int8)

template <typename T>
MONET_BODY void from_int8_body(const float* scales, const int8_t* in, int64_t numel, T* out) {
  for (int64_t first = 0; first < numel; first += kScaled) {
    const op_type<T> scale = *scales++;
    const int64_t end = std::min(first + kScaled, numel);
#pragma GCC ivdep
    for (int64_t i = first; i < end; ++i) {
      store(out[i], static_cast<op_type<T>>(in[i]) * scale);
    }
  }
}
MONET_FOR_EACH_ISA(from_int8)

// Calls f(first element, number of elements) on ranges of whole blocks of kScaled.
template <typename F>
void for_scaled(int64_t numel, const F& f) {
  parallel_for(0, scale_count(numel), 128, [&](int64_t begin, int64_t end) {
    f(begin * kScaled, std::min(end * kScaled, numel) - begin * kScaled);
  });
}

}  // namespace

void pack_largest_loops(const Largest& layout, const void* x, uint8_t* cache) {
  with_bits(layout.itemsize, [&](auto zero) {
    using U = decltype(zero);
    const U* from = static_cast<const U*>(x);
    U* values = reinterpret_cast<U*>(cache);
    for_blocks(layout, [&](int64_t first, int64_t n, int64_t kept) {
      U scratch[Largest::kBlock];
      pack_block(
          from + first, n, kept, values + layout.kept(first), cache + layout.index_at(first), layout.places(),
          static_cast<U*>(scratch));
    });
  });
}

void unpack_largest_loops(const Largest& layout, const uint8_t* cache, void* out) {
  with_bits(layout.itemsize, [&](auto zero) {
    using U = decltype(zero);
    const U* values = reinterpret_cast<const U*>(cache);
    U* to = static_cast<U*>(out);
    for_blocks(layout, [&](int64_t first, int64_t n, int64_t kept) {
      unpack_block(
          values + layout.kept(first), cache + layout.index_at(first), n, kept, layout.places(), to + first);
    });
  });
}

// float16 is computed in float32: its loops would not be compiled to the processor's conversions.
void pack_int8_loops(c10::ScalarType dtype, const void* x, uint8_t* cache, int64_t numel) {
  float* scales = reinterpret_cast<float*>(cache);
  int8_t* bytes = reinterpret_cast<int8_t*>(scales + scale_count(numel));
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x);
    for_scaled(numel, [&](int64_t first, int64_t n) {
      if constexpr (std::is_same_v<T, c10::Half>) {
        float block[kScaled];
        for (int64_t i = first; i < first + n; i += kScaled) {
          const int64_t count = std::min(kScaled, first + n - i);
          widen(from + i, static_cast<float*>(block), count);
          to_int8(static_cast<const float*>(block), count, scales + i / kScaled, bytes + i);
        }
      } else {
        to_int8(from + first, n, scales + first / kScaled, bytes + first);
      }
    });
  });
}

void unpack_int8_loops(c10::ScalarType dtype, const uint8_t* cache, void* out, int64_t numel) {
  const float* scales = reinterpret_cast<const float*>(cache);
  const int8_t* bytes = reinterpret_cast<const int8_t*>(scales + scale_count(numel));
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    T* to = static_cast<T*>(out);
    for_scaled(numel, [&](int64_t first, int64_t n) {
      if constexpr (std::is_same_v<T, c10::Half>) {
        float block[kScaled];
        for (int64_t i = first; i < first + n; i += kScaled) {
          const int64_t count = std::min(kScaled, first + n - i);
          from_int8(scales + i / kScaled, bytes + i, count, static_cast<float*>(block));
          narrow(static_cast<const float*>(block), to + i, count);
        }
      } else {
        from_int8(scales + first / kScaled, bytes + first, n, to + first);
      }
    });
  });
}

}  // namespace monet_like::caches
