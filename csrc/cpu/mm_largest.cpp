// The product of a matrix and a matrix x of which only the largest elements are kept. It multiplies the kept elements
// alone or, where dense products are faster, unpacks some rows of x at a time.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <vector>

#include "../caches.h"
#include "isa.h"

namespace monet_like {
namespace {

// The approximate number of rows of a group. Kept elements are sorted by column within a group, whose part of `grad` stays
// in the cache.
constexpr int64_t kRows = 256;
// Bytes of the columns of `grad` that are done at once, so that the sums of one column of x stay in registers.
constexpr int64_t kTile = 256;

struct Groups {
  Largest layout;
  int64_t rows, columns, blocks;  // of x; blocks of elements in a group

  int64_t count() const { return (layout.blocks() + blocks - 1) / blocks; }
  int64_t first(int64_t g) const { return std::min(g * blocks * Largest::kBlock, layout.numel); }
  int64_t first_row(int64_t g) const { return first(g) / columns; }
  int64_t last_row(int64_t g) const { return (first(g + 1) - 1) / columns; }
  int64_t most_rows() const { return std::min(rows, blocks * Largest::kBlock / columns + 2); }
};

// The kept elements of every group column by column, and the start of each column.
template <typename T, typename O>
void sort_by_column(const Groups& groups, const uint8_t* packed, O* values, int32_t* rows, int64_t* starts) {
  const Largest& layout = groups.layout;
  const T* kept_values = reinterpret_cast<const T*>(packed);
  at::parallel_for(0, groups.count(), 1, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> places;  // within the group
    for (int64_t g = begin; g < end; ++g) {
      const int64_t base = groups.first(g), stop = groups.first(g + 1), offset = layout.kept(base);
      places.assign(layout.kept(stop) - offset, 0);
      for (int64_t first = base; first < stop; first += Largest::kBlock) {
        const int64_t n = std::min(Largest::kBlock, stop - first), before = layout.kept(first) - offset;
        for_kept(packed + layout.index_at(first), n, layout.kept(n), layout.places(), [&](int64_t place, int64_t k) {
          places[before + k] = static_cast<uint32_t>(first - base + place);
        });
      }
      int64_t* column_starts = starts + g * (groups.columns + 1);
      std::fill_n(column_starts, groups.columns + 1, 0);
      const uint32_t columns = static_cast<uint32_t>(groups.columns);
      const uint32_t shift = static_cast<uint32_t>(base - groups.first_row(g) * groups.columns);
      for (const uint32_t place : places) {
        ++column_starts[(place + shift) % columns + 1];
      }
      column_starts[0] = offset;
      for (int64_t c = 0; c < groups.columns; ++c) {
        column_starts[c + 1] += column_starts[c];
      }
      for (size_t k = 0; k < places.size(); ++k) {
        const uint32_t at = places[k] + shift;
        const int64_t to = column_starts[at % columns]++;
        rows[to] = static_cast<int32_t>(at / columns);
        values[to] = static_cast<O>(load(kept_values[offset + k]));
      }
      for (int64_t c = groups.columns; c > 0; --c) {
        column_starts[c] = column_starts[c - 1];
      }
      column_starts[0] = offset;
    }
  });
}

// Adds to the sums of every column from `first` to `last` each of its values times the row of `grad` of that value.
template <typename O>
MONET_BODY void add_columns_body(
    const O* grad, const O* values, const int32_t* rows, const int64_t* starts, int64_t first, int64_t last, O* sums) {
  typedef O Vector __attribute__((vector_size(32)));
  constexpr int64_t kVectors = kTile / sizeof(Vector);
  for (int64_t c = first; c < last; ++c, sums += kTile / sizeof(O)) {
    if (starts[c] == starts[c + 1]) {
      continue;
    }
    Vector* to = reinterpret_cast<Vector*>(sums);
    Vector sum[kVectors];
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVectors; ++v) {
      sum[v] = to[v];
    }
    for (int64_t k = starts[c]; k < starts[c + 1]; ++k) {
      const Vector* row = reinterpret_cast<const Vector*>(grad + rows[k] * (kTile / sizeof(O)));
      const O value = values[k];
#pragma GCC unroll 8
      for (int64_t v = 0; v < kVectors; ++v) {
        sum[v] += row[v] * value;
      }
    }
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVectors; ++v) {
      to[v] = sum[v];
    }
  }
}
MONET_FOR_EACH_ISA(add_columns)

