#pragma once
#include "c10/cuda/CUDAException.h"

namespace c10::cuda {
inline signed char current_device() { return 0; }
}  // namespace c10::cuda
