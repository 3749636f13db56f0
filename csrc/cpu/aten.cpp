// What the loops ask of ATen (isa.h, loops/loops.h).

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include "loops/loops.h"

namespace monet_like {

// It follows ATEN_CPU_CAPABILITY, so that one switch sets ATen and these kernels alike.
Isa isa_of_aten() {
  const std::string capability = at::get_cpu_capability();
  return capability == "AVX512" ? Isa::Avx512 : capability == "AVX2" ? Isa::Avx2 : Isa::Baseline;
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFunction f) {
  at::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) { f(first, last); });
}

int64_t thread_count() {
  return at::get_num_threads();
}

int64_t thread_number() {
  return at::get_thread_num();
}

}  // namespace monet_like