template <typename T>
void product(const at::Tensor& grad, const at::Tensor& packed, const Groups& groups, bool transposed, at::Tensor& out) {
  using O = op_type<T>;
  constexpr int64_t kWide = kTile / sizeof(O);
  const auto wide = grad.options().dtype(c10::CppTypeToScalarType<O>::value);
  const int64_t kept = groups.layout.kept(groups.layout.numel), columns = groups.columns, outs = grad.size(1);
  at::Tensor values = at::empty({kept}, wide), rows = at::empty({kept}, wide.dtype(at::kInt));
  at::Tensor starts = at::empty({groups.count(), columns + 1}, wide.dtype(at::kLong));
  sort_by_column<T>(
      groups, packed.const_data_ptr<uint8_t>(), values.mutable_data_ptr<O>(), rows.mutable_data_ptr<int32_t>(),
      starts.mutable_data_ptr<int64_t>());
  // With fewer tiles than threads, each thread does some of the columns.
  const int64_t threads = at::get_num_threads(), tiles = (outs + kWide - 1) / kWide;
  const int64_t parts = std::min(columns, (threads + tiles - 1) / tiles), part = (columns + parts - 1) / parts;
  at::Tensor sums = at::empty({threads, part * kWide}, wide);
  at::Tensor tile = at::empty({threads, groups.most_rows() * kWide}, wide);
  const T* from = grad.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  const int64_t row_stride = grad.stride(0), column_stride = grad.stride(1);
  at::parallel_for(0, tiles * parts, 1, [&](int64_t begin, int64_t end) {
    O* sum = sums.mutable_data_ptr<O>() + at::get_thread_num() * part * kWide;
    O* some = tile.mutable_data_ptr<O>() + at::get_thread_num() * groups.most_rows() * kWide;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t start = task / parts * kWide, width = std::min(kWide, outs - start);
      const int64_t first = std::min(task % parts * part, columns), last = std::min(first + part, columns);
      std::fill_n(sum, (last - first) * kWide, O(0));
      for (int64_t g = 0; g < groups.count(); ++g) {
        O* row = some;
        for (int64_t r = groups.first_row(g); r <= groups.last_row(g); ++r, row += kWide) {
          const T* source = from + r * row_stride + start * column_stride;
          for (int64_t j = 0; j < width; ++j) {
            row[j] = static_cast<O>(load(source[j * column_stride]));
          }
          std::fill(row + width, row + kWide, O(0));
        }
        add_columns(
            static_cast<const O*>(some), values.const_data_ptr<O>(), rows.const_data_ptr<int32_t>(),
            starts.const_data_ptr<int64_t>() + g * (columns + 1), first, last, sum);
      }
      const int64_t by_column = transposed ? outs : 1, by_out = transposed ? 1 : columns;
      for (int64_t c = first; c < last; ++c) {
        for (int64_t j = 0; j < width; ++j) {
          to[c * by_column + (start + j) * by_out] = static_cast<T>(sum[(c - first) * kWide + j]);
        }
      }
    }
  });
}

template <typename T>
using unsigned_of =
    std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// The approximate number of elements of x that are unpacked at a time, and of the result that are computed before a
// transposition.
constexpr int64_t kDense = int64_t(1) << 22;
constexpr int64_t kPart = int64_t(1) << 18;

// The speed of a product of 16-bit floats relative to float32, roughly: with matrix units (AMX), with dot products
// (AVX512_BF16), or, below 1, without either.
double speed_of_16_bits() {
#if defined(__x86_64__)
  unsigned int a = 0, b = 0, c = 0, d = 0;
  if (isa() == Isa::Avx512) {
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) != 0) {
      return 6;
    }
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1) != 0) {
      return 2;
    }
  }
