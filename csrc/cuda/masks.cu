// One-bit masks on the GPU: ReLU and hardtanh gradients, dropout masks.

#include "common.cuh"

namespace monet_like {
namespace {

template <typename T>
struct Positive {
  __device__ bool operator()(T x) const { return passes_threshold(static_cast<op_type<T>>(x)); }
};

// ATen's CUDA kernel lets the gradient of a NaN through.
template <typename T>
struct InRange {
  op_type<T> lo, hi;
  __device__ bool operator()(T x) const {
    const auto value = static_cast<op_type<T>>(x);
    return !(value <= lo || value >= hi);
  }
};

// Elements whose bits make one byte: a thread has kUnroll times as many at a time, 32.
constexpr int kPerByte = 8;

template <typename T, typename P>
__device__ __forceinline__ uint8_t pack_byte(const T* values, int count, const P& passes) {
  unsigned int bits = 0;
#pragma unroll
  for (int j = 0; j < kPerByte; ++j) {
    bits |= j < count && passes(values[j]) ? 1u << j : 0u;
  }
  return static_cast<uint8_t>(bits);
}

// The output ends at the last byte in use.
template <typename T, typename P>
__global__ void pack_kernel(const T* __restrict__ x, uint8_t* __restrict__ out, int count, P passes) {
  const int bytes = count / kPerByte;
  take_of_grid(
      bytes, [&](int v) { return load<kPerByte>(x + v * kPerByte); },
      [&](int v, const Vector<T, kPerByte>& values) { out[v] = pack_byte(values.at, kPerByte, passes); });
  if (grid_thread() == 0 && bytes * kPerByte < count) {
    out[bytes] = pack_byte(x + bytes * kPerByte, count - bytes * kPerByte, passes);
  }
}

// ---- bytes: four of them in a word of 32 bits ----

constexpr int kBytes = 16;  // a vector of them

// Bit j of the result: whether byte j is not zero.
__device__ __forceinline__ unsigned int nonzero_bytes(unsigned int bytes) {
  const unsigned int top = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  return ((top >> 7) * 0x10204080u) >> 28;  // the products meet in the top four bits, and nowhere carry
}

// Byte j of the result: bit j, for the lowest four.
__device__ __forceinline__ unsigned int spread_bits(unsigned int bits) {
  return ((bits & 15u) * 0x00204081u) & 0x01010101u;
}

__global__ void pack_bool_kernel(const uint8_t* __restrict__ mask, uint8_t* __restrict__ out, int count) {
  const int vectors = count / kBytes;
  take_of_grid(
      vectors,
      [&](int v) { return load<kBytes / 4>(reinterpret_cast<const uint32_t*>(mask) + v * (kBytes / 4)); },
      [&](int v, const Vector<uint32_t>& words) {
        const unsigned int bits = nonzero_bytes(words.at[0]) | nonzero_bytes(words.at[1]) << 4 |
            nonzero_bytes(words.at[2]) << 8 | nonzero_bytes(words.at[3]) << 12;
        reinterpret_cast<uint16_t*>(out)[v] = static_cast<uint16_t>(bits);
      });
  const int first = vectors * kBytes + grid_thread() * kPerByte;
  if (first < count && grid_thread() < kBytes / kPerByte) {
    out[first / kPerByte] = pack_byte(mask + first, count - first, [](uint8_t x) { return x != 0; });
  }
}

__global__ void unpack_kernel(const uint8_t* __restrict__ mask, uint8_t* __restrict__ out, int count) {
  const int vectors = count / kBytes;
  take_of_grid(
      vectors,
      [&](int v) { return static_cast<unsigned int>(reinterpret_cast<const uint16_t*>(mask)[v]); },
      [&](int v, unsigned int bits) {
        const Vector<uint32_t> words{
            {spread_bits(bits), spread_bits(bits >> 4), spread_bits(bits >> 8), spread_bits(bits >> 12)}};
        store(reinterpret_cast<uint32_t*>(out) + v * (kBytes / 4), words);
      });
  const int i = vectors * kBytes + grid_thread();
  if (i < count) {
    out[i] = (mask[i / kPerByte] >> (i % kPerByte)) & 1;
  }
}

// ---- elements and their bits ----

// out[i] = change(in[i], bit i). `in` may be `out`: a thread reads its elements before it writes them.
//
// Neighbouring threads have neighbouring vectors, so that a warp writes whole sectors of memory. Two vectors of 32-bit
// elements, and four of 64-bit elements, share a byte of the mask.
template <typename T, typename F>
__device__ __forceinline__ void change_by_bit(const T* in, const uint8_t* __restrict__ mask, T* out, int count, F change) {
  constexpr int N = kVector<T>;
  constexpr unsigned int kSharing = kPerByte / N;
  struct Masked {
    Words values;
    unsigned int byte;
  };
  const int vectors = count / N;
  take_of_grid(
      vectors,
      [&](int v) { return Masked{load_words(in + v * N), mask[static_cast<unsigned int>(v) / kSharing]}; },
      [&](int v, const Masked& masked) {
        const unsigned int bits = masked.byte >> (static_cast<unsigned int>(v) % kSharing * N);
        Vector<T> values = elements<T>(masked.values);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          values.at[j] = change(values.at[j], (bits >> j & 1) != 0);
        }
        store(out + v * N, values);
      });
  const int i = vectors * N + grid_thread();
  if (i < count) {
    out[i] = change(in[i], (mask[i / kPerByte] >> (i % kPerByte) & 1) != 0);
  }
}

template <typename U>
__global__ void keep_where_kernel(const U* in, const uint8_t* __restrict__ mask, U* out, int count) {
  change_by_bit(in, mask, out, count, [](U x, bool keep) { return keep ? x : U(0); });
}

template <typename T>
__global__ void scale_where_kernel(
    const T* in, const uint8_t* __restrict__ mask, T* out, int count, op_type<T> scale, op_type<T> otherwise) {
  // Multiply rather than select: inf * 0 is NaN, as in (x * mask) * scale.
  change_by_bit(in, mask, out, count, [=](T x, bool keep) {
    return static_cast<T>(static_cast<op_type<T>>(x) * (keep ? scale : otherwise));
  });
}

// ---- half bytes ----

// Of four bytes the low halves, next to each other.
__device__ __forceinline__ unsigned int join_word(unsigned int bytes) {
  const unsigned int pairs = (bytes & 0x000f000fu) | (bytes >> 4 & 0x00f000f0u);
  return (pairs | pairs >> 8) & 0xffffu;
}

__device__ __forceinline__ unsigned int split_word(unsigned int halves) {
  const unsigned int pairs = (halves & 0xffu) | (halves & 0xff00u) << 8;
  return (pairs & 0x000f000fu) | (pairs & 0x00f000f0u) << 4;
}

// The last byte may have half a byte only.
__global__ void join_nibbles_kernel(const uint8_t* __restrict__ in, uint8_t* __restrict__ out, int count) {
  const int vectors = count / kBytes;
  take_of_grid(
      vectors,
      [&](int v) { return load<kBytes / 4>(reinterpret_cast<const uint32_t*>(in) + v * (kBytes / 4)); },
      [&](int v, const Vector<uint32_t>& words) {
        const Vector<uint32_t, 2> joined{
            {join_word(words.at[0]) | join_word(words.at[1]) << 16,
             join_word(words.at[2]) | join_word(words.at[3]) << 16}};
        store(reinterpret_cast<uint32_t*>(out) + v * 2, joined);
      });
  const int i = vectors * kBytes + 2 * grid_thread();
  if (i < count) {
    const unsigned int high = i + 1 < count ? in[i + 1] : 0u;
    out[i / 2] = static_cast<uint8_t>((in[i] & 15u) | high << 4);
  }
}

__global__ void split_nibbles_kernel(const uint8_t* __restrict__ in, uint8_t* __restrict__ out, int count) {
  const int vectors = count / kBytes;
  take_of_grid(
      vectors,
      [&](int v) { return load<2>(reinterpret_cast<const uint32_t*>(in) + v * 2); },
      [&](int v, const Vector<uint32_t, 2>& joined) {
        const Vector<uint32_t> words{
            {split_word(joined.at[0]), split_word(joined.at[0] >> 16), split_word(joined.at[1]),
             split_word(joined.at[1] >> 16)}};
        store(reinterpret_cast<uint32_t*>(out) + v * (kBytes / 4), words);
      });
  const int i = vectors * kBytes + grid_thread();
  if (i < count) {
    out[i] = (in[i / 2] >> (i % 2 * 4)) & 15;
  }
}

// ---- launches ----

Tensor empty_mask(const Tensor& x) {
  return empty({packed_bytes(x.numel())}, x.options().dtype(kByte));
}

template <typename T, typename P>
Tensor pack_with(const Tensor& x, P passes) {
  const Tensor in = aligned(in_packing_order(x));
  Tensor out = empty_mask(x);
  for_parts(x.numel(), [&](int64_t first, int count) {
    pack_kernel<T, P>
        <<<grid_of_vectors(count / kPerByte), kThreads, 0, current_stream()>>>(
            in.const_data_ptr<T>() + first, out.mutable_data_ptr<uint8_t>() + first / kPerByte, count, passes);
    MONET_CUDA(cudaGetLastError());
  });
  return out;
}

Tensor pack_sign(const Tensor& x) {
  check_floating(x, "pack_sign", "x");
  const DeviceGuard guard(x.device());
  return MONET_DISPATCH_FLOATS(x.scalar_type(), [&] { return pack_with<scalar_t>(x, Positive<scalar_t>{}); });
}

Tensor pack_range(const Tensor& x, double lo, double hi) {
  check_floating(x, "pack_range", "x");
  const DeviceGuard guard(x.device());
  return MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
    using O = op_type<scalar_t>;
    return pack_with<scalar_t>(x, InRange<scalar_t>{static_cast<O>(lo), static_cast<O>(hi)});
  });
}

