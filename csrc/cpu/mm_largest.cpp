// The product of a matrix with one of which only the largest elements are kept, without making that dense.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "../caches.h"
#include "isa.h"

namespace monet_like {
namespace {

// Kept elements are sorted by column within groups of about so many rows, whose part of `grad` stays in the cache.
constexpr int64_t kRows = 256;
// Columns of `grad` that are done at once fill so many bytes, the sums of one column of x in registers.
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

// Of every group the kept elements column by column, and where each column starts.
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

// For every column from `first` to `last`: its sums plus each of its values times the row of `grad` that it is in.
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

at::Tensor mm_largest(
    const at::Tensor& grad, const at::Tensor& packed, int64_t keep, int64_t columns, bool transposed) {
  const Largest layout = check_mm_largest(grad, packed, keep, columns);
  const int64_t outs = grad.size(1);
  at::Tensor out = at::empty({transposed ? columns : outs, transposed ? outs : columns}, grad.options());
  if (layout.numel == 0 || out.numel() == 0) {
    return out.zero_();
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
