// Lossy caches on the GPU: a tensor's largest elements, or all of them in 8 bits.

#include <numeric>

#include "../caches.h"
#include "common.cuh"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

namespace monet_like {
namespace {

// ---- the largest elements ----

// One block of threads processes one block of elements. Each thread holds kUnits times kUnit adjacent elements in registers,
// so that they are loaded once; unit k of thread t is unit k * kSelectors + t of the block.
constexpr int kSelectors = 512, kSelectorWarps = kSelectors / 32, kUnit = 8;
constexpr int kUnits = static_cast<int>(Largest::kBlock) / kUnit / kSelectors;

template <typename U>
__device__ __forceinline__ U magnitude(U bits) {
  return bits & static_cast<U>(static_cast<U>(~U(0)) >> 1);
}

__device__ __forceinline__ int unit_start(int k) {
  return (k * kSelectors + static_cast<int>(threadIdx.x)) * kUnit;
}

// The sum of `value` over the lanes up to this one.
__device__ __forceinline__ unsigned int sum_up_to(unsigned int value) {
  for (int step = 1; step < 32; step *= 2) {
    const unsigned int below = __shfl_up_sync(0xffffffffu, value, step);
    value += static_cast<int>(threadIdx.x % 32) >= step ? below : 0u;
  }
  return value;
}

// counts[k] becomes the sum over all units before unit k of this thread.
__device__ __forceinline__ void sum_before(unsigned int (&counts)[kUnits]) {
  __shared__ unsigned int totals[kUnits * kSelectorWarps];
  constexpr int kEach = kUnits * kSelectorWarps / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const unsigned int up_to = sum_up_to(counts[k]);
    if (lane == 31) {
      totals[k * kSelectorWarps + warp] = up_to;
    }
    counts[k] = up_to - counts[k];
  }
  __syncthreads();
  if (warp == 0) {
    unsigned int own[kEach], sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      own[e] = totals[lane * kEach + e];
      sum += own[e];
    }
    unsigned int before = sum_up_to(sum) - sum;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      totals[lane * kEach + e] = before;
      before += own[e];
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    counts[k] += totals[k * kSelectorWarps + warp];
  }
}

