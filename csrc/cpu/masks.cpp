// Masks of one bit an element on the CPU, for the gradients of ReLU and hardtanh and for dropout; numbers of four bits.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../checks.h"
#include "isa.h"

namespace monet_like {
namespace {

struct Positive {
  template <typename T>
  MONET_BODY bool operator()(T x) const {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      return passes_threshold_bits(x.x, 0x7f80);
    } else if constexpr (std::is_same_v<T, c10::Half>) {
      return passes_threshold_bits(x.x, 0x7c00);
    } else {
      return passes_threshold(x);
    }
  }
};

// For a NaN ATen's vectorised loop stops the gradient and its scalar loop for the last elements lets it pass. Here it
// always stops.
template <typename O>
struct InRange {
  O lo, hi;
  template <typename T>
  MONET_BODY bool operator()(T x) const {
    const O value = load(x);
    return value > lo && value < hi;
  }
};

struct IsTrue {
  MONET_BODY bool operator()(uint8_t x) const { return x != 0; }
};

template <typename T, typename P>
MONET_BODY void pack_body(const T* x, uint8_t* out, int64_t numel, P predicate) {
  constexpr int64_t kBlock = 128;
  uint8_t flags[kBlock];
  int64_t i = 0;
  for (; i + kBlock <= numel; i += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j) {
      flags[j] = predicate(x[i + j]) ? 1 : 0;
    }
    for (int64_t j = 0; j < kBlock / 8; ++j) {
      out[i / 8 + j] = gather_bits(flags + 8 * j);
    }
  }
  if (i < numel) {
    std::memset(flags, 0, sizeof(flags));
    for (int64_t j = 0; j < numel - i; ++j) {
      flags[j] = predicate(x[i + j]) ? 1 : 0;
    }
    for (int64_t j = 0; j < packed_bytes(numel - i); ++j) {
      out[i / 8 + j] = gather_bits(flags + 8 * j);
    }
  }
}
MONET_FOR_EACH_ISA(pack)

// Bits of a mask that one loop processes: the compiler unrolls shorter loops before it could vectorise them.
constexpr int64_t kWord = 32;

MONET_BODY uint32_t word_of(const uint8_t* mask, int64_t word) {
  uint32_t bits;
  std::memcpy(&bits, mask + 4 * word, sizeof(bits));
  return bits;
}

// Keeps or clears whole bit patterns, so a kept gradient is unchanged whatever it holds.
template <typename U>
MONET_BODY void keep_bits_body(const U* in, const uint8_t* mask, U* out, int64_t numel) {
  const int64_t whole = numel / kWord;
  for (int64_t b = 0; b < whole; ++b) {
    const uint32_t bits = word_of(mask, b);
#pragma GCC ivdep
    for (uint32_t j = 0; j < kWord; ++j) {
      const U keep = static_cast<U>(-static_cast<U>((bits >> j) & 1));
      out[kWord * b + j] = in[kWord * b + j] & keep;
    }
  }
  for (int64_t i = kWord * whole; i < numel; ++i) {
    out[i] = (mask[i / 8] >> (i % 8)) & 1 ? in[i] : U(0);
  }
}
MONET_FOR_EACH_ISA(keep_bits)

MONET_BODY void spread_bits(const uint8_t* mask, uint8_t* out, int64_t numel) {
  for (int64_t b = 0; b < numel / 8; ++b) {
    // Bit i to byte i: copy the byte eight times, keep one bit of each copy, turn "not zero" into one.
    const uint64_t one_bit_each = (mask[b] * 0x0101010101010101ull) & 0x8040201008040201ull;
    const uint64_t flags = ((one_bit_each + 0x7f7f7f7f7f7f7f7full) >> 7) & 0x0101010101010101ull;
    std::memcpy(out + 8 * b, &flags, sizeof(flags));
  }
  for (int64_t i = numel / 8 * 8; i < numel; ++i) {
    out[i] = (mask[i / 8] >> (i % 8)) & 1;
  }
}

