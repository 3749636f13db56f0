// The loops of the product of a matrix and a matrix x of which only the largest elements are kept.

#include "mm_largest.h"

namespace monet_like::mm_largest {
namespace {

// The kept elements of every group column by column, and the start of each column.
template <typename T, typename O>
void sort_by_column(const Groups& groups, const uint8_t* packed, O* values, int32_t* rows, int64_t* starts) {
  const Largest& layout = groups.layout;
  const T* kept_values = reinterpret_cast<const T*>(packed);
  parallel_for(0, groups.count(), 1, [&](int64_t begin, int64_t end) {
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
void product(
    const Matrix& grad, const uint8_t* packed, const Groups& groups, const Tiles& tiles, bool transposed,
    const Scratch& scratch, T* to) {
  using O = op_type<T>;
  constexpr int64_t kWide = kTile / sizeof(O);
  O* const values = static_cast<O*>(scratch.values);
  const int64_t columns = groups.columns, outs = grad.outs, parts = tiles.parts, part = tiles.part;
  sort_by_column<T>(groups, packed, values, scratch.rows, scratch.starts);
  const T* from = static_cast<const T*>(grad.data);
  const int64_t row_stride = grad.row_stride, column_stride = grad.column_stride;
  parallel_for(0, tiles.count * parts, 1, [&](int64_t begin, int64_t end) {
    O* sum = static_cast<O*>(scratch.sums) + thread_number() * part * kWide;
    O* some = static_cast<O*>(scratch.tile) + thread_number() * groups.most_rows() * kWide;
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
            static_cast<const O*>(some), static_cast<const O*>(values), static_cast<const int32_t*>(scratch.rows),
            static_cast<const int64_t*>(scratch.starts) + g * (columns + 1), first, last, sum);
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

// Rows [first, last) of x as the columns of `out`, [columns, last - first] with `pitch` elements from row to row.
template <typename U>
void unpack_transposed(
    const uint8_t* packed, const Largest& layout, int64_t columns, int64_t first, int64_t last, U* out, int64_t pitch) {
  const U* values = reinterpret_cast<const U*>(packed);
  parallel_for(0, columns, std::max<int64_t>(1, 8192 / pitch), [&](int64_t begin, int64_t end) {
    std::fill(out + begin * pitch, out + end * pitch, U(0));
  });
  const int64_t first_block = first * columns / Largest::kBlock;
  const int64_t last_block = (last * columns + Largest::kBlock - 1) / Largest::kBlock;
  parallel_for(first_block, last_block, 1, [&](int64_t begin, int64_t end) {
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

}  // namespace

void product_loops(
    c10::ScalarType dtype, const Matrix& grad, const uint8_t* packed, const Groups& groups, const Tiles& tiles,
    bool transposed, const Scratch& scratch, void* out) {
  with_dtype(dtype, [&](auto zero) {
    product(grad, packed, groups, tiles, transposed, scratch, static_cast<decltype(zero)*>(out));
  });
}

void unpack_transposed_loops(
    const uint8_t* packed, const Largest& layout, int64_t columns, int64_t first, int64_t last, void* out,
    int64_t pitch) {
  with_bits(layout.itemsize, [&](auto zero) {
    unpack_transposed(packed, layout, columns, first, last, static_cast<decltype(zero)*>(out), pitch);
  });
}

void put_transposed_loops(
    c10::ScalarType dtype, bool add, const void* in, int64_t rows, int64_t columns, void* out) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(out);
    parallel_for(0, columns, std::max<int64_t>(32, 16384 / rows), [&](int64_t begin, int64_t end) {
      if (add) {
        put_transposed<true>(from + begin, columns, rows, end - begin, to + begin * rows, rows);
      } else {
        put_transposed<false>(from + begin, columns, rows, end - begin, to + begin * rows, rows);
      }
    });
  });
}

}  // namespace monet_like::mm_largest
