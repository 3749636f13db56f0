// Max pooling on the GPU that remembers one byte per output instead of ATen's int64 index.
//
// A unit is pooled independently of all others: a plane, or with channels last an image whose pixels have `lanes` channels.
// Windows of 3 x 3 and 2 x 2 that move by two, those of nearly every network, have kernels of their own, in which a thread
// loads all that it needs before it uses the first element. All others take the general ones.

#include <limits>
#include <tuple>

#include "../max_pool.h"
#include "common.cuh"

namespace monet_like {
namespace {

// A window in 32 bits, and its divisors.
struct Geometry {
  int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int in_h, in_w, out_h, out_w, lanes;
  Divisor by_in_h, by_in_w, by_out_h, by_out_w, by_lanes, by_stride_h, by_stride_w, by_dilation_h, by_dilation_w,
      by_kernel_w;

  Geometry(const Window& w, int64_t many)
      : kernel_h(narrow(w.kernel_h)), kernel_w(narrow(w.kernel_w)), stride_h(narrow(w.stride_h)),
        stride_w(narrow(w.stride_w)), pad_h(narrow(w.pad_h)), pad_w(narrow(w.pad_w)), dilation_h(narrow(w.dilation_h)),
        dilation_w(narrow(w.dilation_w)), in_h(narrow(w.in_h)), in_w(narrow(w.in_w)), out_h(narrow(w.out_h)),
        out_w(narrow(w.out_w)), lanes(narrow(many)), by_in_h(in_h), by_in_w(in_w), by_out_h(out_h), by_out_w(out_w),
        by_lanes(lanes), by_stride_h(stride_h), by_stride_w(stride_w), by_dilation_h(dilation_h),
        by_dilation_w(dilation_w), by_kernel_w(kernel_w) {}

  MONET_HD int in_area() const { return in_h * in_w; }
  MONET_HD int out_area() const { return out_h * out_w; }

