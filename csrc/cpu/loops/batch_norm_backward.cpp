// The gradient of training-mode batch norm and of the activation that follows it.
//
// With y = a x + b, g = grad through the activation at y, N = elements per channel, m and s the saved mean and invstd:
//   grad_bias   = sum g                      grad_weight = s * sum (x - m) g
//   grad_input  = (g - mean(g) - (x - m) s^2 mean((x - m) g)) * s * weight
// y is recomputed with the formula of the forward pass, so it is the forward pass's y.

#include "batch_norm.h"

namespace monet_like::batch_norm {
namespace {

template <typename O>
struct Gradient {
  O mean_g, slope, scale;  // grad_input = (g - mean_g - (x - m) * slope) * scale
};

template <typename O>
Gradient<O> gradient_of(double sum, double dot, int64_t count, O invstd, O weight) {
  const double s = invstd, w = weight;
  return {static_cast<O>(sum / count), static_cast<O>(dot / count * s * s), static_cast<O>(s * w)};
}

template <Formula F, Activation A, typename T, typename O = op_type<T>>
MONET_BODY O gradient_through(O grad, O x, O a, O b, O mean, O invstd, O lo, O hi) {
  return activation_gradient<A, F>(grad, as_stored<T>(normalised<F>(x, a, b, mean, invstd)), lo, hi);
}

// Adds sum g and sum (x - m) g of n elements to `sums`. grad and x have the tensor's type T or the type of the computation.
// With `Keep`, g is stored in `kept`, which may be grad.
template <Formula F, Activation A, bool Keep, typename T, typename S, typename O>
MONET_BODY void reduce_run_body(
    const T*, const S* grad, const S* x, S* kept, int64_t n, const Channel<O>* channel, O lo, O hi, double* sums) {
  const Channel<O> k = *channel;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t last = std::min(n, first + kBlock);
    O sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int64_t i = first; i < last; ++i) {
      const O value = load(x[i]);
      const O g = gradient_through<F, A, T>(load(grad[i]), value, k.a, k.b, k.mean, k.invstd, lo, hi);
      if constexpr (Keep) {
        store(kept[i], g);
      }
      sum += g;
      dot = fused_or_not<F>(value - k.mean, g, dot);
    }
    sums[0] += sum;
    sums[1] += dot;
  }
}
MONET_FOR_EACH_ISA(reduce_run)

// grad_input of n elements of one channel.
template <Formula F, Activation A, typename T, typename O>
MONET_BODY void input_grad_run_body(
    const T* grad, const T* x, T* out, int64_t n, const Channel<O>* channel, const Gradient<O>* gradient, O lo, O hi) {
  const Channel<O> k = *channel;
  const Gradient<O> d = *gradient;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const O value = load(x[i]);
    const O g = gradient_through<F, A, T>(load(grad[i]), value, k.a, k.b, k.mean, k.invstd, lo, hi);
    store(out[i], (g - d.mean_g - (value - k.mean) * d.slope) * d.scale);
  }
}
MONET_FOR_EACH_ISA(input_grad_run)

// As `reduce_run` for rows of adjacent channels, which are added to sum[c] and dot[c]. The g of a costly activation is kept.
template <Formula F, Activation A, typename T, typename O>
MONET_BODY void reduce_rows_body(
    const T* grad, const T* x, T* kept, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
    const O* invstd, O lo, O hi, O* sum, O* dot) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* grad_row = grad + r * channels;
    const T* x_row = x + r * channels;
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      const O value = load(x_row[c]);
      const O g = gradient_through<F, A, T>(load(grad_row[c]), value, a[c], b[c], mean[c], invstd[c], lo, hi);
      if constexpr (is_costly(A)) {
        store(kept[r * channels + c], g);
      }
      sum[c] += g;
      dot[c] = fused_or_not<F>(value - mean[c], g, dot[c]);
    }
  }
}
MONET_FOR_EACH_ISA(reduce_rows)

// grad_input from a g that `reduce_run` has kept.
template <typename T, typename S, typename O>
MONET_BODY void input_grad_kept_body(
    const S* kept, const S* x, T* out, int64_t n, O mean, const Gradient<O>* gradient) {
  const Gradient<O> d = *gradient;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(out[i], (load(kept[i]) - d.mean_g - (load(x[i]) - mean) * d.slope) * d.scale);
  }
}
MONET_FOR_EACH_ISA(input_grad_kept)

// grad_input of rows of adjacent channels. The g of a costly activation has been kept in `grad`.
template <Formula F, Activation A, typename T, typename O>
MONET_BODY void input_grad_rows_body(
    const T* grad, const T* x, T* out, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
    const O* invstd, const O* mean_g, const O* slope, const O* scale, O lo, O hi) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* grad_row = grad + r * channels;
    const T* x_row = x + r * channels;
    T* out_row = out + r * channels;
