// Stream capture and graphs without a GPU, as of one stream: what is launched on it while it is captured is recorded, and a
// graph's launch does the small copies and fills among it. What a thread must not do while it captures fails as on a card,
// with cudaErrorStreamCaptureUnsupported (900), and so does then the capture. Waits between streams join nothing.
//
//   fake_gpu_graph_launches  graphs that were launched
//   fake_gpu_recorded        work that was recorded
//   fake_gpu_forbidden       calls that a capture does not permit

#include <stdlib.h>
#include <string.h>

#include "fake_gpu.h"

long fake_gpu_graph_launches = 0, fake_gpu_recorded = 0, fake_gpu_forbidden = 0;

typedef struct {
  Work* work;
  size_t count;
} Graph;

// Of a thread, at most one at a time.
static __thread struct {
  cudaStream_t stream;
  enum cudaStreamCaptureStatus status;
  unsigned long long id;
  Graph* graph;
} capture;
static __thread enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

static int is_captured(cudaStream_t stream) {
  return capture.status != cudaStreamCaptureStatusNone && capture.stream == stream;
}

static cudaError_t forbidden(void) {
  ++fake_gpu_forbidden;
  capture.status = cudaStreamCaptureStatusInvalidated;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t fake_gpu_unless_captured(void) {
  return capture.status == cudaStreamCaptureStatusNone || mode == cudaStreamCaptureModeRelaxed ? cudaSuccess : forbidden();
}

cudaError_t fake_gpu_launch(Work work, cudaStream_t stream) {
  if (!is_captured(stream)) {
    ++fake_gpu_launches;
    fake_gpu_move(work);
    return cudaSuccess;
  }
  if (capture.status == cudaStreamCaptureStatusInvalidated) {
    return cudaErrorStreamCaptureInvalidated;
  }
  Graph* graph = capture.graph;
  graph->work = realloc(graph->work, (graph->count + 1) * sizeof(Work));
  graph->work[graph->count++] = work;
  ++fake_gpu_recorded;
  return cudaSuccess;
}

cudaError_t fake_gpu_launch_product(void) {
  return fake_gpu_launch((Work){0}, capture.status == cudaStreamCaptureStatusNone ? NULL : capture.stream);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* other) {
  const enum cudaStreamCaptureMode before = mode;
  mode = *other;
  *other = before;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode asked) {
  static unsigned long long next = 0;
  if (!stream || capture.status != cudaStreamCaptureStatusNone) {
    return forbidden();
  }
  capture.stream = stream;
  capture.status = cudaStreamCaptureStatusActive;
  capture.id = __sync_add_and_fetch(&next, 1);
  capture.graph = calloc(1, sizeof(Graph));
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const int valid = is_captured(stream) && capture.status == cudaStreamCaptureStatusActive;
  capture.status = cudaStreamCaptureStatusNone;
  *graph = valid ? (cudaGraph_t)capture.graph : NULL;
  return valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = is_captured(stream) ? capture.status : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(stream, status);
  const int active = *status == cudaStreamCaptureStatusActive;
  if (id) {
    *id = active ? capture.id : 0;
  }
  if (graph) {
    *graph = active ? (cudaGraph_t)capture.graph : NULL;
  }
  if (count) {
    *count = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  *count = ((Graph*)graph)->count;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  const Graph* from = (Graph*)graph;
  Graph* copy = calloc(1, sizeof(Graph));
  copy->count = from->count;
  copy->work = malloc(from->count * sizeof(Work) + 1);
  memcpy(copy->work, from->work, from->count * sizeof(Work));
  *made = (cudaGraphExec_t)copy;
  return cudaSuccess;
}
static cudaError_t destroyed(Graph* graph) {
  if (graph) {
    free(graph->work);
    free(graph);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return destroyed((Graph*)graph); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return destroyed((Graph*)graph); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (is_captured(stream)) {
    return forbidden();
  }
  ++fake_gpu_graph_launches;
  for (size_t i = 0; i < ((Graph*)graph)->count; ++i) {
    fake_gpu_move(((Graph*)graph)->work[i]);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  fake_gpu_wait_for_all();
  return fake_gpu_unless_captured();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  fake_gpu_wait(stream);
  return is_captured(stream) ? forbidden() : cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return is_captured(stream) ? forbidden() : cudaSuccess; }