  static int narrow(int64_t n) {
    MONET_CHECK(
        n >= 0 && n < (int64_t(1) << 30), "monet_like: max pooling on a GPU takes extents below 2^30, got ", n);
    return static_cast<int>(n);
  }
};

// Element i of a pooled tensor, or of one that was pooled.
struct Place {
  int unit, h, w, lane;
};

__device__ __forceinline__ Place place_of(int i, const Divisor& by_h, const Divisor& by_w, const Divisor& by_lanes) {
  uint32_t lane = static_cast<uint32_t>(i), w = by_lanes.split(lane), h = by_w.split(w);
  const uint32_t unit = by_h.split(h);
  return {static_cast<int>(unit), static_cast<int>(h), static_cast<int>(w), static_cast<int>(lane)};
}

__device__ __forceinline__ Place pooled_place(int i, const Geometry& g) {
  return place_of(i, g.by_out_h, g.by_out_w, g.by_lanes);
}

// The same as Window::first_step.
__device__ __forceinline__ int first_step(int start, int dilation, const Divisor& by_dilation) {
  return start >= 0 ? 0 : static_cast<int>(by_dilation.quotient(static_cast<uint32_t>(dilation - 1 - start)));
}

// The same as Window::index_of.
__device__ __forceinline__ int index_of(const Place& at, int offset, const Geometry& g) {
  uint32_t kw = static_cast<uint32_t>(offset);
  const int kh = static_cast<int>(g.by_kernel_w.split(kw));
  return (at.h * g.stride_h - g.pad_h + kh * g.dilation_h) * g.in_w + at.w * g.stride_w - g.pad_w +
      static_cast<int>(kw) * g.dilation_w;
}

// The same as Window::offset_of.
__device__ __forceinline__ int offset_of(const Place& at, int64_t index, const Geometry& g) {
  const int start_h = at.h * g.stride_h - g.pad_h, start_w = at.w * g.stride_w - g.pad_w;
  const int first = first_step(start_h, g.dilation_h, g.by_dilation_h) * g.kernel_w +
      first_step(start_w, g.dilation_w, g.by_dilation_w);
  if (index == index_of(at, first, g)) {
    return first;
  }
  if (index < 0 || index >= g.in_area()) {
    return -1;
  }
  uint32_t w = static_cast<uint32_t>(index);
  const int h = static_cast<int>(g.by_in_w.split(w));
  uint32_t dh = static_cast<uint32_t>(h - start_h), dw = w - static_cast<uint32_t>(start_w);
  if (h < start_h || static_cast<int>(w) < start_w) {
    return -1;
  }
  const int kh = static_cast<int>(g.by_dilation_h.split(dh)), kw = static_cast<int>(g.by_dilation_w.split(dw));
  return dh != 0 || dw != 0 || kh >= g.kernel_h || kw >= g.kernel_w ? -1 : kh * g.kernel_w + kw;
}

// ---- any window ----

// One thread per output. Cells in ATen's order: of equal maxima the first wins, of NaNs the last.
template <typename T>
__global__ void pool_kernel(
    const T* __restrict__ in, T* __restrict__ y, uint8_t* __restrict__ offsets, Geometry g, int count) {
  using O = op_type<T>;
  const int i = grid_thread();
  if (i >= count) {
    return;
  }
  const Place at = pooled_place(i, g);
  const T* plane = in + at.unit * g.in_area() * g.lanes + at.lane;
  const int h0 = at.h * g.stride_h - g.pad_h, w0 = at.w * g.stride_w - g.pad_w;
  const int first_h = first_step(h0, g.dilation_h, g.by_dilation_h);
  const int first_w = first_step(w0, g.dilation_w, g.by_dilation_w);
  O best = -std::numeric_limits<O>::infinity();
  int cell = first_h * g.kernel_w + first_w;
  for (int kh = first_h; kh < g.kernel_h && h0 + kh * g.dilation_h < g.in_h; ++kh) {
    const T* row = plane + (h0 + kh * g.dilation_h) * g.in_w * g.lanes;
    for (int kw = first_w; kw < g.kernel_w && w0 + kw * g.dilation_w < g.in_w; ++kw) {
      const O value = static_cast<O>(row[(w0 + kw * g.dilation_w) * g.lanes]);
      if (value > best || value != value) {
        best = value;
        cell = kh * g.kernel_w + kw;
      }
    }
  }
  y[i] = static_cast<T>(best);
  offsets[i] = static_cast<uint8_t>(cell);
}

// One thread per input: it gathers from the windows that chose it, in the order of the outputs (no atomics, so the
// result never varies), summing in at least float32 and rounding once.
//
// As in ATen's kernel a window is asked for the index of its cell, not for the cell: a window wholly in the padding has
// none in the image, and what ATen then names may be the index of a pixel in a row below.
template <typename T>
__global__ void pool_backward_kernel(
    const T* __restrict__ grad, const uint8_t* __restrict__ offsets, T* __restrict__ out, Geometry g, int count) {
  using O = op_type<T>;
  const int i = grid_thread();
  if (i >= count) {
    return;
  }
  const Place at = place_of(i, g.by_in_h, g.by_in_w, g.by_lanes);
  // Windows that may reach this pixel: start <= position <= start + (kernel - 1) * dilation.
  const int top = at.h + g.pad_h - (g.kernel_h - 1) * g.dilation_h;
  const int left = at.w + g.pad_w - (g.kernel_w - 1) * g.dilation_w;
  const int oh0 = static_cast<int>(g.by_stride_h.quotient(static_cast<uint32_t>(max(0, top + g.stride_h - 1))));
  const int ow0 = static_cast<int>(g.by_stride_w.quotient(static_cast<uint32_t>(max(0, left + g.stride_w - 1))));
  const int oh1 = min(static_cast<int>(g.by_stride_h.quotient(static_cast<uint32_t>(at.h + g.pad_h))) + 1, g.out_h);
  const int ow1 = min(static_cast<int>(g.by_stride_w.quotient(static_cast<uint32_t>(at.w + g.pad_w))) + 1, g.out_w);
  const int index = at.h * g.in_w + at.w;
  O sum = 0;
  for (int oh = oh0; oh < oh1; ++oh) {
    const int row = (at.unit * g.out_h + oh) * g.out_w;
#pragma unroll 1
    for (int ow = ow0; ow < ow1; ++ow) {
      const int pooled = (row + ow) * g.lanes + at.lane;
      if (index_of({at.unit, oh, ow, at.lane}, offsets[pooled], g) == index) {
        sum += static_cast<O>(grad[pooled]);
      }
    }
  }
  out[i] = static_cast<T>(sum);
}

__global__ void to_indices_kernel(
    const uint8_t* __restrict__ offsets, int64_t* __restrict__ indices, Geometry g, int count) {
  take_of_grid(
      count, [&](int i) { return offsets[i]; },
      [&](int i, uint8_t offset) { indices[i] = index_of(pooled_place(i, g), offset, g); });
}

__global__ void to_offsets_kernel(
    const int64_t* __restrict__ indices, uint8_t* __restrict__ offsets, Geometry g, int count) {
  take_of_grid(
      count, [&](int i) { return indices[i]; },
      [&](int i, int64_t index) {
        const int cell = offset_of(pooled_place(i, g), index, g);
        CUDA_KERNEL_ASSERT(cell >= 0 && "monet_like::max_pool2d_offsets: an index lies outside its window");
        offsets[i] = static_cast<uint8_t>(cell);
      });
}

// ---- windows of K x K that move by kStep ----

constexpr int kStep = 2;

// The K x K cells of a window without dilation. Where it reaches beyond the image its outermost cells are taken again:
// they neither change the maximum nor, once their numbers are corrected, the choice.
template <int K>
struct Cells {
  int start_h, start_w, last_h, last_w, row[K], column[K];  // positions in the image

