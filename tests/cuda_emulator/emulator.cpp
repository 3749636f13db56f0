// What runs emulated kernels: threads as fibers, barriers and exchanges within warps, and a look at every access to
// memory. Compiled without -fsanitize=thread; the kernels are compiled with it and call the __tsan_* functions below.
//
// Found: access outside of any tensor (every tensor on the CPU lies between guard zones of its own), to memory of the
// host, misaligned, to a shared variable past its end or before anything was written there; reads of tensors before
// anything was written there (4 bytes and wider); races in shared and in global memory; barriers and exchanges that not
// all threads reach, or that they reach at different places; lanes that read from lanes which take no part; threads that
// leave the kernel while others wait for them; launches without a device guard or of impossible sizes; failed assertions.
//
// Settings and counts: the C functions at the end of this file; control.py has them for Python.

#include "cuda_emulator.h"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#define USE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {
namespace {

using std::size_t;
using std::uint64_t;
using std::uintptr_t;

// ---- settings ----

enum class Order { Forward, Reverse, Random };
Order order = Order::Forward;
std::mt19937_64 dice(1);
constexpr int kUnwritten = 0xa5;
int fill = kUnwritten;  // of new tensors
int64_t most_blocks = 0;  // 0: as many as the kernel wants
size_t race_bytes = size_t(1) << 20;
std::string skipped;   // FILE:LINE of a barrier that is none
int mutant = 0;        // the deliberate mistake that is switched on, from 1
size_t shared_limit = size_t(48) << 10;

void set_order(const char* text) {
  const std::string word = text == nullptr ? "" : text;
  order = word == "reverse" ? Order::Reverse : word.rfind("random", 0) == 0 ? Order::Random : Order::Forward;
  dice.seed(word.size() > 7 ? std::strtoull(word.c_str() + 7, nullptr, 0) : 1);
}

std::vector<unsigned int> permutation(unsigned int n) {
  std::vector<unsigned int> found(n);
  for (unsigned int i = 0; i < n; ++i) {
    found[i] = order == Order::Reverse ? n - 1 - i : i;
  }
  if (order == Order::Random) {
    std::shuffle(found.begin(), found.end(), dice);
  }
  return found;
}

// ---- who touched a byte last ----

// serial (20 bits) of the launch, or for shared memory of the block; epoch (11): barriers so far; warp (8): __syncwarp so
// far, of the thread; atomic (1); thread (24).
struct Stamp {
  uint64_t bits = 0;
  Stamp() = default;
  Stamp(uint64_t serial, uint64_t epoch, uint64_t warp, bool atomic, uint64_t thread)
      : bits((serial & 0xfffff) << 44 | (epoch & 0x7ff) << 33 | (warp & 0xff) << 25 | uint64_t(atomic) << 24 |
             (thread & 0xffffff)) {}
  uint64_t serial() const { return bits >> 44; }
  uint64_t epoch() const { return bits >> 33 & 0x7ff; }
  uint64_t warp() const { return bits >> 25 & 0xff; }
  bool atomic() const { return bits >> 24 & 1; }
  unsigned int thread() const { return bits & 0xffffff; }
};

struct Cell {
  Stamp written, read, read_before;  // the last reader, and the last one before it that is another thread
};

enum class Access { Read, Write, Atomic };

// ---- memory of tensors ----

struct Allocation {
  uintptr_t begin = 0;
  size_t bytes = 0;
  std::vector<Cell> cells;  // made when a kernel touches it
};

constexpr size_t kGuard = 512;
std::mutex allocations_mutex;
std::map<uintptr_t, Allocation> allocations;  // by their ends
std::atomic<uint64_t> generation{1};

void release(void* p) {
  if (p == nullptr) {
    return;
  }
  {
    const std::lock_guard lock(allocations_mutex);
    const auto found = allocations.upper_bound(reinterpret_cast<uintptr_t>(p));
    allocations.erase(found);
    ++generation;
  }
  std::free(static_cast<char*>(p) - kGuard);
}

struct GuardedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    }
    char* base = static_cast<char*>(std::aligned_alloc(kGuard, (n + 3 * kGuard - 1) / kGuard * kGuard));
    TORCH_CHECK(base != nullptr, "emulator: no memory");
    char* p = base + kGuard;
    std::memset(p, fill, n);
    const std::lock_guard lock(allocations_mutex);
    const auto begin = reinterpret_cast<uintptr_t>(p);
    allocations[begin + n] = {begin, n, {}};
    ++generation;
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};