#endif
  return 0.5;
}

// Whether unpacking x pays. In float32, the product with a sixth of the elements takes as long as that with all.
bool dense_pays(at::ScalarType dtype, int64_t keep) {
  static const double of_16_bits = speed_of_16_bits();
  const double speed = c10::elementSize(dtype) == 2 ? of_16_bits : 1;
  return 6.0 * static_cast<double>(keep) * speed >= static_cast<double>(Largest::kBlock);
}

// Rows [first, last) of x as the columns of `out`, [columns, last - first] with `pitch` elements from row to row.
template <typename U>
void unpack_transposed(
    const uint8_t* packed, const Largest& layout, int64_t columns, int64_t first, int64_t last, U* out, int64_t pitch) {
  const U* values = reinterpret_cast<const U*>(packed);
  at::parallel_for(0, columns, std::max<int64_t>(1, 8192 / pitch), [&](int64_t begin, int64_t end) {
    std::fill(out + begin * pitch, out + end * pitch, U(0));
  });
  const int64_t first_block = first * columns / Largest::kBlock;
  const int64_t last_block = (last * columns + Largest::kBlock - 1) / Largest::kBlock;
  at::parallel_for(first_block, last_block, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t base = b * Largest::kBlock, n = std::min(Largest::kBlock, layout.numel - base);
      const U* kept = values + layout.kept(base);
      // Places ascend, so one division a row is enough; if they do not ascend, the cache is corrupt.
      int64_t row = base / columns, start = row * columns;
      for_kept(packed + layout.index_at(base), n, layout.kept(n), layout.places(), [&](int64_t place, int64_t k) {
        const int64_t at = base + place;
        if (at < start || at >= start + columns) {
          row = at / columns;
          start = row * columns;
        }
        if (row >= first && row < last) {
          out[(at - start) * pitch + row - first] = kept[k];
        }
      });
    }
  });
}

constexpr int64_t kSide = 32;

// The transpose of a square of kSide, with pitches for the elements from row to row. Rows are first interleaved to words
// of eight bytes, in vectors; what then changes places are words.
template <typename T>
MONET_BODY void transpose_square(const T* in, int64_t pitch, T* out, int64_t out_pitch) {
  using U = unsigned_of<T>;
  constexpr int64_t kInWord = 8 / sizeof(U);
  const U* from = reinterpret_cast<const U*>(in);
  uint64_t words[kSide / kInWord][kSide];
  for (int64_t i = 0; i < kSide / kInWord; ++i) {
    for (int64_t j = 0; j < kSide; ++j) {
      uint64_t word = 0;
      for (int64_t k = 0; k < kInWord; ++k) {
        word |= static_cast<uint64_t>(from[(i * kInWord + k) * pitch + j]) << (8 * sizeof(U) * k);
      }
      words[i][j] = word;
    }
  }
  for (int64_t j = 0; j < kSide; ++j) {
    for (int64_t i = 0; i < kSide / kInWord; ++i) {
      std::memcpy(out + j * out_pitch + i * kInWord, &words[i][j], sizeof(uint64_t));
    }
  }
}

// Adds, or stores, the transpose of `in`, [rows, columns] with `pitch` elements from row to row, to `out`, [columns, rows]
// with `out_pitch`, in squares that stay in the cache.
template <bool Add, typename T>
MONET_BODY void put_transposed_body(
    const T* in, int64_t pitch, int64_t rows, int64_t columns, T* out, int64_t out_pitch) {
  for (int64_t r = 0; r < rows; r += kSide) {
    for (int64_t c = 0; c < columns; c += kSide) {
      const int64_t high = std::min(kSide, rows - r), wide = std::min(kSide, columns - c);
      const T* from = in + r * pitch + c;
      T* to = out + c * out_pitch + r;
      const bool whole = high == kSide && wide == kSide;
      if (whole && !Add) {
        transpose_square(from, pitch, to, out_pitch);
        continue;
      }
      T square[kSide * kSide];
      if (whole) {
        transpose_square(from, pitch, static_cast<T*>(square), kSide);
      } else {
        for (int64_t i = 0; i < high; ++i) {
          for (int64_t j = 0; j < wide; ++j) {
            square[j * kSide + i] = from[i * pitch + j];
          }
        }
      }
      for (int64_t j = 0; j < wide; ++j) {
#pragma GCC ivdep
        for (int64_t i = 0; i < high; ++i) {
          T& cell = to[j * out_pitch + i];
          if constexpr (Add) {
            store(cell, load(cell) + load(square[j * kSide + i]));
          } else {
            cell = square[j * kSide + i];
          }
        }
      }
    }
  }
}
MONET_FOR_EACH_ISA(put_transposed)