  __device__ __forceinline__ Cells(int oh, int ow, const Geometry& g)
      : start_h(oh * kStep - g.pad_h), start_w(ow * kStep - g.pad_w), last_h(g.in_h - 1), last_w(g.in_w - 1) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      // The padding is at most one: every other cell lies in the image or past its end.
      row[k] = k == 0 ? max(start_h, 0) : min(start_h + k, last_h);
      column[k] = k == 0 ? max(start_w, 0) : min(start_w + k, last_w);
    }
  }

  // The number of a cell; (kh, kw) may be the cell that was read in its place.
  __device__ __forceinline__ int number(int kh, int kw) const {
    return min(max(kh, -start_h), last_h - start_h) * K + min(max(kw, -start_w), last_w - start_w);
  }
};

// What is compared at a time: an element, or two of 16 bits in one word, each with the number of its cell.
template <typename T>
inline constexpr bool kPairs = sizeof(T) == 2;

template <typename T>
using Compared = std::conditional_t<kPairs<T>, uint32_t, T>;

template <typename T>
__device__ __forceinline__ void consider(Compared<T> value, uint32_t cell, Compared<T>& best, uint32_t& chosen) {
  if constexpr (kPairs<T>) {
    const uint32_t taken = greater_or_nan<T>(value, best);
    best = (value & taken) | (best & ~taken);
    chosen = (cell & taken) | (chosen & ~taken);
  } else if (value > best || value != value) {
    best = value;
    chosen = cell;
  }
}

// The number of a cell for each of the elements that are compared at a time.
template <typename T>
__device__ __forceinline__ uint32_t for_compared(int cell) {
  return static_cast<uint32_t>(cell) * (kPairs<T> ? 0x10001u : 1u);
}

// A thread's part of a plane: kAcross * kDown adjacent windows, or the inputs that they move over.
template <typename T>
inline constexpr int kAcross = sizeof(T) == 2 ? 4 : 2;
template <typename T>
inline constexpr int kColumns = kAcross<T> * kStep;
constexpr int kDown = 2;

// Threads of a plane, and of all planes, as one number.
struct Parts {
  Divisor by_across, by_down;
  int count;

  Parts(int64_t planes, int64_t across, int64_t down)
      : by_across(across), by_down(down), count(static_cast<int>(planes * across * down)) {}
};

template <typename T>
struct Part {
  int plane, down, across;

  __device__ __forceinline__ Part(int i, const Parts& parts) {
    uint32_t of_row = static_cast<uint32_t>(i), of_plane = parts.by_across.split(of_row);
    plane = static_cast<int>(parts.by_down.split(of_plane));
    down = static_cast<int>(of_plane) * kDown;
    across = static_cast<int>(of_row) * kAcross<T>;
  }
};

// N elements of a row, and a further one before or behind them. They wait in words (see `Words`).
template <typename T, int N>
struct Strip {
  static constexpr int kWords = (N * static_cast<int>(sizeof(T)) + 3) / 4;
  Vector<uint32_t, kWords> words;
  T edge;

  // Columns first to first + N - 1, and column `beside`; of those outside the row, the nearest. If `Whole`, all but
  // `beside` lie in the row and start at a multiple of their size.
  template <bool Whole>
  static __device__ __forceinline__ Strip of(const T* row, int first, int beside, int width) {
    Vector<T, N> loaded;
    if constexpr (Whole) {
      loaded = load<N>(row + first);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        loaded.at[j] = row[min(first + j, width - 1)];
      }
    }
    Strip strip;
    strip.words = {};
    __builtin_memcpy(&strip.words, &loaded, sizeof(loaded));
    strip.edge = row[min(max(beside, 0), width - 1)];
    return strip;
  }

  __device__ __forceinline__ Vector<T, N> elements() const {
    Vector<T, N> v;
    __builtin_memcpy(&v, &words, sizeof(v));
    return v;
  }
};