// ---- fibers ----

constexpr size_t kStack = size_t(128) << 10;

#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.local emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
#endif

struct Thread;

struct Fiber {
  char* memory = nullptr;
  Thread* thread = nullptr;
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  uintptr_t low() const { return reinterpret_cast<uintptr_t>(memory); }
};

enum class State { Fresh, Ready, AtBarrier, InWarp, Left };

struct Thread {
  unsigned int index = 0;  // in the block
  State state = State::Fresh;
  Fiber* fiber = nullptr;
  uint3 place{};
  Site site{};
  Op op{};
  unsigned int mask = 0;
  uint64_t value = 0;
  int argument = 0, width = 32;
  unsigned int warp_epoch = 0;  // how many __syncwarp it has passed
  bool fenced = false;          // it has passed a __threadfence
};

// ---- the launch that runs ----

struct SharedVariable {
  uintptr_t begin;
  size_t bytes;
  const char* name;
  std::vector<Cell> cells;
};

bool active = false;  // a kernel's fiber runs
const char* kernel = "";
Site launch_site{};
dim3 grid_size, block_size;
uint3 block_place{}, thread_place{};
unsigned int block_threads = 0;
uint64_t block_number = 0;
void (*kernel_body)(void*) = nullptr;
void* kernel_closure = nullptr;
std::vector<Thread> threads;
std::deque<unsigned int> ready;
Thread* current = nullptr;
unsigned int left = 0, waiting = 0;
uint64_t launch_serial = 0, block_serial = 0, epoch = 0;
std::string error;
void* error_at = nullptr;
std::vector<Fiber*> idle;
Fiber scheduler;
uintptr_t host_low = 0, host_high = 0;
std::map<uintptr_t, SharedVariable> shared_variables;  // by their beginnings
std::vector<SharedVariable*> declared;                 // by the block that runs
std::map<std::string, uint64_t> launches;  // of each __global__ function
const char* entered_last = nullptr;
uint64_t entered_serial = 0;
// What blocks of this launch have made known: by an atomic access after a __threadfence, to those whose atomic access to
// the same address comes later.
std::map<uintptr_t, std::set<uint64_t>> published;
std::set<uint64_t> acquired;  // blocks whose results the running one may read
std::unique_ptr<char[]> dynamic_memory;
SharedVariable dynamic_variable{};
std::mutex launch_mutex;
thread_local int guards = 0;

void to_scheduler(Fiber& from) {
#if defined(__x86_64__)
  emu_switch(&from.stack_pointer, scheduler.stack_pointer);
#else
  swapcontext(&from.context, &scheduler.context);
#endif
}

void fiber_main();

