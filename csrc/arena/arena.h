// An arena: one block of memory from which the tensors of a training step are cut, each at a place that was chosen ahead.
//
// A step allocates the same sizes in the same order every time. So a plan first records what one step allocates and frees, then
// monet_like/replay/memory/placement.py chooses an offset for every allocation, and from then on the n-th allocation of a step gets the n-th
// offset. Nothing relies on that: an allocation of another size, on another stream, or at a place that is still taken comes from
// PyTorch's own allocator, as every small one does.
//
// cpu.cpp and cuda.cpp put this in front of PyTorch's allocators. Each library has an instance of its own.

#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace monet_like::arena {

// Smaller allocations are left to PyTorch's allocator, which keeps blocks of 2 MiB for them.
constexpr int64_t kLeastBytes = 1 << 20;
// Offsets and sizes are multiples of it, as those of PyTorch's caching allocator.
constexpr int64_t kGrain = 512;

// A stream of the device; null: the CPU, or the default stream.
using Stream = void*;

inline int64_t rounded(size_t bytes) { return (static_cast<int64_t>(bytes) + kGrain - 1) / kGrain * kGrain; }

struct Allocation {
  int64_t bytes;
  int64_t end = -1;     // how many allocations the step had made when this one was freed; -1: it was not freed in the step
  int64_t offset = -1;  // -1: not placed
};

// Whose an allocation is: the schedule's, or of what runs between its forward and its backward, such as the loss.
enum class Part { Schedule, Between };

// What one training step allocates on its stream, in order. Either part is counted by itself, so that one allocation more between
// forward and backward moves none of the schedule's.
struct Plan {
  std::vector<Allocation> allocations;
  std::array<std::vector<size_t>, 2> of_part;  // which of them are of each part
  std::array<size_t, 2> next = {};             // position of the step that runs, in each part
  bool recording = false;
  int64_t recordings = 0;
  int64_t placed = 0, missed = 0;  // since the step began: allocations at their places, and those not as recorded
};

// An allocation of PyTorch's allocator that a plan has recorded.
struct Recorded {
  std::shared_ptr<Plan> plan;
  size_t index;
  int64_t recording;
};

struct Taken {
  int64_t bytes;
  std::vector<Stream> others;  // streams other than the arena's that use it
};

// The block of memory.
struct Block {
  c10::DataPtr memory;
  char* start = nullptr;
  int64_t bytes = 0;
  std::map<int64_t, Taken> taken;  // by offset
  Stream stream = nullptr;
  int device = -1;
  bool closed = false;  // nobody will allocate from it

  bool is_free(int64_t offset, int64_t size) const {
    const auto after = taken.lower_bound(offset);
    if (after != taken.end() && after->first < offset + size) return false;
    return after == taken.begin() || std::prev(after)->first + std::prev(after)->second.bytes <= offset;
  }
};

// On which plan allocations are.
struct Active {
  std::shared_ptr<Plan> plan;
  std::shared_ptr<Block> block;
  Stream stream = nullptr;
  int device = -1;
  Part part = Part::Schedule;
};

// Of the present thread, while it runs a part of a schedule.
inline Active& active() {
  thread_local Active here;
  return here;
}

// A freed part of a block that other streams use.
struct Freed {
  int device;
  Stream stream;
  std::vector<Stream> others;
};

// All plans and blocks of a process, by number.
class Arenas {
 public:
  static Arenas& all() {
    static Arenas* const arenas = new Arenas;  // tensors may be freed after static objects are destroyed
    return *arenas;
  }

  int64_t add_plan() {
    const std::lock_guard lock(mutex_);
    plans_[++count_] = std::make_shared<Plan>();
    return count_;
  }

  int64_t add_block() {
    const std::lock_guard lock(mutex_);
    blocks_[++count_] = std::make_shared<Block>();
    return count_;
  }

  void drop_plan(int64_t number) {
    const std::lock_guard lock(mutex_);
    if (const auto found = plans_.find(number); found != plans_.end()) {
      end_between([&](const auto& of) { return of.second.plan == found->second; });
      plans_.erase(found);
    }
  }

  void drop_block(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(number);
    if (found == blocks_.end()) return;
    end_between([&](const auto& of) { return of.second.block == found->second; });
    found->second->closed = true;
    if (found->second->taken.empty()) release(*found->second);
    blocks_.erase(found);
  }

  // Give a block its memory, or take it if `memory` is empty. False: tensors are cut from what it has.
  bool fill(int64_t number, c10::DataPtr memory, int64_t bytes, Stream stream, int device = -1) {
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Block> block = blocks_.at(number);
    if (!block->taken.empty()) return false;
    release(*block);
    if (memory.get() == nullptr) return true;
    block->start = static_cast<char*>(memory.get());
    block->memory = std::move(memory);
    block->bytes = bytes;
    block->stream = stream;
    block->device = device;
    by_start_[block->start] = block;
    return true;
  }

