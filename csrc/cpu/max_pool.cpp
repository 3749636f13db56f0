// Max pooling on the CPU that keeps one byte for each output, where ATen keeps an int64 index.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <limits>
#include <tuple>

#include "../max_pool.h"
#include "isa.h"

// Attributes of a lambda that is compiled for the instruction set of the function around it.
#define MONET_INLINE_LAMBDA __attribute__((always_inline))

namespace monet_like {
namespace {

constexpr int64_t kGrain = 8192;  // fewer elements are not worth a thread

// Integers as wide as the compute type, so that value and cell are selected by one vector mask.
template <typename O>
using cell_type = std::conditional_t<sizeof(O) == 8, int64_t, int32_t>;

// Cells are visited in ATen's order with ATen's test: of equal maxima the first wins, of NaNs the last.
// Step 0 means "known only at run time"; 1 and 2 let the compiler use plain and interleaved vector loads.
template <int Step, typename T, typename O>
MONET_BODY void take_larger(const T* in, int64_t step, O* best, cell_type<O>* cell, int64_t n, cell_type<O> here) {
  const int64_t s = Step == 0 ? step : Step;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const O value = load(in[i * s]);
    const bool take = (value > best[i]) | (value != value);
    best[i] = take ? value : best[i];
    cell[i] = take ? here : cell[i];
  }
}

template <typename T, typename O>
MONET_BODY void finish(const O* best, const cell_type<O>* cell, T* y, uint8_t* offsets, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(y[i], best[i]);
    offsets[i] = static_cast<uint8_t>(cell[i]);
  }
}

// One plane of a contiguous image, one output row at a time, vectorised along the row.
// Scratch: best[out_w], cell[out_w]; first_w[out_w] holds each window's first step inside the image.
template <int Step, typename T, typename O>
MONET_BODY void pool_plane_body(
    const T* in, T* y, uint8_t* offsets, const Window* window, O* best, cell_type<O>* cell,
    const cell_type<O>* first_w) {
  const Window w = *window;
  for (int64_t oh = 0; oh < w.out_h; ++oh) {
    const int64_t h0 = w.start_h(oh), first_h = Window::first_step(h0, w.dilation_h);
    const auto first_row = static_cast<cell_type<O>>(first_h * w.kernel_w);
    for (int64_t i = 0; i < w.out_w; ++i) {
      best[i] = -std::numeric_limits<O>::infinity();
      cell[i] = first_row + first_w[i];
    }
    for (int64_t kh = first_h; kh < w.kernel_h && h0 + kh * w.dilation_h < w.in_h; ++kh) {
      const T* row = in + (h0 + kh * w.dilation_h) * w.in_w;
      for (int64_t kw = 0; kw < w.kernel_w; ++kw) {
        // Outputs whose cell (kh, kw) lies inside the image: 0 <= ow * stride + shift < in_w.
        const int64_t shift = kw * w.dilation_w - w.pad_w;
        const int64_t lo = shift >= 0 ? 0 : (-shift + w.stride_w - 1) / w.stride_w;
        const int64_t room = w.in_w - 1 - shift;
        const int64_t hi = room < 0 ? 0 : std::min(w.out_w, room / w.stride_w + 1);
        if (lo < hi) {
          take_larger<Step>(
              row + lo * w.stride_w + shift, w.stride_w, best + lo, cell + lo, hi - lo,
              static_cast<cell_type<O>>(kh * w.kernel_w + kw));
        }
      }
    }
    finish(best, cell, y + oh * w.out_w, offsets + oh * w.out_w, w.out_w);
  }
}
MONET_FOR_EACH_ISA(pool_plane)

