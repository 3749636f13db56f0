// The gradient of max pooling that keeps one byte for each output.

#include "max_pool.h"

namespace monet_like::max_pool {
namespace {

// Adds in the order of the outputs and in the tensor's own precision, as ATen does: the sums are bit-equal. A cell
// outside the plane (a window wholly in the padding, or a corrupt offset) gets nothing.
//
// A plane of `elements` from `pooled` outputs, each of whose windows begins at its `start`.
template <typename T>
void scatter_plane(
    const T* __restrict grad, const uint8_t* __restrict offsets, T* __restrict out, int64_t pooled, uint64_t elements,
    const int64_t* __restrict start, const int64_t* __restrict distance) {
  for (int64_t i = 0; i < pooled; ++i) {
    const int64_t at = start[i] + distance[offsets[i]];
    if (static_cast<uint64_t>(at) < elements) {
      store(out[at], load(out[at]) + load(grad[i]));
    }
  }
}

// A channels-last image: `lanes` channels lie next to each other, of which [first, first + count) are done here;
// `distance` is in elements.
template <typename T>
void scatter_pixels(
    const T* __restrict grad, const uint8_t* __restrict offsets, T* __restrict out, const Window& window,
    const int64_t* __restrict distance, int64_t lanes, int64_t first, int64_t count) {
  const Window w = window;
  const uint64_t elements = static_cast<uint64_t>(w.in_h * w.in_w * lanes);
  int64_t pooled = 0;
  for (int64_t oh = 0; oh < w.out_h; ++oh) {
    int64_t start = (w.start_h(oh) * w.in_w + w.start_w(0)) * lanes;
    for (int64_t ow = 0; ow < w.out_w; ++ow, pooled += lanes, start += w.stride_w * lanes) {
      for (int64_t c = first; c < first + count; ++c) {
        const int64_t at = start + distance[offsets[pooled + c]] + c;
        if (static_cast<uint64_t>(at) < elements) {
          store(out[at], load(out[at]) + load(grad[pooled + c]));
        }
      }
    }
  }
}

// One input pixel of a channels-last image: the sum of the gradients of the windows [oh, end_h) x [ow, end_w) around it
// that have their maximum there, in the order of the outputs, so that the sum has the bits of scatter_pixels.
template <int Count, typename T, typename O>
MONET_BODY void gather_pixel(
    const T* grad, const uint8_t* offsets, T* out, const Window& w, int64_t ih, int64_t iw, int64_t oh_first,
    int64_t oh_end, int64_t ow_first, int64_t ow_end, int64_t pitch, int64_t count) {
  constexpr int64_t kMost = Count == 0 ? 64 : Count;
  const int64_t n = Count == 0 ? count : Count;
  O sum[kMost];
  for (int64_t c = 0; c < n; ++c) {
    sum[c] = 0;
  }
  for (int64_t oh = oh_first; oh < oh_end; ++oh) {
    for (int64_t ow = ow_first; ow < ow_end; ++ow) {
      const auto here = static_cast<cell_type<O>>((ih - w.start_h(oh)) * w.kernel_w + iw - w.start_w(ow));
      const T* from = grad + (oh * w.out_w + ow) * pitch;
      const uint8_t* cells = offsets + (oh * w.out_w + ow) * pitch;
#pragma GCC ivdep
      for (int64_t c = 0; c < n; ++c) {
        const O more = as_stored<T>(sum[c] + load(from[c]));
        sum[c] = static_cast<cell_type<O>>(cells[c]) == here ? more : sum[c];
      }
    }
  }
#pragma GCC ivdep
  for (int64_t c = 0; c < n; ++c) {
    store(out[c], sum[c]);
  }
}

// Input rows [begin, end) of channels-last images, for windows without dilation, which all have a cell in the image.
template <typename T>
MONET_BODY void gather_rows_body(
    const T* grad, const uint8_t* offsets, T* out, const Window* window, int64_t channels, int64_t begin,
    int64_t end) {
  using O = op_type<T>;
  const Window w = *window;
  const auto first_of = [](int64_t i, int64_t pad, int64_t kernel, int64_t stride) {
    return i + pad < kernel ? 0 : (i + pad - kernel) / stride + 1;
  };
  for (int64_t row = begin; row < end; ++row) {
    const int64_t n = row / w.in_h, ih = row % w.in_h, image = n * w.out_h * w.out_w * channels;
    const int64_t oh_first = first_of(ih, w.pad_h, w.kernel_h, w.stride_h);
    const int64_t oh_end = std::min(w.out_h, (ih + w.pad_h) / w.stride_h + 1);
    for (int64_t iw = 0; iw < w.in_w; ++iw) {
      const int64_t ow_first = first_of(iw, w.pad_w, w.kernel_w, w.stride_w);
      const int64_t ow_end = std::min(w.out_w, (iw + w.pad_w) / w.stride_w + 1);
      T* to = out + (row * w.in_w + iw) * channels;
      for_channel_blocks(channels, [&](auto count, int64_t c, int64_t many) MONET_INLINE_LAMBDA {
        gather_pixel<decltype(count)::value, T, O>(
            grad + image + c, offsets + image + c, to + c, w, ih, iw, oh_first, oh_end, ow_first, ow_end, channels,
            many);
      });
    }
  }
}
MONET_FOR_EACH_ISA(gather_rows)

template <typename T>
void scatter(const T* grad, const uint8_t* offsets, T* out, const PoolArguments& pool, bool channels_last) {
  const Window& w = pool.window;
  const int64_t in_area = w.in_h * w.in_w, out_area = w.out_h * w.out_w;
  std::vector<int64_t> distance = cell_distances(w);
  if (!channels_last) {
    std::vector<int64_t> start(out_area);
    for (int64_t i = 0; i < out_area; ++i) {
      start[i] = w.start_h(i / w.out_w) * w.in_w + w.start_w(i % w.out_w);
    }
    parallel_for(0, pool.planes, grain_of(in_area), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        std::fill_n(out + p * in_area, in_area, T(0));
        scatter_plane(
            grad + p * out_area, offsets + p * out_area, out + p * in_area, out_area, in_area, start.data(),
            distance.data());
      }
    });
    return;
  }
  const int64_t C = pool.channels, threads = thread_count();
  // Windows that overlap little are gathered where channels fill vectors: each element is then written once.
  const int64_t around = (w.kernel_h + w.stride_h - 1) / w.stride_h * ((w.kernel_w + w.stride_w - 1) / w.stride_w);
  if (w.dilation_h == 1 && w.dilation_w == 1 && C >= 64 && around <= 9) {
    parallel_for(0, pool.batch * w.in_h, grain_of(w.in_w * C), [&](int64_t begin, int64_t end) {
      gather_rows(grad, offsets, out, static_cast<const Window*>(&w), C, begin, end);
    });
    return;
  }
  for (int64_t k = 0; k < w.kernel_h * w.kernel_w; ++k) {
    distance[k] *= C;
  }
  // Small batches are also split over channels; blocks of 16 keep two threads off one cache line, mostly.
  const int64_t wanted = pool.batch >= threads ? 1 : (threads + pool.batch - 1) / pool.batch;
  const int64_t block = std::max<int64_t>(16, (C + wanted - 1) / wanted);
  const int64_t blocks = (C + block - 1) / block;
  parallel_for(0, pool.batch * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / blocks, first = task % blocks * block, count = std::min(block, C - first);
      T* image = out + n * in_area * C;
      if (blocks == 1) {
        std::fill_n(image, in_area * C, T(0));
      } else {
        for (int64_t i = 0; i < in_area; ++i) {
          std::fill_n(image + i * C + first, count, T(0));
        }
      }
      scatter_pixels(
          grad + n * out_area * C, offsets + n * out_area * C, image, w, distance.data(), C, first, count);
    }
  });
}

}  // namespace

void scatter_loops(
    c10::ScalarType dtype, const void* grad, const uint8_t* offsets, void* out, const PoolArguments& pool,
    bool channels_last) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    scatter(static_cast<const T*>(grad), offsets, static_cast<T*>(out), pool, channels_last);
  });
}

}  // namespace monet_like::max_pool