// The smallest magnitude among the `wanted` largest of the first n elements, found eight bits at a time. `wanted` becomes the
// number of kept elements with exactly that magnitude.
template <typename U>
__device__ U select(const Vector<U, kUnit> (&values)[kUnits], int n, int& wanted) {
  constexpr int kBins = 256, kEach = kBins / 32;
  __shared__ unsigned int bins[kBins];
  __shared__ int bin, rest;
  U found = 0, known = 0;  // the leading bits, and which bits these are
  for (int low = 8 * sizeof(U) - 8; low >= 0; low -= 8) {
    if (threadIdx.x < kBins) {
      bins[threadIdx.x] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        const U key = magnitude(values[k].at[j]);
        if (unit_start(k) + j < n && (key & known) == found) {
          atomicAdd(&bins[(key >> low) & 255], 1u);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // one warp: the largest bins are its first lane's
      const int largest = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
      unsigned int sum = 0;
      for (int e = 0; e < kEach; ++e) {
        sum += bins[largest - e];
      }
      int missing = wanted - static_cast<int>(sum_up_to(sum) - sum);
      if (missing > 0 && missing <= static_cast<int>(sum)) {
        int here = largest;
        for (; static_cast<int>(bins[here]) < missing; --here) {
          missing -= static_cast<int>(bins[here]);
        }
        bin = here;
        rest = missing;
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

template <typename U>
__global__ void __launch_bounds__(kSelectors) pack_largest_kernel(
    const U* __restrict__ x, uint8_t* __restrict__ packed, Largest layout) {
  const int64_t first = blockIdx.x * Largest::kBlock;
  const int n = static_cast<int>(min(static_cast<int64_t>(Largest::kBlock), layout.numel - first));
  U* kept = reinterpret_cast<U*>(packed) + layout.kept(first);
  uint8_t* index = packed + layout.index_at(first);
  const bool places = layout.places();
  x += first;
  Vector<U, kUnit> values[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int start = unit_start(k);
    if (start + kUnit <= n) {
      values[k] = load<kUnit>(x + start);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        values[k].at[j] = start + j < n ? x[start + j] : U(0);
      }
    }
  }
  int ties = static_cast<int>(layout.kept(n));
  const U threshold = select(values, n, ties);
  // Before each unit: elements above the threshold in the low half, elements equal to it in the high half.
  unsigned int counts[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    counts[k] = 0;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const U key = magnitude(values[k].at[j]);
      counts[k] += unit_start(k) + j >= n ? 0u : key > threshold ? 1u : key == threshold ? 1u << 16 : 0u;
    }
  }
  sum_before(counts);
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int start = unit_start(k);
    int above = static_cast<int>(counts[k] & 0xffffu), equal = static_cast<int>(counts[k] >> 16);
    unsigned int bits = 0;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const U key = magnitude(values[k].at[j]);
      const bool larger = start + j < n && key > threshold, same = start + j < n && key == threshold;
      if (larger || (same && equal < ties)) {
        const int place = above + min(equal, ties);
        kept[place] = values[k].at[j];
        if (places) {
          reinterpret_cast<uint16_t*>(index)[place] = static_cast<uint16_t>(start + j);
        }
        bits |= 1u << j;
      }
      above += larger ? 1 : 0;
      equal += same ? 1 : 0;
    }
    if (!places && start < n) {
      index[start / kUnit] = static_cast<uint8_t>(bits);
    }
  }
}

// Unpacks as many blocks as there are thread blocks, from a given one on. A damaged index leads to no access outside a block.
template <typename U>
__global__ void __launch_bounds__(kSelectors) unpack_largest_kernel(
    const uint8_t* __restrict__ packed, U* __restrict__ out, Largest layout, int64_t from_block) {
  const int64_t first = (from_block + blockIdx.x) * Largest::kBlock;
  const int n = static_cast<int>(min(static_cast<int64_t>(Largest::kBlock), layout.numel - first));
  const int kept = static_cast<int>(layout.kept(n));
  const U* values = reinterpret_cast<const U*>(packed) + layout.kept(first);
  const uint8_t* index = packed + layout.index_at(first);
  const bool places = layout.places();
  out += blockIdx.x * Largest::kBlock;
  unsigned int bits[kUnits], before[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int start = unit_start(k);
    bits[k] = places || start >= n ? 0u : index[start / kUnit];
    bits[k] &= start + kUnit <= n ? 255u : (1u << max(n - start, 0)) - 1;
    before[k] = static_cast<unsigned int>(__popc(bits[k]));
  }
  if (!places) {
    sum_before(before);
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int start = unit_start(k);
    int place = static_cast<int>(before[k]);
    Vector<U, kUnit> made;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const bool keep = (bits[k] >> j & 1) != 0 && place < kept;
      made.at[j] = keep ? values[place] : U(0);
      place += keep ? 1 : 0;
    }
    if (start + kUnit <= n) {
      store(out + start, made);
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        if (start + j < n) {
          out[start + j] = made.at[j];
        }
      }
    }
  }
  if (places) {
    __syncthreads();
    for (int i = threadIdx.x; i < kept; i += kSelectors) {
      const int place = reinterpret_cast<const uint16_t*>(index)[i];
      if (place < n) {
        out[place] = values[i];
      }
    }
  }
}

Tensor pack_largest(const Tensor& x, int64_t keep) {
  check_floating(x, "pack_largest", "x");
  const DeviceGuard guard(x.device());
  const Largest layout = largest(x, keep, x.scalar_type(), "pack_largest");
  const Tensor dense = aligned(in_packing_order(x));
  Tensor out = empty_cache(layout.bytes(), x);
  if (x.numel() > 0) {
    with_bits(layout.itemsize, [&](auto zero) {
      using U = decltype(zero);
      pack_largest_kernel<U>
          <<<static_cast<unsigned int>(layout.blocks()), kSelectors, 0, current_stream()>>>(
              static_cast<const U*>(dense.const_data_ptr()), out.mutable_data_ptr<uint8_t>(), layout);
      MONET_CUDA(cudaGetLastError());
    });
  }
  return out;
}