// The same for short rows, one window after the other. A branch on the largest cell could not be predicted, so bits are
// selected without one.
template <typename T>
MONET_BODY void pool_windows_body(const T* in, T* y, uint8_t* offsets, const Window* window) {
  using O = op_type<T>;
  using I = cell_type<O>;
  const Window w = *window;
  for (int64_t oh = 0; oh < w.out_h; ++oh) {
    const int64_t h0 = w.start_h(oh), first_h = Window::first_step(h0, w.dilation_h);
    for (int64_t ow = 0; ow < w.out_w; ++ow) {
      const int64_t w0 = w.start_w(ow), first_w = Window::first_step(w0, w.dilation_w);
      O best = -std::numeric_limits<O>::infinity();
      I cell = static_cast<I>(first_h * w.kernel_w + first_w);
      for (int64_t kh = first_h; kh < w.kernel_h && h0 + kh * w.dilation_h < w.in_h; ++kh) {
        const T* row = in + (h0 + kh * w.dilation_h) * w.in_w + w0;
        for (int64_t kw = first_w; kw < w.kernel_w && w0 + kw * w.dilation_w < w.in_w; ++kw) {
          const O value = load(row[kw * w.dilation_w]);
          const I take = -static_cast<I>((value > best) | (value != value));
          I old_bits, new_bits;
          std::memcpy(&old_bits, &best, sizeof(best));
          std::memcpy(&new_bits, &value, sizeof(value));
          old_bits ^= (old_bits ^ new_bits) & take;
          std::memcpy(&best, &old_bits, sizeof(best));
          cell ^= (cell ^ static_cast<I>(kh * w.kernel_w + kw)) & take;
        }
      }
      store(*y++, best);
      *offsets++ = static_cast<uint8_t>(cell);
    }
  }
}
MONET_FOR_EACH_ISA(pool_windows)

// Calls f(size known when compiling or 0, first channel, number of channels) for blocks that cover all channels. The
// last block moves back to be whole: channels that two blocks share are done twice, which costs less than a remainder.
// Blocks are no smaller than 32, because loops of up to 16 are unrolled before they could be vectorised.
template <typename F>
MONET_BODY void for_channel_blocks(int64_t channels, const F& f) {
  if (channels < 32) {
    f(std::integral_constant<int, 0>{}, int64_t(0), channels);
    return;
  }
  int64_t c = 0;
  for (; c + 64 <= channels; c += 64) {
    f(std::integral_constant<int, 64>{}, c, int64_t(64));
  }
  for (; c < channels; c += 32) {
    f(std::integral_constant<int, 32>{}, std::min(c, channels - 32), int64_t(32));
  }
}

// One output pixel of a channels-last image, `count` channels from in[0] on. A count known when compiling (most
// channels, in blocks) gives loops without remainders over scratch that never leaves the first-level cache.
template <int Count, typename T, typename O>
MONET_BODY void pool_pixel(
    const T* in, T* y, uint8_t* offsets, const Window& w, int64_t h0, int64_t w0, int64_t pitch, int64_t count) {
  constexpr int64_t kMost = Count == 0 ? 64 : Count;
  const int64_t n = Count == 0 ? count : Count;
  O best[kMost];
  cell_type<O> cell[kMost];
  const int64_t first_h = Window::first_step(h0, w.dilation_h), first_w = Window::first_step(w0, w.dilation_w);
  const auto first = static_cast<cell_type<O>>(first_h * w.kernel_w + first_w);
  for (int64_t c = 0; c < n; ++c) {
    best[c] = -std::numeric_limits<O>::infinity();
    cell[c] = first;
  }
  for (int64_t kh = first_h; kh < w.kernel_h && h0 + kh * w.dilation_h < w.in_h; ++kh) {
    const T* row = in + (h0 + kh * w.dilation_h) * w.in_w * pitch;
    for (int64_t kw = first_w; kw < w.kernel_w && w0 + kw * w.dilation_w < w.in_w; ++kw) {
      const auto here = static_cast<cell_type<O>>(kh * w.kernel_w + kw);
      take_larger<1>(row + (w0 + kw * w.dilation_w) * pitch, 1, best, cell, n, here);
    }
  }
  finish(best, cell, y, offsets, n);
}

// Output pixels [begin, end) of a channels-last image, vectorised over channels.
template <typename T>
MONET_BODY void pool_pixels_body(
    const T* in, T* y, uint8_t* offsets, const Window* window, int64_t channels, int64_t begin, int64_t end) {
  using O = op_type<T>;
  const Window w = *window;
  for (int64_t pixel = begin; pixel < end; ++pixel) {
    const int64_t ow = pixel % w.out_w, oh = pixel / w.out_w % w.out_h, n = pixel / w.out_w / w.out_h;
    const int64_t h0 = w.start_h(oh), w0 = w.start_w(ow);
    const T* image = in + n * w.in_h * w.in_w * channels;
    T* to = y + pixel * channels;
    uint8_t* off = offsets + pixel * channels;
    for_channel_blocks(channels, [&](auto count, int64_t c, int64_t n) MONET_INLINE_LAMBDA {
      pool_pixel<decltype(count)::value, T, O>(image + c, to + c, off + c, w, h0, w0, channels, n);
    });
  }
}
MONET_FOR_EACH_ISA(pool_pixels)