Tensor pack_bool(const Tensor& mask) {
  MONET_CHECK(
      mask.scalar_type() == kBool, "monet_like::pack_bool: mask must be bool, got ", mask.scalar_type());
  const DeviceGuard guard(mask.device());
  const Tensor in = aligned(in_packing_order(mask));
  Tensor out = empty_mask(mask);
  for_parts(mask.numel(), [&](int64_t first, int count) {
    pack_bool_kernel<<<
        grid_of_vectors(count / kBytes), kThreads, 0, current_stream()>>>(
        static_cast<const uint8_t*>(in.const_data_ptr()) + first, out.mutable_data_ptr<uint8_t>() + first / kPerByte, count);
    MONET_CUDA(cudaGetLastError());
  });
  return out;
}

template <typename U>
void keep_where_typed(const Tensor& in, const Tensor& mask, const Tensor& out) {
  for_parts(in.numel(), [&](int64_t first, int count) {
    keep_where_kernel<U>
        <<<grid_of_vectors(count / kVector<U>), kThreads, 0,
           current_stream()>>>(
            static_cast<const U*>(in.const_data_ptr()) + first, mask.const_data_ptr<uint8_t>() + first / kPerByte,
            static_cast<U*>(out.mutable_data_ptr()) + first, count);
    MONET_CUDA(cudaGetLastError());
  });
}