template <typename T>
MONET_BODY void scale_where_body(
    const T* in, const uint8_t* mask, T* out, int64_t numel, op_type<T> scale, op_type<T> otherwise) {
  const int64_t whole = numel / kWord;
  for (int64_t b = 0; b < whole; ++b) {
    const uint32_t bits = word_of(mask, b);
#pragma GCC ivdep
    for (uint32_t j = 0; j < kWord; ++j) {
      // Multiply rather than select: inf * 0 is NaN and -1 * 0 is -0, as in (x * mask) * scale.
      const op_type<T> factor = (bits >> j) & 1 ? scale : otherwise;
      store(out[kWord * b + j], load(in[kWord * b + j]) * factor);
    }
  }
  for (int64_t i = kWord * whole; i < numel; ++i) {
    store(out[i], load(in[i]) * ((mask[i / 8] >> (i % 8)) & 1 ? scale : otherwise));
  }
}
MONET_FOR_EACH_ISA(scale_where)

constexpr int64_t kGrainBytes = 4096;  // 32768 elements, ATen's own grain

// Calls f(first element, number of elements) on ranges that start at a byte of the mask.
template <typename F>
void for_packed_ranges(int64_t numel, const F& f) {
  at::parallel_for(0, packed_bytes(numel), kGrainBytes, [&](int64_t begin, int64_t end) {
    f(8 * begin, std::min(8 * end, numel) - 8 * begin);
  });
}

template <typename T, typename P>
at::Tensor pack_with(const at::Tensor& dense, const T* x, P predicate) {
  at::Tensor out = at::empty({packed_bytes(dense.numel())}, dense.options().dtype(at::kByte).memory_format(
                                                                  at::MemoryFormat::Contiguous));
  uint8_t* bytes = out.mutable_data_ptr<uint8_t>();
  for_packed_ranges(dense.numel(), [&](int64_t first, int64_t n) { pack(x + first, bytes + first / 8, n, predicate); });
  return out;
}

at::Tensor pack_sign(const at::Tensor& x) {
  check_floating(x, "pack_sign", "x");
  const at::Tensor dense = in_packing_order(x);
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack_sign", [&] {
    return pack_with(dense, dense.const_data_ptr<scalar_t>(), Positive{});
  });
}

at::Tensor pack_range(const at::Tensor& x, double lo, double hi) {
  check_floating(x, "pack_range", "x");
  const at::Tensor dense = in_packing_order(x);
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "pack_range", [&] {
    using O = op_type<scalar_t>;
    return pack_with(
        dense, dense.const_data_ptr<scalar_t>(), InRange<O>{static_cast<O>(lo), static_cast<O>(hi)});
  });
}

at::Tensor pack_bool(const at::Tensor& mask) {
  TORCH_CHECK_TYPE(
      mask.scalar_type() == at::kBool, "monet_like::pack_bool: mask must be bool, got ", mask.scalar_type());
  const at::Tensor dense = in_packing_order(mask);
  return pack_with(dense, static_cast<const uint8_t*>(dense.const_data_ptr()), IsTrue{});
}

void keep_where_dense(const at::Tensor& in, const at::Tensor& mask, const at::Tensor& out) {
  const uint8_t* bytes = mask.const_data_ptr<uint8_t>();
  const auto run = [&](auto zero) {
    using U = decltype(zero);
    const U* from = static_cast<const U*>(in.const_data_ptr());
    U* to = static_cast<U*>(out.mutable_data_ptr());
    for_packed_ranges(in.numel(), [&](int64_t first, int64_t n) {
      keep_bits(from + first, bytes + first / 8, to + first, n);
    });
  };
  switch (in.element_size()) {
    case 2:
      return run(uint16_t(0));
    case 4:
      return run(uint32_t(0));
    default:
      return run(uint64_t(0));
  }
}

// to_packing_order without its search, if the tensor already has the packing order.
at::Tensor in_order(const at::Tensor& t, at::IntArrayRef stride, const char* op) {
  const bool same = t.is_contiguous() && (stride.empty() || stride == t.strides());
  return same ? t : to_packing_order(t, stride, op);
}

at::Tensor keep_where(const at::Tensor& x, const at::Tensor& mask, at::IntArrayRef stride) {
  check_floating(x, "keep_where", "x");
  check_packed(mask, x.numel(), x, "keep_where");
  const at::Tensor dense = in_order(x, stride, "keep_where");
  // A copy that was made for the layout can be overwritten.
  const at::Tensor out = dense.is_same(x) ? at::empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  keep_where_dense(dense, mask, out);
  return out;
}