int64_t grain_of(int64_t elements) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements));
}

template <typename T>
void pool_contiguous(const T* in, T* y, uint8_t* offsets, const PoolArguments& pool) {
  using O = op_type<T>;
  const Window& w = pool.window;
  std::vector<cell_type<O>> first_w(w.out_w);
  for (int64_t ow = 0; ow < w.out_w; ++ow) {
    first_w[ow] = static_cast<cell_type<O>>(Window::first_step(w.start_w(ow), w.dilation_w));
  }
  at::parallel_for(0, pool.planes, grain_of(w.out_h * w.out_w), [&](int64_t begin, int64_t end) {
    std::vector<O> best(w.out_w);
    std::vector<cell_type<O>> cell(w.out_w);
    for (int64_t p = begin; p < end; ++p) {
      const T* plane = in + p * w.in_h * w.in_w;
      T* out = y + p * w.out_h * w.out_w;
      uint8_t* off = offsets + p * w.out_h * w.out_w;
      const cell_type<O>* first = first_w.data();
      if (w.out_w <= 8) {
        pool_windows(plane, out, off, &w);
      } else if (w.stride_w == 1) {
        pool_plane<1>(plane, out, off, &w, best.data(), cell.data(), first);
      } else if (w.stride_w == 2) {
        pool_plane<2>(plane, out, off, &w, best.data(), cell.data(), first);
      } else {
        pool_plane<0>(plane, out, off, &w, best.data(), cell.data(), first);
      }
    }
  });
}

template <typename T>
void pool_channels_last(const T* in, T* y, uint8_t* offsets, const PoolArguments& pool) {
  const Window& w = pool.window;
  at::parallel_for(0, pool.batch * w.out_h * w.out_w, grain_of(pool.channels), [&](int64_t begin, int64_t end) {
    pool_pixels(in, y, offsets, &w, pool.channels, begin, end);
  });
}

std::tuple<at::Tensor, at::Tensor> max_pool2d_with_offsets(
    const at::Tensor& x, at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool ceil_mode) {
  const Pooling call = pooling_forward("max_pool2d_with_offsets", x, kernel, stride, padding, dilation, ceil_mode);
  if (call.out.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "max_pool2d_with_offsets", [&] {
      const auto run = call.channels_last ? &pool_channels_last<scalar_t> : &pool_contiguous<scalar_t>;
      run(call.in.const_data_ptr<scalar_t>(), call.out.mutable_data_ptr<scalar_t>(),
          call.cells.mutable_data_ptr<uint8_t>(), call.pool);
    });
  }
  return {call.out, call.cells};
}

// Distance in the input plane from a window's (unclipped) start to each of its cells; beyond the window: far outside.
std::vector<int64_t> cell_distances(const Window& w) {
  std::vector<int64_t> distance(256, std::numeric_limits<int64_t>::max() / 4);
  for (int64_t k = 0; k < w.kernel_h * w.kernel_w; ++k) {
    distance[k] = k / w.kernel_w * w.dilation_h * w.in_w + k % w.kernel_w * w.dilation_w;
  }
  return distance;
}

// Calls f(position in memory, oh, ow) for every pooled element.
template <typename F>
void for_each_pooled(const PoolArguments& pool, bool channels_last, const F& f) {
  const Window& w = pool.window;
  const int64_t lanes = channels_last ? pool.channels : 1;
  const int64_t rows = (channels_last ? pool.batch : pool.planes) * w.out_h;
  at::parallel_for(0, rows, grain_of(w.out_w * lanes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t oh = row % w.out_h;
      for (int64_t ow = 0; ow < w.out_w; ++ow) {
        const int64_t at = (row * w.out_w + ow) * lanes;
        for (int64_t c = 0; c < lanes; ++c) {
          f(at + c, oh, ow);
        }
      }
    }
  });
}

