#pragma once
#include "cuda_emulator.h"

using cudaStream_t = void*;
namespace c10::cuda {
struct CUDAStream {
  operator cudaStream_t() const { return nullptr; }
  cudaStream_t stream() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream(signed char = -1) { return {}; }
}  // namespace c10::cuda
namespace at::cuda {
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;
}  // namespace at::cuda
