// The loops of RMS norm.

#pragma once

#include "loops.h"

namespace monet_like::rms_norm {

// A contiguous tensor of rows, in a dtype of its own; null if there is none.
struct Rows {
  c10::ScalarType dtype;
  const void* data;
};

// The type of the computation and of the reciprocal roots is float64 for such an x, else float32.

// Computes y, and the reciprocal root of each row if it is not given.
void forward_loops(
    const Rows& x, const Rows& weight, int64_t rows, int64_t width, double eps, bool rounded, void* rstd,
    bool given_rstd, c10::ScalarType dtype, void* y);

// Writes grad_x, of x's dtype, plus `residual`, and adds the gradient of the weight to `grad_weight`.
void backward_loops(
    const Rows& grad, const Rows& x, const Rows& weight, const void* rstd, const Rows& residual, int64_t rows,
    int64_t width, void* grad_x, double* grad_weight);

}  // namespace monet_like::rms_norm
