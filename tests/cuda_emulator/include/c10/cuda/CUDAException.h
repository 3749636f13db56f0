#pragma once
#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include "cuda_emulator.h"

#define C10_CUDA_CHECK(call)                                                                              \
  do {                                                                                                    \
    const cudaError_t emu_error = (call);                                                                 \
    TORCH_CHECK(emu_error == cudaSuccess, "emulated CUDA error: ", cudaGetErrorString(emu_error), " of " #call); \
  } while (0)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#define AT_CUDA_CHECK(call) C10_CUDA_CHECK(call)
// ATen's aborts the process on the CPU.
#undef CUDA_KERNEL_ASSERT
#define CUDA_KERNEL_ASSERT(condition) \
  static_cast<void>((condition) || (::emu::fail_assertion(#condition, EMU_HERE), true))
