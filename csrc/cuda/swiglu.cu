// SwiGLU on CUDA: silu(gate) * up, and both of its gradients, each in one pass. What ATen's kernels write to memory between
// their passes is rounded here as there, and products that they fuse with a sum are fused.

#include <tuple>

#include "common.cuh"

namespace monet_like {
namespace {

template <typename O>
__device__ __forceinline__ O one_and_exp(O x) {
  if constexpr (sizeof(O) == 4) {
    return O(1) + expf(x);
  } else {
    return O(1) + exp(x);
  }
}

// silu(x) as T stores it. ATen divides once; a product with the sigmoid would round twice.
template <typename T>
__device__ __forceinline__ op_type<T> stored_silu(op_type<T> x) {
  return static_cast<op_type<T>>(static_cast<T>(x / one_and_exp(-x)));
}

template <typename T>
__device__ __forceinline__ op_type<T> product(op_type<T> gate, op_type<T> up) {
  return stored_silu<T>(gate) * up;
}

template <typename T>
struct Gradients {
  op_type<T> of_gate, of_up;
};

template <typename T>
__device__ __forceinline__ Gradients<T> gradients(op_type<T> grad, op_type<T> gate, op_type<T> up) {
  using O = op_type<T>;
  const O through = static_cast<O>(static_cast<T>(grad * up)), s = O(1) / one_and_exp(-gate);
  return {through * s * fused(gate, O(1) - s, O(1)), grad * stored_silu<T>(gate)};
}

template <typename T>
__global__ void swiglu_kernel(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ out, int count) {
  constexpr int N = kVector<T>;
  struct Pair {
    Words gate, up;
  };
  const int vectors = count / N;
  take_of_grid(
      vectors,
      [&](int v) { return Pair{load_words(gate + v * N), load_words(up + v * N)}; },
      [&](int v, const Pair& in) {
        Vector<op_type<T>, N> made;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          made.at[j] = product<T>(widened<T>(in.gate, j), widened<T>(in.up, j));
        }
        store(out + v * N, narrowed<T>(made));
      });
  const int i = vectors * N + grid_thread();
  if (i < count) {
    out[i] = static_cast<T>(product<T>(static_cast<op_type<T>>(gate[i]), static_cast<op_type<T>>(up[i])));
  }
}

template <typename T>
__global__ void swiglu_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ of_gate,
    T* __restrict__ of_up, int count) {
  constexpr int N = kVector<T>;
  struct Triple {
    Words grad, gate, up;
  };
  const int vectors = count / N;
  take_of_grid(
      vectors,
      [&](int v) {
        return Triple{load_words(grad + v * N), load_words(gate + v * N), load_words(up + v * N)};
      },
      [&](int v, const Triple& in) {
        Vector<op_type<T>, N> first, second;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const auto made =
              gradients<T>(widened<T>(in.grad, j), widened<T>(in.gate, j), widened<T>(in.up, j));
          first.at[j] = made.of_gate;
          second.at[j] = made.of_up;
        }
        store(of_gate + v * N, narrowed<T>(first));
        store(of_up + v * N, narrowed<T>(second));
      });
  const int i = vectors * N + grid_thread();
  if (i < count) {
    using O = op_type<T>;
    const auto made =
        gradients<T>(static_cast<O>(grad[i]), static_cast<O>(gate[i]), static_cast<O>(up[i]));
    of_gate[i] = static_cast<T>(made.of_gate);
    of_up[i] = static_cast<T>(made.of_up);
  }
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_alike("swiglu", "up", up, gate);
  const DeviceGuard guard(gate.device());
  const Tensor g = aligned(gate.contiguous()), u = aligned(up.contiguous());
  const Tensor out = empty(gate.sizes(), gate.options());
  MONET_DISPATCH_FLOATS(gate.scalar_type(), [&] {
    for_parts(gate.numel(), [&](int64_t first, int count) {
      swiglu_kernel<scalar_t>
          <<<grid_of_vectors(count / kVector<scalar_t>), kThreads, 0, current_stream()>>>(
              g.const_data_ptr<scalar_t>() + first, u.const_data_ptr<scalar_t>() + first,
              out.mutable_data_ptr<scalar_t>() + first, count);
      MONET_CUDA(cudaGetLastError());
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward(
    const Tensor& grad, const Tensor& gate, const Tensor& up) {
  check_alike("swiglu_backward", "up", up, gate);
  check_alike("swiglu_backward", "grad", grad, gate);
  const DeviceGuard guard(gate.device());
  const Tensor d = aligned(grad.contiguous()), g = aligned(gate.contiguous()), u = aligned(up.contiguous());
  const auto options = gate.options();
  const Tensor of_gate = empty(gate.sizes(), options), of_up = empty(gate.sizes(), options);
  MONET_DISPATCH_FLOATS(gate.scalar_type(), [&] {
    for_parts(gate.numel(), [&](int64_t first, int count) {
      swiglu_backward_kernel<scalar_t>
          <<<grid_of_vectors(count / kVector<scalar_t>), kThreads, 0, current_stream()>>>(
              d.const_data_ptr<scalar_t>() + first, g.const_data_ptr<scalar_t>() + first,
              u.const_data_ptr<scalar_t>() + first, of_gate.mutable_data_ptr<scalar_t>() + first,
              of_up.mutable_data_ptr<scalar_t>() + first, count);
      MONET_CUDA(cudaGetLastError());
    });
  });
  return {of_gate, of_up};
}

}  // namespace

MONET_KERNELS(CUDA, m) {
  m.add<&swiglu>("swiglu");
  m.add<&swiglu_backward>("swiglu_backward");
}

}  // namespace monet_like
