// cuDNN's convolutions by named algorithms without a GPU: they check what they are given and compute nothing. All else
// of cuDNN is not faked (see build.py).
//
// A process reads through ctypes how often these functions were called, and what the latest convolution was given.

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "fake_gpu.h"

enum { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000 };
enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT };
enum { DESTROYED, HANDLE, DESCRIPTOR };

typedef struct {
  int kind, device;
} Handle;

// A descriptor of a tensor, of a weight or of a convolution. Its memory outlives it, so that a later use is seen.
typedef struct {
  int kind, type, format, size[4];           // of a tensor or weight
  int padding[2], stride[2], dilation[2], groups, math;  // of a convolution
} Description;


long fake_cudnn_created = 0, fake_cudnn_destroyed = 0, fake_cudnn_set = 0, fake_cudnn_asked = 0, fake_cudnn_runs = 0;

// Which of the three, algorithm, dtype, layout, math type, groups; stride, padding, dilation; sizes of x, weight and y;
// the device of the handle; bytes of the workspace.
__thread long fake_cudnn_latest[26];

__attribute__((destructor)) static void end(void) {
  if (getenv("FAKE_GPU_TRACE")) {
    fprintf(stderr, "fake_gpu: end created=%ld destroyed=%ld\n", fake_cudnn_created, fake_cudnn_destroyed);
  }
}

static int wrong(const char* what) {
  fprintf(stderr, "fake_gpu: cuDNN is given %s\n", what);
  return BAD_PARAM;
}

int cudnnCreate(Handle** out) {
  *out = calloc(1, sizeof(Handle));
  (*out)->kind = HANDLE;
  return cudaGetDevice(&(*out)->device);
}
int cudnnDestroy(Handle* handle) {
  handle->kind = DESTROYED;
  return SUCCESS;
}
int cudnnSetStream(Handle* handle, void* stream) { return handle->kind == HANDLE ? SUCCESS : wrong("no handle"); }

static int create(Description** out) {
  *out = calloc(1, sizeof(Description));
  (*out)->kind = DESCRIPTOR;
  __sync_add_and_fetch(&fake_cudnn_created, 1);
  return SUCCESS;
}
static int destroy(Description* it) {
  if (it->kind != DESCRIPTOR) {
    return wrong("a destroyed descriptor to destroy");
  }
  it->kind = DESTROYED;
  __sync_add_and_fetch(&fake_cudnn_destroyed, 1);
  return SUCCESS;
}
static int set(Description* it) {
  __sync_add_and_fetch(&fake_cudnn_set, 1);
  return it->kind == DESCRIPTOR ? SUCCESS : wrong("a destroyed descriptor to set");
}

int cudnnCreateTensorDescriptor(Description** out) { return create(out); }
int cudnnCreateFilterDescriptor(Description** out) { return create(out); }
int cudnnCreateConvolutionDescriptor(Description** out) { return create(out); }
int cudnnDestroyTensorDescriptor(Description* it) { return destroy(it); }
int cudnnDestroyFilterDescriptor(Description* it) { return destroy(it); }
int cudnnDestroyConvolutionDescriptor(Description* it) { return destroy(it); }

int cudnnSetTensor4dDescriptor(Description* it, int format, int type, int n, int c, int h, int w) {
  it->type = type, it->format = format;
  it->size[0] = n, it->size[1] = c, it->size[2] = h, it->size[3] = w;
  return set(it);
}
int cudnnSetFilter4dDescriptor(Description* it, int type, int format, int k, int c, int h, int w) {
  return cudnnSetTensor4dDescriptor(it, format, type, k, c, h, w);
}
int cudnnSetConvolution2dDescriptor(
    Description* it, int pad_h, int pad_w, int stride_h, int stride_w, int dilation_h, int dilation_w, int mode,
    int type) {
  it->type = type;
  it->padding[0] = pad_h, it->padding[1] = pad_w;
  it->stride[0] = stride_h, it->stride[1] = stride_w;
  it->dilation[0] = dilation_h, it->dilation[1] = dilation_w;
  return set(it);
}
int cudnnSetConvolutionGroupCount(Description* it, int groups) {
  it->groups = groups;
  return set(it);
}
int cudnnSetConvolutionMathType(Description* it, int math) {
  it->math = math;
  return set(it);
}

