// What the loops ask of ATen (isa.h, loops/loops.h).

#include "../tensor.h"
#include "loops/loops.h"

namespace monet_like {

namespace {
Isa of_aten = Isa::Baseline;
}

Isa isa_of_aten() {
  return of_aten;
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFunction f) {
  const auto run = [](int64_t first, int64_t last, void* function) { (*static_cast<RangeFunction*>(function))(first, last); };
  MONET_TORCH(torch_parallel_for, begin, end, grain, run, &f);
}

int64_t thread_count() {
  uint32_t count = 0;
  MONET_TORCH(torch_get_num_threads, &count);
  return count;
}

int64_t thread_number() {
  uint32_t number = 0;
  MONET_TORCH(torch_get_thread_idx, &number);
  return number;
}

}  // namespace monet_like

// Called once after loading, with torch.backends.cpu.get_cpu_capability(). That follows ATEN_CPU_CAPABILITY, so one switch sets ATen and
// these kernels alike.
extern "C" __attribute__((visibility("default"))) void monet_like_set_cpu_capability(const char* capability) {
  using monet_like::Isa;
  const std::string_view name(capability);
  monet_like::of_aten = name == "AVX512" ? Isa::Avx512 : name == "AVX2" ? Isa::Avx2 : Isa::Baseline;
}
