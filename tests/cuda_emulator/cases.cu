// Kernels with one mistake each, and right ones beside them: what the emulator must and must not object to.

#include "common.cuh"

namespace {

using monet_like::current_stream;
using monet_like::DeviceGuard;
using monet_like::empty;
using monet_like::kInt;
using monet_like::Tensor;

constexpr int kThreads = 64;

__global__ void beyond_the_end(const float* in, float* out, int64_t n) {
  const int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) {
    out[i] = 2 * in[i];
  }
}

__global__ void before_the_start(const float* in, float* out, int64_t n) {
  const int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    out[i] = in[i - 1];
  }
}

__global__ void misaligned(const float* in, float* out, int64_t n) {
  if (threadIdx.x == 0) {
    *reinterpret_cast<unsigned int*>(reinterpret_cast<char*>(out) + 2) = 7;
  }
}

__global__ void never_written(const float* in, float* out, int64_t n) {
  const int64_t i = threadIdx.x;
  if (i < n) {
    out[i] += in[i];
  }
}

template <int Mistake>
__global__ void reversed(const float* in, float* out, int64_t n) {
  __shared__ float tile[kThreads];
  const int i = threadIdx.x;
  if constexpr (Mistake == 4) {  // leaves before the barrier
    if (i >= n) {
      return;
    }
  }
  if (Mistake == 2 ? i < n - 1 : i < n) {  // 2: one cell stays unwritten
    tile[i] = in[i];
  }
  if constexpr (Mistake == 5) {  // a barrier that some threads pass by
    if (i < 32) {
      __syncthreads();
    }
  } else if constexpr (Mistake == 6) {  // different barriers
    if (i < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if constexpr (Mistake != 1) {  // 1: no barrier
    __syncthreads();
  }
  if (i < n) {
    out[i] = tile[n - 1 - i + (Mistake == 3 ? kThreads : 0)];  // 3: past its end
  }
}

template <int Mistake>
__global__ void warp_sums(const float* in, float* out, int64_t n) {
  const int i = threadIdx.x;
  float sum = i < n ? in[i] : 0;
  if constexpr (Mistake == 1) {  // lanes that do not take part
    if (i < n) {
      for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, step);
      }
    }
  } else if constexpr (Mistake == 2) {  // a mask without the caller
    sum += __shfl_xor_sync(0x0000ffffu, sum, 1);
  } else if constexpr (Mistake == 3) {  // reads from lanes beyond the mask
    if (i % 32 < 16) {
      sum += __shfl_xor_sync(0x0000ffffu, sum, 16);
    }
  } else if constexpr (Mistake == 4) {  // two exchanges of one warp
    if (i % 2 == 0) {
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    } else {
      sum += __ballot_sync(0xffffffffu, 1);
    }
  } else if constexpr (Mistake == 5) {  // half a warp waits for a barrier, half for an exchange
    if (i % 32 < 16) {
      __syncthreads();
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (i % 32 >= 16) {
      __syncthreads();
    }
  } else {
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_down_sync(0xffffffffu, sum, step);
    }
  }
  if (i % 32 == 0) {
    out[i / 32] = sum;
  }
}

__global__ void race_of_blocks(const float* in, float* out, int64_t n) {
  if (threadIdx.x == 0) {
    out[0] = in[0];
  }
}

__global__ void race_of_threads(const float* in, float* out, int64_t n) {
  const int i = threadIdx.x;
  if (i < n) {
    out[i] = in[i];
    if (i > 0) {
      out[0] = out[i - 1];
    }
  }
}

__global__ void asserts(const float* in, float* out, int64_t n) {
  CUDA_KERNEL_ASSERT(threadIdx.x < 5);
}

__global__ void writes_an_address(float** out, int64_t) {
  *out = nullptr;
}

__global__ void counts(const float* in, unsigned int* out, int64_t n) {
  __shared__ unsigned int bins[2];
  if (threadIdx.x < 2) {
    bins[threadIdx.x] = 0;
  }
  __syncthreads();
  const int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    atomicAdd(&bins[in[i] > 0], 1u);
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
  }
}

// max of a NaN and a number is the number, on a GPU.
__global__ void largest(const float* in, float* out, int64_t n) {
  float top = in[0];
  for (int64_t i = 1; i < n; ++i) {
    top = max(top, in[i]);
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    out[0] = top;
  }
}

// ---- what fast kernels use ----