// Bytes of the workspace, which depend on the operator, the algorithm and x. As with cuDNN, FFT and Winograd refuse
// strides, here those of the height. The forward's GEMM is refused in float64 too, but not before it is to run.
static int workspace_of(
    const Handle* handle, const Description* x, const Description* weight, const Description* convolution,
    const Description* y, int which, int algorithm, size_t* bytes) {
  if (handle->kind != HANDLE) {
    return wrong("no handle");
  }
  if (x->kind != DESCRIPTOR || weight->kind != DESCRIPTOR || y->kind != DESCRIPTOR || convolution->kind != DESCRIPTOR) {
    return wrong("a destroyed descriptor");
  }
  if (convolution->stride[0] > 1 && algorithm >= 4) {
    return NOT_SUPPORTED;
  }
  *bytes = (size_t)algorithm * x->size[0] * x->size[1] * x->size[2] * x->size[3] + (algorithm ? which : 0);
  return SUCCESS;
}

static int run(
    const Handle* handle, const Description* x, const Description* weight, const Description* convolution,
    const Description* y, int which, int algorithm, const void* workspace, size_t bytes) {
  size_t needed = 0;
  const int status = workspace_of(handle, x, weight, convolution, y, which, algorithm, &needed);
  int device = 0;
  cudaGetDevice(&device);
  if (status) {
    return status;
  }
  if (bytes != needed || !workspace != !needed) {
    return wrong("another workspace than was asked for");
  }
  if (handle->device != device) {
    return wrong("the handle of another device");
  }
  if (which == FORWARD && algorithm == 2 && x->type == 1) {
    return NOT_SUPPORTED;
  }
  long* latest = fake_cudnn_latest;
  const int first[] = {which, algorithm, x->type, x->format, convolution->math, convolution->groups};
  for (int i = 0; i < 6; ++i) {
    *latest++ = first[i];
  }
  const int* pairs[] = {convolution->stride, convolution->padding, convolution->dilation};
  for (int i = 0; i < 6; ++i) {
    *latest++ = pairs[i / 2][i % 2];
  }
  const int* sizes[] = {x->size, weight->size, y->size};
  for (int i = 0; i < 12; ++i) {
    *latest++ = sizes[i / 4][i % 4];
  }
  *latest++ = handle->device;
  *latest++ = (long)bytes;
  __sync_add_and_fetch(&fake_cudnn_runs, 1);
  return fake_gpu_launch_product() == cudaSuccess ? SUCCESS : NOT_SUPPORTED;
}

static int asked(
    const Handle* handle, const Description* x, const Description* weight, const Description* convolution,
    const Description* y, int which, int algorithm, size_t* bytes) {
  __sync_add_and_fetch(&fake_cudnn_asked, 1);
  return workspace_of(handle, x, weight, convolution, y, which, algorithm, bytes);
}

int cudnnGetConvolutionForwardWorkspaceSize(
    Handle* handle, Description* x, Description* weight, Description* convolution, Description* y, int algorithm,
    size_t* bytes) {
  return asked(handle, x, weight, convolution, y, FORWARD, algorithm, bytes);
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(
    Handle* handle, Description* weight, Description* y, Description* convolution, Description* x, int algorithm,
    size_t* bytes) {
  return asked(handle, x, weight, convolution, y, BACKWARD_INPUT, algorithm, bytes);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(
    Handle* handle, Description* x, Description* y, Description* convolution, Description* weight, int algorithm,
    size_t* bytes) {
  return asked(handle, x, weight, convolution, y, BACKWARD_WEIGHT, algorithm, bytes);
}

int cudnnConvolutionForward(
    Handle* handle, void* one, Description* x, void* x_data, Description* weight, void* weight_data,
    Description* convolution, int algorithm, void* workspace, size_t bytes, void* zero, Description* y, void* y_data) {
  return run(handle, x, weight, convolution, y, FORWARD, algorithm, workspace, bytes);
}
int cudnnConvolutionBackwardData(
    Handle* handle, void* one, Description* weight, void* weight_data, Description* y, void* y_data,
    Description* convolution, int algorithm, void* workspace, size_t bytes, void* zero, Description* x, void* x_data) {
  return run(handle, x, weight, convolution, y, BACKWARD_INPUT, algorithm, workspace, bytes);
}
int cudnnConvolutionBackwardFilter(
    Handle* handle, void* one, Description* x, void* x_data, Description* y, void* y_data, Description* convolution,
    int algorithm, void* workspace, size_t bytes, void* zero, Description* weight, void* weight_data) {
  return run(handle, x, weight, convolution, y, BACKWARD_WEIGHT, algorithm, workspace, bytes);
}