// The product of x's transpose, some rows of x at a time, and `grad`: both as oneDNN reads them fastest, which is not so
// for the transpose of `grad` and x. Of more rows than are dense at a time the sums are rounded in between.
template <typename T>
void dense_product(
    const at::Tensor& grad, const at::Tensor& packed, const Largest& layout, int64_t columns, bool transposed,
    at::Tensor& out) {
  using U = unsigned_of<T>;
  const int64_t rows = grad.size(0), outs = grad.size(1), chunk = std::clamp<int64_t>(kDense / columns, 1, rows);
  // A pitch that is no power of two: the cells of one row of x would share a few sets of the cache.
  const int64_t pitch = (chunk + 31) / 32 * 32 + 32;
  const int64_t tile = std::min(outs, std::max<int64_t>(256, kPart / columns / 64 * 64));
  at::Tensor dense = at::empty({columns, pitch}, grad.options());
  at::Tensor parts = at::empty({transposed ? 0 : columns * tile}, grad.options());
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t last = std::min(first + chunk, rows);
    unpack_transposed(
        packed.const_data_ptr<uint8_t>(), layout, columns, first, last, static_cast<U*>(dense.mutable_data_ptr()), pitch);
    const at::Tensor x = dense.narrow(1, 0, last - first), some = grad.narrow(0, first, last - first);
    if (transposed) {
      out.addmm_(x, some, first == 0 ? 0 : 1);
      continue;
    }
    for (int64_t start = 0; start < outs; start += tile) {
      const int64_t width = std::min(tile, outs - start);
      at::Tensor part = parts.narrow(0, 0, columns * width).view({columns, width});
      at::mm_out(part, x, some.narrow(1, start, width));
      const T* from = part.const_data_ptr<T>();
      T* to = out.mutable_data_ptr<T>() + start * columns;
      at::parallel_for(0, width, std::max<int64_t>(32, 16384 / columns), [&](int64_t begin, int64_t end) {
        if (first == 0) {
          put_transposed<false>(from + begin, width, columns, end - begin, to + begin * columns, columns);
        } else {
          put_transposed<true>(from + begin, width, columns, end - begin, to + begin * columns, columns);
        }
      });
    }
  }
}

at::Tensor mm_largest(
    const at::Tensor& grad, const at::Tensor& packed, int64_t keep, int64_t columns, bool transposed) {
  const Largest layout = check_mm_largest(grad, packed, keep, columns);
  const int64_t outs = grad.size(1);
  at::Tensor out = at::empty({transposed ? columns : outs, transposed ? outs : columns}, grad.options());
  if (layout.numel == 0 || out.numel() == 0) {
    return out.zero_();
  }
  if (dense_pays(grad.scalar_type(), keep)) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "mm_largest", [&] {
      dense_product<scalar_t>(grad, packed, layout, columns, transposed, out);
    });
    return out;
  }
  // A place in a group fits 32 bits.
  const int64_t blocks = std::clamp<int64_t>(kRows * columns / Largest::kBlock, 1, 1 << 16);
  const Groups groups{layout, grad.size(0), columns, std::min(blocks, layout.blocks())};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "mm_largest", [&] {
    product<scalar_t>(grad, packed, groups, transposed, out);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("mm_largest", &mm_largest);
}

}  // namespace monet_like
