// SwiGLU on the CPU: a thread takes its elements in parts that stay in its cache, and has ATen's own kernels compute each
// part. So results are ATen's, bit for bit. For this a thread's first element is ATen's, too: its vectors begin there.

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "../checks.h"

namespace monet_like {
namespace {

constexpr int64_t kGrain = 32768;  // at::internal::GRAIN_SIZE: ATen has no thread for fewer elements
constexpr int64_t kPart = 16384;  // elements; a multiple of all of ATen's vectors

// Elements first to last - 1 of a contiguous tensor.
at::Tensor part_of(const at::Tensor& t, int64_t first, int64_t last) {
  char* data = static_cast<char*>(const_cast<void*>(t.const_data_ptr())) + first * t.element_size();
  return at::from_blob(data, {last - first}, t.options());
}

// f(first, last) for all parts.
template <typename F>
void for_parts(int64_t numel, const F& f) {
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (int64_t first = begin; first < end; first += kPart) {
      f(first, std::min(end, first + kPart));
    }
  });
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  check_alike("swiglu", "up", up, gate);
  const at::Tensor g = gate.contiguous(), u = up.contiguous();
  const at::Tensor out = at::empty(gate.sizes(), gate.options().memory_format(at::MemoryFormat::Contiguous));
  for_parts(gate.numel(), [&](int64_t first, int64_t last) {
    at::Tensor made = part_of(out, first, last);
    at::silu_out(made, part_of(g, first, last));
    made.mul_(part_of(u, first, last));
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  check_alike("swiglu_backward", "up", up, gate);
  check_alike("swiglu_backward", "grad", grad, gate);
  const at::Tensor d = grad.contiguous(), g = gate.contiguous(), u = up.contiguous();
  const auto options = gate.options().memory_format(at::MemoryFormat::Contiguous);
  const at::Tensor of_gate = at::empty(gate.sizes(), options), of_up = at::empty(gate.sizes(), options);
  for_parts(gate.numel(), [&](int64_t first, int64_t last) {
    const at::Tensor upstream = part_of(d, first, last), gates = part_of(g, first, last);
    at::Tensor made = part_of(of_up, first, last), through = part_of(of_gate, first, last);
    at::silu_out(made, gates);
    made.mul_(upstream);
    at::mul_out(through, upstream, part_of(u, first, last));
    at::silu_backward_out(through, through, gates);
  });
  return {of_gate, of_up};
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
}

}  // namespace monet_like
