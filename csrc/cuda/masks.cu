// One-bit masks on the GPU: ReLU and hardtanh gradients, dropout masks.

#include <torch/library.h>

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

struct IsTrue {
  __device__ bool operator()(uint8_t x) const { return x != 0; }
};

// One warp makes 32 bits by a ballot; its first lane writes them. The output ends at the last byte in use.
template <typename T, typename P>
__global__ void pack_kernel(const T* x, uint8_t* out, int64_t numel, P predicate) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  for (int64_t word = warp; word * 32 < numel; word += warps) {
    const int64_t i = word * 32 + lane;
    const bool flag = i < numel && predicate(x[i]);
    const unsigned int bits = __ballot_sync(0xffffffffu, flag);
    if (word * 32 + 32 <= numel) {
      if (lane == 0) {
        reinterpret_cast<unsigned int*>(out)[word] = bits;
      }
    } else if (lane < (numel - word * 32 + 7) / 8) {
      out[word * 4 + lane] = static_cast<uint8_t>(bits >> (8 * lane));
    }
  }
}

__device__ __forceinline__ bool bit_at(const uint8_t* mask, int64_t i) {
  return (mask[i >> 3] >> (i & 7)) & 1;
}

template <typename U>
__global__ void keep_where_kernel(const U* in, const uint8_t* mask, U* out, int64_t numel) {
  MONET_GRID_STRIDE(i, numel) {
    out[i] = bit_at(mask, i) ? in[i] : U(0);
  }
}

__global__ void unpack_kernel(const uint8_t* mask, bool* out, int64_t numel) {
  MONET_GRID_STRIDE(i, numel) {
    out[i] = bit_at(mask, i);
  }
}

template <typename T>
__global__ void scale_where_kernel(
    const T* in, const uint8_t* mask, T* out, int64_t numel, op_type<T> scale, op_type<T> otherwise) {
  MONET_GRID_STRIDE(i, numel) {
    // Multiply rather than select: inf * 0 is NaN, as in (x * mask) * scale.
    out[i] = static_cast<T>(static_cast<op_type<T>>(in[i]) * (bit_at(mask, i) ? scale : otherwise));
  }
}

// One thread per byte; the last one may have half a byte only.
__global__ void join_nibbles_kernel(const uint8_t* in, uint8_t* out, int64_t numel) {
  MONET_GRID_STRIDE(b, (numel + 1) / 2) {
    const uint8_t high = 2 * b + 1 < numel ? in[2 * b + 1] : 0;
    out[b] = static_cast<uint8_t>((in[2 * b] & 15) | (high << 4));
  }
}

__global__ void split_nibbles_kernel(const uint8_t* in, uint8_t* out, int64_t numel) {
  MONET_GRID_STRIDE(i, numel) {
    out[i] = (in[i / 2] >> (i % 2 * 4)) & 15;
  }
}

template <typename T, typename P>
at::Tensor pack_with(const at::Tensor& dense, const T* x, P predicate) {
  const int64_t n = dense.numel();
  at::Tensor out = at::empty(
      {packed_bytes(n)}, dense.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
  if (n > 0) {
    pack_kernel<<<blocks_for(n), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x, out.mutable_data_ptr<uint8_t>(), n, predicate);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return out;
}

at::Tensor pack_sign(const at::Tensor& x) {
  check_floating(x, "pack_sign", "x");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dense = in_packing_order(x);
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack_sign", [&] {
    return pack_with(dense, dense.const_data_ptr<scalar_t>(), Positive<scalar_t>{});
  });
}

at::Tensor pack_range(const at::Tensor& x, double lo, double hi) {
  check_floating(x, "pack_range", "x");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dense = in_packing_order(x);
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack_range", [&] {
    using O = op_type<scalar_t>;
    return pack_with(
        dense, dense.const_data_ptr<scalar_t>(), InRange<scalar_t>{static_cast<O>(lo), static_cast<O>(hi)});
  });
}

at::Tensor pack_bool(const at::Tensor& mask) {
  TORCH_CHECK_TYPE(
      mask.scalar_type() == at::kBool, "monet_like::pack_bool: mask must be bool, got ", mask.scalar_type());
  const c10::cuda::CUDAGuard guard(mask.device());
  const at::Tensor dense = in_packing_order(mask);
  return pack_with(dense, static_cast<const uint8_t*>(dense.const_data_ptr()), IsTrue{});
}

