// cuBLAS without a GPU: handles exist, products do nothing. What is not defined here returns 0 (see build.py).

#include <stdlib.h>

#include "fake_gpu.h"

enum { HANDLE_BYTES = 64 };

static int made(void** out) {
  *out = calloc(1, HANDLE_BYTES);
  return 0;
}
static int freed(void* handle) {
  free(handle);
  return 0;
}

int cublasCreate_v2(void** handle) { return made(handle); }
int cublasLtMatmulDescCreate(void** description, int compute, int scale) { return made(description); }
int cublasLtMatmulPreferenceCreate(void** preference) { return made(preference); }
int cublasLtMatrixLayoutCreate(void** layout, int type, unsigned long rows, unsigned long columns, long pitch) {
  return made(layout);
}
int cublasLtMatmulDescDestroy(void* description) { return freed(description); }
int cublasLtMatmulPreferenceDestroy(void* preference) { return freed(preference); }
int cublasLtMatrixLayoutDestroy(void* layout) { return freed(layout); }
int cublasGetMathMode(void* handle, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetPointerMode_v2(void* handle, int* mode) {
  *mode = 0;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(
    void* handle, void* description, void* a, void* b, void* c, void* d, void* preference, int wanted, void* results,
    int* found) {
  *found = 1;
  return 0;
}
unsigned long cublasLtGetVersion(void) { return 130000; }

// What PyTorch's matrix products come down to: each is a launch.
#define PRODUCT(name) \
  int name(void) { return fake_gpu_launch_product() != cudaSuccess; }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasLtMatmul)
