#pragma once
#include "c10/cuda/CUDAException.h"
#include "c10/cuda/CUDAFunctions.h"
#include "c10/cuda/CUDAStream.h"

namespace at::cuda {
inline const cudaDeviceProp* getCurrentDeviceProperties() {
  static const cudaDeviceProp device;
  return &device;
}
}  // namespace at::cuda