// A maximum and the number of its cell.
template <typename O>
struct Best {
  O value;
  int cell;

  __device__ __forceinline__ void consider(O other, int of_other) {
    if (other > value || other != other) {
      value = other;
      cell = of_other;
    }
  }
};

// A row of inputs is reduced once for all windows that it lies in: to its maximum in the columns of each.
template <typename T, int K, int Pad, bool Whole>
__global__ void pool_planes_kernel(
    const T* __restrict__ in, T* __restrict__ y, uint8_t* __restrict__ offsets, Geometry g, Parts parts) {
  using O = op_type<T>;
  constexpr int kRows = kStep * (kDown - 1) + K;
  const int i = grid_thread();
  if (i >= parts.count) {
    return;
  }
  const Part<T> part(i, parts);
  const T* plane = in + part.plane * g.in_area();
  const int first_h = part.down * kStep - Pad, first_w = part.across * kStep, last_h = g.in_h - 1;
  Strip<T, kColumns<T>> strips[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int h = min(max(first_h + r, 0), last_h);
    strips[r] = Strip<T, kColumns<T>>::template of<Whole>(
        plane + h * g.in_w, first_w, Pad == 1 ? first_w - 1 : first_w + kColumns<T>, g.in_w);
  }
  // Cells outside the image have the element and the number of the nearest one inside: they change nothing.
  int numbers[kAcross<T>][K];
#pragma unroll
  for (int m = 0; m < kAcross<T>; ++m) {
#pragma unroll
    for (int kw = 0; kw < K; ++kw) {
      const int start = first_w + m * kStep - Pad;
      numbers[m][kw] = min(max(kw, -start), g.in_w - 1 - start);
    }
  }
  Best<O> rows[kRows][kAcross<T>];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Vector<T, kColumns<T>> values = strips[r].elements();
    const auto column = [&](int c) {  // of first_w - Pad + c
      return static_cast<O>(c - Pad < 0 || c - Pad >= kColumns<T> ? strips[r].edge : values.at[(c - Pad) % kColumns<T>]);
    };
#pragma unroll
    for (int m = 0; m < kAcross<T>; ++m) {
      rows[r][m] = {column(m * kStep), numbers[m][0]};
#pragma unroll
      for (int kw = 1; kw < K; ++kw) {
        rows[r][m].consider(column(m * kStep + kw), numbers[m][kw]);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kDown; ++k) {
    const int start = first_h + k * kStep, oh = part.down + k;
    Vector<T, kAcross<T>> made;
    Vector<uint8_t, kAcross<T>> chosen;
#pragma unroll
    for (int m = 0; m < kAcross<T>; ++m) {
      const auto number = [&](int kh) { return min(max(kh, -start), last_h - start) * K; };
      Best<O> best = {rows[k * kStep][m].value, rows[k * kStep][m].cell + number(0)};
#pragma unroll
      for (int kh = 1; kh < K; ++kh) {
        const Best<O>& row = rows[k * kStep + kh][m];
        best.consider(row.value, row.cell + number(kh));
      }
      made.at[m] = static_cast<T>(best.value);
      chosen.at[m] = static_cast<uint8_t>(best.cell);
    }
    const int to = (part.plane * g.out_h + oh) * g.out_w + part.across;
    if (oh < g.out_h && g.out_w % kAcross<T> == 0) {
      store(y + to, made);
      store(offsets + to, chosen);
    } else if (oh < g.out_h) {
#pragma unroll
      for (int m = 0; m < kAcross<T>; ++m) {
        if (part.across + m < g.out_w) {
          y[to + m] = made.at[m];
          offsets[to + m] = chosen.at[m];
        }
      }
    }
  }
}

// Channels last: a thread has a vector of channels of one output.
template <typename T, int K>
__global__ void pool_pixels_kernel(
    const T* __restrict__ in, T* __restrict__ y, uint8_t* __restrict__ offsets, Geometry g, Divisor by_vectors,
    int count) {
  constexpr int N = kVector<T>, kCompared = kPairs<T> ? N / 2 : N;
  const int i = grid_thread();
  if (i >= count) {
    return;
  }
  const Place at = place_of(i, g.by_out_h, g.by_out_w, by_vectors);
  const Cells<K> cells(at.h, at.w, g);
  const T* from = in + at.unit * g.in_area() * g.lanes + at.lane * N;
  Vector<Compared<T>> values[K * K];
#pragma unroll
  for (int k = 0; k < K * K; ++k) {
    values[k] = load<kCompared>(
        reinterpret_cast<const Compared<T>*>(from + (cells.row[k / K] * g.in_w + cells.column[k % K]) * g.lanes));
  }
  uint32_t chosen[kCompared];
#pragma unroll
  for (int k = 0; k < K * K; ++k) {
    const uint32_t cell = for_compared<T>(cells.number(k / K, k % K));
#pragma unroll
    for (int j = 0; j < kCompared; ++j) {
      if (k == 0) {
        chosen[j] = cell;
      } else {
        consider<T>(values[k].at[j], cell, values[0].at[j], chosen[j]);
      }
    }
  }
  Vector<uint8_t, N> numbers;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    numbers.at[j] = static_cast<uint8_t>(kPairs<T> ? chosen[j / 2] >> (j % 2 * 16) : chosen[j]);
  }
  store(reinterpret_cast<Compared<T>*>(y + i * N), values[0]);
  store(offsets + i * N, numbers);
}