// Keeps or clears whole bit patterns, so a kept gradient is unchanged whatever it holds.
void keep_where_dense(const Tensor& in, const Tensor& mask, const Tensor& out) {
  switch (in.element_size()) {
    case 2:
      return keep_where_typed<uint16_t>(in, mask, out);
    case 4:
      return keep_where_typed<uint32_t>(in, mask, out);
    default:
      return keep_where_typed<uint64_t>(in, mask, out);
  }
}

// The tensor that receives the result for `in`. If `in` is a copy of x in another layout, it is overwritten.
Tensor output_for(const Tensor& in, const Tensor& x) {
  return in.is_same(x) ? empty_strided(in.sizes(), in.strides(), in.options()) : in;
}

Tensor keep_where(const Tensor& x, const Tensor& mask, IntArrayRef stride) {
  check_floating(x, "keep_where", "x");
  check_packed(mask, x.numel(), x, "keep_where");
  const DeviceGuard guard(x.device());
  const Tensor in = aligned(to_packing_order(x, stride, "keep_where"));
  const Tensor out = output_for(in, x);
  keep_where_dense(in, mask, out);
  return out;
}

Tensor& keep_where_(Tensor& x, const Tensor& mask, IntArrayRef stride) {
  check_floating(x, "keep_where_", "x");
  check_packed(mask, x.numel(), x, "keep_where_");
  const DeviceGuard guard(x.device());
  const Tensor in = aligned(to_packing_order(x, stride, "keep_where_"));
  keep_where_dense(in, mask, in);
  if (!in.is_same(x)) {
    x.copy_(in);
  }
  return x;
}

