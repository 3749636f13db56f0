// Lossy caches on the GPU: a tensor's largest elements, or all of them in 8 bits.

#include <torch/library.h>

#include <numeric>

#include "../caches.h"
#include "common.cuh"

namespace monet_like {
namespace {

constexpr int kWarps = kThreads / 32;

template <typename U>
__device__ __forceinline__ U magnitude(U bits) {
  return bits & static_cast<U>(static_cast<U>(~U(0)) >> 1);
}

// For the threads of a block, in order: how many before this one have the flag, and how many have it in all.
__device__ __forceinline__ int rank_in_block(bool flag, int& total) {
  __shared__ int counts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned int bits = __ballot_sync(0xffffffffu, flag);
  if (lane == 0) {
    counts[warp] = __popc(bits);
  }
  __syncthreads();
  int before = __popc(bits & ((1u << lane) - 1));
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? counts[w] : 0;
    total += counts[w];
  }
  __syncthreads();
  return before;
}

// The magnitude from which on `wanted` of n elements are kept, eight bits at a time; `wanted` becomes how many of it.
template <typename U>
__device__ U select(const U* x, int n, int& wanted) {
  __shared__ unsigned int bins[256];
  __shared__ int bin, rest;
  U found = 0, known = 0;  // the leading bits, and which bits these are
  for (int low = 8 * sizeof(U) - 8; low >= 0; low -= 8) {
    bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const U key = magnitude(x[i]);
      if ((key & known) == found) {
        atomicAdd(&bins[(key >> low) & 255], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      rest = wanted;
      for (bin = 255; bins[bin] < rest; --bin) {
        rest -= bins[bin];
      }
    }
    __syncthreads();
    found |= static_cast<U>(static_cast<U>(bin) << low);
    known |= static_cast<U>(static_cast<U>(255) << low);
    wanted = rest;
    __syncthreads();
  }
  return found;
}

// One thread block for each block of elements.
template <typename U>
__global__ void pack_largest_kernel(const U* x, uint8_t* packed, Largest layout) {
  static_assert(kThreads == 256, "select has a thread for every bin");
  const int64_t first = blockIdx.x * Largest::kBlock;
  const int n = static_cast<int>(min(static_cast<int64_t>(Largest::kBlock), layout.numel - first));
  U* values = reinterpret_cast<U*>(packed) + layout.kept(first);
  uint8_t* index = packed + layout.index_at(first);
  x += first;
  int ties = static_cast<int>(layout.kept(n));
  const U threshold = select(x, n, ties);
  int made = 0, equals = 0;
  for (int start = 0; start < n; start += kThreads) {
    const int i = start + threadIdx.x;
    const U key = i < n ? magnitude(x[i]) : U(0);
    int total;
    const bool equal = i < n && key == threshold;
    const int rank = equals + rank_in_block(equal, total);
    equals += total;
    const bool keep = i < n && (key > threshold || (equal && rank < ties));
    const int place = made + rank_in_block(keep, total);
    made += total;
    if (keep) {
      values[place] = x[i];
    }
    if (layout.places()) {
      if (keep) {
        reinterpret_cast<uint16_t*>(index)[place] = static_cast<uint16_t>(i);
      }
    } else {
      const unsigned int bits = __ballot_sync(0xffffffffu, keep);
      const int lane = threadIdx.x % 32, word = i - lane;
      if (lane < 4 && word + 8 * lane < n) {
        index[word / 8 + lane] = static_cast<uint8_t>(bits >> (8 * lane));
      }
    }
  }
}

// From a block on, as many as there are thread blocks. Whatever the index says, nothing outside the block is touched.
template <typename U>
__global__ void unpack_largest_kernel(const uint8_t* packed, U* out, Largest layout, int64_t from_block) {
  const int64_t first = (from_block + blockIdx.x) * Largest::kBlock;
  const int n = static_cast<int>(min(static_cast<int64_t>(Largest::kBlock), layout.numel - first));
  const int kept = static_cast<int>(layout.kept(n));
  const U* values = reinterpret_cast<const U*>(packed) + layout.kept(first);
  const uint8_t* index = packed + layout.index_at(first);
  out += blockIdx.x * Largest::kBlock;
  if (layout.places()) {
    for (int i = threadIdx.x; i < n; i += kThreads) {
      out[i] = U(0);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kept; i += kThreads) {
      const int place = reinterpret_cast<const uint16_t*>(index)[i];
      if (place < n) {
        out[place] = values[i];
      }
    }
    return;
  }
  int used = 0;
  for (int start = 0; start < n; start += kThreads) {
    const int i = start + threadIdx.x;
    const bool keep = i < n && ((index[i / 8] >> (i % 8)) & 1);
    int total;
    const int place = used + rank_in_block(keep, total);
    used += total;
    if (i < n) {
      out[i] = keep && place < kept ? values[place] : U(0);
    }
  }
}

at::Tensor pack_largest(const at::Tensor& x, int64_t keep) {
  check_floating(x, "pack_largest", "x");
  const c10::cuda::CUDAGuard guard(x.device());
  const Largest layout = largest(x, keep, x.scalar_type(), "pack_largest");
  const at::Tensor dense = in_packing_order(x);
  at::Tensor out = empty_cache(layout.bytes(), x);
  if (x.numel() > 0) {
    with_bits(layout.itemsize, [&](auto zero) {
      using U = decltype(zero);
      pack_largest_kernel<U>
          <<<static_cast<unsigned int>(layout.blocks()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              static_cast<const U*>(dense.const_data_ptr()), out.mutable_data_ptr<uint8_t>(), layout);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  return out;
}

// Blocks first to last, laid out from the start of `out` on.
void unpack_blocks(
    const at::Tensor& packed, const Largest& layout, int64_t first, int64_t last, const at::Tensor& out) {
  with_bits(layout.itemsize, [&](auto zero) {
    using U = decltype(zero);
    unpack_largest_kernel<U>
        <<<static_cast<unsigned int>(last - first), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            packed.const_data_ptr<uint8_t>(), static_cast<U*>(out.mutable_data_ptr()), layout, first);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

at::Tensor unpack_largest(
    const at::Tensor& packed, int64_t keep, at::IntArrayRef size, at::ScalarType dtype, at::IntArrayRef stride) {
  const c10::cuda::CUDAGuard guard(packed.device());
  at::Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(dtype), "unpack_largest");
  check_floating(out, "unpack_largest", "the result");
  const Largest layout = largest(out, keep, dtype, "unpack_largest");
  check_cache(packed, layout.bytes(), "unpack_largest");
  if (out.numel() > 0) {
    unpack_blocks(packed, layout, 0, layout.blocks(), out);
  }
  return out;
}

// About so many elements of x are dense at a time.
constexpr int64_t kChunk = int64_t(1) << 22;

// A GPU multiplies dense matrices faster than it gathers: x is made dense and multiplied some rows at a time. Where a
// row and a block of elements end together only after many rows, all are done at once.
at::Tensor mm_largest(
    const at::Tensor& grad, const at::Tensor& packed, int64_t keep, int64_t columns, bool transposed) {
  const Largest layout = check_mm_largest(grad, packed, keep, columns);
  const c10::cuda::CUDAGuard guard(grad.device());
  const int64_t outs = grad.size(1);
  at::Tensor out = at::empty({transposed ? columns : outs, transposed ? outs : columns}, grad.options()).zero_();
  if (layout.numel == 0 || outs == 0) {
    return out;
  }
  const int64_t together = std::lcm(columns, Largest::kBlock);
  const int64_t chunk = std::max<int64_t>(1, kChunk / together) * together;
  const at::Tensor dense = at::empty({std::min(chunk, layout.numel)}, grad.options());
  for (int64_t first = 0; first < layout.numel; first += chunk) {
    const int64_t last = std::min(first + chunk, layout.numel);
    unpack_blocks(packed, layout, first / Largest::kBlock, (last + Largest::kBlock - 1) / Largest::kBlock, dense);
    const at::Tensor x = dense.narrow(0, 0, last - first).view({-1, columns});
    const at::Tensor part = grad.narrow(0, first / columns, (last - first) / columns);
    transposed ? out.addmm_(x.t(), part) : out.addmm_(part.t(), x);
  }
  return out;
}

// One warp for each block of kScaled elements. A NaN is not found by a maximum, so whether all are finite goes apart.
template <typename T>
__global__ void to_int8_kernel(const T* x, float* scales, int8_t* out, int64_t numel) {
  using O = op_type<T>;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  const int lane = threadIdx.x % 32;
  for (int64_t b = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; b * kScaled < numel; b += warps) {
    const int64_t end = min(numel, (b + 1) * kScaled);
    O top = 0;
    bool finite = true;
    for (int64_t i = b * kScaled + lane; i < end; i += 32) {
      const O value = static_cast<O>(x[i]);
      finite = finite && value - value == O(0);
      top = max(top, value < O(0) ? -value : value);
    }
    for (int step = 16; step > 0; step /= 2) {
      top = max(top, __shfl_xor_sync(0xffffffffu, top, step));
    }
    const bool all = __all_sync(0xffffffffu, finite);
    const float scale = all ? int8_scale(top) : __int_as_float(0x7fc00000);
    if (lane == 0) {
      scales[b] = scale;
    }
    for (int64_t i = b * kScaled + lane; i < end; i += 32) {
      out[i] = int8_of(static_cast<O>(x[i]), scale);
    }
  }
}

template <typename T>
__global__ void from_int8_kernel(const float* scales, const int8_t* in, T* out, int64_t numel) {
  MONET_GRID_STRIDE(i, numel) {
    out[i] = static_cast<T>(static_cast<op_type<T>>(in[i]) * static_cast<op_type<T>>(scales[i / kScaled]));
  }
}

at::Tensor pack_int8(const at::Tensor& x) {
  check_floating(x, "pack_int8", "x");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dense = in_packing_order(x);
  at::Tensor out = empty_cache(int8_bytes(x.numel()), x);
  if (x.numel() > 0) {
    float* scales = reinterpret_cast<float*>(out.mutable_data_ptr<uint8_t>());
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack_int8", [&] {
      to_int8_kernel<scalar_t>
          <<<blocks_for(scale_count(x.numel()) * 32), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              dense.const_data_ptr<scalar_t>(), scales, reinterpret_cast<int8_t*>(scales + scale_count(x.numel())),
              x.numel());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  return out;
}

at::Tensor unpack_int8(
    const at::Tensor& packed, at::IntArrayRef size, at::ScalarType dtype, at::IntArrayRef stride) {
  const c10::cuda::CUDAGuard guard(packed.device());
  at::Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(dtype), "unpack_int8");
  check_floating(out, "unpack_int8", "the result");
  check_cache(packed, int8_bytes(out.numel()), "unpack_int8");
  if (out.numel() > 0) {
    const float* scales = reinterpret_cast<const float*>(packed.const_data_ptr<uint8_t>());
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "unpack_int8", [&] {
      from_int8_kernel<scalar_t>
          <<<blocks_for(out.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              scales, reinterpret_cast<const int8_t*>(scales + scale_count(out.numel())),
              out.mutable_data_ptr<scalar_t>(), out.numel());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CUDA, m) {
  m.impl("pack_largest", &pack_largest);
  m.impl("unpack_largest", &unpack_largest);
  m.impl("mm_largest", &mm_largest);
  m.impl("pack_int8", &pack_int8);
  m.impl("unpack_int8", &unpack_int8);
}

}  // namespace monet_like