  // Allocations of this thread belong to a plan from now on: to a new step of it, or to the one that runs.
  void enter(int64_t plan, int64_t block, Stream stream, bool anew, int device = -1) {
    const std::lock_guard lock(mutex_);
    end_between([here = place_of(stream, device)](const auto& of) { return of.first == here; });
    active() = {plans_.at(plan), blocks_.at(block), stream, device};
    if (anew) {
      Plan& of = *active().plan;
      of.next = {};
      of.placed = of.missed = 0;
    }
  }

  // They no longer do. After a forward, those at the same place do until the backward begins.
  void leave(bool after_forward) {
    const std::lock_guard lock(mutex_);
    if (after_forward) {
      Active& between = between_[place_of(active().stream, active().device)] = active();
      between.part = Part::Between;
      is_between_ = true;
    }
    active() = {};
  }

  // Whether an allocation of the present thread may be on a plan.
  bool may_place() const { return active().plan != nullptr || is_between_; }

  // On which plan the present thread's allocations on a stream are; on none: without a plan.
  Active current(Stream stream, int device) {
    if (active().plan) return active().stream == stream && active().device == device ? active() : Active{};
    if (!is_between_) return {};
    const std::lock_guard lock(mutex_);
    const auto found = between_.find(place_of(stream, device));
    return found == between_.end() ? Active{} : found->second;
  }

  // Record the steps that begin from now on, or stop that.
  void record(int64_t plan, bool recording) {
    const std::lock_guard lock(mutex_);
    Plan& of = *plans_.at(plan);
    of.recording = recording;
    if (!recording) return;
    of.allocations.clear();
    of.of_part = {};
    ++of.recordings;
  }

  // How many tensors lie in a block.
  int64_t taken(int64_t number) {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(blocks_.at(number)->taken.size());
  }

  std::shared_ptr<Plan> plan(int64_t number) {
    const std::lock_guard lock(mutex_);
    return plans_.at(number);
  }

  // The place of the next allocation; null: PyTorch's allocator has to make it.
  void* take(const Active& here, size_t size) {
    const std::lock_guard lock(mutex_);
    Plan& plan = *here.plan;
    if (plan.recording) return nullptr;
    const auto part = static_cast<size_t>(here.part);
    const size_t index = plan.next[part]++;
    const int64_t bytes = rounded(size);
    Block& block = *here.block;
    if (index < plan.of_part[part].size()) {
      const Allocation& expected = plan.allocations[plan.of_part[part][index]];
      if (expected.bytes == bytes && expected.offset < 0) return nullptr;  // it outlives the step
      if (expected.bytes == bytes && expected.offset + bytes <= block.bytes &&
          block.stream == here.stream && block.is_free(expected.offset, bytes)) {
        block.taken.emplace(expected.offset, Taken{bytes, {}});
        ++plan.placed;
        return block.start + expected.offset;
      }
    }
    ++plan.missed;
    return nullptr;
  }

  // Record what PyTorch's allocator has made. False: the plan records nothing now.
  bool made(const Active& here, void* at, size_t size) {
    const std::lock_guard lock(mutex_);
    Plan& plan = *here.plan;
    if (!plan.recording) return false;
    recorded_[at] = {here.plan, plan.allocations.size(), plan.recordings};
    plan.of_part[static_cast<size_t>(here.part)].push_back(plan.allocations.size());
    plan.allocations.push_back({rounded(size)});
    return true;
  }

  // Free a part of a block; nothing if it is none. For what PyTorch's allocator made it is recorded, and nothing is returned.
  std::optional<Freed> free(void* at) {
    const std::lock_guard lock(mutex_);
    if (const auto found = recorded_.find(at); found != recorded_.end()) {
      const Recorded& one = found->second;
      std::vector<Allocation>& made = one.plan->allocations;
      if (one.plan->recording && one.plan->recordings == one.recording) made[one.index].end = static_cast<int64_t>(made.size());
      recorded_.erase(found);
      return std::nullopt;
    }
    const std::shared_ptr<Block> block = around(at);
    if (!block) return std::nullopt;
    const auto found = block->taken.find(static_cast<char*>(at) - block->start);
    TORCH_CHECK(found != block->taken.end(), "a tensor of a training step's arena was freed twice");
    Freed freed{block->device, block->stream, std::move(found->second.others)};
    block->taken.erase(found);
    if (block->closed && block->taken.empty()) release(*block);
    return freed;
  }

  // Another stream uses a part of a block. False: it is none.
  bool use_on(void* at, Stream stream) {
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Block> block = around(at);
    if (!block) return false;
    const auto found = block->taken.find(static_cast<char*>(at) - block->start);
    if (found != block->taken.end() && stream != block->stream) found->second.others.push_back(stream);
    return true;
  }

  // Where the block around an address starts; null: there is none.
  void* start_of(void* at) {
    const std::lock_guard lock(mutex_);
    const std::shared_ptr<Block> block = around(at);
    return block ? block->start : nullptr;
  }

