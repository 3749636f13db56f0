// Argument checks and memory-layout rules, shared by all devices.

#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "tensor.h"

namespace monet_like {

inline void check_floating(const Tensor& t, const char* op, const char* name) {
  const auto type = t.scalar_type();
  MONET_CHECK(
      type == kFloat || type == kDouble || type == kHalf || type == kBFloat16,
      "monet_like::", op, ": ", name, " must be float32, float64, float16 or bfloat16, got ", type);
}

inline void check_packed(const Tensor& packed, int64_t numel, const Tensor& other, const char* op) {
  MONET_CHECK(
      packed.scalar_type() == kByte, "monet_like::", op, ": the packed mask must be uint8, got ",
      packed.scalar_type());
  MONET_CHECK(
      packed.dim() == 1 && packed.is_contiguous() && packed.numel() == packed_bytes(numel), "monet_like::", op,
      ": a mask of ", numel, " bits has shape [", packed_bytes(numel), "] and is contiguous, got shape ",
      packed.sizes());
  MONET_CHECK(
      packed.device() == other.device(), "monet_like::", op, ": mask on ", packed.device(), ", tensor on ",
      other.device());
}

inline void check_bytes(const Tensor& t, const char* op) {
  MONET_CHECK(
      t.scalar_type() == kByte, "monet_like::", op, ": x must be uint8, got ", t.scalar_type());
}

inline void check_nibbles(const Tensor& packed, int64_t numel) {
  check_bytes(packed, "unpack_nibbles");
  MONET_CHECK(
      packed.dim() == 1 && packed.is_contiguous() && packed.numel() == (numel + 1) / 2,
      "monet_like::unpack_nibbles: ", numel, " half bytes have shape [", (numel + 1) / 2,
      "] and are contiguous, got shape ", packed.sizes());
}

// Whether `stride` lays `size` out without gaps and without overlap, in some order of the dimensions.
inline bool is_dense(IntArrayRef size, IntArrayRef stride) {
  if (std::find(size.begin(), size.end(), 0) != size.end()) {
    return true;
  }
  std::vector<size_t> order(size.size());
  std::iota(order.begin(), order.end(), 0);
  order.erase(
      std::remove_if(order.begin(), order.end(), [&](size_t d) { return size[d] == 1; }), order.end());
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return stride[a] < stride[b]; });
  int64_t expected = 1;
  for (const size_t d : order) {
    if (stride[d] != expected) {
      return false;
    }
    expected *= size[d];
  }
  return true;
}

// The order in which a tensor's elements are packed: memory order if it is dense, row-major order otherwise.
inline Tensor in_packing_order(const Tensor& t) {
  return is_dense(t.sizes(), t.strides()) ? t : t.contiguous();
}

// An uninitialised tensor with the layout that in_packing_order gives a tensor of this size and stride.
inline Tensor empty_in_packing_order(
    IntArrayRef size, IntArrayRef stride, const TensorOptions& options, const char* op) {
  if (stride.empty()) {
    return empty(size, options);
  }
  MONET_CHECK(
      stride.size() == size.size(), "monet_like::", op, ": stride must have one entry per dimension (", size.size(),
      "), got ", stride.size());
  return is_dense(size, stride) ? empty_strided(size, stride, options)
                                : empty(size, options);
}

// `t`, copied if need be, in the memory order of the tensor that was packed.
inline Tensor to_packing_order(const Tensor& t, IntArrayRef stride, const char* op) {
  if (stride.empty()) {
    return in_packing_order(t);
  }
  MONET_CHECK(
      stride.size() == static_cast<size_t>(t.dim()), "monet_like::", op, ": stride must have one entry per dimension (",
      t.dim(), "), got ", stride.size());
  const bool dense = is_dense(t.sizes(), stride);
  bool same = true;
  if (dense) {
    for (int64_t d = 0; d < t.dim(); ++d) {
      same = same && (t.size(d) == 1 || t.stride(d) == stride[d]);
    }
  } else {
    same = t.is_contiguous();
  }
  if (same || t.numel() == 0) {
    return t;
  }
  return empty_in_packing_order(t.sizes(), stride, t.options(), op).copy_(t);
}

// Tensors that are combined element by element: floats of one dtype and shape on one device.
inline void check_alike(const char* op, const char* name, const Tensor& t, const Tensor& gate) {
  check_floating(gate, op, "gate");
  MONET_CHECK(
      t.scalar_type() == gate.scalar_type(), "monet_like::", op, ": ", name, " must be ", gate.scalar_type(),
      " like gate, got ", t.scalar_type());
  MONET_CHECK(
      t.sizes() == gate.sizes(), "monet_like::", op, ": ", name, " must have gate's shape ", gate.sizes(), ", got ",
      t.sizes());
  MONET_CHECK(
      t.device() == gate.device(), "monet_like::", op, ": ", name, " on ", t.device(), ", gate on ", gate.device());
}