// The windows over a square of kStep x kStep inputs, along one axis, of which the first input is kStep * a: windows a + kLow
// to a + kHigh. Input kStep * a + i is cell i + Pad - kStep * j of window a + j.
template <int K, int Pad>
struct Overlap {
  static constexpr int kLow = -((K - 1 - Pad) / kStep), kHigh = (kStep - 1 + Pad) / kStep, kCount = kHigh - kLow + 1;

  // Of input i and the window at position j of these; negative or K and more: not a cell of it.
  static constexpr MONET_HD int cell(int i, int j) { return i + Pad - kStep * (j + kLow); }
  static constexpr MONET_HD bool has(int i, int j) { return cell(i, j) >= 0 && cell(i, j) < K; }
};

// A thread adds to each of its inputs what the windows over it have for it, in the order of the windows.
template <typename T, int K, int Pad, bool Whole>
__global__ void pool_planes_backward_kernel(
    const T* __restrict__ grad, const uint8_t* __restrict__ offsets, T* __restrict__ out, Geometry g, Parts parts) {
  using O = op_type<T>;
  using Over = Overlap<K, Pad>;
  constexpr int kAround = Over::kCount - 1;  // windows beside the own ones, before them or behind: at most one
  constexpr int kRows = kDown + kAround, kWindows = kAcross<T> + kAround;
  const int i = grid_thread();
  if (i >= parts.count) {
    return;
  }
  const Part<T> part(i, parts);
  const int beside = Over::kLow < 0 ? part.across - 1 : part.across + kAcross<T>;
  Strip<T, kAcross<T>> gradients[kRows];
  Strip<uint8_t, kAcross<T>> chosen[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int oh = min(max(part.down + Over::kLow + r, 0), g.out_h - 1);
    const int row = (part.plane * g.out_h + oh) * g.out_w;
    gradients[r] = Strip<T, kAcross<T>>::template of<Whole>(grad + row, part.across, beside, g.out_w);
    chosen[r] = Strip<uint8_t, kAcross<T>>::template of<Whole>(offsets + row, part.across, beside, g.out_w);
  }
#pragma unroll
  for (int k = 0; k < kDown; ++k) {
    O sums[kStep][kColumns<T>] = {};
#pragma unroll
    for (int j = 0; j < Over::kCount; ++j) {
      const int oh = part.down + k + Over::kLow + j;
      const Vector<T, kAcross<T>> values = gradients[k + j].elements();
      const Vector<uint8_t, kAcross<T>> cells = chosen[k + j].elements();
#pragma unroll
      for (int m = 0; m < kWindows; ++m) {
        const int at = m + Over::kLow, ow = part.across + at;  // `at`: among the own windows
        const bool own = at >= 0 && at < kAcross<T>;
        const O value = static_cast<O>(own ? values.at[at & (kAcross<T> - 1)] : gradients[k + j].edge);
        const int number = own ? cells.at[at & (kAcross<T> - 1)] : chosen[k + j].edge;
        // A window that does not exist chose no input.
        const int cell = oh >= 0 && oh < g.out_h && ow >= 0 && ow < g.out_w ? number : K * K;
#pragma unroll
        for (int ih = 0; ih < kStep; ++ih) {
#pragma unroll
          for (int iw = 0; iw < kColumns<T>; ++iw) {
            const int mine = m - iw / kStep;  // the position of the window over this square
            if (mine >= 0 && mine < Over::kCount && Over::has(ih, j) && Over::has(iw % kStep, mine) &&
                cell == Over::cell(ih, j) * K + Over::cell(iw % kStep, mine)) {
              sums[ih][iw] += value;
            }
          }
        }
      }
    }
#pragma unroll
    for (int ih = 0; ih < kStep; ++ih) {
      const int h = (part.down + k) * kStep + ih, w = part.across * kStep;
      if (h >= g.in_h) {
        continue;
      }
      Vector<O, kColumns<T>> made;
#pragma unroll
      for (int iw = 0; iw < kColumns<T>; ++iw) {
        made.at[iw] = sums[ih][iw];
      }
      const Vector<T, kColumns<T>> rounded = narrowed<T>(made);
      T* to = out + (part.plane * g.in_h + h) * g.in_w + w;
      if constexpr (Whole) {
        store(to, rounded);
      } else {
#pragma unroll
        for (int iw = 0; iw < kColumns<T>; ++iw) {
          if (w + iw < g.in_w) {
            to[iw] = rounded.at[iw];
          }
        }
      }
    }
  }
}

