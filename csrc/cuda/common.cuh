// Code that every CUDA file shares: element types, 16-byte vectors, the loop around them, grids and divisors.

#pragma once

#include <cuda_runtime.h>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "../checks.h"

namespace monet_like {

// The type that elements are computed in.
template <typename T>
using op_type = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int kThreads = 256;

// The number of independent vectors that a thread loads before it uses the first one. With 64 bytes in flight for each
// thread, half of the resident threads hide the latency of an H100's memory.
constexpr int kUnroll = 4;

// The result of a function without arguments, in which scalar_t is the C++ type of a floating dtype.
#define MONET_DISPATCH_FLOATS(type, ...) \
  [&] {                                  \
    switch (type) {                      \
      case kFloat: {                     \
        using scalar_t = float;          \
        return __VA_ARGS__();            \
      }                                  \
      case kDouble: {                    \
        using scalar_t = double;         \
        return __VA_ARGS__();            \
      }                                  \
      case kHalf: {                      \
        using scalar_t = c10::Half;      \
        return __VA_ARGS__();            \
      }                                  \
      default: {                         \
        using scalar_t = c10::BFloat16;  \
        return __VA_ARGS__();            \
      }                                  \
    }                                    \
  }()

// ---- the device ----

inline void check_cuda(cudaError_t status, const char* what) {
  MONET_CHECK(status == cudaSuccess, "CUDA error: ", cudaGetErrorString(status), ", from ", what);
}
#define MONET_CUDA(call) ::monet_like::check_cuda(call, #call)

// Makes a tensor's GPU the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device) { MONET_TORCH(aoti_torch_create_cuda_guard, device.index, &guard_); }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_cuda_guard(guard_); }

 private:
  CUDAGuardHandle guard_ = nullptr;
};

// PyTorch's stream on the current GPU.
inline cudaStream_t current_stream() {
  void* stream = nullptr;
  MONET_TORCH(aoti_torch_get_current_cuda_stream, -1, &stream);
  return static_cast<cudaStream_t>(stream);
}

// ---- dtypes known at run time ----

// A tensor of any floating dtype; null if there is none.
struct Floats {
  void* data;
  ScalarType type;

  explicit Floats(const Tensor& t)
      : data(t.defined() ? const_cast<void*>(t.const_data_ptr()) : nullptr),
        type(t.defined() ? t.scalar_type() : kFloat) {}

  template <typename O>
  __device__ __forceinline__ O at(int64_t i) const {
    switch (type) {
      case kFloat:
        return static_cast<O>(static_cast<const float*>(data)[i]);
      case kDouble:
        return static_cast<O>(static_cast<const double*>(data)[i]);
      case kHalf:
        return static_cast<O>(static_cast<float>(static_cast<const c10::Half*>(data)[i]));
      default:
        return static_cast<O>(static_cast<float>(static_cast<const c10::BFloat16*>(data)[i]));
    }
  }

  template <typename O>
  __device__ __forceinline__ void put(int64_t i, O value) const {
    switch (type) {
      case kFloat:
        static_cast<float*>(data)[i] = static_cast<float>(value);
        return;
      case kDouble:
        static_cast<double*>(data)[i] = static_cast<double>(value);
        return;
      case kHalf:
        static_cast<c10::Half*>(data)[i] = static_cast<float>(value);
        return;
      default:
        static_cast<c10::BFloat16*>(data)[i] = static_cast<float>(value);
    }
  }

  // The value that reads back after `value` is stored.
  template <typename O>
  __device__ __forceinline__ O rounded(O value) const {
    switch (type) {
      case kHalf:
        return static_cast<O>(static_cast<float>(static_cast<c10::Half>(static_cast<float>(value))));
      case kBFloat16:
        return static_cast<O>(static_cast<float>(static_cast<c10::BFloat16>(static_cast<float>(value))));
      default:
        return value;
    }
  }
};

// ---- vectors ----

// Elements that lie next to each other, loaded and stored 16 bytes at a time, or all at once if they are fewer bytes.
//
// No streaming hints: what a kernel writes the next task reads, often from the L2 cache, and whether an input is read for
// the last time only the schedule knows.
template <typename T, int N = 16 / sizeof(T)>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
  T at[N];
};

template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load(const T* p) {
  return *reinterpret_cast<const Vector<T, N>*>(p);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* p, const Vector<T, N>& v) {
  *reinterpret_cast<Vector<T, N>*>(p) = v;
}

template <typename T>
inline constexpr int kVector = 16 / sizeof(T);

