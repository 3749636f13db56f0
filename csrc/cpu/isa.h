// Compiles one loop body for several x86 vector widths and runs the width that ATen chose for itself.

#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../elementwise.h"

#define MONET_BODY inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MONET_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))
#define MONET_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define MONET_HAS_ISA 1
#elif defined(__x86_64__) && defined(__clang__)
#define MONET_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define MONET_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define MONET_HAS_ISA 1
#else
#define MONET_HAS_ISA 0
#endif

namespace monet_like {

enum class Isa { Baseline, Avx2, Avx512 };

// The vector width that ATen uses (aten.cpp).
Isa isa_of_aten();

// The vector width in use.
inline Isa isa() {
  static const Isa chosen = isa_of_aten();
  return chosen;
}

// Whether a formula is among the template constants of a loop. `Formula::Folded` is what ATen computes where its own code
// has no fused multiply-add, which is the baseline: such a loop is compiled for that width alone. A loop of
// `Formula::FoldedFma` is compiled for the wider ones alone.
template <Formula F, typename V>
constexpr bool is_formula(V value) {
  if constexpr (std::is_same_v<V, Formula>) {
    return value == F;
  } else {
    return false;
  }
}
template <auto... V>
constexpr bool kBaselineOnly = (is_formula<Formula::Folded>(V) || ...);
template <auto... V>
constexpr bool kWideOnly = (is_formula<Formula::FoldedFma>(V) || ...);

// MONET_FOR_EACH_ISA defines `name<constants...>(arguments...)`, which runs the right compilation of `name_body`.
// MONET_FOR_AVX2 does the same without a compilation for AVX-512, for loops that it makes no faster.
#if MONET_HAS_ISA
#define MONET_COMPILED_FOR(name, isa_name, target)     \
  template <auto... V, typename... A>                  \
  target void name##_##isa_name(A... a) {              \
    name##_body<V...>(a...);                           \
  }
#define MONET_RUN_RIGHT_ISA(name, widest)                         \
  template <auto... V, typename... A>                             \
  void name(A... a) {                                             \
    if constexpr (kBaselineOnly<V...>) {                          \
      name##_body<V...>(a...);                                    \
    } else if (isa() == Isa::Avx512) {                            \
      name##_##widest<V...>(a...);                                \
    } else if (kWideOnly<V...> || isa() == Isa::Avx2) {           \
      name##_avx2<V...>(a...);                                    \
    } else if constexpr (!kWideOnly<V...>) {                      \
      name##_body<V...>(a...);                                    \
    }                                                             \
  }
#define MONET_FOR_EACH_ISA(name)                           \
  MONET_COMPILED_FOR(name, avx512, MONET_TARGET_AVX512)    \
  MONET_COMPILED_FOR(name, avx2, MONET_TARGET_AVX2)        \
  MONET_RUN_RIGHT_ISA(name, avx512)
#define MONET_FOR_AVX2(name)                               \
  MONET_COMPILED_FOR(name, avx2, MONET_TARGET_AVX2)        \
  MONET_RUN_RIGHT_ISA(name, avx2)
#else
#define MONET_FOR_EACH_ISA(name)      \
  template <auto... V, typename... A> \
  void name(A... a) {                 \
    name##_body<V...>(a...);          \
  }
#define MONET_FOR_AVX2(name) MONET_FOR_EACH_ISA(name)
#endif

// The type a kernel computes in.
template <typename T>
using op_type = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
MONET_BODY op_type<T> load(const T& value) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const uint32_t bits = static_cast<uint32_t>(value.x) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
  } else {
    return static_cast<op_type<T>>(value);
  }
}

// A float's bits, of which the upper half is the bfloat16 nearest to it, ties to even: without a branch, so that the
// loop around it vectorises.
MONET_BODY uint32_t rounded_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return value != value ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}

template <typename T>
MONET_BODY void store(T& to, op_type<T> value) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    to.x = static_cast<uint16_t>(rounded_to_bfloat16(value) >> 16);
  } else {
    to = static_cast<T>(value);
  }
}

// The value that a y has after it was stored and loaded again.
template <typename T>
MONET_BODY op_type<T> as_stored(op_type<T> y) {
  if constexpr (sizeof(T) == sizeof(op_type<T>)) {
    return y;
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const uint32_t bits = rounded_to_bfloat16(y) & 0xffff0000u;
    std::memcpy(&y, &bits, sizeof(bits));
    return y;
  } else {
    T stored;
    store(stored, y);
    return load(stored);
  }
}

// Eight 0/1 bytes to one byte, the first byte to bit 0: the multiplication gathers them in the top byte.
MONET_BODY uint8_t gather_bits(const uint8_t* flags) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "gather_bits reads eight bytes as one little-endian word");
  uint64_t word;
  std::memcpy(&word, flags, sizeof(word));
  return static_cast<uint8_t>((word * 0x0102040810204080ull) >> 56);
}

}  // namespace monet_like