#pragma GCC ivdep
    for (int64_t c = 0; c < channels; ++c) {
      const O value = load(x_row[c]);
      O g = load(grad_row[c]);
      if constexpr (!is_costly(A)) {
        g = gradient_through<F, A, T>(g, value, a[c], b[c], mean[c], invstd[c], lo, hi);
      }
      store(out_row[c], (g - mean_g[c] - (value - mean[c]) * slope[c]) * scale[c]);
    }
  }
}
MONET_FOR_EACH_ISA(input_grad_rows)

// The loops of a formula and an activation, with their bounds. `reduce_gathered` is `reduce_run` of a channel that has been
// gathered in the type of the computation, where g is kept.
template <typename T, typename O = op_type<T>>
struct Loops {
  O lo, hi;
  void (*reduce_run)(const T*, const T*, T*, int64_t, const Channel<O>*, O, O, double*);
  void (*reduce_gathered)(O*, const O*, int64_t, const Channel<O>*, O, O, double*);
  void (*input_grad_run)(const T*, const T*, T*, int64_t, const Channel<O>*, const Gradient<O>*, O, O);
  void (*reduce_rows)(
      const T*, const T*, T*, int64_t, int64_t, const O*, const O*, const O*, const O*, O, O, O*, O*);
  void (*input_grad_rows)(
      const T*, const T*, T*, int64_t, int64_t, const O*, const O*, const O*, const O*, const O*, const O*, const O*,
      O, O);
};

template <Formula F, Activation A, typename T, typename O = op_type<T>>
Loops<T> loops_of(O lo, O hi) {
  static constexpr const T* kType = nullptr;
  return {
      lo, hi,
      [](const T* grad, const T* x, T* kept, int64_t n, const Channel<O>* channel, O lo, O hi, double* sums) {
        reduce_run<F, A, is_costly(A)>(kType, grad, x, kept, n, channel, lo, hi, sums);
      },
      [](O* grad, const O* x, int64_t n, const Channel<O>* channel, O lo, O hi, double* sums) {
        reduce_run<F, A, true>(kType, static_cast<const O*>(grad), x, grad, n, channel, lo, hi, sums);
      },
      [](const T* grad, const T* x, T* out, int64_t n, const Channel<O>* channel, const Gradient<O>* gradient, O lo,
         O hi) {
        if constexpr (is_costly(A)) {
          input_grad_kept(grad, x, out, n, channel->mean, gradient);
        } else {
          input_grad_run<F, A>(grad, x, out, n, channel, gradient, lo, hi);
        }
      },
      [](const T* grad, const T* x, T* kept, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
         const O* invstd, O lo, O hi, O* sum, O* dot) {
        reduce_rows<F, A>(grad, x, kept, rows, channels, a, b, mean, invstd, lo, hi, sum, dot);
      },
      [](const T* grad, const T* x, T* out, int64_t rows, int64_t channels, const O* a, const O* b, const O* mean,
         const O* invstd, const O* mean_g, const O* slope, const O* scale, O lo, O hi) {
        input_grad_rows<F, A>(grad, x, out, rows, channels, a, b, mean, invstd, mean_g, slope, scale, lo, hi);
      }};
}

template <typename T>
Loops<T> choose_loops(Formula formula, Activation activation, op_type<T> lo, op_type<T> hi) {
  Loops<T> found{};
  with_formula(formula, [&](auto chosen) {
    constexpr Formula F = decltype(chosen)::value;
    with_activation(activation, [&](auto followed) {
      constexpr Activation A = decltype(followed)::value;
      if constexpr (kHasLoop<F, A, T>) {
        found = loops_of<F, A, T>(lo, hi);
      }
    });
  });
  return found;
}

// Both passes over elements of one channel or over rows of channels. The first sums; the second writes grad_input, for a
// costly activation from a g that the first has kept there.
template <typename T>
class Passes {
 public:
  using O = op_type<T>;

  Passes(const Layer& layer, const Constants<O>& constants) : k_(constants), costly_(is_costly(layer.activation)) {
    const bool clamps = layer.activation == Activation::Clamp;
    const O lo = static_cast<O>(clamps ? open_bound(layer.lo) : layer.lo);
    const O hi = static_cast<O>(clamps ? open_bound(layer.hi) : layer.hi);
    loops_ = choose_loops<T>(layer.formula, layer.activation, lo, hi);
  }

  bool costly() const { return costly_; }

