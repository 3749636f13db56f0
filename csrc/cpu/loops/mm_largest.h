// The loops of the product of a matrix and a matrix x of which only the largest elements are kept.

#pragma once

#include "../../cache_layout.h"
#include "loops.h"

namespace monet_like::mm_largest {

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

// How the product with the kept elements alone is divided among threads: tiles of columns of `grad`, and with fewer tiles
// than threads also parts of the columns of x.
struct Tiles {
  int64_t wide, count, parts, part;  // columns of a tile, tiles, parts, columns of a part

  Tiles(int64_t outs, int64_t columns, int64_t itemsize) : wide(kTile / itemsize), count((outs + wide - 1) / wide) {
    parts = std::min(columns, (thread_count() + count - 1) / count);
    part = (columns + parts - 1) / parts;
  }
};

// Memory of that product, in the type of the computation where none is given: the kept elements sorted by column, their
// rows, the start of each column in each group; for each thread the sums of a part and a tile of the rows of a group.
struct Scratch {
  void* values;
  int32_t* rows;
  int64_t* starts;
  void *sums, *tile;
};

// A matrix [rows, outs] with any strides.
struct Matrix {
  const void* data;
  int64_t outs, row_stride, column_stride;
};

void product_loops(
    c10::ScalarType dtype, const Matrix& grad, const uint8_t* packed, const Groups& groups, const Tiles& tiles,
    bool transposed, const Scratch& scratch, void* out);

// Rows [first, last) of x as the columns of `out`, [columns, last - first] with `pitch` elements from row to row.
void unpack_transposed_loops(
    const uint8_t* packed, const Largest& layout, int64_t columns, int64_t first, int64_t last, void* out,
    int64_t pitch);

// Adds, or stores, the transpose of `in`, [rows, columns], to `out`, [columns, rows].
void put_transposed_loops(
    c10::ScalarType dtype, bool add, const void* in, int64_t rows, int64_t columns, void* out);

}  // namespace monet_like::mm_largest