// Channels last: a thread has a vector of channels of kStep x kStep inputs, and of 16-bit elements one after the other.
template <typename T, int K, int Pad>
__global__ void __launch_bounds__(kThreads, 3) pool_pixels_backward_kernel(
    const T* __restrict__ grad, const uint8_t* __restrict__ offsets, T* __restrict__ out, Geometry g, Divisor by_h,
    Divisor by_w, Divisor by_vectors, int count) {
  using O = op_type<T>;
  using Over = Overlap<K, Pad>;
  constexpr int N = kVector<T>, kCount = Over::kCount;
  for (int i = grid_thread(); i < count; i += static_cast<int>(gridDim.x * blockDim.x)) {
    const Place at = place_of(i, by_h, by_w, by_vectors);
    Vector<T, N> values[kCount * kCount];
    Vector<uint8_t, N> cells[kCount * kCount];
    bool exists[kCount * kCount];
#pragma unroll
    for (int k = 0; k < kCount * kCount; ++k) {
      const int oh = at.h + Over::kLow + k / kCount, ow = at.w + Over::kLow + k % kCount;
      const int near_h = min(max(oh, 0), g.out_h - 1), near_w = min(max(ow, 0), g.out_w - 1);
      const int from = ((at.unit * g.out_h + near_h) * g.out_w + near_w) * g.lanes + at.lane * N;
      values[k] = load<N>(grad + from);
      cells[k] = load<N>(offsets + from);
      exists[k] = oh == near_h && ow == near_w;
    }
#pragma unroll
    for (int p = 0; p < kStep * kStep; ++p) {
      const int ih = p / kStep, iw = p % kStep, h = at.h * kStep + ih, w = at.w * kStep + iw;
      Vector<T, N> made;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        O sum = 0;
#pragma unroll
        for (int k = 0; k < kCount * kCount; ++k) {
          if (Over::has(ih, k / kCount) && Over::has(iw, k % kCount) && exists[k] &&
              cells[k].at[j] == Over::cell(ih, k / kCount) * K + Over::cell(iw, k % kCount)) {
            sum += static_cast<O>(values[k].at[j]);
          }
        }
        made.at[j] = static_cast<T>(sum);
      }
      if (h < g.in_h && w < g.in_w) {
        store(out + ((at.unit * g.in_h + h) * g.in_w + w) * g.lanes + at.lane * N, made);
      }
    }
  }
}

// ---- launches ----

// Calls f(first unit, how many) for parts of a tensor that 32-bit indices reach.
template <typename F>
void for_units(const Geometry& g, int64_t units, const F& f) {
  const int64_t each = std::max<int64_t>(int64_t(g.in_h) * g.in_w, int64_t(g.out_h) * g.out_w) * g.lanes;
  MONET_CHECK(
      each <= kMost32, "monet_like: max pooling on a GPU takes planes, or images with channels last, of up to ", kMost32,
      " elements, got ", each);
  const int64_t most = std::max<int64_t>(1, kMost32 / std::max<int64_t>(each, 1));
  for (int64_t first = 0; first < units; first += most) {
    f(first, static_cast<int>(std::min(most, units - first)));
  }
}

bool moves_by_two(const Window& w) {
  return w.stride_h == kStep && w.stride_w == kStep && w.dilation_h == 1 && w.dilation_w == 1 &&
      w.kernel_h == w.kernel_w;
}

// The arguments of one launch; pointers are to the units of that launch.
struct Units {
  Geometry g;
  int units;
  cudaStream_t stream;
  bool by_two;
};

// Whether a launch is of windows of K x K with this padding that move by kStep.
template <int K, int Pad>
bool is_by_two(const Units& u) {
  return u.by_two && u.g.kernel_h == K && u.g.pad_h == Pad && u.g.pad_w == Pad;
}