  void reduce_run(const T* grad, const T* x, T* kept, int64_t n, const Channel<O>& channel, double* sums) const {
    loops_.reduce_run(grad, x, kept, n, &channel, loops_.lo, loops_.hi, sums);
  }

  // `grad` is the kept g if the activation is costly.
  void input_grad_run(
      const T* grad, const T* x, T* out, int64_t n, const Channel<O>& channel, const Gradient<O>& gradient) const {
    loops_.input_grad_run(grad, x, out, n, &channel, &gradient, loops_.lo, loops_.hi);
  }

  // The passes of a channel whose x and grad have been gathered in the type of the computation. The first one replaces grad
  // by g.
  void reduce_gathered(O* grad, const O* x, int64_t n, const Channel<O>& channel, double* sums) const {
    loops_.reduce_gathered(grad, x, n, &channel, loops_.lo, loops_.hi, sums);
  }

  void input_grad_gathered(
      const O* grad, const O* x, T* out, int64_t n, const Channel<O>& channel, const Gradient<O>& gradient) const {
    input_grad_kept(grad, x, out, n, channel.mean, &gradient);
  }

  // Adds the sums of some rows to sum[c] and dot[c].
  void reduce_rows(const T* grad, const T* x, T* kept, int64_t rows, int64_t channels, O* sum, O* dot) const {
    loops_.reduce_rows(
        grad, x, kept, rows, channels, k_.a.data(), k_.b.data(), k_.mean.data(), k_.invstd.data(), loops_.lo,
        loops_.hi, sum, dot);
  }

  void input_grad_rows(
      const T* grad, const T* x, T* out, int64_t rows, int64_t channels, const O* mean_g, const O* slope,
      const O* scale) const {
    loops_.input_grad_rows(
        grad, x, out, rows, channels, k_.a.data(), k_.b.data(), k_.mean.data(), k_.invstd.data(), mean_g, slope,
        scale, loops_.lo, loops_.hi);
  }

 private:
  const Constants<O>& k_;
  bool costly_;
  Loops<T> loops_;
};

// float16 is computed in blocks: x and the gradient through the activation in float32, then loops without an activation.
// Clamps are the only activations (`is_compiled`).
template <>
class Passes<c10::Half> {
 public:
  using T = c10::Half;
  static constexpr float kNoBound = std::numeric_limits<float>::quiet_NaN();

  Passes(const Layer& layer, const Constants<float>& constants)
      : k_(constants),
        formula_(layer.formula),
        lo_(static_cast<float>(open_bound(layer.lo))),
        hi_(static_cast<float>(open_bound(layer.hi))),
        loops_(choose_loops<float>(layer.formula, Activation::Clamp, kNoBound, kNoBound)) {}

  bool costly() const { return false; }

  void reduce_run(const T* grad, const T* x, T*, int64_t n, const Channel<float>& channel, double* sums) const {
    in_blocks(grad, x, n, channel, [&](int64_t, const float* g, const float* values, int64_t count) {
      loops_.reduce_run(g, values, nullptr, count, &channel, loops_.lo, loops_.hi, sums);
    });
  }

  void input_grad_run(
      const T* grad, const T* x, T* out, int64_t n, const Channel<float>& channel,
      const Gradient<float>& gradient) const {
    in_blocks(grad, x, n, channel, [&](int64_t first, float* g, const float* values, int64_t count) {
      loops_.input_grad_run(g, values, g, count, &channel, &gradient, loops_.lo, loops_.hi);
      narrow(g, out + first, count);
    });
  }

  void reduce_gathered(float* grad, const float* x, int64_t n, const Channel<float>& channel, double* sums) const {
    float y[kStep];
    for (int64_t i = 0; i < n; i += kStep) {
      const int64_t count = std::min(kStep, n - i);
      std::copy_n(x + i, count, y);
      normalise_run(formula_, y, count, channel);
      round_as(T(), y, count);
      clamp_gradients(grad + i, y, count, lo_, hi_);
    }
    loops_.reduce_run(grad, x, nullptr, n, &channel, loops_.lo, loops_.hi, sums);
  }

  void input_grad_gathered(
      const float* grad, const float* x, T* out, int64_t n, const Channel<float>& channel,
      const Gradient<float>& gradient) const {
    float block[kStep];
    for (int64_t i = 0; i < n; i += kStep) {
      const int64_t count = std::min(kStep, n - i);
      input_grad_kept(grad + i, x + i, static_cast<float*>(block), count, channel.mean, &gradient);
      narrow(block, out + i, count);
    }
  }