Fiber* new_fiber() {
  auto* fiber = new Fiber;
  fiber->memory = static_cast<char*>(
      mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (fiber->memory == MAP_FAILED) {
    throw std::runtime_error("emulator: no memory for a stack");
  }
  mprotect(fiber->memory, 4096, PROT_NONE);
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(fiber->memory + kStack) - 3;  // as a call leaves it
  top[0] = nullptr;                                 // where fiber_main would return to
  top[-1] = reinterpret_cast<void*>(&fiber_main);
  fiber->stack_pointer = top - 7;                   // six registers below
#else
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->memory;
  fiber->context.uc_stack.ss_size = kStack;
  makecontext(&fiber->context, &fiber_main, 0);
#endif
  return fiber;
}

// A fiber takes one thread after the other, as long as they leave.
void fiber_main() {
  Fiber* const self = current->fiber;
  for (;;) {
    kernel_body(kernel_closure);
    self->thread->state = State::Left;
    ++left;
    to_scheduler(*self);
  }
}

void resume(Thread& thread) {
  if (thread.state == State::Fresh) {
    if (idle.empty()) {
      idle.push_back(new_fiber());
    }
    thread.fiber = idle.back();
    idle.pop_back();
    thread.fiber->thread = &thread;
  }
  thread.state = State::Ready;
  current = &thread;
  thread_place = thread.place;
  active = true;
#if defined(__x86_64__)
  emu_switch(&scheduler.stack_pointer, thread.fiber->stack_pointer);
#else
  swapcontext(&scheduler.context, &thread.fiber->context);
#endif
  active = false;
  if (thread.state == State::Left) {
    idle.push_back(thread.fiber);
    thread.fiber = nullptr;
  }
}

void wait(State state) {
  current->state = state;
  to_scheduler(*current->fiber);
}

std::string at(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

std::string triple(unsigned int x, unsigned int y, unsigned int z) {
  return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

[[noreturn]] void fail(std::string message, void* pc = nullptr) {
  error = std::move(message);
  error_at = pc;
  if (active) {
    to_scheduler(*current->fiber);  // which never comes back
    std::abort();
  }
  throw std::runtime_error(error);
}

const char* name_of(Op op) {
  static const char* const names[] = {"__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
                                      "__ballot_sync", "__all_sync", "__any_sync", "__reduce_max_sync", "__syncwarp"};
  return names[static_cast<int>(op)];
}

std::string doing(const Thread& t) {
  char mask[24];
  std::snprintf(mask, sizeof(mask), " of lanes %08x", t.mask);
  return t.state == State::AtBarrier ? "wait at __syncthreads at " + at(t.site)
      : t.state == State::InWarp     ? std::string("wait at ") + name_of(t.op) + mask + " at " + at(t.site)
      : t.state == State::Left       ? "have left the kernel"
                                     : "run";
}

// Every thread of the block, those that do the same together.
std::string situation() {
  std::string text;
  for (unsigned int i = 0; i < threads.size();) {
    unsigned int end = i + 1;
    while (end < threads.size() && doing(threads[end]) == doing(threads[i])) {
      ++end;
    }
    text += (text.empty() ? "" : "; ") + std::string("threads ") + std::to_string(i) + " to " + std::to_string(end - 1) +
        " " + doing(threads[i]);
    i = end;
    if (text.size() > 2000) {
      return text + "; ...";
    }
  }
  return text;
}

// ---- accesses ----

bool clashes(Stamp before, Stamp now, bool global) {
  if (before.bits == 0 || before.serial() != now.serial() || before.thread() == now.thread()) {
    return false;
  }
  const unsigned int first = before.thread(), second = now.thread();
  if (global && first / block_threads != second / block_threads) {
    return acquired.count(first / block_threads) == 0;
  }
  const bool same_warp = first % block_threads / 32 == second % block_threads / 32;
  return before.epoch() == now.epoch() && !(same_warp && before.warp() != now.warp());
}

// 0, or the thread that this access races with, plus one.
unsigned int race(Cell& cell, Access access, Stamp now, bool global) {
  Stamp other;
  if (clashes(cell.written, now, global) && !(access == Access::Atomic && cell.written.atomic())) {
    other = cell.written;
  } else if (access != Access::Read) {
    if (clashes(cell.read, now, global)) {
      other = cell.read;
    } else if (clashes(cell.read_before, now, global)) {
      other = cell.read_before;
    }
  }
  if (access == Access::Read) {
    if (cell.read.thread() != now.thread() || cell.read.serial() != now.serial()) {
      cell.read_before = cell.read;
    }
    cell.read = now;
  } else {
    cell.written = now;
  }
  return other.bits == 0 ? 0 : other.thread() + 1;
}

const char* verb(Access access) {
  return access == Access::Read ? "reads " : access == Access::Write ? "writes " : "atomically changes ";
}

[[noreturn]] void fail_race(Access access, size_t size, const std::string& what, unsigned int other, void* pc) {
  const unsigned int thread = other - 1;
  fail(
      "race: " + std::string(verb(access)) + std::to_string(size) + " bytes of " + what + ", which thread " +
          std::to_string(thread % block_threads) + (thread >= block_threads || block_number > 0
              ? " (block " + std::to_string(thread / block_threads) + ")" : "") +
          " touched with no barrier in between",
      pc);
}

Allocation* find_allocation(uintptr_t address) {
  static Allocation* recent[4];
  static uint64_t known[4], turn;
  for (int i = 0; i < 4; ++i) {
    if (recent[i] != nullptr && known[i] == generation && address - recent[i]->begin < recent[i]->bytes) {
      return recent[i];
    }
  }
  const std::lock_guard lock(allocations_mutex);
  auto found = allocations.upper_bound(address);
  if (found == allocations.end() || found->second.begin > address + kGuard) {  // or shortly after the one before
    if (found == allocations.begin() || address - (--found)->first >= kGuard) {
      return nullptr;
    }
  }
  const uint64_t slot = turn++ % 4;
  recent[slot] = &found->second;
  known[slot] = generation;
  return recent[slot];
}

// `aligned`: the type that is accessed wants a multiple of its size.
void touch(void* p, size_t size, Access access, bool aligned, void* pc) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (address - current->fiber->low() < kStack) {
    return;
  }
  if (address - host_low < host_high - host_low) {  // the arguments of the launch
    if (access != Access::Read) {
      fail(std::string(verb(access)) + "the host's stack", pc);
    }
    return;
  }
  const auto what = [&](const char* kind) {
    return std::string(kind) + verb(access) + std::to_string(size) + " bytes at ";
  };
  if (aligned && address % size != 0) {
    fail(what("misaligned: ") + "an address that is " + std::to_string(address % size) + " past a multiple of " +
             std::to_string(size), pc);
  }
  for (SharedVariable* variable : declared) {
    const auto offset = static_cast<int64_t>(address - variable->begin);
    if (offset < -64 || offset >= static_cast<int64_t>(variable->bytes) + 64) {
      continue;
    }
    const auto place = [&] { return "byte " + std::to_string(offset) + " of shared variable " + variable->name; };
    if (offset < 0 || offset + size > variable->bytes) {
      fail(what("out of bounds: ") + place() + " of " + std::to_string(variable->bytes) + " bytes", pc);
    }
    const Stamp now(block_serial, epoch, current->warp_epoch, access == Access::Atomic, current->index);
    for (size_t i = offset; i < offset + size; ++i) {
      Cell& cell = variable->cells[i];
      if (access != Access::Write && cell.written.serial() != now.serial()) {
        fail(what("not written: ") + place() + ", to which no thread of the block has written", pc);
      }
      if (const unsigned int other = race(cell, access, now, false)) {
        fail_race(access, size, std::string("shared variable ") + variable->name, other, pc);
      }
    }
    return;
  }
  Allocation* allocation = find_allocation(address);
  if (allocation == nullptr) {
    fail(what("out of bounds: ") + "an address which is in no tensor", pc);
  }
  const auto offset = static_cast<int64_t>(address - allocation->begin);
  const auto place = [&] {
    return "byte " + std::to_string(offset) + " of a tensor of " + std::to_string(allocation->bytes) + " bytes";
  };
  if (offset < 0 || offset + size > allocation->bytes) {
    fail(what("out of bounds: ") + place(), pc);
  }
  if (fill == kUnwritten && access != Access::Write) {
    for (size_t i = 0; i + 4 <= size; i += 4) {
      uint32_t word = 0;
      std::memcpy(&word, static_cast<const char*>(p) + i, sizeof(word));
      if (word == 0x01010101u * kUnwritten) {
        fail(what("not written: ") + place() + ", to which nothing was written", pc);
      }
    }
  }
  if (allocation->bytes > race_bytes) {
    return;
  }
  if (allocation->cells.empty()) {
    allocation->cells.resize(allocation->bytes);
  }
  const Stamp now(
      launch_serial, epoch, current->warp_epoch, access == Access::Atomic,
      block_number * block_threads + current->index);
  for (size_t i = offset; i < offset + size; ++i) {
    if (const unsigned int other = race(allocation->cells[i], access, now, true)) {
      fail_race(access, size, place(), other, pc);
    }
  }
}

// ---- blocks ----

void run_block() {
  ++block_serial;
  epoch = 0;
  left = waiting = 0;
  declared.clear();
  acquired.clear();
  ready.clear();
  threads.assign(block_threads, {});
  for (unsigned int i = 0; i < block_threads; ++i) {
    threads[i].index = i;
    threads[i].place = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
  }
  for (const unsigned int i : permutation(block_threads)) {
    ready.push_back(i);
  }
  while (left < block_threads) {
    if (ready.empty()) {
      fail("deadlock: " + situation());
    }
    const unsigned int next = ready.front();
    ready.pop_front();
    resume(threads[next]);
    if (!error.empty()) {
      return;
    }
  }
}

// The source line of an address in this library.
std::string line_of(void* pc) {
  Dl_info info;
  if (pc == nullptr || dladdr(pc, &info) == 0) {
    return "";
  }
  char command[600], line[600] = "";
  std::snprintf(
      command, sizeof(command), "addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
      static_cast<size_t>(static_cast<char*>(pc) - static_cast<char*>(info.dli_fbase)) - 1);
  if (FILE* pipe = popen(command, "r")) {
    if (std::fgets(line, sizeof(line), pipe) == nullptr) {
      line[0] = 0;
    }
    pclose(pipe);
  }
  std::string text(line, std::strcspn(line, " \n"));
  return text.empty() || text[0] == '?' ? "" : " at " + text;
}

void find_host_stack() {
  thread_local uintptr_t top = 0;
  if (top == 0) {
    pthread_attr_t attributes;
    void* low = nullptr;
    size_t size = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &low, &size);
    pthread_attr_destroy(&attributes);
    top = reinterpret_cast<uintptr_t>(low) + size;
  }
  host_low = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  host_high = top;
}

struct Start {
  GuardedAllocator allocator;
  Start() { c10::SetCPUAllocator(&allocator, 255); }
};
Start* const start = new Start;  // never destroyed: tensors outlive static objects

}  // namespace