// The 16 bytes at `p` as words, with access to their elements. Data that waits in registers should have this form: single
// elements of one or two bytes would take a register each.
using Words = Vector<uint32_t, 4>;

template <typename T>
__device__ __forceinline__ Words load_words(const T* p) {
  return load<4>(reinterpret_cast<const uint32_t*>(p));
}

template <typename T>
__device__ __forceinline__ Vector<T> elements(const Words& words) {
  Vector<T> v;
  __builtin_memcpy(&v, &words, sizeof(v));
  return v;
}

// Element j of 16 bytes, in the type that it is computed in. The upper bfloat16 of a word needs a mask only.
template <typename T>
__device__ __forceinline__ op_type<T> widened(const Words& words, int j) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const uint32_t word = words.at[j / 2];
    return __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    return static_cast<op_type<T>>(elements<T>(words).at[j]);
  }
}

// The same elements in the type that they are computed in.
template <typename T>
__device__ __forceinline__ Vector<op_type<T>, kVector<T>> widened(const Words& words) {
  Vector<op_type<T>, kVector<T>> values;
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) {
    values.at[j] = widened<T>(words, j);
  }
  return values;
}

// Numbers rounded to T, next to each other; an instruction rounds two to 16 bits.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> narrowed(const Vector<op_type<T>, N>& values) {
  Vector<T, N> made;
#if defined(__NVCC__)
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      if constexpr (std::is_same_v<T, c10::BFloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values.at[j], values.at[j + 1]);
        __builtin_memcpy(&made.at[j], &pair, sizeof(pair));
      } else {
        const __half2 pair = __floats2half2_rn(values.at[j], values.at[j + 1]);
        __builtin_memcpy(&made.at[j], &pair, sizeof(pair));
      }
    }
    return made;
  }
#endif
#pragma unroll
  for (int j = 0; j < N; ++j) {
    made.at[j] = static_cast<T>(values.at[j]);
  }
  return made;
}

// Of two pairs of 16-bit floats: all bits of a half in which the first is greater than the second, or a NaN.
template <typename T>
__device__ __forceinline__ uint32_t greater_or_nan(uint32_t a, uint32_t b) {
#if defined(__NVCC__)
  using Pair = std::conditional_t<std::is_same_v<T, c10::BFloat16>, __nv_bfloat162, __half2>;
  Pair first, second;
  __builtin_memcpy(&first, &a, sizeof(a));
  __builtin_memcpy(&second, &b, sizeof(b));
  return __hgt2_mask(first, second) | __hneu2_mask(first, first);
#else
  Vector<T, 2> first, second;
  __builtin_memcpy(&first, &a, sizeof(a));
  __builtin_memcpy(&second, &b, sizeof(b));
  uint32_t mask = 0;
  for (int j = 0; j < 2; ++j) {
    const float value = first.at[j];
    mask |= value > static_cast<float>(second.at[j]) || value != value ? 0xffffu << (16 * j) : 0u;
  }
  return mask;
#endif
}

// The larger of two unsigned integers of 16 bits, in both halves of a word.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__NVCC__)
  return __vmaxu2(a, b);
#else
  return std::max(a & 0xffff0000u, b & 0xffff0000u) | std::max(a & 0xffffu, b & 0xffffu);
#endif
}