// Blocks first to last, laid out from the start of `out` on.
void unpack_blocks(
    const Tensor& packed, const Largest& layout, int64_t first, int64_t last, const Tensor& out) {
  with_bits(layout.itemsize, [&](auto zero) {
    using U = decltype(zero);
    unpack_largest_kernel<U>
        <<<static_cast<unsigned int>(last - first), kSelectors, 0, current_stream()>>>(
            packed.const_data_ptr<uint8_t>(), static_cast<U*>(out.mutable_data_ptr()), layout, first);
    MONET_CUDA(cudaGetLastError());
  });
}

Tensor unpack_largest(
    const Tensor& packed, int64_t keep, IntArrayRef size, ScalarType dtype, IntArrayRef stride) {
  const DeviceGuard guard(packed.device());
  Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(dtype), "unpack_largest");
  check_floating(out, "unpack_largest", "the result");
  const Largest layout = largest(out, keep, dtype, "unpack_largest");
  check_cache(packed, layout.bytes(), layout.itemsize, "unpack_largest");
  if (out.numel() > 0) {
    unpack_blocks(packed, layout, 0, layout.blocks(), out);
  }
  return out;
}

// The approximate number of elements of x that are dense at a time.
constexpr int64_t kChunk = int64_t(1) << 22;

// A GPU multiplies dense matrices faster than it gathers: x is made dense and multiplied some rows at a time. Where a
// row and a block of elements end together only after many rows, all are done at once.
Tensor mm_largest(
    const Tensor& grad, const Tensor& packed, int64_t keep, int64_t columns, bool transposed) {
  const Largest layout = check_mm_largest(grad, packed, keep, columns);
  const DeviceGuard guard(grad.device());
  const int64_t outs = grad.size(1);
  Tensor out = empty({transposed ? columns : outs, transposed ? outs : columns}, grad.options()).zero_();
  if (layout.numel == 0 || outs == 0) {
    return out;
  }
  const int64_t together = std::lcm(columns, Largest::kBlock);
  const int64_t chunk = std::max<int64_t>(1, kChunk / together) * together;
  const Tensor dense = empty({std::min(chunk, layout.numel)}, grad.options());
  for (int64_t first = 0; first < layout.numel; first += chunk) {
    const int64_t last = std::min(first + chunk, layout.numel);
    unpack_blocks(packed, layout, first / Largest::kBlock, (last + Largest::kBlock - 1) / Largest::kBlock, dense);
    const Tensor x = dense.view(std::array{(last - first) / columns, columns});
    const Tensor part = grad.narrow(0, first / columns, (last - first) / columns);
    MONET_TORCH(
        aoti_torch_cuda_addmm_out, out.get(), out.get(), (transposed ? x : part).t().get(),
        (transposed ? part : x).get(), 1.0, 1.0);
  }
  return out;
}

// ---- eight bits ----

// A thread's part of a block of kScaled elements, of which a warp has one: a vector, or several that lie 32 vectors apart,
// so that the threads of a warp read and write next to each other.
template <typename T>
struct Eighths {
  static constexpr int kCount = static_cast<int>(kScaled) / 32, kVectors = kCount / kVector<T>;
  Words words[kVectors];

  // Of element j, where it lies in the block.
  static __device__ __forceinline__ int place(int j) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return (j / kVector<T> * 32 + lane) * kVector<T> + j % kVector<T>;
  }

  __device__ __forceinline__ op_type<T> at(int j) const {
    return widened<T>(words[j / kVector<T>], j % kVector<T>);
  }
};