// ---- what kernels call ----

uint3 thread_index() { return thread_place; }
uint3 block_index() { return block_place; }
dim3 block_extent() { return block_size; }
dim3 grid_extent() { return grid_size; }

bool mutated(int number) { return number == mutant; }

void entered(const char* name) {
  if (entered_serial != launch_serial || entered_last != name) {
    entered_serial = launch_serial;
    entered_last = name;
    ++launches[name];
  }
}

void fence() { current->fenced = true; }

void allow_dynamic_shared(size_t bytes) { shared_limit = std::max(shared_limit, bytes); }

int64_t block_limit(int64_t most) { return most_blocks > 0 ? std::min(most, most_blocks) : most; }

void fail_assertion(const char* condition, Site site) {
  fail("device-side assertion at " + at(site) + ": " + condition);
}

namespace {

// Whether it is new to the block.
bool declare(SharedVariable* variable) {
  if (std::find(declared.begin(), declared.end(), variable) != declared.end()) {
    return false;
  }
  declared.push_back(variable);
  size_t total = 0, fixed = 0;
  for (const SharedVariable* other : declared) {
    total += other->bytes;
    fixed += other == &dynamic_variable ? 0 : other->bytes;
  }
  if (fixed > (size_t(48) << 10) || total > shared_limit) {
    fail("more than " + std::to_string(fixed > (size_t(48) << 10) ? 48 : shared_limit >> 10) + " KiB of shared memory");
  }
  std::memset(reinterpret_cast<void*>(variable->begin), fill, variable->bytes);
  return true;
}

}  // namespace

