// The CUDA runtime without a GPU: what PyTorch's dispatcher, allocator, streams and events see of one NVIDIA H100.
//
// Memory is host memory that is mapped lazily, so 80 GB cost nothing until they are touched. Kernels do not run; events
// tell how many were launched between them, at 10 us each. Copies above 1 MiB move nothing. What is not defined here or
// in graphs.c, cublas.c and cudnn.c returns 0 (see build.py).
//
//   FAKE_GPU_DEVICES     how many GPUs (1)
//   FAKE_GPU_BYTES       memory of each (80 GiB)
//   FAKE_GPU_CAPABILITY  its compute capability, as 90 for 9.0 (90)
//   FAKE_GPU_BEHIND      no event has been reached that the host has not waited for
//   FAKE_GPU_TRACE       a line on stderr for every event and launch, with its device, for every copy that moves nothing,
//                        and at the end for cuDNN's descriptors

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake_gpu.h"

enum { MAX_BLOCKS = 200000, MAX_DEVICES = 16 };

long fake_gpu_launches = 0;  // with cublas.c's products and cudnn.c's convolutions
long fake_gpu_mallocs = 0;  // blocks that the driver was asked for
static __thread int current = 0;

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? strtol(text, NULL, 10) : otherwise;
}

static size_t total_bytes(void) { return (size_t)setting("FAKE_GPU_BYTES", 80L << 30); }

static void trace(const char* what) {
  if (getenv("FAKE_GPU_TRACE")) {
    fprintf(stderr, "fake_gpu: %s device=%d\n", what, current);
  }
}

// Memory

typedef struct {
  char* start;
  size_t bytes;
  enum cudaMemoryType type;
  int device;
} Block;