template <typename U>
void keep_where_typed(const at::Tensor& in, const at::Tensor& mask, const at::Tensor& out) {
  keep_where_kernel<U><<<blocks_for(in.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      static_cast<const U*>(in.const_data_ptr()), mask.const_data_ptr<uint8_t>(),
      static_cast<U*>(out.mutable_data_ptr()), in.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Keeps or clears whole bit patterns, so a kept gradient is unchanged whatever it holds.
void keep_where_dense(const at::Tensor& in, const at::Tensor& mask, const at::Tensor& out) {
  if (in.numel() == 0) {
    return;
  }
  switch (in.element_size()) {
    case 2:
      return keep_where_typed<uint16_t>(in, mask, out);
    case 4:
      return keep_where_typed<uint32_t>(in, mask, out);
    default:
      return keep_where_typed<uint64_t>(in, mask, out);
  }
}

at::Tensor keep_where(const at::Tensor& x, const at::Tensor& mask, at::IntArrayRef stride) {
  check_floating(x, "keep_where", "x");
  check_packed(mask, x.numel(), x, "keep_where");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dense = to_packing_order(x, stride, "keep_where");
  // A copy made for the layout is ours to overwrite.
  const at::Tensor out = dense.is_same(x) ? at::empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  keep_where_dense(dense, mask, out);
  return out;
}

at::Tensor& keep_where_(at::Tensor& x, const at::Tensor& mask, at::IntArrayRef stride) {
  check_floating(x, "keep_where_", "x");
  check_packed(mask, x.numel(), x, "keep_where_");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dense = to_packing_order(x, stride, "keep_where_");
  keep_where_dense(dense, mask, dense);
  if (!dense.is_same(x)) {
    x.copy_(dense);
  }
  return x;
}

at::Tensor unpack_bool(const at::Tensor& packed, at::IntArrayRef size, at::IntArrayRef stride) {
  const c10::cuda::CUDAGuard guard(packed.device());
  at::Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(at::kBool), "unpack_bool");
  check_packed(packed, out.numel(), out, "unpack_bool");
  if (out.numel() > 0) {
    unpack_kernel<<<blocks_for(out.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr<bool>(), out.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return out;
}

at::Tensor masked_scale(
    const at::Tensor& x, const at::Tensor& packed, double scale, at::IntArrayRef stride, double otherwise) {
  check_floating(x, "masked_scale", "x");
  check_packed(packed, x.numel(), x, "masked_scale");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dense = to_packing_order(x, stride, "masked_scale");
  const at::Tensor out = dense.is_same(x) ? at::empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  if (x.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "masked_scale", [&] {
      scale_where_kernel<scalar_t><<<blocks_for(x.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          dense.const_data_ptr<scalar_t>(), packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr<scalar_t>(),
          x.numel(), static_cast<op_type<scalar_t>>(scale), static_cast<op_type<scalar_t>>(otherwise));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
  return out;
}

at::Tensor pack_nibbles(const at::Tensor& x) {
  check_bytes(x, "pack_nibbles");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor dense = in_packing_order(x);
  const int64_t bytes = (x.numel() + 1) / 2;
  at::Tensor out = at::empty({bytes}, x.options().memory_format(at::MemoryFormat::Contiguous));
  if (bytes > 0) {
    join_nibbles_kernel<<<blocks_for(bytes), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        dense.const_data_ptr<uint8_t>(), out.mutable_data_ptr<uint8_t>(), x.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return out;
}

at::Tensor unpack_nibbles(const at::Tensor& packed, at::IntArrayRef size, at::IntArrayRef stride) {
  const c10::cuda::CUDAGuard guard(packed.device());
  at::Tensor out = empty_in_packing_order(size, stride, packed.options(), "unpack_nibbles");
  check_nibbles(packed, out.numel());
  if (out.numel() > 0) {
    split_nibbles_kernel<<<blocks_for(out.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        packed.const_data_ptr<uint8_t>(), out.mutable_data_ptr<uint8_t>(), out.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CUDA, m) {
  m.impl("pack_sign", &pack_sign);
  m.impl("pack_range", &pack_range);
  m.impl("pack_bool", &pack_bool);
  m.impl("keep_where", &keep_where);
  m.impl("keep_where_", &keep_where_);
  m.impl("unpack_bool", &unpack_bool);
  m.impl("masked_scale", &masked_scale);
  m.impl("pack_nibbles", &pack_nibbles);
  m.impl("unpack_nibbles", &unpack_nibbles);
}

}  // namespace monet_like