  void reduce_rows(const T* grad, const T* x, T*, int64_t rows, int64_t channels, float* sum, float* dot) const {
    in_row_blocks(grad, x, rows, channels, [&](int64_t, int64_t c, float* g, const float* values, int64_t high,
                                               int64_t wide) {
      loops_.reduce_rows(
          g, values, nullptr, high, wide, k_.a.data() + c, k_.b.data() + c, k_.mean.data() + c, k_.invstd.data() + c,
          loops_.lo, loops_.hi, sum + c, dot + c);
    });
  }

  void input_grad_rows(
      const T* grad, const T* x, T* out, int64_t rows, int64_t channels, const float* mean_g, const float* slope,
      const float* scale) const {
    in_row_blocks(grad, x, rows, channels, [&](int64_t first, int64_t c, float* g, const float* values, int64_t high,
                                               int64_t wide) {
      loops_.input_grad_rows(
          g, values, g, high, wide, k_.a.data() + c, k_.b.data() + c, k_.mean.data() + c, k_.invstd.data() + c,
          mean_g + c, slope + c, scale + c, loops_.lo, loops_.hi);
      narrow(g, out + first, high * wide);
    });
  }

 private:
  // Calls f(first element, g, x, number of elements) for every block.
  template <typename F>
  void in_blocks(const T* grad, const T* x, int64_t n, const Channel<float>& channel, const F& f) const {
    float g[kStep], values[kStep], y[kStep];
    for (int64_t i = 0; i < n; i += kStep) {
      const int64_t count = std::min(kStep, n - i);
      widen(grad + i, g, count);
      widen(x + i, values, count);
      std::copy_n(values, count, y);
      normalise_run(formula_, y, count, channel);
      round_as(T(), y, count);
      clamp_gradients(g, y, count, lo_, hi_);
      f(i, g, values, count);
    }
  }

  // Calls f(first element, first channel, g, x, rows, channels) for every block.
  template <typename F>
  void in_row_blocks(const T* grad, const T* x, int64_t rows, int64_t channels, const F& f) const {
    float g[kStep], values[kStep], y[kStep];
    for_row_blocks(rows, channels, [&](int64_t r, int64_t c, int64_t high, int64_t wide) {
      const int64_t i = r * channels + c, count = high * wide;
      widen(grad + i, g, count);
      widen(x + i, values, count);
      std::copy_n(values, count, y);
      normalise_rows(
          formula_, y, high, wide, k_.a.data() + c, k_.b.data() + c, k_.mean.data() + c, k_.invstd.data() + c);
      round_as(T(), y, count);
      clamp_gradients(g, y, count, lo_, hi_);
      f(i, c, g, values, high, wide);
    });
  }

  const Constants<float>& k_;
  Formula formula_;
  float lo_, hi_;
  Loops<float> loops_;
};

// Adds another gradient to n elements of grad_input.
template <typename T>
MONET_BODY void add_run_body(T* to, const T* other, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    store(to[i], load(to[i]) + load(other[i]));
  }
}
MONET_FOR_EACH_ISA(add_run)

void add_gradient(c10::Half* to, const c10::Half* other, int64_t n) {
  float sum[kStep], more[kStep];
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t count = std::min(kStep, n - i);
    widen(to + i, sum, count);
    widen(other + i, more, count);
    add(sum, more, count);
    narrow(sum, to + i, count);
  }
}

template <typename T>
void add_gradient(T* to, const T* other, int64_t n) {
  add_run(to, other, n);
}

// Copies the images of one channel, `pitch` elements apart, one after the other, in the type of the computation.
template <typename T, typename O>
MONET_BODY void gather_images_body(const T* in, O* out, int64_t batch, int64_t image, int64_t pitch) {
  for (int64_t n = 0; n < batch; ++n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < image; ++i) {
      out[n * image + i] = load(in[n * pitch + i]);
    }
  }
}
MONET_FOR_EACH_ISA(gather_images)

void gather(const c10::Half* in, float* out, int64_t batch, int64_t image, int64_t pitch) {
  for (int64_t n = 0; n < batch; ++n) {
    widen(in + n * pitch, out + n * image, image);
  }
}

template <typename T>
void gather(const T* in, op_type<T>* out, int64_t batch, int64_t image, int64_t pitch) {
  gather_images(in, out, batch, image, pitch);
}