// Four floats at a time, with hints; the rest one by one.
template <int Mistake>
__global__ void __launch_bounds__(kThreads, 4) doubles_vectors(
    const float* __restrict__ in, float* __restrict__ out, int64_t n) {
  const float* from = in + (Mistake == 1 ? 1 : 0);  // 1: misaligned
  const int vectors = static_cast<int>(n / 4) + (Mistake == 2 ? 1 : 0);  // 2: one too many
  for (int v = blockIdx.x * kThreads + threadIdx.x; v < vectors; v += gridDim.x * kThreads) {
    float4 x;
    if constexpr (Mistake == 3) {  // never written
      x = reinterpret_cast<const float4*>(out)[v];
    } else {
      x = __ldcs(reinterpret_cast<const float4*>(from) + v);
    }
    __stcs(reinterpret_cast<float4*>(out) + v, make_float4(2 * x.x, 2 * x.y, 2 * x.z, 2 * x.w));
  }
  const int i = vectors * 4 + static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && i < n) {
    out[i] = 2 * __ldg(in + i);
  }
}

// Eight numbers of two bytes, or a pair of floats that is aligned as one of them.
struct alignas(16) Eight {
  c10::Half at[8];
};
struct Pair {
  float a, b;
};

template <typename V, int Offset>
__global__ void copies(const float* in, float* out, int64_t n) {
  const V* from = reinterpret_cast<const V*>(in + Offset);
  V* to = reinterpret_cast<V*>(out + Offset);
  const int64_t count = (n - Offset) * sizeof(float) / sizeof(V);
#pragma unroll 2
  for (int64_t v = threadIdx.x; v < count; v += kThreads) {
    const V value = from[v];
    to[v] = value;
  }
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    if (i < Offset || i >= Offset + count * static_cast<int64_t>(sizeof(V) / sizeof(float))) {
      out[i] = in[i];
    }
  }
}

template <int Mistake>
__global__ void reversed_dynamic(const float* in, float* out, int64_t n) {
  extern __shared__ __align__(16) float tile[];
  const int i = threadIdx.x;
  if (i < n) {
    tile[i] = in[i];
  }
  if constexpr (Mistake != 1) {  // 1: no barrier
    __syncthreads();
  }
  if (i < n) {
    out[i] = tile[n - 1 - i];
  }
}

// Lanes hand over to their neighbours through shared memory.
template <int Mistake>
__global__ void turned_in_warps(const float* in, float* out, int64_t n) {
  __shared__ float tile[kThreads];
  const int i = threadIdx.x, neighbour = i / 32 * 32 + (i + 1) % 32;
  tile[i] = i < n ? in[i] : 0;
  if constexpr (Mistake != 1) {  // 1: no barrier
    __syncwarp();
  }
  if (i < n) {
    out[i] = tile[Mistake == 2 ? (i + 32) % kThreads : neighbour];  // 2: another warp's
  }
}

// The block that ends last adds what all have written.
template <int Mistake>
__global__ void sums_of_blocks(const float* in, float* out, unsigned int* done, int64_t n) {
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
      sum += in[i];
    }
    out[1 + blockIdx.x] = sum;
    if constexpr (Mistake != 1) {  // 1: the sum may be seen after the count
      __threadfence();
    }
    if (Mistake == 2 ? blockIdx.x == gridDim.x - 1 : atomicAdd(done, 1u) == gridDim.x - 1) {  // 2: counts nothing
      float total = 0;
      for (unsigned int b = 0; b < gridDim.x; ++b) {
        total += out[1 + b];
      }
      out[0] = total;
    }
  }
}

__global__ void intrinsics(const float* in, float* out, int64_t n) {
  const unsigned int lane = threadIdx.x % 32, word = 0x80c0e0f0u + lane;
  int found = 0;
  float results[16];
  results[found++] = __fmaf_rn(in[0], in[1], in[2]);
  results[found++] = fmaf(in[0], in[1], in[2]);
  results[found++] = __fmul_rn(in[0], in[1]);
  results[found++] = static_cast<float>(__umulhi(word, 0xfffffff0u) - word + 64);
  results[found++] = static_cast<float>(__popc(__ballot_sync(0xffffffffu, lane % 3 == 0)));
  results[found++] = __shfl_sync(0xffffffffu, static_cast<float>(lane), 7);
  results[found++] = __shfl_xor_sync(0xffffffffu, static_cast<float>(lane), 5);
  results[found++] = static_cast<float>(__byte_perm(0x04030201u, 0x08070605u, 0x7531u) == 0x08060402u);
  results[found++] = static_cast<float>(__clz(0x00010000) + __ffs(8));
  results[found++] = __uint_as_float(__float_as_uint(in[0]) ^ 0x80000000u);
  results[found++] = min(in[1], __int_as_float(0x7fc00000));
  results[found++] = static_cast<float>(__any_sync(0xffffffffu, lane == 40) + 2 * __all_sync(0xffffffffu, lane < 32));
  if (blockIdx.x == 0 && threadIdx.x == 3) {
#pragma unroll
    for (int i = 0; i < 12; ++i) {
      out[i] = results[i];
    }
  }
}