// The largest of the values of a whole warp.
template <typename U>
__device__ __forceinline__ U warp_max(U value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (sizeof(U) == sizeof(uint32_t)) {
    return __reduce_max_sync(0xffffffffu, value);
  }
#endif
  for (int step = 16; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

// Whether 16 bytes can be loaded at `p`.
template <typename T>
MONET_HD bool is_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// Elements before the first one of `p` at a multiple of 16 bytes.
template <typename T>
MONET_HD int before_aligned(const T* p) {
  return static_cast<int>((0 - reinterpret_cast<uintptr_t>(p)) % 16 / sizeof(T));
}

// A tensor whose data can be read 16 bytes at a time: `t`, or a copy if it is a view that starts anywhere else. The
// allocator's own tensors never need one.
inline Tensor aligned(const Tensor& t) {
  return !t.defined() || t.numel() == 0 || is_aligned(static_cast<const char*>(t.const_data_ptr()))
      ? t
      : empty_like(t).copy_(t);
}

// ---- the loop ----

// For the Unroll vectors first, first + step, ... that are below count: use(v, fetch(v)), all fetches before the first use.
// A condition on each vector, rather than a second loop for the rest, keeps the code short.
template <int Unroll, typename Fetch, typename Use>
__device__ __forceinline__ void take_vectors(int count, int first, int step, const Fetch& fetch, const Use& use) {
  decltype(fetch(first)) fetched[Unroll];
#pragma unroll
  for (int k = 0; k < Unroll; ++k) {
    if (first + k * step < count) {
      fetched[k] = fetch(first + k * step);
    }
  }
#pragma unroll
  for (int k = 0; k < Unroll; ++k) {
    if (first + k * step < count) {
      use(first + k * step, fetched[k]);
    }
  }
}

// A grid's part of `count` vectors: kUnroll for each thread, those of a block next to each other.
template <typename Fetch, typename Use>
__device__ __forceinline__ void take_of_grid(int count, const Fetch& fetch, const Use& use) {
  const int threads = static_cast<int>(blockDim.x);
  take_vectors<kUnroll>(
      count, static_cast<int>(blockIdx.x) * threads * kUnroll + static_cast<int>(threadIdx.x), threads, fetch, use);
}

// The same as take_vectors for all vectors first, first + step, ... below count.
template <typename Fetch, typename Use>
__device__ __forceinline__ void for_vectors(int count, int first, int step, const Fetch& fetch, const Use& use) {
#pragma unroll 1
  for (int v = first; v < count; v += kUnroll * step) {
    take_vectors<kUnroll>(count, v, step, fetch, use);
  }
}

// ---- indices ----

// Largest number of elements that kernels with 32-bit indices take: a grid may reach past it by some blocks.
constexpr int64_t kMost32 = (int64_t(1) << 31) - (int64_t(1) << 24);

// For kernels that treat every element alike: f(first, count) for parts that 32-bit indices reach, each a multiple of 16
// elements but the last. A launch more is cheaper than a second copy of the kernel's code.
template <typename F>
void for_parts(int64_t numel, const F& f) {
  constexpr int64_t kPart = int64_t(1) << 30;
  for (int64_t first = 0; first < numel; first += kPart) {
    f(first, static_cast<int32_t>(std::min(kPart, numel - first)));
  }
}

// Position of this thread in its grid.
__device__ __forceinline__ int grid_thread() {
  return static_cast<int>(blockIdx.x) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
}

// Division by a number that is known before the launch: a multiplication and a shift. Exact for numerators below 2^31
// and divisors from 1 to 2^31 (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
struct Divisor {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((int64_t(1) << shift) < d) {
      ++shift;
    }
    const uint64_t excess = (uint64_t(1) << shift) - divisor;
    multiplier = static_cast<uint32_t>((excess << 32) / divisor + 1);
  }

  MONET_HD uint32_t quotient(uint32_t n) const {
    return (static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32) + n) >> shift;
  }
  // n becomes the remainder.
  MONET_HD uint32_t split(uint32_t& n) const {
    const uint32_t q = quotient(n);
    n -= q * divisor;
    return q;
  }
};

// ---- grids ----

// Blocks of `threads` threads, a multiple of 32, that the current device runs of a kernel at once. CUDA is asked once.
template <auto Kernel>
int64_t resident_blocks(int threads) {
  constexpr size_t kDevices = 64, kWarps = 33;
  static std::array<std::atomic<int>, kDevices * kWarps> known{};
  int device = 0;
  MONET_CUDA(cudaGetDevice(&device));
  std::atomic<int>& blocks = known[(static_cast<size_t>(device) % kDevices) * kWarps + threads / 32];
  if (blocks == 0) {
    int processors = 0, each = 0;
    MONET_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    MONET_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, Kernel, threads, 0));
    blocks = std::max(1, processors * each);
  }
  return blocks;
}

// A grid of at most `wanted` blocks that all run at once: no block waits for another one to end.
template <auto Kernel>
unsigned int resident_grid(int64_t wanted, int threads) {
  return static_cast<unsigned int>(std::clamp<int64_t>(wanted, 1, resident_blocks<Kernel>(threads)));
}

// Grids of kernels that treat every element alike: a thread for each, or for kUnroll vectors. On an H200, resident blocks
// that stride over the elements move 5 to 10 % fewer bytes in a second than blocks that end and are replaced.
inline unsigned int grid_of(int64_t count) {
  return static_cast<unsigned int>(std::max<int64_t>(1, (count + kThreads - 1) / kThreads));
}

inline unsigned int grid_of_vectors(int64_t vectors) {
  return grid_of((vectors + kUnroll - 1) / kUnroll);
}

}  // namespace monet_like