at::Tensor max_pool2d_offsets(
    const at::Tensor& indices, at::IntArrayRef input_size, at::IntArrayRef kernel, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation) {
  const char* op = "max_pool2d_offsets";
  const Pooling call =
      pooling_cells(op, indices, "indices", at::kLong, at::kByte, input_size, kernel, stride, padding, dilation);
  const Window& w = call.pool.window;
  const int64_t* from = call.in.const_data_ptr<int64_t>();
  uint8_t* to = call.out.mutable_data_ptr<uint8_t>();
  std::atomic<bool> foreign{false};

  // A table from distance to cell spares the divisions. It needs different cells at different distances.
  const std::vector<int64_t> distance = cell_distances(w);
  const int64_t longest = distance[w.kernel_h * w.kernel_w - 1];
  if ((w.kernel_w - 1) * w.dilation_w < w.in_w && longest < (1 << 20)) {
    std::vector<int16_t> cell_at(longest + 1, -1);
    for (int64_t k = 0; k < w.kernel_h * w.kernel_w; ++k) {
      cell_at[distance[k]] = static_cast<int16_t>(k);
    }
    for_each_pooled(call.pool, call.channels_last, [&](int64_t i, int64_t oh, int64_t ow) {
      const int64_t d = from[i] - (w.start_h(oh) * w.in_w + w.start_w(ow));
      const int16_t cell = d >= 0 && d <= longest ? cell_at[d] : int16_t(-1);
      if (cell < 0) {
        foreign.store(true, std::memory_order_relaxed);
      }
      to[i] = static_cast<uint8_t>(cell);
    });
  } else {
    for_each_pooled(call.pool, call.channels_last, [&](int64_t i, int64_t oh, int64_t ow) {
      const int64_t cell = w.offset_of(oh, ow, from[i]);
      if (cell < 0) {
        foreign.store(true, std::memory_order_relaxed);
      }
      to[i] = static_cast<uint8_t>(cell);
    });
  }
  TORCH_CHECK_VALUE(!foreign.load(), "monet_like::", op, ": an index lies outside its window; wrong window or indices");
  return call.out;
}

at::Tensor max_pool2d_offsets_to_indices(
    const at::Tensor& offsets, at::IntArrayRef input_size, at::IntArrayRef kernel, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation) {
  const Pooling call = pooling_cells(
      "max_pool2d_offsets_to_indices", offsets, "offsets", at::kByte, at::kLong, input_size, kernel, stride, padding,
      dilation);
  const Window& w = call.pool.window;
  const uint8_t* from = call.in.const_data_ptr<uint8_t>();
  int64_t* to = call.out.mutable_data_ptr<int64_t>();
  const std::vector<int64_t> distance = cell_distances(w);
  for_each_pooled(call.pool, call.channels_last, [&](int64_t i, int64_t oh, int64_t ow) {
    to[i] = w.start_h(oh) * w.in_w + w.start_w(ow) + distance[from[i]];
  });
  return call.out;
}

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
    at::parallel_for(0, pool.planes, grain_of(in_area), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        std::fill_n(out + p * in_area, in_area, T(0));
        scatter_plane(
            grad + p * out_area, offsets + p * out_area, out + p * in_area, out_area, in_area, start.data(),
            distance.data());
      }
    });
    return;
  }
  const int64_t C = pool.channels, threads = at::get_num_threads();
  // Windows that overlap little are gathered where channels fill vectors: each element is then written once.
  const int64_t around = (w.kernel_h + w.stride_h - 1) / w.stride_h * ((w.kernel_w + w.stride_w - 1) / w.stride_w);
  if (w.dilation_h == 1 && w.dilation_w == 1 && C >= 64 && around <= 9) {
    at::parallel_for(0, pool.batch * w.in_h, grain_of(w.in_w * C), [&](int64_t begin, int64_t end) {
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
  at::parallel_for(0, pool.batch * blocks, 1, [&](int64_t begin, int64_t end) {
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

at::Tensor max_pool2d_offsets_backward(
    const at::Tensor& grad, const at::Tensor& offsets, at::IntArrayRef input_size, at::IntArrayRef kernel,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  const Pooling call = pooling_backward(
      "max_pool2d_offsets_backward", grad, offsets, input_size, kernel, stride, padding, dilation);
  if (call.out.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "max_pool2d_offsets_backward", [&] {
      scatter(
          call.in.const_data_ptr<scalar_t>(), call.cells.const_data_ptr<uint8_t>(),
          call.out.mutable_data_ptr<scalar_t>(), call.pool, call.channels_last);
    });
  }
  return call.out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("max_pool2d_with_offsets", &max_pool2d_with_offsets);
  m.impl("max_pool2d_offsets", &max_pool2d_offsets);
  m.impl("max_pool2d_offsets_to_indices", &max_pool2d_offsets_to_indices);
  m.impl("max_pool2d_offsets_backward", &max_pool2d_offsets_backward);
}

}  // namespace monet_like
