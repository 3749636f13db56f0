// The loops of masks of one bit an element, and of numbers of four bits.

#include "masks.h"

#include "convert.h"

namespace monet_like::masks {
namespace {

template <typename O>
struct Positive {
  MONET_BODY bool operator()(O x) const { return passes_threshold(x); }
};

// The same of 2-byte floats, by their bits.
struct PositiveBits {
  uint16_t infinity;
  MONET_BODY bool operator()(uint16_t x) const { return passes_threshold_bits(x, infinity); }
};

// For a NaN ATen's vectorised loop stops the gradient and its scalar loop for the last elements lets it pass. Here it
// always stops.
template <typename O>
struct InRange {
  O lo, hi;
  template <typename T>
  MONET_BODY bool operator()(T x) const {
    const O value = load(x);
    return value > lo && value < hi;
  }
};

struct IsTrue {
  MONET_BODY bool operator()(uint8_t x) const { return x != 0; }
};

template <typename T, typename P>
MONET_BODY void pack_body(const T* x, uint8_t* out, int64_t numel, P predicate) {
  constexpr int64_t kBlock = 128;
  uint8_t flags[kBlock];
  int64_t i = 0;
  for (; i + kBlock <= numel; i += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j) {
      flags[j] = predicate(x[i + j]) ? 1 : 0;
    }
    for (int64_t j = 0; j < kBlock / 8; ++j) {
      out[i / 8 + j] = gather_bits(flags + 8 * j);
    }
  }
  if (i < numel) {
    std::memset(flags, 0, sizeof(flags));
    for (int64_t j = 0; j < numel - i; ++j) {
      flags[j] = predicate(x[i + j]) ? 1 : 0;
    }
    for (int64_t j = 0; j < packed_bytes(numel - i); ++j) {
      out[i / 8 + j] = gather_bits(flags + 8 * j);
    }
  }
}
MONET_FOR_EACH_ISA(pack)

// Bits of a mask that one loop processes: the compiler unrolls shorter loops before it could vectorise them.
constexpr int64_t kWord = 32;

MONET_BODY uint32_t word_of(const uint8_t* mask, int64_t word) {
  uint32_t bits;
  std::memcpy(&bits, mask + 4 * word, sizeof(bits));
  return bits;
}

// Keeps or clears whole bit patterns, so a kept gradient is unchanged whatever it holds.
template <typename U>
MONET_BODY void keep_bits_body(const U* in, const uint8_t* mask, U* out, int64_t numel) {
  const int64_t whole = numel / kWord;
  for (int64_t b = 0; b < whole; ++b) {
    const uint32_t bits = word_of(mask, b);
#pragma GCC ivdep
    for (uint32_t j = 0; j < kWord; ++j) {
      const U keep = static_cast<U>(-static_cast<U>((bits >> j) & 1));
      out[kWord * b + j] = in[kWord * b + j] & keep;
    }
  }
  for (int64_t i = kWord * whole; i < numel; ++i) {
    out[i] = (mask[i / 8] >> (i % 8)) & 1 ? in[i] : U(0);
  }
}
MONET_FOR_EACH_ISA(keep_bits)

MONET_BODY void spread_bits(const uint8_t* mask, uint8_t* out, int64_t numel) {
  for (int64_t b = 0; b < numel / 8; ++b) {
    // Bit i to byte i: copy the byte eight times, keep one bit of each copy, turn "not zero" into one.
    const uint64_t one_bit_each = (mask[b] * 0x0101010101010101ull) & 0x8040201008040201ull;
    const uint64_t flags = ((one_bit_each + 0x7f7f7f7f7f7f7f7full) >> 7) & 0x0101010101010101ull;
    std::memcpy(out + 8 * b, &flags, sizeof(flags));
  }
  for (int64_t i = numel / 8 * 8; i < numel; ++i) {
    out[i] = (mask[i / 8] >> (i % 8)) & 1;
  }
}

template <typename T>
MONET_BODY void scale_where_body(
    const T* in, const uint8_t* mask, T* out, int64_t numel, op_type<T> scale, op_type<T> otherwise) {
  const int64_t whole = numel / kWord;
  for (int64_t b = 0; b < whole; ++b) {
    const uint32_t bits = word_of(mask, b);
#pragma GCC ivdep
    for (uint32_t j = 0; j < kWord; ++j) {
      // Multiply rather than select: inf * 0 is NaN and -1 * 0 is -0, as in (x * mask) * scale.
      const op_type<T> factor = (bits >> j) & 1 ? scale : otherwise;
      store(out[kWord * b + j], load(in[kWord * b + j]) * factor);
    }
  }
  for (int64_t i = kWord * whole; i < numel; ++i) {
    store(out[i], load(in[i]) * ((mask[i / 8] >> (i % 8)) & 1 ? scale : otherwise));
  }
}
MONET_FOR_EACH_ISA(scale_where)

constexpr int64_t kGrainBytes = 4096;  // 32768 elements, ATen's own grain

// Calls f(first element, number of elements) on ranges that start at a byte of the mask.
template <typename F>
void for_packed_ranges(int64_t numel, const F& f) {
  parallel_for(0, packed_bytes(numel), kGrainBytes, [&](int64_t begin, int64_t end) {
    f(8 * begin, std::min(8 * end, numel) - 8 * begin);
  });
}

template <typename B>
MONET_BODY void join_nibbles_body(const B* in, B* out, int64_t bytes) {
#pragma GCC ivdep
  for (int64_t b = 0; b < bytes; ++b) {
    out[b] = static_cast<B>((in[2 * b] & 15) | (in[2 * b + 1] << 4));
  }
}
MONET_FOR_EACH_ISA(join_nibbles)

template <typename B>
MONET_BODY void split_nibbles_body(const B* in, B* out, int64_t bytes) {
#pragma GCC ivdep
  for (int64_t b = 0; b < bytes; ++b) {
    out[2 * b] = in[b] & 15;
    out[2 * b + 1] = in[b] >> 4;
  }
}
MONET_FOR_EACH_ISA(split_nibbles)

template <typename T, typename P>
void pack_all(const T* x, uint8_t* mask, int64_t numel, P predicate) {
  for_packed_ranges(numel, [&](int64_t first, int64_t n) { pack(x + first, mask + first / 8, n, predicate); });
}

// float16 is computed in float32, block by block: its loops would not be compiled to the processor's conversions.
constexpr int64_t kHalves = 1024;

// Calls f(first element, number of elements) on blocks that start at a byte of the mask.
template <typename F>
void for_half_blocks(int64_t numel, const F& f) {
  for_packed_ranges(numel, [&](int64_t first, int64_t n) {
    for (int64_t i = first; i < first + n; i += kHalves) {
      f(i, std::min(kHalves, first + n - i));
    }
  });
}

}  // namespace