void declare_shared(void* address, size_t size, const char* name, Site) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto [found, added] = shared_variables.try_emplace(begin, SharedVariable{begin, size, name, {}});
  if (added) {
    found->second.cells.resize(size);
  }
  declare(&found->second);
}

void* dynamic_shared(const char* name) {
  if (dynamic_variable.bytes == 0) {
    fail("dynamic shared memory " + std::string(name) + " of a launch without any: the third launch argument is 0");
  }
  dynamic_variable.name = name;
  declare(&dynamic_variable);
  return reinterpret_cast<void*>(dynamic_variable.begin);
}

void barrier(Site site) {
  if (!skipped.empty() && at(site) == skipped) {
    return;
  }
  if (left > 0) {
    current->site = site;
    current->state = State::AtBarrier;
    fail("barrier that not all threads reach: " + situation());
  }
  current->site = site;
  if (++waiting < block_threads) {
    wait(State::AtBarrier);
    return;
  }
  for (const Thread& t : threads) {
    if (&t != current && (t.site.line != site.line || std::strcmp(t.site.file, site.file) != 0)) {
      current->state = State::AtBarrier;
      fail("threads meet at different barriers: " + situation());
    }
  }
  waiting = 0;
  ++epoch;
  const unsigned int self = current->index;
  for (const unsigned int i : permutation(block_threads)) {
    if (i != self) {
      threads[i].state = State::Ready;
      ready.push_back(i);
    }
  }
  if (order != Order::Forward) {  // the last one to arrive need not be the first one to go on
    ready.push_back(self);
    wait(State::Ready);
  }
}

