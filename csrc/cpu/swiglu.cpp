// SwiGLU on the CPU: a thread takes its elements in parts that stay in its cache, and has ATen's own kernels compute each
// part. So results are ATen's, bit for bit. For this a thread's first element is ATen's, too: its vectors begin there.

#include <algorithm>
#include <tuple>

#include "../checks.h"
#include "loops/loops.h"

namespace monet_like {
namespace {

constexpr int64_t kGrain = 32768;  // at::internal::GRAIN_SIZE: ATen has no thread for fewer elements
constexpr int64_t kPart = 16384;  // elements; a multiple of all of ATen's vectors

// Elements first to last - 1 of a contiguous tensor.
Tensor part_of(const Tensor& t, int64_t first, int64_t last) {
  return t.as_strided(std::array{last - first}, std::array{int64_t(1)}, first);
}

// f(first, last) for all parts.
template <typename F>
void for_parts(int64_t numel, const F& f) {
  parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kPart) {
      f(first, std::min(end, first + kPart));
    }
  });
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check_alike("swiglu", "up", up, gate);
  const Tensor g = gate.contiguous(), u = up.contiguous();
  const Tensor out = empty(gate.sizes(), gate.options());
  for_parts(gate.numel(), [&](int64_t first, int64_t last) {
    const Tensor made = part_of(out, first, last);
    call("aten::silu", "out", part_of(g, first, last), made);
    call("aten::mul_", "Tensor", made, part_of(u, first, last));
  });
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward(
    const Tensor& grad, const Tensor& gate, const Tensor& up) {
  check_alike("swiglu_backward", "up", up, gate);
  check_alike("swiglu_backward", "grad", grad, gate);
  const Tensor d = grad.contiguous(), g = gate.contiguous(), u = up.contiguous();
  const auto options = gate.options();
  const Tensor of_gate = empty(gate.sizes(), options), of_up = empty(gate.sizes(), options);
  for_parts(gate.numel(), [&](int64_t first, int64_t last) {
    const Tensor upstream = part_of(d, first, last), gates = part_of(g, first, last);
    const Tensor made = part_of(of_up, first, last), through = part_of(of_gate, first, last);
    call("aten::silu", "out", gates, made);
    call("aten::mul_", "Tensor", made, upstream);
    call("aten::mul", "out", upstream, part_of(u, first, last), through);
    call("aten::silu_backward", "grad_input", through, gates, through);
  });
  return {of_gate, of_up};
}

}  // namespace

MONET_KERNELS(CPU, m) {
  m.add<&swiglu>("swiglu");
  m.add<&swiglu_backward>("swiglu_backward");
}

}  // namespace monet_like