// The gradients of a tensor whose channels are images; sums[0..C) and sums[C..2C) receive sum g and sum (x - m) g.
template <typename T>
void backward_planes(
    Pitched<const T> grad, const T* x, Pitched<T> out, Pitched<const T> residual, const NormShape& shape,
    const Passes<T>& passes, const Constants<op_type<T>>& k, double* sums) {
  using O = op_type<T>;
  const int64_t image = shape.image, pitch = shape.channels * image;
  const int64_t count = shape.batch * image;
  // One thread does both passes of a channel, the second over what the first left in its cache.
  const bool gathers = gathers_images(shape);
  parallel_for(0, shape.channels, std::max<int64_t>(1, 8192 / count), [&](int64_t begin, int64_t end) {
    std::vector<O> scratch(gathers ? 2 * count : 0);
    O *g = scratch.data(), *values = g + (gathers ? count : 0);
    for (int64_t c = begin; c < end; ++c) {
      const Channel<O> channel = k.channel(c);
      const T *of_x = x + c * image, *of_grad = grad.data + c * image;
      T* to = out.data == nullptr ? nullptr : out.data + c * image;
      double totals[2] = {0, 0};
      if (gathers) {
        gather(of_grad, g, shape.batch, image, grad.pitch);
        gather(of_x, values, shape.batch, image, pitch);
        passes.reduce_gathered(g, values, count, channel, &totals[0]);
      } else {
        for (int64_t n = 0; n < shape.batch; ++n) {
          T* kept = passes.costly() ? to + n * out.pitch : nullptr;
          passes.reduce_run(of_grad + n * grad.pitch, of_x + n * pitch, kept, image, channel, &totals[0]);
        }
      }
      sums[c] = totals[0];
      sums[shape.channels + c] = totals[1];
      if (out.data == nullptr) {
        continue;
      }
      const Gradient<O> gradient = gradient_of(totals[0], totals[1], count, k.invstd[c], k.weight[c]);
      for (int64_t n = 0; n < shape.batch; ++n) {
        T* into = to + n * out.pitch;
        if (gathers) {
          passes.input_grad_gathered(g + n * image, values + n * image, into, image, channel, gradient);
        } else {
          const T* from = passes.costly() ? into : of_grad + n * grad.pitch;
          passes.input_grad_run(from, of_x + n * pitch, into, image, channel, gradient);
        }
        if (residual.data != nullptr) {
          add_gradient(into, residual.data + n * residual.pitch + c * image, image);
        }
      }
    }
  });
}

// The same of a tensor in rows of adjacent channels. grad and grad_input are whole tensors here.
template <typename T>
void backward_rows(
    const T* grad, const T* x, T* out, Pitched<const T> residual, const NormShape& shape, const Passes<T>& passes,
    const Constants<op_type<T>>& k, double* sums) {
  using O = op_type<T>;
  const int64_t C = shape.channels, rows = shape.batch * shape.image;
  const std::vector<double> found = sums_of_rows<O>(rows, C, [&](int64_t first, int64_t count, O* into) {
    passes.reduce_rows(
        grad + first * C, x + first * C, passes.costly() ? out + first * C : nullptr, count, C, into, into + C);
  });
  std::copy(found.begin(), found.end(), sums);
  if (out == nullptr) {
    return;
  }
  std::vector<O> mean_g(C), slope(C), scale(C);
  for (int64_t c = 0; c < C; ++c) {
    const Gradient<O> d = gradient_of(sums[c], sums[C + c], rows, k.invstd[c], k.weight[c]);
    mean_g[c] = d.mean_g;
    slope[c] = d.slope;
    scale[c] = d.scale;
  }
  const T* from = passes.costly() ? out : grad;
  parallel_for(0, rows, row_grain(C), [&](int64_t begin, int64_t end) {
    passes.input_grad_rows(
        from + begin * C, x + begin * C, out + begin * C, end - begin, C, mean_g.data(), slope.data(), scale.data());
    for (int64_t row = begin; residual.data != nullptr && row < end; ++row) {
      add_gradient(out + row * C, residual.data + row * residual.pitch, C);
    }
  });
}

}  // namespace

void backward_loops(
    const Input& x, const Layer& layer, Pitched<const void> grad, Pitched<void> out, Pitched<const void> residual,
    double* sums) {
  with_dtype(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Constants<op_type<T>> k = constants<op_type<T>>(layer, x.shape.channels);
    const Passes<T> passes(layer, k);
    const Pitched<const T> upstream{static_cast<const T*>(grad.data), grad.pitch};
    const Pitched<const T> more{static_cast<const T*>(residual.data), residual.pitch};
    const Pitched<T> to{static_cast<T*>(out.data), out.pitch};
    const T* from = static_cast<const T*>(x.data);
    if (x.by_rows) {
      backward_rows(upstream.data, from, to.data, more, x.shape, passes, k, sums);
    } else {
      backward_planes(upstream, from, to, more, x.shape, passes, k, sums);
    }
  });
}

}  // namespace monet_like::batch_norm
