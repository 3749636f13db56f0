// CUDA kernels on the CPU, for tests: the part of the language and the library that the kernels use.
//
// transform.py turns `kernel<<<grid, block, shared, stream>>>(arguments)` into emu::launch(...) and `__shared__ T name;`
// into EMU_SHARED. Threads of a block are fibers of one OS thread (emulator.cpp). The kernels are compiled with
// -fsanitize=thread, whose calls at every access to memory end in emulator.cpp and not in libtsan.

#pragma once

#include <math.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

// ---- vectors ----

#define EMU_VECTOR(name, T, align2, align4)                                                       \
  struct alignas(align2) name##2 { T x, y; };                                                     \
  struct name##3 { T x, y, z; };                                                                  \
  struct alignas(align4) name##4 { T x, y, z, w; };                                               \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                      \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                              \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(char, signed char, 2, 4)
EMU_VECTOR(uchar, unsigned char, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(ushort, unsigned short, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(uint, unsigned int, 8, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(long, long, 16, 16)
EMU_VECTOR(ulong, unsigned long, 16, 16)
EMU_VECTOR(longlong, long long, 16, 16)
EMU_VECTOR(ulonglong, unsigned long long, 16, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

namespace emu {

struct Site {
  const char* file;
  int line;
};

enum class Op : int { ShflIdx, ShflUp, ShflDown, ShflXor, Ballot, All, Any, Max, Sync };

// Constant for a thread, and a thread is one fiber: a compiler may keep them.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_extent();
__attribute__((const)) dim3 grid_extent();

void barrier(Site site);
std::uint64_t collective(Site site, Op op, unsigned int mask, std::uint64_t value, int argument, int width);
void atomic_access(void* address, std::size_t size);
void declare_shared(void* address, std::size_t size, const char* name, Site site);
void* dynamic_shared(const char* name);
void entered(const char* kernel);  // what transform.py puts first into every __global__ function
void fence();
bool mutated(int number);       // whether this deliberate mistake is switched on, see transform.py
std::int64_t block_limit(std::int64_t most);  // of grids that stride: EMU_BLOCKS, where that is less
[[noreturn]] void fail_assertion(const char* condition, Site site);
void run_grid(
    const char* name, Site site, dim3 grid, dim3 block, std::size_t dynamic_shared, void (*body)(void*), void* closure);

template <typename T>
T clamp(T value, T low, T high) {
  high = static_cast<T>(block_limit(high));
  return value < low ? low : value > high ? high : value;
}

template <typename F, typename... Arguments>
void launch(
    const char* name, Site site, dim3 grid, dim3 block, std::size_t dynamic_shared, F call, Arguments... arguments) {
  auto body = [&] { call(arguments...); };
  run_grid(name, site, grid, block, dynamic_shared, [](void* p) { (*static_cast<decltype(body)*>(p))(); }, &body);
}

template <typename T>
T shuffle(Site site, Op op, unsigned int mask, T value, int argument, int width = 32) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  std::uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof(T));
  raw = collective(site, op, mask, raw, argument, width);
  std::memcpy(&value, &raw, sizeof(T));
  return value;
}

// Between guard zones, so that an index out of bounds does not reach the next variable.
template <typename T>
struct SharedStorage {
  alignas(64) unsigned char before[64];
  alignas(16) T value;
  alignas(64) unsigned char after[64];
};

template <typename T>
T& shared(SharedStorage<T>& storage, const char* name, Site site) {
  declare_shared(&storage.value, sizeof(T), name, site);
  return storage.value;
}

#define EMU_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
template <typename T, typename F>
EMU_UNCHECKED T atomically(T* address, F change) {
  atomic_access(address, sizeof(T));
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace emu

#define EMU_HERE (::emu::Site{__FILE__, __LINE__})
#define EMU_SHARED(type, name)                      \
  static ::emu::SharedStorage<type> emu_of_##name; \
  auto& name = ::emu::shared(emu_of_##name, #name, EMU_HERE)

#define EMU_DYNAMIC_SHARED(type, name) auto* const name = static_cast<type*>(::emu::dynamic_shared(#name))

#define threadIdx (::emu::thread_index())
#define blockIdx (::emu::block_index())
#define blockDim (::emu::block_extent())
#define gridDim (::emu::grid_extent())
#define warpSize 32

#define __syncthreads() ::emu::barrier(EMU_HERE)
#define __syncwarp(...) ::emu::collective(EMU_HERE, ::emu::Op::Sync, ::emu::first(__VA_ARGS__), 0, 0, 32)
#define __shfl_sync(mask, ...) ::emu::shuffle(EMU_HERE, ::emu::Op::ShflIdx, mask, __VA_ARGS__)
#define __shfl_up_sync(mask, ...) ::emu::shuffle(EMU_HERE, ::emu::Op::ShflUp, mask, __VA_ARGS__)
#define __shfl_down_sync(mask, ...) ::emu::shuffle(EMU_HERE, ::emu::Op::ShflDown, mask, __VA_ARGS__)
#define __shfl_xor_sync(mask, ...) ::emu::shuffle(EMU_HERE, ::emu::Op::ShflXor, mask, __VA_ARGS__)
#define EMU_VOTE(op, mask, flag) ::emu::collective(EMU_HERE, ::emu::Op::op, mask, (flag) ? 1 : 0, 0, 32)
#define __ballot_sync(mask, flag) static_cast<unsigned int>(EMU_VOTE(Ballot, mask, flag))
#define __all_sync(mask, flag) static_cast<int>(EMU_VOTE(All, mask, flag))
#define __any_sync(mask, flag) static_cast<int>(EMU_VOTE(Any, mask, flag))
#define __reduce_max_sync(mask, value) \
  static_cast<unsigned int>(::emu::collective(EMU_HERE, ::emu::Op::Max, mask, static_cast<unsigned int>(value), 0, 32))

#define __threadfence() ::emu::fence()
#define __threadfence_block() static_cast<void>(0)

namespace emu {
constexpr unsigned int first(unsigned int mask = 0xffffffffu) { return mask; }
}  // namespace emu

// ---- loads and stores with hints: the hint changes no value ----

template <typename T>
inline T __ldg(const T* p) { return *p; }
template <typename T>
inline T __ldca(const T* p) { return *p; }
template <typename T>
inline T __ldcg(const T* p) { return *p; }
template <typename T>
inline T __ldcs(const T* p) { return *p; }
template <typename T>
inline T __ldlu(const T* p) { return *p; }
template <typename T>
inline T __ldcv(const T* p) { return *p; }
template <typename T>
inline void __stwb(T* p, std::type_identity_t<T> v) { *p = v; }
template <typename T>
inline void __stcg(T* p, std::type_identity_t<T> v) { *p = v; }
template <typename T>
inline void __stcs(T* p, std::type_identity_t<T> v) { *p = v; }
template <typename T>
inline void __stwt(T* p, std::type_identity_t<T> v) { *p = v; }

// ---- integers ----

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>(static_cast<unsigned long long>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned int __brev(unsigned int x) {
  unsigned int y = 0;
  for (int i = 0; i < 32; ++i) {
    y |= (x >> i & 1u) << (31 - i);
  }
  return y;
}
inline unsigned int __funnelshift_l(unsigned int lo, unsigned int hi, unsigned int shift) {
  return static_cast<unsigned int>(((static_cast<unsigned long long>(hi) << 32 | lo) << (shift & 31)) >> 32);
}
inline unsigned int __funnelshift_r(unsigned int lo, unsigned int hi, unsigned int shift) {
  return static_cast<unsigned int>((static_cast<unsigned long long>(hi) << 32 | lo) >> (shift & 31));
}
// Byte i of the result is byte (selector >> 4 * i & 7) of the eight of y and x; with bit 3 set, its sign everywhere.
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned int made = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned int choice = selector >> (4 * i) & 15u;
    unsigned int byte = static_cast<unsigned int>(both >> (8 * (choice & 7u))) & 255u;
    byte = (choice & 8u) == 0 ? byte : (byte & 128u) != 0 ? 255u : 0u;
    made |= byte << (8 * i);
  }
  return made;
}

// ---- arithmetic with a named rounding ----

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
// A GPU's differ in the last bits.
inline float rsqrtf(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float rsqrt(float a) { return rsqrtf(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
inline float __expf(float a) { return expf(a); }

template <typename To, typename From>
inline To emu_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline float __uint_as_float(unsigned int x) { return emu_bits<float>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline unsigned int __float_as_uint(float x) { return emu_bits<unsigned int>(x); }

// As CUDA's math library: of a number and a NaN the number.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
#define EMU_MIN_MAX(T)                                  \
  inline T min(T a, T b) { return b < a ? b : a; }      \
  inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned int)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX

template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return emu::atomically(p, [v](T old) { return static_cast<T>(old + v); });
}
template <typename T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  return emu::atomically(p, [v](T old) { return old < v ? v : old; });
}
template <typename T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  return emu::atomically(p, [v](T old) { return v < old ? v : old; });
}
template <typename T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return emu::atomically(p, [v](T) { return v; });
}
template <typename T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return emu::atomically(p, [=](T old) { return old == expected ? v : old; });
}

// ---- the device ----

// A small one, so that a kernel's loop over the grid turns more than once: blocks for 3 x 2 are resident.
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrL2CacheSize };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
struct cudaDeviceProp {
  int multiProcessorCount = 3;
  int maxThreadsPerMultiProcessor = 2048;
  int maxThreadsPerBlock = 1024;
  int l2CacheSize = 50 << 20;
  int major = 8, minor = 0;
  std::size_t sharedMemPerBlock = std::size_t(48) << 10;
  std::size_t sharedMemPerBlockOptin = std::size_t(163) << 10;
};

namespace emu {
void allow_dynamic_shared(std::size_t bytes);
}

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid value"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const cudaDeviceProp device;
  *value = which == cudaDevAttrMultiProcessorCount ? device.multiProcessorCount
      : which == cudaDevAttrL2CacheSize            ? device.l2CacheSize
                                                   : static_cast<int>(device.sharedMemPerBlockOptin);
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads, std::size_t shared_bytes) {
  const bool possible = threads > 0 && threads <= 1024 && shared_bytes <= cudaDeviceProp().sharedMemPerBlockOptin;
  return *blocks = possible ? 2 : 0, possible ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute which, int value) {
  if (which == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || static_cast<std::size_t>(value) > cudaDeviceProp().sharedMemPerBlockOptin) {
      return cudaErrorInvalidValue;
    }
    ::emu::allow_dynamic_shared(static_cast<std::size_t>(value));
  }
  return cudaSuccess;
}