static Block blocks[MAX_BLOCKS];
static int block_count = 0;
static size_t used[MAX_DEVICES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t allocate(void** out, size_t bytes, enum cudaMemoryType type) {
  pthread_mutex_lock(&mutex);
  const size_t mapped = bytes ? bytes : 4096;
  const int device = type == cudaMemoryTypeDevice;
  cudaError_t error = cudaErrorMemoryAllocation;
  if (!(device && used[current] + mapped > total_bytes()) && block_count < MAX_BLOCKS) {
    void* start = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED) {
      used[current] += device ? mapped : 0;
      blocks[block_count++] = (Block){start, mapped, type, current};
      *out = start;
      error = cudaSuccess;
    }
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

static Block* block_of(const void* address) {  // the mutex is held
  for (int i = block_count - 1; i >= 0; --i) {
    const char* start = blocks[i].start;
    if (start && (const char*)address >= start && (const char*)address < start + blocks[i].bytes) {
      return &blocks[i];
    }
  }
  return NULL;
}

static cudaError_t release(void* address) {
  pthread_mutex_lock(&mutex);
  Block* block = address ? block_of(address) : NULL;
  if (block) {
    munmap(block->start, block->bytes);
    used[block->device] -= block->type == cudaMemoryTypeDevice ? block->bytes : 0;
    block->start = NULL;
    while (block_count && !blocks[block_count - 1].start) {
      --block_count;
    }
  }
  pthread_mutex_unlock(&mutex);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** out, size_t bytes) {
  const cudaError_t error = fake_gpu_unless_captured();
  fake_gpu_mallocs += !error;
  return error ? error : allocate(out, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaFree(void* address) {
  const cudaError_t error = fake_gpu_unless_captured();
  return error ? error : release(address);
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags) {
  const cudaError_t error = fake_gpu_unless_captured();
  return error ? error : allocate(out, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* address) { return release(address); }

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = total_bytes();
  *free_bytes = *total - used[current];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* found, const void* address) {
  memset(found, 0, sizeof(*found));
  pthread_mutex_lock(&mutex);
  const Block* block = block_of(address);
  found->type = block ? block->type : cudaMemoryTypeUnregistered;
  if (block) {
    found->device = block->device;
    found->devicePointer = (void*)address;
    found->hostPointer = block->type == cudaMemoryTypeHost ? (void*)address : NULL;
  }
  pthread_mutex_unlock(&mutex);
  return cudaSuccess;
}

static const char* place(const void* address) {
  struct cudaPointerAttributes found;
  cudaPointerGetAttributes(&found, address);
  return found.type == cudaMemoryTypeDevice ? "device" : found.type == cudaMemoryTypeHost ? "pinned" : "pageable";
}

void fake_gpu_move(Work work) {
  if (work.from && work.bytes <= SMALL_COPY) {
    memmove(work.to, work.from, work.bytes);
  } else if (work.from && getenv("FAKE_GPU_TRACE")) {
    fprintf(stderr, "fake_gpu: copy bytes=%zu from=%s to=%s\n", work.bytes, place(work.from), place(work.to));
  } else if (work.bytes && work.bytes <= SMALL_COPY) {
    memset(work.to, work.value, work.bytes);
  }
}

static cudaError_t copied(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  return fake_gpu_launch((Work){to, from, bytes, 0}, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
  const cudaError_t error = fake_gpu_unless_captured();
  return error ? error : copied(to, from, bytes, NULL);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copied(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int device, const void* from, int other, size_t bytes, cudaStream_t stream) {
  return copied(to, from, bytes, stream);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fake_gpu_launch((Work){to, NULL, bytes, value}, NULL);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fake_gpu_launch((Work){to, NULL, bytes, value}, stream);
}

// Devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = (int)setting("FAKE_GPU_DEVICES", 1);
  return *count <= MAX_DEVICES ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int other) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, (size_t)length, "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof(*found));
  strcpy(found->name, "NVIDIA H100 80GB HBM3");
  found->totalGlobalMem = total_bytes();
  found->major = (int)setting("FAKE_GPU_CAPABILITY", 90) / 10;
  found->minor = (int)setting("FAKE_GPU_CAPABILITY", 90) % 10;
  found->multiProcessorCount = 132;
  found->l2CacheSize = 50 << 20;
  found->memoryBusWidth = 5120;
  found->totalConstMem = 65536;
  found->textureAlignment = 512;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp known;
  cudaGetDeviceProperties(&known, device);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = known.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = known.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = known.minor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = known.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = known.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)known.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)known.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = known.regsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = known.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = known.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *value = known.warpSize; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

// Streams and events

static cudaError_t new_stream(cudaStream_t* stream) {
  static long next = 0x1000;
  *stream = (cudaStream_t)__sync_add_and_fetch(&next, 16);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) { return new_stream(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

typedef struct {
  long launches;
  long number;  // in the order in which events were recorded; 0: not yet
  cudaStream_t stream;
} Event;

// How far the host has waited, for each stream that it has waited for, and for all: numbers of events.
static struct {
  cudaStream_t stream;
  long number;
} waited[64];
static long events_recorded = 0, waited_for_all = 0;

static void wait_until(cudaStream_t stream, long number) {
  pthread_mutex_lock(&mutex);
  int i = 0;
  while (i < 63 && waited[i].number && waited[i].stream != stream) {
    ++i;
  }
  waited[i].stream = stream;
  waited[i].number = number > waited[i].number ? number : waited[i].number;
  pthread_mutex_unlock(&mutex);
}

void fake_gpu_wait(cudaStream_t stream) { wait_until(stream, events_recorded); }
void fake_gpu_wait_for_all(void) { waited_for_all = events_recorded; }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Event* asked = (Event*)event;
  if (!getenv("FAKE_GPU_BEHIND") || asked->number <= waited_for_all) {
    return cudaSuccess;
  }
  for (int i = 0; i < 64 && waited[i].number; ++i) {
    if (waited[i].stream == asked->stream && asked->number <= waited[i].number) {
      return cudaSuccess;
    }
  }
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  wait_until(((Event*)event)->stream, ((Event*)event)->number);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = (cudaEvent_t)calloc(1, sizeof(Event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *(Event*)event = (Event){fake_gpu_launches, __sync_add_and_fetch(&events_recorded, 1), stream};
  trace("event");
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = (float)(((Event*)to)->launches - ((Event*)from)->launches) * 0.01f + 0.001f;
  return cudaSuccess;
}

// Kernels

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  trace("launch");
  const long threads = (long)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024 || shared > 232448) {
    fprintf(
        stderr, "fake_gpu: no GPU launches a grid of %u x %u x %u blocks of %u x %u x %u threads\n", grid.x, grid.y, grid.z,
        block.x, block.y, block.z);
    return cudaErrorInvalidConfiguration;
  }
  return fake_gpu_launch((Work){0}, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  return cudaLaunchKernel(
      kernel, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* found, const void* kernel) {
  memset(found, 0, sizeof(*found));
  found->maxThreadsPerBlock = 1024;
  found->ptxVersion = found->binaryVersion = 90;
  found->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks_found, const void* kernel, int threads, size_t shared, unsigned flags) {
  *blocks_found = 2048 / (threads ? threads : 1);
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  static char constants[1 << 20];
  *address = constants;
  return cudaSuccess;
}

// Others

const char* cudaGetErrorString(cudaError_t error) { return "an error of the fake GPU"; }
const char* cudaGetErrorName(cudaError_t error) { return "fakeGpuError"; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* result) {
  *function = NULL;
  if (result) {
    *result = cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