at::Tensor& keep_where_(at::Tensor& x, const at::Tensor& mask, at::IntArrayRef stride) {
  check_floating(x, "keep_where_", "x");
  check_packed(mask, x.numel(), x, "keep_where_");
  const at::Tensor dense = in_order(x, stride, "keep_where_");
  keep_where_dense(dense, mask, dense);
  if (!dense.is_same(x)) {
    x.copy_(dense);
  }
  return x;
}

at::Tensor unpack_bool(const at::Tensor& packed, at::IntArrayRef size, at::IntArrayRef stride) {
  at::Tensor out = empty_in_packing_order(size, stride, packed.options().dtype(at::kBool), "unpack_bool");
  check_packed(packed, out.numel(), out, "unpack_bool");
  const uint8_t* bytes = packed.const_data_ptr<uint8_t>();
  uint8_t* flags = static_cast<uint8_t*>(out.mutable_data_ptr());
  for_packed_ranges(
      out.numel(), [&](int64_t first, int64_t n) { spread_bits(bytes + first / 8, flags + first, n); });
  return out;
}

at::Tensor masked_scale(
    const at::Tensor& x, const at::Tensor& packed, double scale, at::IntArrayRef stride, double otherwise) {
  check_floating(x, "masked_scale", "x");
  check_packed(packed, x.numel(), x, "masked_scale");
  const at::Tensor dense = in_order(x, stride, "masked_scale");
  const at::Tensor out = dense.is_same(x) ? at::empty_strided(dense.sizes(), dense.strides(), dense.options()) : dense;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "masked_scale", [&] {
    const scalar_t* from = dense.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const uint8_t* bytes = packed.const_data_ptr<uint8_t>();
    for_packed_ranges(x.numel(), [&](int64_t first, int64_t n) {
      scale_where(
          from + first, bytes + first / 8, to + first, n, static_cast<op_type<scalar_t>>(scale),
          static_cast<op_type<scalar_t>>(otherwise));
    });
  });
  return out;
}

template <typename B>
MONET_BODY void join_nibbles_body(const B* in, B* out, int64_t bytes) {
#pragma GCC ivdep
  for (int64_t b = 0; b < bytes; ++b) {
    out[b] = static_cast<B>((in[2 * b] & 15) | (in[2 * b + 1] << 4));
  }
}
MONET_FOR_EACH_ISA(join_nibbles)

template <typename B>
MONET_BODY void split_nibbles_body(const B* in, B* out, int64_t bytes) {
#pragma GCC ivdep
  for (int64_t b = 0; b < bytes; ++b) {
    out[2 * b] = in[b] & 15;
    out[2 * b + 1] = in[b] >> 4;
  }
}
MONET_FOR_EACH_ISA(split_nibbles)

at::Tensor pack_nibbles(const at::Tensor& x) {
  check_bytes(x, "pack_nibbles");
  const at::Tensor dense = in_packing_order(x);
  const int64_t whole = x.numel() / 2;
  at::Tensor out = at::empty({(x.numel() + 1) / 2}, x.options().memory_format(at::MemoryFormat::Contiguous));
  const uint8_t* from = dense.const_data_ptr<uint8_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, whole, 32768, [&](int64_t begin, int64_t end) {
    join_nibbles(from + 2 * begin, to + begin, end - begin);
  });
  if (x.numel() % 2) {
    to[whole] = from[2 * whole] & 15;
  }
  return out;
}

at::Tensor unpack_nibbles(const at::Tensor& packed, at::IntArrayRef size, at::IntArrayRef stride) {
  at::Tensor out = empty_in_packing_order(size, stride, packed.options(), "unpack_nibbles");
  check_nibbles(packed, out.numel());
  const int64_t whole = out.numel() / 2;
  const uint8_t* from = packed.const_data_ptr<uint8_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, whole, 32768, [&](int64_t begin, int64_t end) {
    split_nibbles(from + begin, to + 2 * begin, end - begin);
  });
  if (out.numel() % 2) {
    to[2 * whole] = from[whole] & 15;
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CPU, m) {
  m.impl("pack_sign", &pack_sign);
  m.impl("pack_range", &pack_range);
  m.impl("pack_bool", &pack_bool);
  m.impl("keep_where", &keep_where);
  m.impl("keep_where_", &keep_where_);
  m.impl("unpack_bool", &unpack_bool);
  m.impl("masked_scale", &masked_scale);
  m.impl("pack_nibbles", &pack_nibbles);
  m.impl("unpack_nibbles", &unpack_nibbles);
}

}  // namespace monet_like