uint64_t collective(Site site, Op op, unsigned int mask, uint64_t value, int argument, int width) {
  Thread& self = *current;
  const unsigned int lane = self.index % 32, base = self.index - lane;
  self.site = site;
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.argument = argument;
  self.width = width;
  self.state = State::InWarp;
  if ((mask >> lane & 1) == 0) {
    fail(std::string(name_of(op)) + ": the mask lacks the calling lane " + std::to_string(lane) + ": " + situation());
  }
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fail(std::string(name_of(op)) + ": impossible width " + std::to_string(width));
  }
  bool complete = true;
  for (unsigned int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) == 0) {
      continue;
    }
    if (base + l >= threads.size()) {
      fail(std::string(name_of(op)) + ": the mask has lane " + std::to_string(l) + ", which the block lacks");
    }
    const Thread& t = threads[base + l];
    if (t.state == State::Left) {
      fail(std::string(name_of(op)) + " that not all lanes reach: " + situation());
    }
    if (t.state != State::InWarp) {
      complete = false;
    } else if (t.op != op || t.mask != mask || t.site.line != site.line) {
      fail("lanes of a warp meet at different exchanges: " + situation());
    }
  }
  if (!complete) {
    wait(State::InWarp);
    return self.value;
  }
  uint64_t results[32] = {};
  uint64_t votes = 0, largest = 0;
  for (unsigned int l = 0; l < 32; ++l) {
    const uint64_t value = (mask >> l & 1) != 0 ? threads[base + l].value : 0;
    votes |= value != 0 ? uint64_t(1) << l : 0;
    largest = std::max(largest, value);
  }
  for (unsigned int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) == 0) {
      continue;
    }
    const Thread& t = threads[base + l];
    const int i = static_cast<int>(l), start_of = i / t.width * t.width, end_of = start_of + t.width;
    int from = i;
    switch (op) {
      case Op::ShflIdx:
        from = start_of + (t.argument & (t.width - 1));
        break;
      case Op::ShflUp:
        from = i - t.argument < start_of ? i : i - t.argument;
        break;
      case Op::ShflDown:
        from = i + t.argument >= end_of ? i : i + t.argument;
        break;
      case Op::ShflXor:
        from = (i ^ t.argument) >= end_of ? i : i ^ t.argument;
        break;
      case Op::Ballot:
        results[l] = votes;
        continue;
      case Op::All:
        results[l] = votes == mask;
        continue;
      case Op::Any:
        results[l] = votes != 0;
        continue;
      case Op::Max:
        results[l] = largest;
        continue;
      case Op::Sync:
        continue;
    }
    if ((mask >> from & 1) == 0) {
      fail(std::string(name_of(op)) + ": lane " + std::to_string(l) + " reads from lane " + std::to_string(from) +
           ", which takes no part: " + situation());
    }
    results[l] = threads[base + from].value;
  }
  unsigned int passed = 0;  // shuffles and votes order no accesses to memory; __syncwarp does
  for (unsigned int l = 0; op == Op::Sync && l < 32; ++l) {
    passed = (mask >> l & 1) != 0 ? std::max(passed, threads[base + l].warp_epoch + 1) : passed;
  }
  for (unsigned int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) == 0) {
      continue;
    }
    Thread& t = threads[base + l];
    t.warp_epoch = std::max(t.warp_epoch, passed);
    t.value = results[l];
    t.state = State::Ready;
    if (&t != &self) {
      ready.push_back(t.index);
    }
  }
  return self.value;
}

