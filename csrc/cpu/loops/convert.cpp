// Blocks of 16-bit floats to float32 and back.

#include "convert.h"

namespace monet_like {
namespace {

template <typename T>
MONET_BODY void widen_loop_body(const T* in, float* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    out[i] = load(in[i]);
  }
}
MONET_FOR_EACH_ISA(widen_loop)

template <typename T>
MONET_BODY void narrow_loop_body(const float* in, T* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(out[i], in[i]);
  }
}
MONET_FOR_EACH_ISA(narrow_loop)

template <auto...>
MONET_BODY void round_bfloat16_body(float* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    y[i] = as_stored<c10::BFloat16>(y[i]);
  }
}
MONET_FOR_EACH_ISA(round_bfloat16)

#if MONET_HAS_ISA
// Loops over float16 are not compiled to the processor's conversions, which do eight numbers each.
typedef float Floats __attribute__((vector_size(32)));
typedef short Halves __attribute__((vector_size(16)));
constexpr int64_t kHalves = 8;

MONET_TARGET_AVX2 void widen_halves(const c10::Half* in, float* out, int64_t n) {
  for (int64_t i = 0; i + kHalves <= n; i += kHalves) {
    Halves halves;
    std::memcpy(&halves, in + i, sizeof(halves));
    const Floats floats = __builtin_ia32_vcvtph2ps256(halves);
    std::memcpy(out + i, &floats, sizeof(floats));
  }
}

MONET_TARGET_AVX2 void narrow_halves(const float* in, c10::Half* out, int64_t n) {
  for (int64_t i = 0; i + kHalves <= n; i += kHalves) {
    Floats floats;
    std::memcpy(&floats, in + i, sizeof(floats));
    const Halves halves = (Halves)__builtin_ia32_vcvtps2ph256(floats, 0);  // to the nearest, ties to even
    std::memcpy(static_cast<void*>(out + i), &halves, sizeof(halves));
  }
}

MONET_TARGET_AVX2 void round_halves(float* y, int64_t n) {
  for (int64_t i = 0; i + kHalves <= n; i += kHalves) {
    Floats floats;
    std::memcpy(&floats, y + i, sizeof(floats));
    floats = __builtin_ia32_vcvtph2ps256((Halves)__builtin_ia32_vcvtps2ph256(floats, 0));
    std::memcpy(y + i, &floats, sizeof(floats));
  }
}

// The number of leading elements that the functions above do.
int64_t whole_vectors(int64_t n) {
  return isa() == Isa::Baseline ? 0 : n / kHalves * kHalves;
}
#else
void widen_halves(const c10::Half*, float*, int64_t) {}
void narrow_halves(const float*, c10::Half*, int64_t) {}
void round_halves(float*, int64_t) {}
int64_t whole_vectors(int64_t) {
  return 0;
}
#endif

}  // namespace

void widen(const c10::BFloat16* in, float* out, int64_t n) {
  widen_loop(in, out, n);
}

void narrow(const float* in, c10::BFloat16* out, int64_t n) {
  narrow_loop(in, out, n);
}

void round_as(c10::BFloat16, float* y, int64_t n) {
  round_bfloat16(y, n);
}

void widen(const c10::Half* in, float* out, int64_t n) {
  const int64_t done = whole_vectors(n);
  widen_halves(in, out, done);
  for (int64_t i = done; i < n; ++i) {
    out[i] = load(in[i]);
  }
}

void narrow(const float* in, c10::Half* out, int64_t n) {
  const int64_t done = whole_vectors(n);
  narrow_halves(in, out, done);
  for (int64_t i = done; i < n; ++i) {
    store(out[i], in[i]);
  }
}

void round_as(c10::Half, float* y, int64_t n) {
  const int64_t done = whole_vectors(n);
  round_halves(y, done);
  for (int64_t i = done; i < n; ++i) {
    y[i] = as_stored<c10::Half>(y[i]);
  }
}

}  // namespace monet_like
