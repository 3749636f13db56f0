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
    if (static_cast<int64_t>(size) < kLeastBytes) return before->allocate(size);
    Arenas& arenas = Arenas::all();
    if (void* placed = arenas.take(size, nullptr)) return {placed, placed, &release, kDevice};
    c10::DataPtr made = before->allocate(size);
    if (!arenas.records(nullptr)) return made;
    void* at = made.release_context();
    arenas.made(at, size);
    return {at, at, &release, kDevice};
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

// 1: the block has so many bytes now; 0: tensors are cut from what it has; -1: so much memory is not there.
MONET_LIKE_EXPORT int arena_fill(int64_t block, int, int64_t bytes) {
  if (!Arenas::all().fill(block, {}, 0, nullptr)) return 0;
  if (bytes == 0) return 1;
  try {
    return Arenas::all().fill(block, before->allocate(static_cast<size_t>(bytes)), bytes, nullptr);
  } catch (const c10::Error&) {
    return -1;
  }
}

MONET_LIKE_EXPORT void arena_enter(int64_t plan, int64_t block, int, int anew) {
  Arenas::all().enter(plan, block, nullptr, anew != 0);
}
