// What the parts of the fake GPU know of each other.

#pragma once

#include <cuda_runtime_api.h>

extern long fake_gpu_launches;  // kernels, products, copies and fills that the host has launched one by one

enum { SMALL_COPY = 1 << 20 };  // larger copies and fills move nothing

// A kernel (`bytes` is 0), a copy, or a fill with `value` (`from` is NULL).
typedef struct {
  void* to;
  const void* from;
  size_t bytes;
  int value;
} Work;

cudaError_t fake_gpu_launch(Work work, cudaStream_t stream);  // done now, or recorded if the stream is captured
cudaError_t fake_gpu_launch_product(void);                     // likewise, on whatever stream the thread captures
cudaError_t fake_gpu_unless_captured(void);                    // an error where this thread may not make such a call
void fake_gpu_move(Work work);
void fake_gpu_wait(cudaStream_t stream);  // the host has waited for it
void fake_gpu_wait_for_all(void);