void atomic_access(void* address, size_t size) {
  if (!active) {
    return;
  }
  touch(address, size, Access::Atomic, true, __builtin_return_address(0));
  std::set<uint64_t>& known = published[reinterpret_cast<uintptr_t>(address)];
  acquired.insert(known.begin(), known.end());
  if (current->fenced) {
    known.insert(block_number);
    known.insert(acquired.begin(), acquired.end());
  }
}

void run_grid(
    const char* name, Site site, dim3 grid, dim3 block, size_t dynamic_shared, void (*body)(void*), void* closure) {
  const std::lock_guard lock(launch_mutex);
  kernel = name;
  launch_site = site;
  const std::string shape = "<<<" + triple(grid.x, grid.y, grid.z) + ", " + triple(block.x, block.y, block.z) + ">>>";
  const auto impossible = [&](const std::string& why) {
    throw std::runtime_error("emulated " + std::string(name) + shape + " launched at " + at(site) + ": " + why);
  };
  const uint64_t per_block = uint64_t(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 ||
      per_block == 0 || per_block > 1024 || block.z > 64) {
    impossible("a grid of this size cannot be launched");
  }
  if (dynamic_shared > shared_limit) {
    impossible(std::to_string(dynamic_shared) + " bytes of dynamic shared memory, " + std::to_string(shared_limit) +
               " are allowed; cudaFuncSetAttribute asks for more");
  }
  if (guards <= 0) {
    impossible("no CUDAGuard: the kernel runs on whatever device is current");
  }
  find_host_stack();
  grid_size = grid;
  block_size = block;
  block_threads = static_cast<unsigned int>(per_block);
  kernel_body = body;
  kernel_closure = closure;
  ++launch_serial;
  error.clear();
  const auto blocks = static_cast<unsigned int>(uint64_t(grid.x) * grid.y * grid.z);
  published.clear();
  if (dynamic_shared > 0) {  // between guard zones, where static variables have theirs
    dynamic_memory.reset(new char[dynamic_shared + 256]);
    dynamic_variable.begin = (reinterpret_cast<uintptr_t>(dynamic_memory.get()) + 127) / 64 * 64;
    dynamic_variable.cells.assign(dynamic_shared, {});
  }
  dynamic_variable.bytes = dynamic_shared;
  for (const unsigned int b : permutation(blocks)) {
    block_number = b;
    block_place = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    try {
      run_block();
    } catch (const std::runtime_error&) {  // a deadlock, found by the scheduler
      current = nullptr;
    }
    if (!error.empty()) {
      const std::string who = current == nullptr
          ? " block " + triple(block_place.x, block_place.y, block_place.z)
          : " block " + triple(block_place.x, block_place.y, block_place.z) + " thread " +
              triple(thread_place.x, thread_place.y, thread_place.z);
      for (Thread& t : threads) {  // what they hold is lost; their stacks are not used again
        if (t.fiber != nullptr) {
          munmap(t.fiber->memory, kStack);
          delete t.fiber;
        }
      }
      threads.clear();
      impossible(error + line_of(error_at) + ";" + who);
    }
  }
}

// Those of PyTorch's C functions that the sources call and that a PyTorch without CUDA lacks.
extern "C" {
AOTITorchError aoti_torch_create_cuda_guard(int32_t, CUDAGuardHandle* guard) {
  *guard = nullptr;
  ++guards;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle) {
  --guards;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_cuda_addmm_out(
    AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle a, AtenTensorHandle b, double beta, double alpha) {
  return aoti_torch_cpu_addmm_out(out, self, a, b, beta, alpha);
}
}

}  // namespace emu

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

// `order`: forward, reverse or random[:seed], in which order threads and blocks run; `fill`: the byte that fills new
// tensors; `blocks`: the most blocks of a grid whose threads stride, or 0; `races`: bytes of a tensor up to which races are
// looked for.
EMU_EXPORT void emu_configure(const char* order, int fill, int64_t blocks, int64_t races) {
  emu::set_order(order);
  emu::fill = fill;
  emu::most_blocks = blocks;
  emu::race_bytes = static_cast<size_t>(races);
}

// Deliberate mistakes: the barrier at `barrier`, FILE:LINE, is left out, and the mutant of this number is switched on.
EMU_EXPORT void emu_break(const char* barrier, int mutant) {
  emu::skipped = barrier;
  emu::mutant = mutant;
}

