// The arena in front of PyTorch's caching allocator of CUDA memory, to which all else is passed on.
//
// The class must pass on every function of its base class. monet_like/build.py compares the two, and leaves this library out where
// PyTorch's header has a function that is not here; those that not all versions have are named in MONET_LIKE_HAS_....

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "arena.h"

namespace monet_like::arena {
namespace {

using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;
using namespace c10::cuda::CUDACachingAllocator;

CUDAAllocator* before = nullptr;

Stream stream_of(DeviceIndex device) { return c10::cuda::getCurrentCUDAStream(device).stream(); }

// What other streams do with a freed part comes before what the arena's stream does next, in which the part is taken anew.
void wait_for(const Freed& freed) {
  if (freed.others.empty()) return;
  const c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(freed.device));
  for (const Stream other : freed.others) {
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    C10_CUDA_CHECK(cudaEventRecord(event, static_cast<cudaStream_t>(other)));
    C10_CUDA_CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(freed.stream), event, 0));
    C10_CUDA_CHECK(cudaEventDestroy(event));
  }
}

void release(void* at) {
  if (const std::optional<Freed> freed = Arenas::all().free(at)) {
    wait_for(*freed);
  } else {
    before->raw_deallocate(at);
  }
}

class CudaAllocator final : public CUDAAllocator {
 public:
  DataPtr allocate(size_t size) override {
    if (static_cast<int64_t>(size) < kLeastBytes || !Arenas::all().may_place() ||
        c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
      return before->allocate(size);
    }
    const DeviceIndex device = c10::cuda::current_device();
    return arena::allocate(size, stream_of(device), c10::Device(c10::DeviceType::CUDA, device), *before, &release);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void recordStream(const DataPtr& ptr, c10::cuda::CUDAStream stream) override {
    if (ptr.get_deleter() != &release) {
      before->recordStream(ptr, stream);
    } else if (!Arenas::all().use_on(ptr.get_context(), stream.stream())) {
      DataPtr theirs(ptr.get_context(), ptr.get_context(), before->raw_deleter(), ptr.device());
      before->recordStream(theirs, stream);
      theirs.release_context();
    }
  }

  void* getBaseAllocation(void* ptr, size_t* size) override {
    void* start = Arenas::all().start_of(ptr);
    return before->getBaseAllocation(start != nullptr ? start : ptr, size);
  }

  ShareableHandle shareIpcHandle(void* ptr) override {
    TORCH_CHECK(Arenas::all().start_of(ptr) == nullptr,
                "this tensor lies in the arena of a training step and cannot be shared with other processes; share a clone");
    return before->shareIpcHandle(ptr);
  }

  // All else is PyTorch's.
  bool initialized() override { return before->initialized(); }
  void emptyCache(MempoolId_t pool) override { before->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return before->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override { before->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { before->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return before->getMemoryInfo(device); }
  void copy_data(void* to, const void* from, size_t bytes) const override { before->copy_data(to, from, bytes); }
  void* raw_alloc(size_t bytes) override { return before->raw_alloc(bytes); }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return before->raw_alloc_with_stream(bytes, stream);
  }
  void raw_delete(void* ptr) override { before->raw_delete(ptr); }
  void init(int devices) override { before->init(devices); }
  double getMemoryFraction(DeviceIndex device) override { return before->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override { before->setMemoryFraction(fraction, device); }
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return before->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { before->enable(value); }
  bool isEnabled() const override { return before->isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest) override { before->cacheInfo(device, largest); }
  SnapshotInfo snapshot(MempoolId_t pool, bool traces) override { return before->snapshot(pool, traces); }
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    before->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override { before->endAllocateToPool(device, pool); }
  void releasePool(DeviceIndex device, MempoolId_t pool) override { before->releasePool(device, pool); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override { return before->getPoolUseCount(device, pool); }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, std::shared_ptr<CUDAAllocator> allocator) override {
    before->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override { before->setUseOnOOM(device, pool, use); }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override { before->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& live) override {
    return before->checkPoolLiveAllocations(device, pool, live);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return before->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return before->isHistoryEnabled(); }
  void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    before->recordHistory(enabled, recorder, most, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
    before->recordAnnotation(pairs);
  }
  void pushCompileContext(std::string& context) override { before->pushCompileContext(context); }
  void popCompileContext() override { before->popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { before->setUserMetadata(metadata); }
  std::string getUserMetadata() override { return before->getUserMetadata(); }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    before->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    before->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex other) override { before->enablePeerAccess(device, other); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
                          bool peer) override {
    return before->memcpyAsync(to, to_device, from, from_device, bytes, stream, peer);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return before->getCheckpointState(device, pool);
  }
  CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> state) override {
    return before->setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return before->name(); }
#ifdef MONET_LIKE_HAS_markCaptureBegin
  void markCaptureBegin(DeviceIndex device) override { before->markCaptureBegin(device); }
#endif
#ifdef MONET_LIKE_HAS_markCaptureEnd
  void markCaptureEnd(DeviceIndex device) override { before->markCaptureEnd(device); }
#endif
#ifdef MONET_LIKE_HAS_getContextForPointer
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* ptr) override {
    return before->getContextForPointer(ptr);
  }
#endif
#ifdef MONET_LIKE_HAS_supportsUserMetadata
  bool supportsUserMetadata() override { return before->supportsUserMetadata(); }
#endif
#ifdef MONET_LIKE_HAS_annotateMemory
  void annotateMemory(const void* ptr, const std::string& metadata) override { before->annotateMemory(ptr, metadata); }
#endif
#ifdef MONET_LIKE_HAS_attachOomRejectionObserver
  void attachOomRejectionObserver(OomRejectionObserver observer) override {
    before->attachOomRejectionObserver(std::move(observer));
  }
#endif
#ifdef MONET_LIKE_HAS_allocateWithAddress
  DataPtr allocateWithAddress(size_t size, void* at) override { return before->allocateWithAddress(size, at); }
#endif
};

}  // namespace
}  // namespace monet_like::arena

using namespace monet_like::arena;

MONET_LIKE_ARENA_FUNCTIONS

// Put the arena in front of PyTorch's allocator; once. 0: PyTorch's allocator cannot be stood in front of.
MONET_LIKE_EXPORT int arena_install() {
  if (before != nullptr) return 1;
  CUDAAllocator* const found = c10::cuda::CUDACachingAllocator::get();
  if (!found->initialized() || found->raw_deleter() == nullptr) return 0;
  before = found;
  static CudaAllocator* const allocator = new CudaAllocator;
  c10::cuda::CUDACachingAllocator::allocator.store(allocator);
  c10::SetAllocator(c10::DeviceType::CUDA, allocator);
  return 1;
}

// See `refill`. The block is for the current stream; what PyTorch's allocator holds unused is given back first.
MONET_LIKE_EXPORT int arena_fill(int64_t block, int device, int64_t bytes) {
  const auto index = static_cast<DeviceIndex>(device);
  return refill(block, bytes, stream_of(index), device, [&] {
    const c10::cuda::CUDAGuard guard(index);
    before->emptyCache({0, 0});
    return before->allocate(static_cast<size_t>(bytes));
  });
}

MONET_LIKE_EXPORT void arena_enter(int64_t plan, int64_t block, int device, int anew) {
  Arenas::all().enter(plan, block, stream_of(static_cast<DeviceIndex>(device)), anew != 0, device);
}