Tensor unpack_bool(const Tensor& packed, IntArrayRef size, IntArrayRef stride) {
  const DeviceGuard guard(packed.device());
  Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(kBool), "unpack_bool");
  check_packed(packed, out.numel(), out, "unpack_bool");
  const Tensor mask = aligned(packed);
  for_parts(out.numel(), [&](int64_t first, int count) {
    unpack_kernel<<<
        grid_of_vectors(count / kBytes), kThreads, 0, current_stream()>>>(
        mask.const_data_ptr<uint8_t>() + first / kPerByte, static_cast<uint8_t*>(out.mutable_data_ptr()) + first, count);
    MONET_CUDA(cudaGetLastError());
  });
  return out;
}

Tensor masked_scale(
    const Tensor& x, const Tensor& packed, double scale, IntArrayRef stride, double otherwise) {
  check_floating(x, "masked_scale", "x");
  check_packed(packed, x.numel(), x, "masked_scale");
  const DeviceGuard guard(x.device());
  const Tensor in = aligned(to_packing_order(x, stride, "masked_scale"));
  const Tensor out = output_for(in, x);
  MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
    using O = op_type<scalar_t>;
    for_parts(x.numel(), [&](int64_t first, int count) {
      scale_where_kernel<scalar_t>
          <<<grid_of_vectors(count / kVector<scalar_t>), kThreads, 0,
             current_stream()>>>(
              in.const_data_ptr<scalar_t>() + first, packed.const_data_ptr<uint8_t>() + first / kPerByte,
              out.mutable_data_ptr<scalar_t>() + first, count, static_cast<O>(scale), static_cast<O>(otherwise));
      MONET_CUDA(cudaGetLastError());
    });
  });
  return out;
}

Tensor pack_nibbles(const Tensor& x) {
  check_bytes(x, "pack_nibbles");
  const DeviceGuard guard(x.device());
  const Tensor in = aligned(in_packing_order(x));
  Tensor out = empty({(x.numel() + 1) / 2}, x.options());
  for_parts(x.numel(), [&](int64_t first, int count) {
    join_nibbles_kernel<<<
        grid_of_vectors(count / kBytes), kThreads, 0, current_stream()>>>(
        in.const_data_ptr<uint8_t>() + first, out.mutable_data_ptr<uint8_t>() + first / 2, count);
    MONET_CUDA(cudaGetLastError());
  });
  return out;
}

Tensor unpack_nibbles(const Tensor& packed, IntArrayRef size, IntArrayRef stride) {
  const DeviceGuard guard(packed.device());
  Tensor out = empty_in_packing_order(size, stride, packed.options(), "unpack_nibbles");
  check_nibbles(packed, out.numel());
  const Tensor in = aligned(packed);
  for_parts(out.numel(), [&](int64_t first, int count) {
    split_nibbles_kernel<<<
        grid_of_vectors(count / kBytes), kThreads, 0, current_stream()>>>(
        in.const_data_ptr<uint8_t>() + first / 2, out.mutable_data_ptr<uint8_t>() + first, count);
    MONET_CUDA(cudaGetLastError());
  });
  return out;
}

}  // namespace

MONET_KERNELS(CUDA, m) {
  m.add<&pack_sign>("pack_sign");
  m.add<&pack_range>("pack_range");
  m.add<&pack_bool>("pack_bool");
  m.add<&keep_where>("keep_where");
  m.add<&keep_where_>("keep_where_");
  m.add<&unpack_bool>("unpack_bool");
  m.add<&masked_scale>("masked_scale");
  m.add<&pack_nibbles>("pack_nibbles");
  m.add<&unpack_nibbles>("unpack_nibbles");
}

}  // namespace monet_like