// The magnitude of the largest element of the block that a warp holds. Magnitudes have the order of their bits, in which a
// NaN is larger than an infinity.
template <typename T>
__device__ __forceinline__ op_type<T> warp_top(const Eighths<T>& values) {
  using O = op_type<T>;
  if constexpr (sizeof(T) == 2) {
    uint32_t top = 0;  // of elements at even places, and of those at odd ones
#pragma unroll
    for (int j = 0; j < Eighths<T>::kCount / 2; ++j) {
      top = larger_halves(top, values.words[j / 4].at[j % 4] & 0x7fff7fffu);
    }
    const Words bits = {{warp_max(max(top >> 16, top & 0xffffu)), 0, 0, 0}};
    return widened<T>(bits, 0);
  } else {
    using U = std::conditional_t<sizeof(T) == 4, uint32_t, unsigned long long>;
    U top = 0;
#pragma unroll
    for (int j = 0; j < Eighths<T>::kCount; ++j) {
      const O value = std::abs(values.at(j));
      U bits;
      __builtin_memcpy(&bits, &value, sizeof(bits));
      top = max(top, bits);
    }
    top = warp_max(top);
    O value;
    __builtin_memcpy(&value, &top, sizeof(value));
    return value;
  }
}

// int8_of for a float: its result is the lowest byte. The sum's lowest bits are the rounded units, as its own unit is one.
__device__ __forceinline__ unsigned int byte_of(float x, float units_in_one) {
  const float least = x != 0.0f ? 1.0f : 0.0f;
  const float units = copysignf(max(std::abs(x * units_in_one), least), x);
  return __float_as_uint(units + 12582912.0f);  // 1.5 * 2^23
}

__device__ __forceinline__ unsigned int byte_of(double x, float units_in_one) {
  return static_cast<unsigned int>(int8_of(x, units_in_one));
}

// The bytes lie behind the scales and so start at a multiple of four only.
template <typename T>
__global__ void to_int8_kernel(const T* __restrict__ x, float* __restrict__ scales, int8_t* __restrict__ out, int count) {
  using Part = Eighths<T>;
  constexpr int kBlock = static_cast<int>(kScaled);
  const int lane = static_cast<int>(threadIdx.x) % 32, blocks = count / kBlock;
  constexpr int kWarps = kThreads / 32;
  take_vectors<kUnroll>(
      blocks, static_cast<int>(blockIdx.x) * kWarps * kUnroll + static_cast<int>(threadIdx.x) / 32, kWarps,
      [&](int b) {
        Part part;
#pragma unroll
        for (int k = 0; k < Part::kVectors; ++k) {
          part.words[k] = load_words(x + b * kBlock + Part::place(k * kVector<T>));
        }
        return part;
      },
      [&](int b, const Part& part) {
        const float scale = int8_scale(warp_top(part)), units = units_in_one(scale);
        if (lane == 0) {
          scales[b] = scale;
        }
        const unsigned int known = scale == scale ? 255u : 0u;
        constexpr int kTogether = std::min(kVector<T>, 4);
#pragma unroll
        for (int j = 0; j < Part::kCount; j += kTogether) {
          Vector<uint8_t, kTogether> made;
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            made.at[i] = static_cast<uint8_t>(byte_of(part.at(j + i), units) & known);
          }
          store(reinterpret_cast<uint8_t*>(out) + b * kBlock + Part::place(j), made);
        }
      });
  if (grid_thread() < 32 && blocks * kBlock < count) {
    const int start = blocks * kBlock;
    Vector<T> values[Part::kVectors];
#pragma unroll
    for (int j = 0; j < Part::kCount; ++j) {
      const int i = start + Part::place(j);
      values[j / kVector<T>].at[j % kVector<T>] = i < count ? x[i] : T(0);
    }
    Part part;
    __builtin_memcpy(&part, values, sizeof(part));
    const float scale = int8_scale(warp_top(part)), units = units_in_one(scale);
    if (lane == 0) {
      scales[blocks] = scale;
    }
#pragma unroll
    for (int j = 0; j < Part::kCount; ++j) {
      const int i = start + Part::place(j);
      if (i < count) {
        out[i] = int8_of(part.at(j), units);
      }
    }
  }
}

