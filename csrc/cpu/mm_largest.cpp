// The product of a matrix and a matrix x of which only the largest elements are kept. It multiplies the kept elements
// alone or, where dense products are faster, unpacks some rows of x at a time.

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>

#include "../caches.h"
#include "loops/mm_largest.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

namespace monet_like::mm_largest {
namespace {

// The approximate number of rows of a group. Kept elements are sorted by column within a group, whose part of `grad` stays
// in the cache.
constexpr int64_t kRows = 256;

// The product with the kept elements alone.
void product(
    const Tensor& grad, const Tensor& packed, const Groups& groups, bool transposed, const Tensor& out) {
  const auto wide = grad.options().dtype(opmath_type(grad));
  const Tiles tiles(grad.size(1), groups.columns, static_cast<int64_t>(element_size(opmath_type(grad))));
  const int64_t kept = groups.layout.kept(groups.layout.numel), threads = thread_count();
  Tensor values = empty({kept}, wide), rows = empty({kept}, wide.dtype(kInt));
  Tensor starts = empty({groups.count(), groups.columns + 1}, wide.dtype(kLong));
  Tensor sums = empty({threads, tiles.part * tiles.wide}, wide);
  Tensor tile = empty({threads, groups.most_rows() * tiles.wide}, wide);
  product_loops(
      grad.scalar_type(), {grad.const_data_ptr(), grad.size(1), grad.stride(0), grad.stride(1)},
      packed.const_data_ptr<uint8_t>(), groups, tiles, transposed,
      {values.mutable_data_ptr(), rows.mutable_data_ptr<int32_t>(), starts.mutable_data_ptr<int64_t>(),
       sums.mutable_data_ptr(), tile.mutable_data_ptr()},
      out.mutable_data_ptr());
}

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
bool dense_pays(ScalarType dtype, int64_t keep) {
  static const double of_16_bits = speed_of_16_bits();
  const double speed = element_size(dtype) == 2 ? of_16_bits : 1;
  return 6.0 * static_cast<double>(keep) * speed >= static_cast<double>(Largest::kBlock);
}

// The product of x's transpose, some rows of x at a time, and `grad`: both as oneDNN reads them fastest, which is not so
// for the transpose of `grad` and x. Of more rows than are dense at a time the sums are rounded in between.
void dense_product(
    const Tensor& grad, const Tensor& packed, const Largest& layout, int64_t columns, bool transposed,
    Tensor& out) {
  const int64_t rows = grad.size(0), outs = grad.size(1), chunk = std::clamp<int64_t>(kDense / columns, 1, rows);
  // A pitch that is no power of two: the cells of one row of x would share a few sets of the cache.
  const int64_t pitch = (chunk + 31) / 32 * 32 + 32;
  const int64_t tile = std::min(outs, std::max<int64_t>(256, kPart / columns / 64 * 64));
  Tensor dense = empty({columns, pitch}, grad.options());
  Tensor parts = empty({transposed ? 0 : columns * tile}, grad.options());
  for (int64_t first = 0; first < rows; first += chunk) {
    const int64_t last = std::min(first + chunk, rows);
    unpack_transposed_loops(
        packed.const_data_ptr<uint8_t>(), layout, columns, first, last, dense.mutable_data_ptr(), pitch);
    const Tensor x = dense.narrow(1, 0, last - first), some = grad.narrow(0, first, last - first);
    if (transposed) {
      MONET_TORCH(aoti_torch_cpu_addmm_out, out.get(), out.get(), x.get(), some.get(), first == 0 ? 0.0 : 1.0, 1.0);
      continue;
    }
    for (int64_t start = 0; start < outs; start += tile) {
      const int64_t width = std::min(tile, outs - start);
      Tensor part = parts.view(std::array{columns, width});
      call("aten::mm", "out", x, some.narrow(1, start, width), part);
      char* to = static_cast<char*>(out.mutable_data_ptr()) + start * columns * out.element_size();
      put_transposed_loops(grad.scalar_type(), first != 0, part.const_data_ptr(), columns, width, to);
    }
  }
}

Tensor mm_largest(
    const Tensor& grad, const Tensor& packed, int64_t keep, int64_t columns, bool transposed) {
  const Largest layout = check_mm_largest(grad, packed, keep, columns);
  const int64_t outs = grad.size(1);
  Tensor out = empty({transposed ? columns : outs, transposed ? outs : columns}, grad.options());
  if (layout.numel == 0 || out.numel() == 0) {
    return out.zero_();
  }
  if (dense_pays(grad.scalar_type(), keep)) {
    dense_product(grad, packed, layout, columns, transposed, out);
    return out;
  }
  // A place in a group fits 32 bits.
  const int64_t blocks = std::clamp<int64_t>(kRows * columns / Largest::kBlock, 1, 1 << 16);
  const Groups groups{layout, grad.size(0), columns, std::min(blocks, layout.blocks())};
  product(grad, packed, groups, transposed, out);
  return out;
}

}  // namespace

MONET_KERNELS(CPU, m) {
  m.add<&mm_largest>("mm_largest");
}

}  // namespace monet_like::mm_largest