// "kernel launches" in lines, since the process began.
EMU_EXPORT const char* emu_launches() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : emu::launches) {
    text += name + " " + std::to_string(count) + "\n";
  }
  return text.c_str();
}

// ---- what -fsanitize=alignment calls ----

namespace emu {
namespace {

struct Misaligned {
  const char* file;
  uint32_t line, column;
  struct {
    uint16_t kind, info;
    char name[1];
  } const* type;
  unsigned char log_alignment, kind;
};

}  // namespace

void misaligned(const Misaligned& what, uintptr_t address) {
  if (!active) {
    return;
  }
  const uintptr_t alignment = uintptr_t(1) << what.log_alignment;
  fail("misaligned: " + std::string(what.kind == 0 ? "reads " : what.kind == 1 ? "writes " : "refers to ") + what.type->name +
       " at an address that is " + std::to_string(address % alignment) + " past a multiple of " +
       std::to_string(alignment) + " at " + at({what.file, static_cast<int>(what.line)}));
}

}  // namespace emu

extern "C" void __ubsan_handle_type_mismatch_v1(void* data, void* address) {
  emu::misaligned(*static_cast<const emu::Misaligned*>(data), reinterpret_cast<uintptr_t>(address));
}

// ---- what -fsanitize=thread calls ----

#define EMU_TOUCH(p, size, access, aligned)                                               \
  if (emu::active) {                                                                      \
    emu::touch(p, size, emu::Access::access, aligned, __builtin_return_address(0));       \
  }
// The compiler calls an access unaligned where its type is aligned to less than its size: a struct of two floats.
#define EMU_SIZED(n)                                                               \
  void __tsan_read##n(void* p) { EMU_TOUCH(p, n, Read, true) }                     \
  void __tsan_write##n(void* p) { EMU_TOUCH(p, n, Write, true) }                   \
  void __tsan_unaligned_read##n(void* p) { EMU_TOUCH(p, n, Read, false) }          \
  void __tsan_unaligned_write##n(void* p) { EMU_TOUCH(p, n, Write, false) }

// The host's reference counts.
#define EMU_ATOMIC(bits, T)                                                                                            \
  T __tsan_atomic##bits##_load(const volatile T* a, int) { return __atomic_load_n(a, __ATOMIC_SEQ_CST); }              \
  void __tsan_atomic##bits##_store(volatile T* a, T v, int) { __atomic_store_n(a, v, __ATOMIC_SEQ_CST); }              \
  T __tsan_atomic##bits##_exchange(volatile T* a, T v, int) { return __atomic_exchange_n(a, v, __ATOMIC_SEQ_CST); }    \
  T __tsan_atomic##bits##_fetch_add(volatile T* a, T v, int) { return __atomic_fetch_add(a, v, __ATOMIC_SEQ_CST); }    \
  T __tsan_atomic##bits##_fetch_sub(volatile T* a, T v, int) { return __atomic_fetch_sub(a, v, __ATOMIC_SEQ_CST); }    \
  T __tsan_atomic##bits##_fetch_and(volatile T* a, T v, int) { return __atomic_fetch_and(a, v, __ATOMIC_SEQ_CST); }    \
  T __tsan_atomic##bits##_fetch_or(volatile T* a, T v, int) { return __atomic_fetch_or(a, v, __ATOMIC_SEQ_CST); }      \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* a, T* e, T v, int, int) {                              \
    return __atomic_compare_exchange_n(a, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                            \
  }                                                                                                                    \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* a, T* e, T v, int, int) {                                \
    return __atomic_compare_exchange_n(a, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                            \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
EMU_SIZED(1)
EMU_SIZED(2)
EMU_SIZED(4)
EMU_SIZED(8)
EMU_SIZED(16)
void __tsan_read_range(void* p, size_t n) { EMU_TOUCH(p, n, Read, false) }
void __tsan_write_range(void* p, size_t n) { EMU_TOUCH(p, n, Write, false) }
EMU_ATOMIC(8, std::uint8_t)
EMU_ATOMIC(32, std::uint32_t)
EMU_ATOMIC(64, std::uint64_t)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
}