inline NormShape check_norm(
    const char* op, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor* mean, const Tensor* invstd) {
  check_floating(x, op, "x");
  MONET_CHECK(x.dim() >= 2, "monet_like::", op, ": x must be [N, C, ...], got ", x.sizes());
  const int64_t channels = x.size(1);
  const auto check = [&](const Tensor& t, const char* name) {
    MONET_CHECK(
        t.dim() == 1 && t.size(0) == channels, "monet_like::", op, ": ", name, " must have shape [", channels,
        "], got ", t.sizes());
    MONET_CHECK(
        t.scalar_type() == x.scalar_type() || t.scalar_type() == kFloat, "monet_like::", op, ": ", name,
        " must be ", x.scalar_type(), " like x or float32, got ", t.scalar_type());
    MONET_CHECK(
        t.device() == x.device(), "monet_like::", op, ": ", name, " on ", t.device(), ", x on ", x.device());
  };
  const auto check_optional = [&](const MaybeTensor& t, const char* name) {
    if (t.has_value() && t->defined()) {
      check(*t, name);
    }
  };
  check_optional(weight, "weight");
  check_optional(bias, "bias");
  if (mean != nullptr) {
    check(*mean, "mean");
    check(*invstd, "invstd");
  }
  const int64_t rows = channels == 0 ? 0 : x.numel() / channels;
  const int64_t image = x.size(0) == 0 ? 0 : rows / x.size(0);
  return {x.size(0), channels, image};
}

inline std::vector<int64_t> joined_sizes(TensorList parts) {
  std::vector<int64_t> sizes = parts[0].sizes().vec();
  sizes[1] = 0;
  for (const Tensor& part : parts) {
    sizes[1] += part.size(1);
  }
  return sizes;
}

// Whether the parts can be read in place, without a copy: contiguous, not empty, with images of more than one element.
inline bool check_parts(const char* op, TensorList parts) {
  MONET_CHECK(!parts.empty(), "monet_like::", op, ": there must be at least one part");
  for (const Tensor& part : parts) {
    check_floating(part, op, "every part");
    MONET_CHECK(
        part.dim() == parts[0].dim() && part.dim() >= 2 && part.size(0) == parts[0].size(0) &&
            part.sizes().slice(2) == parts[0].sizes().slice(2) && part.scalar_type() == parts[0].scalar_type() &&
            part.device() == parts[0].device(),
        "monet_like::", op, ": parts must be alike but for their channels, got ", parts[0].scalar_type(), " ",
        parts[0].sizes(), " and ", part.scalar_type(), " ", part.sizes());
  }
  return std::all_of(parts.begin(), parts.end(), [](const Tensor& part) {
    return part.is_contiguous() && part.numel() > part.size(0) * part.size(1);
  });
}

// The shape that batch norm sees of the joined parts, which have passed `check_parts`.
inline NormShape check_norm_joined(
    const char* op, TensorList parts, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor* mean, const Tensor* invstd) {
  const std::vector<int64_t> sizes = joined_sizes(parts);
  const Tensor whole = parts[0].as_strided(sizes, std::vector<int64_t>(sizes.size(), 0), 0);  // for its shape
  return check_norm(op, whole, weight, bias, mean, invstd);
}

inline void check_gradient(const char* op, const Tensor& grad, IntArrayRef sizes, ScalarType type) {
  MONET_CHECK(
      grad.sizes() == sizes && grad.scalar_type() == type, "monet_like::", op, ": grad (", grad.sizes(), ", ",
      grad.scalar_type(), ") must match x (", sizes, ", ", type, ")");
}

inline bool given(const MaybeTensor& t) {
  return t.has_value() && t->defined();
}

inline void check_residual(const char* op, const Tensor& x, const MaybeTensor& residual) {
  MONET_CHECK(
      !given(residual) || (residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type() &&
                           residual->device() == x.device()),
      "monet_like::", op, ": residual (", given(residual) ? residual->scalar_type() : x.scalar_type(), " ",
      given(residual) ? residual->sizes() : IntArrayRef{}, ") must match x (", x.scalar_type(), " ", x.sizes(), ")");
}

// Elements from one image of `t` to the next, or with `by_rows` from one row of adjacent channels to the next, where `t` is
// channels of a larger tensor of such a layout; -1: it is laid out otherwise.
inline int64_t pitch_of(const Tensor& t, bool by_rows) {
  int64_t expected = by_rows ? -1 : 1, pitch = -1;
  const auto follows = [&](int64_t d) {
    if (t.size(d) == 1) {
      return true;
    }
    if (expected < 0) {
      expected = pitch = t.stride(d);
    }
    const bool does = t.stride(d) == expected;
    expected *= t.size(d);
    return does;
  };
  for (int64_t d = t.dim() - 1; d >= 2; --d) {
    if (!follows(d)) {
      return -1;
    }
  }
  if (by_rows) {
    return (t.size(1) == 1 || t.stride(1) == 1) && follows(0) ? (pitch < 0 ? t.size(1) : pitch) : -1;
  }
  return follows(1) ? (t.size(0) == 1 ? expected : t.stride(0)) : -1;
}