// The threads of a launch over planes that are `high` times `wide` windows or squares of kStep x kStep.
template <typename T>
Parts parts_of(const Units& u, int64_t high, int64_t wide) {
  return {u.units, (wide + kAcross<T> - 1) / kAcross<T>, (high + kDown - 1) / kDown};
}

template <typename T, int K, int Pad>
bool pool_by_two(const Units& u, const T* in, T* y, uint8_t* offsets) {
  const Geometry& g = u.g;
  if (!is_by_two<K, Pad>(u) || (g.lanes > 1 && g.lanes % kVector<T> != 0)) {
    return false;
  }
  if (g.lanes > 1) {
    const int count = u.units * g.out_area() * (g.lanes / kVector<T>);
    const Divisor by_vectors(g.lanes / kVector<T>);
    pool_pixels_kernel<T, K><<<grid_of(count), kThreads, 0, u.stream>>>(in, y, offsets, g, by_vectors, count);
    return true;
  }
  const Parts parts = parts_of<T>(u, g.out_h, g.out_w);
  const auto launch = [&](auto whole) {
    constexpr auto kernel = pool_planes_kernel<T, K, Pad, decltype(whole)::value>;
    kernel<<<grid_of(parts.count), kThreads, 0, u.stream>>>(in, y, offsets, g, parts);
  };
  g.in_w % kColumns<T> == 0 && g.out_w * kStep <= g.in_w ? launch(std::true_type()) : launch(std::false_type());
  return true;
}

template <typename T>
void pool(const Units& u, const T* in, T* y, uint8_t* offsets) {
  if (!pool_by_two<T, 3, 1>(u, in, y, offsets) && !pool_by_two<T, 3, 0>(u, in, y, offsets) &&
      !pool_by_two<T, 2, 0>(u, in, y, offsets)) {
    const int count = u.units * u.g.out_area() * u.g.lanes;
    pool_kernel<T><<<grid_of(count), kThreads, 0, u.stream>>>(in, y, offsets, u.g, count);
  }
  MONET_CUDA(cudaGetLastError());
}

template <typename T, int K, int Pad>
bool pool_backward_by_two(const Units& u, const T* grad, const uint8_t* offsets, T* out) {
  const Geometry& g = u.g;
  if (!is_by_two<K, Pad>(u) || (g.lanes > 1 && g.lanes % kVector<T> != 0)) {
    return false;
  }
  const int high = (g.in_h + kStep - 1) / kStep, wide = (g.in_w + kStep - 1) / kStep;
  if (g.lanes > 1) {
    const int vectors = g.lanes / kVector<T>, count = u.units * high * wide * vectors;
    constexpr auto kernel = pool_pixels_backward_kernel<T, K, Pad>;
    // On an H200 resident threads move 86 % of the bytes that copy_ does for elements of 16 bits, and a thread for each part
    // 81 %; for float32 it is 85 and 95 %.
    const unsigned int blocks = sizeof(T) == 2 ? resident_grid<kernel>(grid_of(count), kThreads) : grid_of(count);
    kernel<<<blocks, kThreads, 0, u.stream>>>(
        grad, offsets, out, g, Divisor(high), Divisor(wide), Divisor(vectors), count);
    return true;
  }
  const Parts parts = parts_of<T>(u, high, wide);
  const auto launch = [&](auto whole) {
    constexpr auto kernel = pool_planes_backward_kernel<T, K, Pad, decltype(whole)::value>;
    kernel<<<grid_of(parts.count), kThreads, 0, u.stream>>>(grad, offsets, out, g, parts);
  };
  const bool whole = g.in_w % kColumns<T> == 0 && g.out_w % kAcross<T> == 0 && g.out_w * kStep >= g.in_w;
  whole ? launch(std::true_type()) : launch(std::false_type());
  return true;
}

template <typename T>
void pool_backward(const Units& u, const T* grad, const uint8_t* offsets, T* out) {
  if (!pool_backward_by_two<T, 3, 1>(u, grad, offsets, out) && !pool_backward_by_two<T, 3, 0>(u, grad, offsets, out) &&
      !pool_backward_by_two<T, 2, 0>(u, grad, offsets, out)) {
    const int count = u.units * u.g.in_area() * u.g.lanes;
    pool_backward_kernel<T><<<grid_of(count), kThreads, 0, u.stream>>>(grad, offsets, out, u.g, count);
  }
  MONET_CUDA(cudaGetLastError());
}