// The bytes of one vector of results, together.
template <typename T>
using Packed = std::conditional_t<kVector<T> == 2, Vector<uint16_t, 1>, Vector<uint32_t, (kVector<T> + 3) / 4>>;

template <typename T>
__global__ void from_int8_kernel(
    const float* __restrict__ scales, const int8_t* __restrict__ in, T* __restrict__ out, int count) {
  using O = op_type<T>;
  constexpr int N = kVector<T>;
  using Word = std::remove_reference_t<decltype(Packed<T>{}.at[0])>;
  constexpr int kWords = sizeof(Packed<T>) / sizeof(Word);
  struct Scaled {
    Packed<T> bytes;
    float scale;
  };
  const int vectors = count / N;
  take_of_grid(
      vectors,
      [&](int v) {
        Scaled scaled;
#pragma unroll
        for (int k = 0; k < kWords; ++k) {  // the bytes start at a multiple of four only
          scaled.bytes.at[k] = reinterpret_cast<const Word*>(in)[v * kWords + k];
        }
        scaled.scale = scales[static_cast<unsigned int>(v) / (static_cast<unsigned int>(kScaled) / N)];
        return scaled;
      },
      [&](int v, const Scaled& scaled) {
        Vector<T> made;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          constexpr int kEach = sizeof(Word);
          const auto byte = static_cast<int8_t>(scaled.bytes.at[j / kEach] >> (j % kEach * 8));
          made.at[j] = static_cast<T>(static_cast<O>(byte) * static_cast<O>(scaled.scale));
        }
        store(out + v * N, made);
      });
  const int i = vectors * N + grid_thread();
  if (i < count) {
    out[i] = static_cast<T>(static_cast<O>(in[i]) * static_cast<O>(scales[i / static_cast<int>(kScaled)]));
  }
}

Tensor pack_int8(const Tensor& x) {
  check_floating(x, "pack_int8", "x");
  const DeviceGuard guard(x.device());
  const Tensor in = aligned(in_packing_order(x));
  Tensor out = empty_cache(int8_bytes(x.numel()), x);
  float* scales = reinterpret_cast<float*>(out.mutable_data_ptr<uint8_t>());
  int8_t* bytes = reinterpret_cast<int8_t*>(scales + scale_count(x.numel()));
  MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
    for_parts(x.numel(), [&](int64_t first, int count) {
      to_int8_kernel<scalar_t>
          <<<grid_of_vectors(count / (kScaled / 32)), kThreads, 0,
             current_stream()>>>(
              in.const_data_ptr<scalar_t>() + first, scales + first / kScaled, bytes + first, count);
      MONET_CUDA(cudaGetLastError());
    });
  });
  return out;
}

Tensor unpack_int8(
    const Tensor& packed, IntArrayRef size, ScalarType dtype, IntArrayRef stride) {
  const DeviceGuard guard(packed.device());
  Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(dtype), "unpack_int8");
  check_floating(out, "unpack_int8", "the result");
  check_cache(packed, int8_bytes(out.numel()), sizeof(float), "unpack_int8");
  const float* scales = reinterpret_cast<const float*>(packed.const_data_ptr<uint8_t>());
  const int8_t* bytes = reinterpret_cast<const int8_t*>(scales + scale_count(out.numel()));
  MONET_DISPATCH_FLOATS(dtype, [&] {
    for_parts(out.numel(), [&](int64_t first, int count) {
      from_int8_kernel<scalar_t>
          <<<grid_of_vectors(count / kVector<scalar_t>), kThreads, 0,
             current_stream()>>>(
              scales + first / kScaled, bytes + first, out.mutable_data_ptr<scalar_t>() + first, count);
      MONET_CUDA(cudaGetLastError());
    });
  });
  return out;
}

}  // namespace

MONET_KERNELS(CUDA, m) {
  m.add<&pack_largest>("pack_largest");
  m.add<&unpack_largest>("unpack_largest");
  m.add<&mm_largest>("mm_largest");
  m.add<&pack_int8>("pack_int8");
  m.add<&unpack_int8>("unpack_int8");
}

}  // namespace monet_like