inline Activation check_activation(const char* op, std::string_view name) {
  if (name == "clamp") {
    return Activation::Clamp;
  }
  if (name == "leaky_relu") {
    return Activation::LeakyRelu;
  }
  if (name == "hardswish") {
    return Activation::Hardswish;
  }
  MONET_CHECK(
      name == "silu", "monet_like::", op, ": activation must be clamp, leaky_relu, hardswish or silu, got ", name);
  return Activation::Silu;
}

// The dtype of a training-mode batch norm's statistics on the CPU: that of its parameters, or of x without any.
inline TensorOptions statistics_options(
    const Tensor& x, std::initializer_list<MaybeTensor> parameters) {
  const bool half = x.scalar_type() == kHalf || x.scalar_type() == kBFloat16;
  const bool wide = half && std::any_of(parameters.begin(), parameters.end(), [](const auto& t) {
    return given(t) && t->scalar_type() == kFloat;
  });
  return x.options().dtype(wide ? kFloat : x.scalar_type());
}

// Tensors normalised over their last dimensions: `rows` of `width` elements, and the shape of a number per row.
struct RowShape {
  int64_t rows, width;
  std::vector<int64_t> statistics;
};

inline ScalarType opmath_type(const Tensor& x) {
  return x.scalar_type() == kDouble ? kDouble : kFloat;
}

inline TensorOptions row_statistics_options(const Tensor& x) {
  return x.options().dtype(opmath_type(x));
}

// Calls f with a zero of the type that tensors like x are computed in.
template <typename F>
void with_opmath(const Tensor& x, const F& f) {
  x.scalar_type() == kDouble ? f(double(0)) : f(float(0));
}

inline RowShape check_rows(
    const char* op, const Tensor& x, const MaybeTensor& weight, const Tensor* rstd,
    int64_t dims) {
  check_floating(x, op, "x");
  MONET_CHECK(
      dims >= 1 && dims <= x.dim(), "monet_like::", op, ": dims is between 1 and those of x, ", x.dim(), ", got ", dims);
  const IntArrayRef width = x.sizes().slice(x.dim() - dims);
  if (given(weight)) {
    check_floating(*weight, op, "weight");
    MONET_CHECK(
        weight->sizes() == width && weight->device() == x.device(), "monet_like::", op, ": weight must have shape ",
        width, " on ", x.device(), ", got ", weight->sizes(), " on ", weight->device());
  }
  RowShape shape{1, 1, x.sizes().vec()};
  for (int64_t d = 0; d < x.dim(); ++d) {
    (d < x.dim() - dims ? shape.rows : shape.width) *= x.size(d);
  }
  std::fill(shape.statistics.end() - dims, shape.statistics.end(), 1);
  if (rstd != nullptr) {
    MONET_CHECK(
        rstd->sizes() == IntArrayRef(shape.statistics) && rstd->scalar_type() == opmath_type(x) &&
            rstd->device() == x.device(),
        "monet_like::", op, ": rstd must be ", opmath_type(x), " of shape ", IntArrayRef(shape.statistics), " on ",
        x.device(), ", got ", rstd->scalar_type(), " ", rstd->sizes(), " on ", rstd->device());
  }
  return shape;
}

inline void check_row_gradients(
    const char* op, const Tensor& x, const Tensor& grad, const MaybeTensor& residual) {
  const auto check = [&](const Tensor& t, const char* name) {
    check_floating(t, op, name);
    MONET_CHECK(
        t.sizes() == x.sizes() && t.device() == x.device(), "monet_like::", op, ": ", name, " must have shape ",
        x.sizes(), " on ", x.device(), ", got ", t.sizes(), " on ", t.device());
  };
  check(grad, "grad");
  if (given(residual)) {
    check(*residual, "residual");
  }
}

enum class NormLayout { ChannelsFirst, ChannelsLast, Strided };

inline NormLayout norm_layout(const Tensor& x) {
  if (x.is_contiguous()) {
    return NormLayout::ChannelsFirst;
  }
  if ((x.dim() == 4 && x.is_contiguous(MemoryFormat::ChannelsLast)) ||
      (x.dim() == 5 && x.is_contiguous(MemoryFormat::ChannelsLast3d))) {
    return NormLayout::ChannelsLast;
  }
  return NormLayout::Strided;
}

// ATen's choice for batch norm's output: a tensor that is contiguous in several formats counts as row-major.
inline MemoryFormat norm_format(const Tensor& x) {
  return x.is_contiguous() ? MemoryFormat::Contiguous : x.suggest_memory_format();
}

}  // namespace monet_like
