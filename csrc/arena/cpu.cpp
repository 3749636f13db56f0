// The arena in front of PyTorch's CPU allocator.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "arena.h"

namespace monet_like::arena {
namespace {

const c10::Device kDevice(c10::DeviceType::CPU);

c10::Allocator* before = nullptr;

void release(void* at) {
  if (!Arenas::all().free(at)) before->raw_deallocate(at);
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (static_cast<int64_t>(size) < kLeastBytes || !Arenas::all().may_place()) return before->allocate(size);
    return arena::allocate(size, nullptr, kDevice, *before, &release);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override { before->copy_data(to, from, bytes); }
};

}  // namespace
}  // namespace monet_like::arena

using namespace monet_like::arena;

MONET_LIKE_ARENA_FUNCTIONS

// Put the arena in front of PyTorch's allocator; once. 0: PyTorch's allocator cannot be stood in front of.
MONET_LIKE_EXPORT int arena_install() {
  if (before != nullptr) return 1;
  c10::Allocator* const found = c10::GetCPUAllocator();
  if (found->raw_deleter() == nullptr) return 0;
  before = found;
  static CpuAllocator* const allocator = new CpuAllocator;
  c10::SetCPUAllocator(allocator);
  return 1;
}

// See `refill`.
MONET_LIKE_EXPORT int arena_fill(int64_t block, int, int64_t bytes) {
  return refill(block, bytes, nullptr, -1, [&] { return before->allocate(static_cast<size_t>(bytes)); });
}

MONET_LIKE_EXPORT void arena_enter(int64_t plan, int64_t block, int, int anew) {
  Arenas::all().enter(plan, block, nullptr, anew != 0);
}