void pack_sign_loops(c10::ScalarType dtype, const void* x, uint8_t* mask, int64_t numel) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return pack_all(static_cast<const float*>(x), mask, numel, Positive<float>{});
    case c10::ScalarType::Double:
      return pack_all(static_cast<const double*>(x), mask, numel, Positive<double>{});
    default:
      return pack_all(
          static_cast<const uint16_t*>(x), mask, numel,
          PositiveBits{static_cast<uint16_t>(dtype == c10::ScalarType::Half ? 0x7c00 : 0x7f80)});
  }
}

void pack_range_loops(c10::ScalarType dtype, const void* x, uint8_t* mask, int64_t numel, double lo, double hi) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using O = op_type<T>;
    const InRange<O> in_range{static_cast<O>(lo), static_cast<O>(hi)};
    const T* from = static_cast<const T*>(x);
    if constexpr (std::is_same_v<T, c10::Half>) {
      for_half_blocks(numel, [&](int64_t first, int64_t n) {
        float block[kHalves];
        widen(from + first, static_cast<float*>(block), n);
        pack(static_cast<const float*>(block), mask + first / 8, n, in_range);
      });
    } else {
      pack_all(from, mask, numel, in_range);
    }
  });
}

void pack_bool_loops(const uint8_t* x, uint8_t* mask, int64_t numel) {
  pack_all(x, mask, numel, IsTrue{});
}

void unpack_bool_loops(const uint8_t* mask, uint8_t* out, int64_t numel) {
  for_packed_ranges(numel, [&](int64_t first, int64_t n) { spread_bits(mask + first / 8, out + first, n); });
}

void keep_where_loops(int64_t itemsize, const void* in, const uint8_t* mask, void* out, int64_t numel) {
  const auto run = [&](auto zero) {
    using U = decltype(zero);
    const U* from = static_cast<const U*>(in);
    U* to = static_cast<U*>(out);
    for_packed_ranges(
        numel, [&](int64_t first, int64_t n) { keep_bits(from + first, mask + first / 8, to + first, n); });
  };
  switch (itemsize) {
    case 2:
      return run(uint16_t(0));
    case 4:
      return run(uint32_t(0));
    default:
      return run(uint64_t(0));
  }
}

void masked_scale_loops(
    c10::ScalarType dtype, const void* in, const uint8_t* mask, void* out, int64_t numel, double scale,
    double otherwise) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using O = op_type<T>;
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(out);
    const O kept = static_cast<O>(scale), other = static_cast<O>(otherwise);
    if constexpr (std::is_same_v<T, c10::Half>) {
      for_half_blocks(numel, [&](int64_t first, int64_t n) {
        float block[kHalves];
        widen(from + first, static_cast<float*>(block), n);
        scale_where(static_cast<const float*>(block), mask + first / 8, static_cast<float*>(block), n, kept, other);
        narrow(static_cast<const float*>(block), to + first, n);
      });
    } else {
      for_packed_ranges(numel, [&](int64_t first, int64_t n) {
        scale_where(from + first, mask + first / 8, to + first, n, kept, other);
      });
    }
  });
}

void pack_nibbles_loops(const uint8_t* in, uint8_t* out, int64_t bytes) {
  parallel_for(0, bytes, 32768, [&](int64_t begin, int64_t end) {
    join_nibbles(in + 2 * begin, out + begin, end - begin);
  });
}

void unpack_nibbles_loops(const uint8_t* in, uint8_t* out, int64_t bytes) {
  parallel_for(0, bytes, 32768, [&](int64_t begin, int64_t end) {
    split_nibbles(in + begin, out + 2 * begin, end - begin);
  });
}

}  // namespace monet_like::masks
