// What every CUDA file needs: the types, the launch, the loop.

#pragma once

#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

#include "../checks.h"

namespace monet_like {

template <typename T>
using op_type = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int kThreads = 256;

// Enough blocks to fill any GPU; kernels stride over what is left.
inline unsigned int blocks_for(int64_t threads_wanted) {
  return static_cast<unsigned int>(std::clamp<int64_t>((threads_wanted + kThreads - 1) / kThreads, 1, 1 << 16));
}

#define MONET_GRID_STRIDE(i, n)                                                              \
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < (n);     \
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)

}  // namespace monet_like