template <auto Kernel>
int64_t resident_blocks() {
  int processors = 0, each = 0;
  MONET_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  MONET_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, Kernel, kThreads, 0));
  return processors * each;
}

template <auto Kernel>
void launch_dynamic(const float* in, float* to, int64_t n, int64_t bytes, cudaStream_t stream) {
  if (bytes > 100000) {
    MONET_CUDA(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  }
  Kernel<<<1, kThreads, static_cast<size_t>(bytes), stream>>>(in, to, n);
}

Tensor run(const Tensor& x, std::string_view which, int64_t blocks) {
  const DeviceGuard guard(x.device());
  Tensor out = empty({x.numel()}, x.options());
  const float* in = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t n = x.numel();
  const auto stream = current_stream();
  const unsigned int b = static_cast<unsigned int>(blocks);
  if (which == "beyond") { beyond_the_end<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "before") { before_the_start<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "misaligned") { misaligned<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "never") { never_written<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "reversed") { reversed<0><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "reversed1") { reversed<1><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "reversed2") { reversed<2><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "reversed3") { reversed<3><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "reversed4") { reversed<4><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "reversed5") { reversed<5><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "reversed6") { reversed<6><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "sums") { warp_sums<0><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "sums1") { warp_sums<1><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "sums2") { warp_sums<2><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "sums3") { warp_sums<3><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "sums4") { warp_sums<4><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "sums5") { warp_sums<5><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "blocks") { race_of_blocks<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "threads") { race_of_threads<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "asserts") { asserts<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "largest") { largest<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "host") { float* there = to; writes_an_address<<<1, 1, 0, stream>>>(&there, n); }
  if (which == "counts") {
    out.zero_();
    counts<<<b, kThreads, 0, stream>>>(in, reinterpret_cast<unsigned int*>(to), n);
  }
  if (which == "freed") {
    const float* gone = empty({n}, x.options()).const_data_ptr<float>();
    beyond_the_end<<<b, kThreads, 0, stream>>>(gone, to, n - 1);
  }
  if (which == "vectors") {
    constexpr auto kernel = doubles_vectors<0>;
    kernel<<<std::clamp<int64_t>(blocks, 1, resident_blocks<doubles_vectors<0>>()), kThreads, 0, stream>>>(in, to, n);
  }
  if (which == "vectors1") { doubles_vectors<1><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "vectors2") { doubles_vectors<2><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "vectors3") { doubles_vectors<3><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "eight") { copies<Eight, 0><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "eight1") { copies<Eight, 2><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "uint4") { copies<uint4, 4><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "uint41") { copies<uint4, 3><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "pair") { copies<Pair, 1><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "dynamic") { launch_dynamic<reversed_dynamic<0>>(in, to, n, n * 4, stream); }
  if (which == "dynamic1") { launch_dynamic<reversed_dynamic<1>>(in, to, n, n * 4, stream); }
  if (which == "dynamic2") { launch_dynamic<reversed_dynamic<0>>(in, to, n, n * 4 - 4, stream); }
  if (which == "dynamic3") { launch_dynamic<reversed_dynamic<0>>(in, to, n, 0, stream); }
  if (which == "dynamic4") { launch_dynamic<reversed_dynamic<0>>(in, to, n, 200000, stream); }
  if (which == "dynamic5") { launch_dynamic<reversed_dynamic<0>>(in, to, n, 50000, stream); }
  if (which == "turned") { turned_in_warps<0><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "turned1") { turned_in_warps<1><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "turned2") { turned_in_warps<2><<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which.rfind("last", 0) == 0) {
    const Tensor done = empty({1}, x.options().dtype(kInt)).zero_();
    auto* count = reinterpret_cast<unsigned int*>(done.mutable_data_ptr<int>());
    if (which == "last") { sums_of_blocks<0><<<b, kThreads, 0, stream>>>(in, to, count, n); }
    if (which == "last1") { sums_of_blocks<1><<<b, kThreads, 0, stream>>>(in, to, count, n); }
    if (which == "last2") { sums_of_blocks<2><<<b, kThreads, 0, stream>>>(in, to, count, n); }
  }
  if (which == "intrinsics") { intrinsics<<<b, kThreads, 0, stream>>>(in, to, n); }
  if (which == "large") { reversed<0><<<b, 2048, 0, stream>>>(in, to, n); }
  return out;
}

Tensor unguarded(const Tensor& x) {
  Tensor out = empty({x.numel()}, x.options());
  reversed<0><<<1, kThreads>>>(x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), x.numel());
  return out;
}

}  // namespace

MONET_KERNELS(CUDA, m) {
  m.add<&run>("emulator_run");
  m.add<&unguarded>("emulator_unguarded");
}
