#pragma once
#include <torch/headeronly/macros/Macros.h>

#include "cuda_emulator.h"

using cudaStream_t = void*;

// PyTorch's aborts the process on the CPU.
#undef CUDA_KERNEL_ASSERT
#define CUDA_KERNEL_ASSERT(condition) \
  static_cast<void>((condition) || (::emu::fail_assertion(#condition, EMU_HERE), true))