// Calls f(units, elements before them in what was pooled, the same in what is pooled) for each launch of a call.
template <typename F>
void for_launches(const Pooling& call, const F& f) {
  const int64_t units = call.channels_last ? call.pool.batch : call.pool.planes;
  const Geometry g(call.pool.window, call.channels_last ? call.pool.channels : 1);
  const cudaStream_t stream = current_stream();
  for_units(g, units, [&](int64_t first, int count) {
    const int64_t before = first * g.lanes;
    f(Units{g, count, stream, moves_by_two(call.pool.window)}, before * g.in_area(), before * g.out_area());
  });
}

std::tuple<Tensor, Tensor> max_pool2d_with_offsets(
    const Tensor& x, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool ceil_mode) {
  const DeviceGuard guard(x.device());
  const Pooling call = pooling_forward("max_pool2d_with_offsets", x, kernel, stride, padding, dilation, ceil_mode);
  const Tensor& y = call.out;
  if (y.numel() > 0) {
    const Tensor in = aligned(call.in);
    MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
      for_launches(call, [&](const Units& units, int64_t inputs, int64_t outputs) {
        pool(
            units, in.const_data_ptr<scalar_t>() + inputs, y.mutable_data_ptr<scalar_t>() + outputs,
            call.cells.mutable_data_ptr<uint8_t>() + outputs);
      });
    });
  }
  return {y, call.cells};
}

Tensor max_pool2d_offsets(
    const Tensor& indices, IntArrayRef input_size, IntArrayRef kernel, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation) {
  const DeviceGuard guard(indices.device());
  const Pooling call = pooling_cells(
      "max_pool2d_offsets", indices, "indices", kLong, kByte, input_size, kernel, stride, padding, dilation);
  const Tensor& offsets = call.out;
  if (offsets.numel() > 0) {
    for_launches(call, [&](const Units& u, int64_t, int64_t first) {
      const int count = u.units * u.g.out_area() * u.g.lanes;
      to_offsets_kernel<<<grid_of_vectors(count), kThreads, 0, u.stream>>>(
          call.in.const_data_ptr<int64_t>() + first, offsets.mutable_data_ptr<uint8_t>() + first, u.g, count);
      MONET_CUDA(cudaGetLastError());
    });
  }
  return offsets;
}

Tensor max_pool2d_offsets_to_indices(
    const Tensor& offsets, IntArrayRef input_size, IntArrayRef kernel, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation) {
  const DeviceGuard guard(offsets.device());
  const Pooling call = pooling_cells(
      "max_pool2d_offsets_to_indices", offsets, "offsets", kByte, kLong, input_size, kernel, stride, padding,
      dilation);
  const Tensor& indices = call.out;
  if (indices.numel() > 0) {
    for_launches(call, [&](const Units& u, int64_t, int64_t first) {
      const int count = u.units * u.g.out_area() * u.g.lanes;
      to_indices_kernel<<<grid_of_vectors(count), kThreads, 0, u.stream>>>(
          call.in.const_data_ptr<uint8_t>() + first, indices.mutable_data_ptr<int64_t>() + first, u.g, count);
      MONET_CUDA(cudaGetLastError());
    });
  }
  return indices;
}

Tensor max_pool2d_offsets_backward(
    const Tensor& grad, const Tensor& offsets, IntArrayRef input_size, IntArrayRef kernel,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation) {
  const DeviceGuard guard(grad.device());
  const Pooling call = pooling_backward(
      "max_pool2d_offsets_backward", grad, offsets, input_size, kernel, stride, padding, dilation);
  const Tensor& out = call.out;
  if (out.numel() > 0) {
    const Tensor upstream = aligned(call.in), cells = aligned(call.cells);
    MONET_DISPATCH_FLOATS(grad.scalar_type(), [&] {
      for_launches(call, [&](const Units& units, int64_t inputs, int64_t outputs) {
        pool_backward(
            units, upstream.const_data_ptr<scalar_t>() + outputs, cells.const_data_ptr<uint8_t>() + outputs,
            out.mutable_data_ptr<scalar_t>() + inputs);
      });
    });
  }
  return out;
}

}  // namespace

MONET_KERNELS(CUDA, m) {
  m.add<&max_pool2d_with_offsets>("max_pool2d_with_offsets");
  m.add<&max_pool2d_offsets>("max_pool2d_offsets");
  m.add<&max_pool2d_offsets_to_indices>("max_pool2d_offsets_to_indices");
  m.add<&max_pool2d_offsets_backward>("max_pool2d_offsets_backward");
}

}  // namespace monet_like