 private:
  std::shared_ptr<Block> around(void* at) {
    auto after = by_start_.upper_bound(static_cast<char*>(at));
    if (after == by_start_.begin()) return nullptr;
    const std::shared_ptr<Block>& block = std::prev(after)->second;
    return static_cast<char*>(at) < block->start + block->bytes ? block : nullptr;
  }

  void release(Block& block) {
    if (block.start == nullptr) return;
    by_start_.erase(block.start);
    block.memory.clear();
    block.start = nullptr;
    block.bytes = 0;
  }

  // Where the loss of a step is computed: on a CPU in a thread; on a GPU on a stream, and of any thread, since autograd runs the loss's
  // backward there in a thread of its own.
  using Place = std::tuple<int, Stream, std::thread::id>;

  static Place place_of(Stream stream, int device) {
    return {device, stream, device >= 0 ? std::thread::id() : std::this_thread::get_id()};
  }

  template <typename Which>
  void end_between(const Which& is_ended) {
    for (auto at = between_.begin(); at != between_.end();) at = is_ended(*at) ? between_.erase(at) : std::next(at);
    is_between_ = !between_.empty();
  }

  std::mutex mutex_;
  std::map<Place, Active> between_;
  std::atomic<bool> is_between_ = false;
  std::map<int64_t, std::shared_ptr<Plan>> plans_;
  std::map<int64_t, std::shared_ptr<Block>> blocks_;
  std::map<char*, std::shared_ptr<Block>> by_start_;
  std::unordered_map<void*, Recorded> recorded_;
  int64_t count_ = 0;
};

// An allocation of at least `kLeastBytes`: at its place, or by PyTorch's allocator `theirs`, which is recorded if the plan records.
inline c10::DataPtr allocate(size_t size, Stream stream, c10::Device device, c10::Allocator& theirs, c10::DeleterFnPtr release) {
  Arenas& arenas = Arenas::all();
  const Active here = arenas.current(stream, device.index());
  if (!here.plan) return theirs.allocate(size);
  if (void* placed = arenas.take(here, size)) return {placed, placed, release, device};
  c10::DataPtr made = theirs.allocate(size);
  if (!arenas.made(here, made.get_context(), size)) return made;
  void* at = made.release_context();
  return {at, at, release, device};
}

// Give a block memory that `make` allocates. 1: it has so many bytes now; 0: tensors are cut from what it has; -1: so much memory is not
// there.
template <typename Make>
int refill(int64_t block, int64_t bytes, Stream stream, int device, const Make& make) {
  if (!Arenas::all().fill(block, {}, 0, nullptr)) return 0;
  if (bytes == 0) return 1;
  try {
    return Arenas::all().fill(block, make(), bytes, stream, device);
  } catch (const c10::Error&) {
    return -1;
  }
}

}  // namespace monet_like::arena

// The functions that monet_like/replay/memory/arena.py calls, beside `arena_install`, `arena_fill` and `arena_enter` of each device.
#define MONET_LIKE_EXPORT extern "C" __attribute__((visibility("default")))
#define MONET_LIKE_ARENA_FUNCTIONS                                                                               \
  using monet_like::arena::Arenas;                                                                               \
  MONET_LIKE_EXPORT int64_t arena_add_plan() { return Arenas::all().add_plan(); }                                \
  MONET_LIKE_EXPORT int64_t arena_add_block() { return Arenas::all().add_block(); }                              \
  MONET_LIKE_EXPORT void arena_drop_plan(int64_t number) { Arenas::all().drop_plan(number); }                    \
  MONET_LIKE_EXPORT void arena_drop_block(int64_t number) { Arenas::all().drop_block(number); }                  \
  MONET_LIKE_EXPORT void arena_record(int64_t plan, int on) { Arenas::all().record(plan, on != 0); }             \
  MONET_LIKE_EXPORT void arena_leave(int after_forward) { Arenas::all().leave(after_forward != 0); }             \
  MONET_LIKE_EXPORT int64_t arena_taken(int64_t block) { return Arenas::all().taken(block); }                    \
  MONET_LIKE_EXPORT int64_t arena_count(int64_t plan) {                                                          \
    return static_cast<int64_t>(Arenas::all().plan(plan)->allocations.size());                                   \
  }                                                                                                              \
  MONET_LIKE_EXPORT void arena_read(int64_t plan, int64_t* bytes, int64_t* end) {                                \
    for (const auto& made : Arenas::all().plan(plan)->allocations) *bytes++ = made.bytes, *end++ = made.end;     \
  }                                                                                                              \
  MONET_LIKE_EXPORT void arena_place(int64_t plan, const int64_t* offsets) {                                     \
    for (auto& made : Arenas::all().plan(plan)->allocations) made.offset = *offsets++;                           \
  }                                                                                                              \
  MONET_LIKE_EXPORT void arena_counts(int64_t plan, int64_t* placed_and_missed) {                                \
    const auto of = Arenas::all().plan(plan);                                                                    \
    placed_and_missed[0] = of->placed, placed_and_missed[1] = of->missed;                                        \
  }
