// The loops of max pooling that keeps one byte for each output.

#include "max_pool.h"

#include <atomic>

namespace monet_like::max_pool {
namespace {

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

// One plane of a contiguous image, one output row at a time, vectorised along the row. Rows are short for AVX-512.
// Scratch: best[out_w], cell[out_w]; first_w[out_w] holds each window's first step inside the image.
template <int Step, typename O>
MONET_BODY void pool_plane_body(
    const O* in, O* y, uint8_t* offsets, const Window* window, O* best, cell_type<O>* cell,
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
      const O* row = in + (h0 + kh * w.dilation_h) * w.in_w;
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
MONET_FOR_AVX2(pool_plane)

// The same for short rows, one window after the other. A branch on the largest cell could not be predicted, so bits are
// selected without one.
template <typename O>
MONET_BODY void pool_windows_body(const O* in, O* y, uint8_t* offsets, const Window* window) {
  using I = cell_type<O>;
  const Window w = *window;
  for (int64_t oh = 0; oh < w.out_h; ++oh) {
    const int64_t h0 = w.start_h(oh), first_h = Window::first_step(h0, w.dilation_h);
    for (int64_t ow = 0; ow < w.out_w; ++ow) {
      const int64_t w0 = w.start_w(ow), first_w = Window::first_step(w0, w.dilation_w);
      O best = -std::numeric_limits<O>::infinity();
      I cell = static_cast<I>(first_h * w.kernel_w + first_w);
      for (int64_t kh = first_h; kh < w.kernel_h && h0 + kh * w.dilation_h < w.in_h; ++kh) {
        const O* row = in + (h0 + kh * w.dilation_h) * w.in_w + w0;
        for (int64_t kw = first_w; kw < w.kernel_w && w0 + kw * w.dilation_w < w.in_w; ++kw) {
          const O value = row[kw * w.dilation_w];
          const I take = -static_cast<I>((value > best) | (value != value));
          I old_bits, new_bits;
          std::memcpy(&old_bits, &best, sizeof(best));
          std::memcpy(&new_bits, &value, sizeof(value));
          old_bits ^= (old_bits ^ new_bits) & take;
          std::memcpy(&best, &old_bits, sizeof(best));
          cell ^= (cell ^ static_cast<I>(kh * w.kernel_w + kw)) & take;
        }
      }
      *y++ = best;
      *offsets++ = static_cast<uint8_t>(cell);
    }
  }
}
MONET_FOR_AVX2(pool_windows)

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

// n elements in the type of the computation: where they are, or copied to `scratch`.
template <typename T>
const op_type<T>* as_computed(const T* in, op_type<T>* scratch, int64_t n) {
  if constexpr (std::is_same_v<T, op_type<T>>) {
    return in;
  } else {
    widen(in, scratch, n);
    return scratch;
  }
}

template <typename T>
void pool_contiguous(const T* in, T* y, uint8_t* offsets, const PoolArguments& pool) {
  using O = op_type<T>;
  const Window& w = pool.window;
  const int64_t in_area = w.in_h * w.in_w, out_area = w.out_h * w.out_w;
  std::vector<cell_type<O>> first_w(w.out_w);
  for (int64_t ow = 0; ow < w.out_w; ++ow) {
    first_w[ow] = static_cast<cell_type<O>>(Window::first_step(w.start_w(ow), w.dilation_w));
  }
  parallel_for(0, pool.planes, grain_of(out_area), [&](int64_t begin, int64_t end) {
    std::vector<O> best(w.out_w);
    std::vector<cell_type<O>> cell(w.out_w);
    std::vector<O> wide_in(sizeof(T) == sizeof(O) ? 0 : in_area), wide_out(sizeof(T) == sizeof(O) ? 0 : out_area);
    for (int64_t p = begin; p < end; ++p) {
      const T* from = in + p * in_area;
      T* to = y + p * out_area;
      uint8_t* off = offsets + p * out_area;
      // 16-bit planes are computed in float32, in a copy.
      const O* plane = as_computed(from, wide_in.data(), in_area);
      O* out = sizeof(T) == sizeof(O) ? reinterpret_cast<O*>(to) : wide_out.data();
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
      if constexpr (sizeof(T) != sizeof(O)) {
        narrow(static_cast<const O*>(out), to, out_area);
      }
    }
  });
}

template <typename T>
void pool_channels_last(const T* in, T* y, uint8_t* offsets, const PoolArguments& pool) {
  const Window& w = pool.window;
  parallel_for(0, pool.batch * w.out_h * w.out_w, grain_of(pool.channels), [&](int64_t begin, int64_t end) {
    pool_pixels(in, y, offsets, &w, pool.channels, begin, end);
  });
}

// Calls f(position in memory, oh, ow) for every pooled element.
template <typename F>
void for_each_pooled(const PoolArguments& pool, bool channels_last, const F& f) {
  const Window& w = pool.window;
  const int64_t lanes = channels_last ? pool.channels : 1;
  const int64_t rows = (channels_last ? pool.batch : pool.planes) * w.out_h;
  parallel_for(0, rows, grain_of(w.out_w * lanes), [&](int64_t begin, int64_t end) {
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

}  // namespace

void pool_loops(
    c10::ScalarType dtype, const void* in, void* y, uint8_t* offsets, const PoolArguments& pool, bool channels_last) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = channels_last ? &pool_channels_last<T> : &pool_contiguous<T>;
    run(static_cast<const T*>(in), static_cast<T*>(y), offsets, pool);
  });
}

bool offsets_loops(const int64_t* from, uint8_t* to, const PoolArguments& pool, bool channels_last) {
  const Window& w = pool.window;
  std::atomic<bool> foreign{false};

  // A table from distance to cell spares the divisions. It needs different cells at different distances.
  const std::vector<int64_t> distance = cell_distances(w);
  const int64_t longest = distance[w.kernel_h * w.kernel_w - 1];
  if ((w.kernel_w - 1) * w.dilation_w < w.in_w && longest < (1 << 20)) {
    std::vector<int16_t> cell_at(longest + 1, -1);
    for (int64_t k = 0; k < w.kernel_h * w.kernel_w; ++k) {
      cell_at[distance[k]] = static_cast<int16_t>(k);
    }
    for_each_pooled(pool, channels_last, [&](int64_t i, int64_t oh, int64_t ow) {
      const int64_t d = from[i] - (w.start_h(oh) * w.in_w + w.start_w(ow));
      const int16_t cell = d >= 0 && d <= longest ? cell_at[d] : int16_t(-1);
      if (cell < 0) {
        foreign.store(true, std::memory_order_relaxed);
      }
      to[i] = static_cast<uint8_t>(cell);
    });
  } else {
    for_each_pooled(pool, channels_last, [&](int64_t i, int64_t oh, int64_t ow) {
      const int64_t cell = w.offset_of(oh, ow, from[i]);
      if (cell < 0) {
        foreign.store(true, std::memory_order_relaxed);
      }
      to[i] = static_cast<uint8_t>(cell);
    });
  }
  return !foreign.load();
}

void indices_loops(const uint8_t* from, int64_t* to, const PoolArguments& pool, bool channels_last) {
  const Window& w = pool.window;
  const std::vector<int64_t> distance = cell_distances(w);
  for_each_pooled(pool, channels_last, [&](int64_t i, int64_t oh, int64_t ow) {
    to[i] = w.start_h(oh) * w.in_w + w.start_w(ow) + distance[from[i]];
  });
}

}  // namespace monet_like::max_pool
