// Training-mode batch norm on the GPU, alone or with the addition and the activation after it, and the gradients.
//
// Two launches each way: sums of every channel in parts, then a pass over the elements, in which every block adds up the
// parts of its own channels, always in the same order. Tensors are seen in one of two forms:
//
//   planes   a block has a part of one channel: images of any size, read 16 bytes at a time. Elements before the first
//            and after the last multiple of 16 bytes are read one by one;
//   columns  a block has adjacent columns of a matrix whose rows are pixels with their channels (channels last), or whole
//            short images of all channels. A thread has the same columns in all of its rows, and their constants in
//            registers.
//
// Tensors whose alignment does not allow reads of 16 bytes, and float64, take the same code with single elements and with
// the activation looked up at run time (kernels `any_...`).
//
// Statistics that must have ATen's bits (`exact`) are ATen's own, in its two launches; the inverse root is part of the pass.

#include <limits>
#include <tuple>

#include "common.cuh"

namespace monet_like {
namespace {

constexpr int kColumnThreads = 512;   // of a block of columns, at most
constexpr int kColumnChannels = 256;  // of a block of columns, at most
constexpr int kSamples = 8;           // the mean of these elements is the shift of a channel

// ---- numbers of channels ----

// A number for each channel, of any dtype; null: there are none.
struct Numbers {
  Floats floats;
  int64_t stride;

  explicit Numbers(const Tensor& t) : floats(t), stride(t.defined() ? t.stride(0) : 0) {}
  explicit Numbers(const MaybeTensor& t) : Numbers(given(t) ? *t : Tensor()) {}

  template <typename O>
  __device__ __forceinline__ O at(int64_t c, O otherwise = O(0)) const {
    return floats.data == nullptr ? otherwise : floats.at<O>(c * stride);
  }
  template <typename O>
  __device__ __forceinline__ void put(int64_t c, O value) const {
    if (floats.data != nullptr) {
      floats.put(c * stride, value);
    }
  }
};

// Two sums for each channel, in parts: [parts, 2, channels]. After sums for the statistics follows each channel's shift.
template <typename O>
struct Sums {
  const O* data;
  int parts;
  int channels;

  __device__ __forceinline__ O at(int part, int which, int c) const {
    return data[(static_cast<int64_t>(part) * 2 + which) * channels + c];
  }
  __device__ __forceinline__ O shift(int c) const { return data[static_cast<int64_t>(parts) * 2 * channels + c]; }
};

template <typename O>
struct Pair {
  O first, second;
};

// The statistics of a batch norm: saved ones, or mean and variance, or sums to make them from.
template <typename O>
struct Statistics {
  enum Source : int { Saved, Variance, Moments };

  Source source;
  Numbers weight, bias;
  Numbers mean, spread;  // read, unless they are computed from sums; `spread` is invstd or the variance
  Sums<O> moments;
  double count;
  O eps, momentum;
  Numbers made_mean, made_invstd, running_mean, running_var;

  // Of channel c, from saved statistics.
  __device__ __forceinline__ Channel<O> saved(int c) const {
    return {weight.template at<O>(c, O(1)), bias.template at<O>(c), mean.template at<O>(c), spread.template at<O>(c)};
  }

  // Of channel c. The thread with `writes` stores the statistics, unless they were saved.
  __device__ __forceinline__ Channel<O> channel(int c, const Pair<O>& sums, bool writes) const {
    Channel<O> k = saved(c);
    if (source == Saved) {
      return k;
    }
    O variance = k.invstd;
    if (source == Moments) {
      const double off = static_cast<double>(sums.first) / count;
      const double raw = static_cast<double>(sums.second) / count - off * off;
      k.mean = static_cast<O>(static_cast<double>(moments.shift(c)) + off);
      variance = static_cast<O>(raw < 0 ? 0 : raw);
    }
    k.invstd = rsqrt(variance + eps);
    if (writes) {
      made_mean.put(c, k.mean);
      made_invstd.put(c, k.invstd);
      const O kept = O(1) - momentum;
      const O unbiased = variance * static_cast<O>(count / (count - 1));
      running_mean.put(c, fused(k.mean, momentum, kept * running_mean.template at<O>(c)));
      running_var.put(c, fused(unbiased, momentum, kept * running_var.template at<O>(c)));
    }
    return k;
  }
};

// Inputs of the gradient of x for each channel besides its statistics, and the outputs for the parameters' gradients.
template <typename O>
struct Slope {
  O mean_grad, slope, scale;
};

template <typename O>
struct Gradients {
  Sums<O> sums;  // of g, and of (x - mean) g
  double count;
  Numbers of_weight, of_bias;

  __device__ __forceinline__ Slope<O> channel(int c, const Channel<O>& k, const Pair<O>& total, bool writes) const {
    const double invstd = k.invstd, dot = total.second;
    if (writes) {
      of_weight.put(c, static_cast<O>(dot * invstd));
      of_bias.put(c, total.first);
    }
    return {
        static_cast<O>(total.first / count), static_cast<O>(dot / count * invstd * invstd), k.invstd * k.a};
  }
};

// ---- elements ----

template <typename T, typename O>
__device__ __forceinline__ O stored(O value) {  // the value that reads back after a store
  return static_cast<O>(static_cast<T>(value));
}

// The activation after a batch norm; its gradient takes bounds in the form for `passes_clamp`.
template <Activation A, typename O>
struct Follow {
  static constexpr Activation kActivation = A;
  O lo, hi;
  __device__ __forceinline__ O operator()(O y) const { return activated<A, Formula::Cuda>(y, lo, hi); }
  __device__ __forceinline__ O gradient(O grad, O y) const {
    return activation_gradient<A, Formula::Cuda>(grad, y, lo, hi);
  }
};

template <typename O>
struct FollowAny {
  Activation activation;
  O lo, hi;
  __device__ __forceinline__ O operator()(O y) const {
    switch (activation) {
      case Activation::Clamp:
        return Follow<Activation::Clamp, O>{lo, hi}(y);
      case Activation::LeakyRelu:
        return Follow<Activation::LeakyRelu, O>{lo, hi}(y);
      case Activation::Hardswish:
        return Follow<Activation::Hardswish, O>{lo, hi}(y);
      default:
        return Follow<Activation::Silu, O>{lo, hi}(y);
    }
  }
  __device__ __forceinline__ O gradient(O grad, O y) const {
    switch (activation) {
      case Activation::Clamp:
        return Follow<Activation::Clamp, O>{lo, hi}.gradient(grad, y);
      case Activation::LeakyRelu:
        return Follow<Activation::LeakyRelu, O>{lo, hi}.gradient(grad, y);
      case Activation::Hardswish:
        return Follow<Activation::Hardswish, O>{lo, hi}.gradient(grad, y);
      default:
        return Follow<Activation::Silu, O>{lo, hi}.gradient(grad, y);
    }
  }
};

template <typename O>
__device__ __forceinline__ O normalised_at(O x, const Channel<O>& k) {
  return normalised<Formula::Cuda>(x, k.a, k.b, k.mean, k.invstd);
}

// The gradient with respect to y, the batch norm's stored result.
template <typename T, typename O, typename F>
__device__ __forceinline__ O through(O grad, O x, const Channel<O>& k, const F& follow) {
  return follow.gradient(grad, stored<T>(normalised_at(x, k)));
}

template <typename O>
__device__ __forceinline__ O input_gradient(O g, O x, O mean, const Slope<O>& s) {
  return fused(mean - x, s.slope, g - s.mean_grad) * s.scale;
}

// N elements as they wait in registers: as words, or one element.
template <typename T, int N>
using Waiting = std::conditional_t<N == 1, Vector<T, 1>, Words>;

template <int N, typename T>
__device__ __forceinline__ Waiting<T, N> wait_for(const T* p) {
  if constexpr (N == 1) {
    return {*p};
  } else {
    return load_words(p);
  }
}

// N elements in the type that they are computed in.
template <int N, typename T>
__device__ __forceinline__ Vector<op_type<T>, N> opened(const Waiting<T, N>& waiting) {
  if constexpr (N == 1) {
    return {static_cast<op_type<T>>(waiting.at[0])};
  } else {
    return widened<T>(waiting);
  }
}

// Numbers of which every one is the value that reads back after a store.
template <typename T, int N>
__device__ __forceinline__ Vector<op_type<T>, N> all_stored(const Vector<op_type<T>, N>& values) {
  if constexpr (std::is_same_v<T, op_type<T>>) {
    return values;
  } else if constexpr (N == 1) {
    return {stored<T>(values.at[0])};
  } else {
    const Vector<T, N> made = narrowed<T>(values);
    Words words;
    __builtin_memcpy(&words, &made, sizeof(words));
    return widened<T>(words);
  }
}

// The results for N elements: last(one(j) + residual), without the sum if there is no residual. Each step rounds as if the
// step before had stored its result.
template <typename T, int N, typename One, typename Last>
__device__ __forceinline__ Vector<T, N> finished(
    bool adds, const Vector<op_type<T>, N>& residual, const One& one, const Last& last) {
  Vector<op_type<T>, N> values;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values.at[j] = one(j);
  }
  values = all_stored<T>(values);
  if (adds) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values.at[j] += residual.at[j];
    }
    values = all_stored<T>(values);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    values.at[j] = last(values.at[j]);
  }
  return narrowed<T>(values);
}

// x and the tensors that are read together with it.
template <typename T, int N>
struct Two {
  Waiting<T, N> x, other;
};

template <typename T, int N>
struct Three {
  Waiting<T, N> x, grad, other;
};

// A tensor, and elements from one image to the next or from one row to the next.
template <typename T>
struct Pitched {
  T* data;
  int pitch;

  // At image or row n, `first` elements behind its start.
  __device__ __forceinline__ T* at(int n, int64_t first) const { return data + first + static_cast<int64_t>(n) * pitch; }
};

// ---- planes ----

// In what order a kernel goes through its tensors. The pass that follows the sums goes backwards: the L2 cache still has
// what the sums read last.
enum class Order { Forwards, Backwards };

// The images of a channel, in turns: in one turn a warp takes kUnroll vectors for each of its threads, of one image. The
// warps of all blocks of the channel share the turns.
struct Planes {
  int batch, image;
  Divisor by_turns;  // of an image

  static constexpr int kWarps = kThreads / 32, kTurn = 32 * kUnroll;

  // each(image, turn of the image) for this warp's turns.
  template <Order O, typename F>
  __device__ __forceinline__ void turns(const F& each) const {
    const int all = batch * static_cast<int>(by_turns.divisor);
    const int first = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32;
#pragma unroll 1
    for (int i = first; i < all; i += static_cast<int>(gridDim.y) * kWarps) {
      uint32_t turn = static_cast<uint32_t>(O == Order::Forwards ? i : all - 1 - i);
      const uint32_t n = by_turns.split(turn);
      each(static_cast<int>(n), static_cast<int>(turn));
    }
  }

  // Of one turn: single(i) for elements before and behind the vectors of the image, fetch and use for the vectors, by first
  // elements, so many vectors of a thread together.
  template <int N, int Together, typename T, typename Single, typename Fetch, typename Use>
  __device__ __forceinline__ void elements(
      const T* start, int turn, const Single& single, const Fetch& fetch, const Use& use) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int before = N == 1 ? 0 : min(before_aligned(start), image);
    const int vectors = (image - before) / N, odd = image - vectors * N;  // elements before and behind
    if (turn == 0 && lane < odd) {
      single(lane < before ? lane : vectors * N + lane);
    }
#pragma unroll 1
    for (int part = 0; part < kTurn; part += 32 * Together) {
      take_vectors<Together>(
          vectors, turn * kTurn + part + lane, 32, [&](int v) { return fetch(before + v * N); },
          [&](int v, const auto& fetched) { use(before + v * N, fetched); });
    }
  }
};

__device__ __forceinline__ int thread_of_block() {
  return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
}

__device__ __forceinline__ bool is_first_part() {
  return blockIdx.y == 0;
}

template <typename O>
__device__ __forceinline__ Pair<O> warp_sum(Pair<O> sums) {
  for (int step = 16; step > 0; step /= 2) {
    sums.first += __shfl_xor_sync(0xffffffffu, sums.first, step);
    sums.second += __shfl_xor_sync(0xffffffffu, sums.second, step);
  }
  return sums;
}

// The sums of a channel; each warp adds up the parts for itself.
template <typename O>
__device__ __forceinline__ Pair<O> total(const Sums<O>& sums, int c) {
  Pair<O> all{0, 0};
  for (int part = thread_of_block() % 32; part < sums.parts; part += 32) {
    all.first += sums.at(part, 0, c);
    all.second += sums.at(part, 1, c);
  }
  return warp_sum(all);
}

// Writes this block's part of the sums of its channel.
template <typename O>
__device__ __forceinline__ void put_sums(Pair<O> sums, O* partial, int channels) {
  __shared__ O shared[2][kThreads / 32];
  const int thread = thread_of_block();
  sums = warp_sum(sums);
  if (thread % 32 == 0) {
    shared[0][thread / 32] = sums.first;
    shared[1][thread / 32] = sums.second;
  }
  __syncthreads();
  if (thread < 2) {
    O all = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      all += shared[thread][warp];
    }
    partial[(static_cast<int64_t>(blockIdx.y) * 2 + thread) * channels + blockIdx.x] = all;
  }
}

// Sums of x - shift and of its square. The shift is the mean of a few elements, so that the later difference loses few
// digits.
template <int N, typename T>
__device__ __forceinline__ void moments_of_planes(const T* x, int pitch, op_type<T>* partial, const Planes& planes) {
  using O = op_type<T>;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * planes.image;
  const Pitched<const T> in{x, pitch};
  const int64_t sample = thread_of_block() % kSamples;
  const int n = static_cast<int>(sample * planes.batch / kSamples);
  O shift = static_cast<O>(*in.at(n, channel + sample * planes.image / kSamples));
  for (int step = kSamples / 2; step > 0; step /= 2) {
    shift += __shfl_xor_sync(0xffffffffu, shift, step);
  }
  shift /= kSamples;
  Pair<O> sums{0, 0};
  const auto add = [&](Pair<O>& to, O value) {
    const O off = value - shift;
    to.first += off;
    to.second = fused(off, off, to.second);
  };
  planes.turns<Order::Forwards>([&](int image, int turn) {
    const T* from = in.at(image, channel);
    planes.elements<N, kUnroll>(
        from, turn, [&](int i) { add(sums, static_cast<O>(from[i])); }, [&](int i) { return wait_for<N>(from + i); },
        [&](int, const Waiting<T, N>& waiting) {
          const Vector<O, N> values = opened<N, T>(waiting);
          Pair<O> some{0, 0};
#pragma unroll
          for (int j = 0; j < N; ++j) {
            add(some, values.at[j]);
          }
          sums.first += some.first;
          sums.second += some.second;
        });
  });
  const int channels = static_cast<int>(gridDim.x);
  put_sums(sums, partial, channels);
  if (is_first_part() && thread_of_block() == 0) {
    partial[static_cast<int64_t>(gridDim.y) * 2 * channels + blockIdx.x] = shift;
  }
}

// Sums of the gradient with respect to y, and of its products with x - mean.
template <int N, typename T, typename F>
__device__ __forceinline__ void sums_of_planes(
    const T* grad, int grad_pitch, const T* x, int pitch, const Statistics<op_type<T>>& statistics, op_type<T>* partial,
    const Planes& planes, const F& follow) {
  using O = op_type<T>;
  const int c = static_cast<int>(blockIdx.x);
  const int64_t channel = static_cast<int64_t>(c) * planes.image;
  const Channel<O> k = statistics.saved(c);
  Pair<O> sums{0, 0};
  const auto add = [&](Pair<O>& to, O value, O upstream) {
    const O g = through<T>(upstream, value, k, follow);
    to.first += g;
    to.second = fused(value - k.mean, g, to.second);
  };
  planes.turns<Order::Forwards>([&](int image, int turn) {
    const T* from = Pitched<const T>{x, pitch}.at(image, channel);
    const T* upstream = Pitched<const T>{grad, grad_pitch}.at(image, channel);
    planes.elements<N, kUnroll>(
        from, turn, [&](int i) { add(sums, static_cast<O>(from[i]), static_cast<O>(upstream[i])); },
        [&](int i) { return Two<T, N>{wait_for<N>(from + i), wait_for<N>(upstream + i)}; },
        [&](int, const Two<T, N>& waiting) {
          const Vector<O, N> values = opened<N, T>(waiting.x), gradients = opened<N, T>(waiting.other);
          Pair<O> some{0, 0};
#pragma unroll
          for (int j = 0; j < N; ++j) {
            add(some, values.at[j], gradients.at[j]);
          }
          sums.first += some.first;
          sums.second += some.second;
        });
  });
  put_sums(sums, partial, static_cast<int>(gridDim.x));
}

template <int N, typename T, typename F>
__device__ __forceinline__ void normalise_planes(
    const T* x, int pitch, const T* residual, int residual_pitch, T* out, int out_pitch,
    const Statistics<op_type<T>>& statistics, const Planes& planes, const F& follow) {
  using O = op_type<T>;
  const int c = static_cast<int>(blockIdx.x);
  const int64_t channel = static_cast<int64_t>(c) * planes.image;
  const Pair<O> moments = statistics.source == Statistics<O>::Moments ? total(statistics.moments, c) : Pair<O>{0, 0};
  const Channel<O> k = statistics.channel(c, moments, is_first_part() && thread_of_block() == 0);
  const bool adds = residual != nullptr;
  planes.turns<Order::Backwards>([&](int image, int turn) {
    const T* from = Pitched<const T>{x, pitch}.at(image, channel);
    const T* more = adds ? Pitched<const T>{residual, residual_pitch}.at(image, channel) : nullptr;
    T* to = Pitched<T>{out, out_pitch}.at(image, channel);
    const auto put = [&](int i, const auto& values, const auto& others) {
      store(to + i, finished<T>(adds, others, [&](int j) { return normalised_at(values.at[j], k); }, follow));
    };
    planes.elements<N, kUnroll / 2>(
        from, turn,
        [&](int i) { put(i, opened<1, T>({from[i]}), opened<1, T>({adds ? more[i] : T(0)})); },
        [&](int i) {
          return Two<T, N>{wait_for<N>(from + i), adds ? wait_for<N>(more + i) : Waiting<T, N>{}};
        },
        [&](int i, const Two<T, N>& waiting) { put(i, opened<N, T>(waiting.x), opened<N, T>(waiting.other)); });
  });
}

template <int N, typename T, typename F>
__device__ __forceinline__ void input_grad_of_planes(
    const T* grad, int grad_pitch, const T* x, int pitch, const T* residual, int residual_pitch, T* out, int out_pitch,
    const Statistics<op_type<T>>& statistics, const Gradients<op_type<T>>& gradients, const Planes& planes,
    const F& follow) {
  using O = op_type<T>;
  const int c = static_cast<int>(blockIdx.x);
  const int64_t channel = static_cast<int64_t>(c) * planes.image;
  const Channel<O> k = statistics.saved(c);
  const Pair<O> sums = total(gradients.sums, c);
  const Slope<O> slope = gradients.channel(c, k, sums, is_first_part() && thread_of_block() == 0);
  const bool adds = residual != nullptr;
  planes.turns<Order::Backwards>([&](int image, int turn) {
    const T* from = Pitched<const T>{x, pitch}.at(image, channel);
    const T* upstream = Pitched<const T>{grad, grad_pitch}.at(image, channel);
    const T* more = adds ? Pitched<const T>{residual, residual_pitch}.at(image, channel) : nullptr;
    T* to = Pitched<T>{out, out_pitch}.at(image, channel);
    const auto put = [&](int i, const auto& values, const auto& gradients, const auto& others) {
      const auto one = [&](int j) {
        const O value = values.at[j];
        return input_gradient(through<T>(gradients.at[j], value, k, follow), value, k.mean, slope);
      };
      store(to + i, finished<T>(adds, others, one, [](O made) { return made; }));
    };
    planes.elements<N, kUnroll / 2>(
        from, turn,
        [&](int i) {
          put(i, opened<1, T>({from[i]}), opened<1, T>({upstream[i]}), opened<1, T>({adds ? more[i] : T(0)}));
        },
        [&](int i) {
          return Three<T, N>{
              wait_for<N>(from + i), wait_for<N>(upstream + i), adds ? wait_for<N>(more + i) : Waiting<T, N>{}};
        },
        [&](int i, const Three<T, N>& waiting) {
          put(i, opened<N, T>(waiting.x), opened<N, T>(waiting.grad), opened<N, T>(waiting.other));
        });
  });
}

// ---- columns ----

// A tensor as a matrix: `rows` rows of channels times `inner` columns. A block has `tile` channels: the last may have fewer.
struct Columns {
  int rows, channels, inner, tile;
  int spread;  // 2^spread is the least that is not below `tile`
  Divisor by_inner;

  __device__ __forceinline__ int first_channel() const { return static_cast<int>(blockIdx.x) * tile; }
  __device__ __forceinline__ int own_channels() const { return min(tile, channels - first_channel()); }
  // Of this thread's first column, in the block and in the matrix.
  template <int N>
  __device__ __forceinline__ int own_column() const {
    return static_cast<int>(threadIdx.x) * N;
  }
  template <int N>
  __device__ __forceinline__ bool has_columns() const {
    return own_column<N>() < own_channels() * inner;
  }
  template <int N>
  __device__ __forceinline__ int64_t first_column() const {
    return static_cast<int64_t>(first_channel()) * inner + own_column<N>();
  }
  // Channel of the block that column j of this thread belongs to.
  template <int N>
  __device__ __forceinline__ int channel_of(int j) const {
    return static_cast<int>(by_inner.quotient(static_cast<uint32_t>(own_column<N>() + j)));
  }

  template <Order O, typename Fetch, typename Use>
  __device__ __forceinline__ void own_rows(const Fetch& fetch, const Use& use) const {
    const auto row = [&](int i) { return O == Order::Forwards ? i : rows - 1 - i; };
    for_vectors(
        rows, static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y), static_cast<int>(gridDim.y * blockDim.y),
        [&](int i) { return fetch(row(i)); }, [&](int i, const auto& fetched) { use(row(i), fetched); });
  }
};

// Calls each(k, c, sums) for the block's channels, by one thread each; `sums` of no parts are zeros. Ends with a barrier.
template <typename O, typename F>
__device__ __forceinline__ void for_channels(const Columns& columns, const Sums<O>& sums, const F& each) {
  __shared__ O shared[2][kColumnThreads];
  const int thread = thread_of_block(), threads = static_cast<int>(blockDim.x * blockDim.y);
  const int first = columns.first_channel(), own = columns.own_channels();
  // Threads that are `high` apart have the same channel, and share its parts. There are more threads than channels.
  const int high = 1 << columns.spread, sharing = threads >> columns.spread;
  const int k = thread & (high - 1), turn = thread >> columns.spread;
  Pair<O> some{0, 0};
  if (k < own && turn < sharing) {
    for_vectors(
        sums.parts, turn, sharing,
        [&](int part) { return Pair<O>{sums.at(part, 0, first + k), sums.at(part, 1, first + k)}; },
        [&](int, const Pair<O>& part) {
          some.first += part.first;
          some.second += part.second;
        });
  }
  shared[0][thread] = some.first;
  shared[1][thread] = some.second;
  __syncthreads();
  if (thread < own) {
    for (int other = 1; other < sharing; ++other) {
      some.first += shared[0][thread + other * high];
      some.second += shared[1][thread + other * high];
    }
    each(thread, first + thread, some);
  }
  __syncthreads();
}

// Adds up `values` of the threads that have the same columns, and the columns of a channel; put(k, sum) by one thread each.
template <int N, typename O, typename F>
__device__ __forceinline__ void for_column_sums(const Columns& columns, O (&values)[N], O* shared, const F& put) {
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int width = static_cast<int>(blockDim.x);
  for (int left = static_cast<int>(blockDim.y); left > 1;) {
    const int half = (left + 1) / 2;
    if (y >= half && y < left) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        shared[((y - half) * N + j) * width + x] = values[j];
      }
    }
    __syncthreads();
    if (y < left - half) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[j] += shared[(y * N + j) * width + x];
      }
    }
    __syncthreads();
    left = half;
  }
  if (y == 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      shared[x * N + j] = values[j];
    }
  }
  __syncthreads();
  const int thread = thread_of_block(), own = columns.own_channels();
  if (columns.inner == 1) {
    if (thread < own) {
      put(thread, shared[thread]);
    }
  } else {
    const int warps = static_cast<int>(blockDim.x * blockDim.y) / 32;  // whole ones
    for (int k = thread / 32; k < own && thread / 32 < warps; k += warps) {
      O sum = 0;
      for (int i = thread % 32; i < columns.inner; i += 32) {
        sum += shared[k * columns.inner + i];
      }
      for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
      }
      if (thread % 32 == 0) {
        put(k, sum);
      }
    }
  }
  __syncthreads();
}

template <int N, typename O>
__device__ __forceinline__ void put_column_sums(const Columns& columns, O (&first)[N], O (&second)[N], O* partial) {
  __shared__ O shared[kColumnThreads * N];
  const auto put = [&](int which) {
    return [=](int k, O sum) {
      partial[(static_cast<int64_t>(blockIdx.y) * 2 + which) * columns.channels + columns.first_channel() + k] = sum;
    };
  };
  for_column_sums<N>(columns, first, shared, put(0));
  for_column_sums<N>(columns, second, shared, put(1));
}

template <int N, typename T>
__device__ __forceinline__ void moments_of_columns(const T* x, int pitch, op_type<T>* partial, const Columns& columns) {
  using O = op_type<T>;
  __shared__ O shifts[kColumnChannels];
  const Pitched<const T> in{x, pitch};
  if (const int k = thread_of_block(); k < columns.own_channels()) {
    const int c = columns.first_channel() + k;
    O samples[kSamples];
#pragma unroll
    for (int64_t i = 0; i < kSamples; ++i) {
      const int64_t column = static_cast<int64_t>(c) * columns.inner + i * columns.inner / kSamples;
      samples[i] = static_cast<O>(*in.at(static_cast<int>(i * columns.rows / kSamples), column));
    }
#pragma unroll
    for (int step = kSamples / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < step; ++i) {
        samples[i] += samples[i + step];
      }
    }
    shifts[k] = samples[0] / kSamples;
    if (blockIdx.y == 0) {
      partial[static_cast<int64_t>(gridDim.y) * 2 * columns.channels + c] = shifts[k];
    }
  }
  __syncthreads();
  O first[N] = {}, second[N] = {};
  if (columns.has_columns<N>()) {
    O shift[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      shift[j] = shifts[columns.channel_of<N>(j)];
    }
    const int64_t column = columns.first_column<N>();
    columns.own_rows<Order::Forwards>(
        [&](int row) { return wait_for<N>(in.at(row, column)); },
        [&](int, const Waiting<T, N>& waiting) {
          const Vector<O, N> values = opened<N, T>(waiting);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const O off = values.at[j] - shift[j];
            first[j] += off;
            second[j] = fused(off, off, second[j]);
          }
        });
  }
  put_column_sums<N>(columns, first, second, partial);
}

// The constants of a block's channels, and those of a thread's columns.
template <typename O>
struct Table {
  O values[4][kColumnChannels];

  __device__ __forceinline__ void put(int k, const Channel<O>& c) {
    values[0][k] = c.a;
    values[1][k] = c.b;
    values[2][k] = c.mean;
    values[3][k] = c.invstd;
  }
  template <int N>
  __device__ __forceinline__ void get(const Columns& columns, Channel<O> (&own)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int k = columns.channel_of<N>(j);
      own[j] = {values[0][k], values[1][k], values[2][k], values[3][k]};
    }
  }
};

template <int N, typename T, typename F>
__device__ __forceinline__ void sums_of_columns(
    const T* grad, int grad_pitch, const T* x, int pitch, const Statistics<op_type<T>>& statistics, op_type<T>* partial,
    const Columns& columns, const F& follow) {
  using O = op_type<T>;
  __shared__ Table<O> table;
  for_channels(columns, Sums<O>{nullptr, 0, 0}, [&](int k, int c, const Pair<O>&) {
    table.put(k, statistics.saved(c));
  });
  O first[N] = {}, second[N] = {};
  if (columns.has_columns<N>()) {
    Channel<O> own[N];
    table.get(columns, own);
    const int64_t column = columns.first_column<N>();
    const Pitched<const T> in{x, pitch}, upstream{grad, grad_pitch};
    columns.own_rows<Order::Forwards>(
        [&](int row) { return Two<T, N>{wait_for<N>(in.at(row, column)), wait_for<N>(upstream.at(row, column))}; },
        [&](int, const Two<T, N>& waiting) {
          const Vector<O, N> values = opened<N, T>(waiting.x), gradients = opened<N, T>(waiting.other);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const O value = values.at[j], g = through<T>(gradients.at[j], value, own[j], follow);
            first[j] += g;
            second[j] = fused(value - own[j].mean, g, second[j]);
          }
        });
  }
  put_column_sums<N>(columns, first, second, partial);
}

template <int N, typename T, typename F>
__device__ __forceinline__ void normalise_columns(
    const T* x, int pitch, const T* residual, int residual_pitch, T* out, int out_pitch,
    const Statistics<op_type<T>>& statistics, const Columns& columns, const F& follow) {
  using O = op_type<T>;
  __shared__ Table<O> table;
  for_channels(columns, statistics.moments, [&](int k, int c, const Pair<O>& moments) {
    table.put(k, statistics.channel(c, moments, is_first_part()));
  });
  if (!columns.has_columns<N>()) {
    return;
  }
  Channel<O> own[N];
  table.get(columns, own);
  const int64_t column = columns.first_column<N>();
  const bool adds = residual != nullptr;
  const Pitched<const T> in{x, pitch}, more{residual, residual_pitch};
  const Pitched<T> to{out, out_pitch};
  columns.own_rows<Order::Backwards>(
      [&](int row) {
        return Two<T, N>{
            wait_for<N>(in.at(row, column)), adds ? wait_for<N>(more.at(row, column)) : Waiting<T, N>{}};
      },
      [&](int row, const Two<T, N>& waiting) {
        const Vector<O, N> values = opened<N, T>(waiting.x);
        const auto one = [&](int j) { return normalised_at(values.at[j], own[j]); };
        store(to.at(row, column), finished<T>(adds, opened<N, T>(waiting.other), one, follow));
      });
}

template <int N, typename T, typename F>
__device__ __forceinline__ void input_grad_of_columns(
    const T* grad, int grad_pitch, const T* x, int pitch, const T* residual, int residual_pitch, T* out, int out_pitch,
    const Statistics<op_type<T>>& statistics, const Gradients<op_type<T>>& gradients, const Columns& columns,
    const F& follow) {
  using O = op_type<T>;
  __shared__ Table<O> table;
  __shared__ O slopes[3][kColumnChannels];
  for_channels(columns, gradients.sums, [&](int k, int c, const Pair<O>& sums) {
    const Channel<O> channel = statistics.saved(c);
    table.put(k, channel);
    const Slope<O> slope = gradients.channel(c, channel, sums, is_first_part());
    slopes[0][k] = slope.mean_grad;
    slopes[1][k] = slope.slope;
    slopes[2][k] = slope.scale;
  });
  if (!columns.has_columns<N>()) {
    return;
  }
  Channel<O> own[N];
  Slope<O> slope[N];
  table.get(columns, own);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int k = columns.channel_of<N>(j);
    slope[j] = {slopes[0][k], slopes[1][k], slopes[2][k]};
  }
  const int64_t column = columns.first_column<N>();
  const bool adds = residual != nullptr;
  const Pitched<const T> in{x, pitch}, upstream{grad, grad_pitch}, more{residual, residual_pitch};
  const Pitched<T> to{out, out_pitch};
  columns.own_rows<Order::Backwards>(
      [&](int row) {
        return Three<T, N>{
            wait_for<N>(in.at(row, column)), wait_for<N>(upstream.at(row, column)),
            adds ? wait_for<N>(more.at(row, column)) : Waiting<T, N>{}};
      },
      [&](int row, const Three<T, N>& waiting) {
        const Vector<O, N> values = opened<N, T>(waiting.x), upstreams = opened<N, T>(waiting.grad);
        const auto one = [&](int j) {
          const O value = values.at[j];
          return input_gradient(through<T>(upstreams.at[j], value, own[j], follow), value, own[j].mean, slope[j]);
        };
        store(to.at(row, column), finished<T>(adds, opened<N, T>(waiting.other), one, [](O made) { return made; }));
      });
}

// ---- kernels ----

// Blocks of planes that a multiprocessor shall hold: activations that divide take more registers.
template <Activation A>
inline constexpr int kResident = A == Activation::Clamp || A == Activation::LeakyRelu ? 4 : 3;

#define MONET_READS(name) const T* __restrict__ name, int name##_pitch

template <typename T>
__global__ void __launch_bounds__(kThreads, 4) moments_planes_kernel(
    MONET_READS(x), op_type<T>* __restrict__ partial, Planes planes) {
  moments_of_planes<kVector<T>>(x, x_pitch, partial, planes);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 4) any_moments_planes_kernel(
    MONET_READS(x), op_type<T>* __restrict__ partial, Planes planes) {
  moments_of_planes<1>(x, x_pitch, partial, planes);
}

template <typename T>
__global__ void __launch_bounds__(kColumnThreads) moments_columns_kernel(
    MONET_READS(x), op_type<T>* __restrict__ partial, Columns columns) {
  moments_of_columns<kVector<T>>(x, x_pitch, partial, columns);
}

template <typename T>
__global__ void __launch_bounds__(kColumnThreads) any_moments_columns_kernel(
    MONET_READS(x), op_type<T>* __restrict__ partial, Columns columns) {
  moments_of_columns<1>(x, x_pitch, partial, columns);
}

template <Activation A, typename T>
__global__ void __launch_bounds__(kThreads, kResident<A>) sums_planes_kernel(
    MONET_READS(grad), MONET_READS(x), Statistics<op_type<T>> statistics, op_type<T>* __restrict__ partial,
    Planes planes, Follow<A, op_type<T>> follow) {
  sums_of_planes<kVector<T>>(grad, grad_pitch, x, x_pitch, statistics, partial, planes, follow);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) any_sums_planes_kernel(
    MONET_READS(grad), MONET_READS(x), Statistics<op_type<T>> statistics, op_type<T>* __restrict__ partial,
    Planes planes, FollowAny<op_type<T>> follow) {
  sums_of_planes<1>(grad, grad_pitch, x, x_pitch, statistics, partial, planes, follow);
}

template <Activation A, typename T>
__global__ void __launch_bounds__(kColumnThreads) sums_columns_kernel(
    MONET_READS(grad), MONET_READS(x), Statistics<op_type<T>> statistics, op_type<T>* __restrict__ partial,
    Columns columns, Follow<A, op_type<T>> follow) {
  sums_of_columns<kVector<T>>(grad, grad_pitch, x, x_pitch, statistics, partial, columns, follow);
}

template <typename T>
__global__ void __launch_bounds__(kColumnThreads) any_sums_columns_kernel(
    MONET_READS(grad), MONET_READS(x), Statistics<op_type<T>> statistics, op_type<T>* __restrict__ partial,
    Columns columns, FollowAny<op_type<T>> follow) {
  sums_of_columns<1>(grad, grad_pitch, x, x_pitch, statistics, partial, columns, follow);
}

template <Activation A, typename T>
__global__ void __launch_bounds__(kThreads, kResident<A>) normalise_planes_kernel(
    MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch, Statistics<op_type<T>> statistics,
    Planes planes, Follow<A, op_type<T>> follow) {
  normalise_planes<kVector<T>>(
      x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, planes, follow);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 4) any_normalise_planes_kernel(
    MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch, Statistics<op_type<T>> statistics,
    Planes planes, FollowAny<op_type<T>> follow) {
  normalise_planes<1>(x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, planes, follow);
}

template <Activation A, typename T>
__global__ void __launch_bounds__(kColumnThreads) normalise_columns_kernel(
    MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch, Statistics<op_type<T>> statistics,
    Columns columns, Follow<A, op_type<T>> follow) {
  normalise_columns<kVector<T>>(
      x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, columns, follow);
}

template <typename T>
__global__ void __launch_bounds__(kColumnThreads) any_normalise_columns_kernel(
    MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch, Statistics<op_type<T>> statistics,
    Columns columns, FollowAny<op_type<T>> follow) {
  normalise_columns<1>(x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, columns, follow);
}

template <Activation A, typename T>
__global__ void __launch_bounds__(kThreads, kResident<A>) input_grad_planes_kernel(
    MONET_READS(grad), MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch,
    Statistics<op_type<T>> statistics, Gradients<op_type<T>> gradients, Planes planes, Follow<A, op_type<T>> follow) {
  input_grad_of_planes<kVector<T>>(
      grad, grad_pitch, x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, gradients, planes, follow);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) any_input_grad_planes_kernel(
    MONET_READS(grad), MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch,
    Statistics<op_type<T>> statistics, Gradients<op_type<T>> gradients, Planes planes, FollowAny<op_type<T>> follow) {
  input_grad_of_planes<1>(
      grad, grad_pitch, x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, gradients, planes, follow);
}

template <Activation A, typename T>
__global__ void __launch_bounds__(kColumnThreads) input_grad_columns_kernel(
    MONET_READS(grad), MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch,
    Statistics<op_type<T>> statistics, Gradients<op_type<T>> gradients, Columns columns, Follow<A, op_type<T>> follow) {
  input_grad_of_columns<kVector<T>>(
      grad, grad_pitch, x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, gradients, columns, follow);
}

template <typename T>
__global__ void __launch_bounds__(kColumnThreads) any_input_grad_columns_kernel(
    MONET_READS(grad), MONET_READS(x), MONET_READS(residual), T* __restrict__ out, int out_pitch,
    Statistics<op_type<T>> statistics, Gradients<op_type<T>> gradients, Columns columns, FollowAny<op_type<T>> follow) {
  input_grad_of_columns<1>(
      grad, grad_pitch, x, x_pitch, residual, residual_pitch, out, out_pitch, statistics, gradients, columns, follow);
}

#undef MONET_READS

// ---- launches ----

bool by_rows(const Tensor& dense, const NormShape& shape) {
  return norm_layout(dense) == NormLayout::ChannelsLast || shape.image == 1;
}

int narrow(int64_t n) {
  MONET_CHECK(
      n <= kMost32, "monet_like: batch norm on a GPU takes images, rows and what is between them of up to ", kMost32,
      " elements, got ", n);
  return static_cast<int>(n);
}

// The form in which a call reads its tensors: all are laid out as x, or are channels of such tensors.
struct Form {
  bool rows_first, in_columns, in_vectors;
  int vector;  // elements
  NormShape shape;
  Planes planes;
  Columns columns;
  dim3 threads;

  // Short images are columns if there are enough of them to pay for the constants that a thread loads.
  static constexpr int64_t kShort = 512, kMany = 8;

  Form(const Tensor& x, const NormShape& shape, std::initializer_list<Tensor> others)
      : rows_first(by_rows(x, shape)), shape(shape) {
    const int64_t size = static_cast<int64_t>(x.element_size());
    vector = static_cast<int>(16 / size);
    bool aligned = x.scalar_type() != kDouble, alike = aligned;
    const int64_t start = offset_of(x), pitch = pitch_of(x, rows_first) * size % 16;
    const auto look = [&](const Tensor& t) {
      if (t.defined()) {
        const int64_t own = pitch_of(t, rows_first) * size % 16;
        aligned = aligned && offset_of(t) == 0 && own == 0;
        alike = alike && offset_of(t) == start && (own == pitch || shape.batch == 1);
      }
    };
    look(x);
    for (const Tensor& other : others) {
      look(other);
    }
    const int64_t inner = rows_first ? 1 : shape.image;
    aligned = aligned && shape.channels * inner % vector == 0;
    in_columns = rows_first || (aligned && inner < kShort && shape.batch >= kMany);
    in_vectors = in_columns ? aligned : alike;
    vector = in_vectors ? vector : 1;
    in_columns ? see_columns(inner) : see_planes();
  }

  static int64_t offset_of(const Tensor& t) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16);
  }

  void see_planes() {
    threads = dim3(kThreads);
    const int64_t each = static_cast<int64_t>(vector) * Planes::kTurn;
    planes = {narrow(shape.batch), narrow(shape.image), Divisor((shape.image + each - 1) / each)};
  }

  // Channels last, 128 bytes of a row; else as many whole channels as there are threads for. Each block's channels begin at
  // 16 bytes, and all blocks have about as many.
  void see_columns(int64_t inner) {
    const int64_t least = vector / std::gcd(inner, static_cast<int64_t>(vector));
    const int64_t wanted = inner == 1 ? (in_vectors ? 8 : 64) : kColumnThreads;
    const int64_t times = std::max<int64_t>(1, std::min(wanted * vector / (least * inner), kColumnChannels / least));
    const int64_t units = shape.channels / least, across = (units + times - 1) / times;
    const int64_t tile = (units + across - 1) / across * least;
    columns = {narrow(inner == 1 ? shape.batch * shape.image : shape.batch), narrow(shape.channels),
               static_cast<int>(inner), static_cast<int>(tile), 0, Divisor(inner)};
    while ((1 << columns.spread) < tile) {
      ++columns.spread;
    }
    const auto width = static_cast<unsigned int>(tile * inner / vector);
    threads = dim3(width, kColumnThreads / width);
  }

  // The number of blocks with `threads` threads: as many as run at once, or fewer if there is less work.
  template <auto Kernel>
  dim3 blocks() const {
    const int64_t resident = resident_blocks<Kernel>(in_columns ? kColumnThreads : kThreads);
    if (in_columns) {
      const int64_t across = (shape.channels + columns.tile - 1) / columns.tile;
      const int64_t work = blocks_for(columns.rows, int64_t(threads.y) * kUnroll);
      const int64_t down = std::clamp<int64_t>(resident / across, 1, work);
      return dim3(static_cast<unsigned int>(across), static_cast<unsigned int>(down));
    }
    return dim3(static_cast<unsigned int>(shape.channels), static_cast<unsigned int>(blocks_of_channel(resident)));
  }

  static int64_t blocks_for(int64_t work, int64_t each) {
    return std::clamp<int64_t>((work + each - 1) / each, 1, 65535);
  }

  // Blocks for each channel of planes. All blocks run at once, or in a few waves of full ones where the channels do not
  // share the multiprocessors evenly; the start of a block takes about as long as kStart turns.
  int64_t blocks_of_channel(int64_t resident) const {
    constexpr int64_t kWaves = 4, kStart = 2;
    const int64_t work = blocks_for(shape.batch * planes.by_turns.divisor, Planes::kWarps);
    const int64_t least = (shape.channels + resident - 1) / resident;
    int64_t best = 1, best_time = std::numeric_limits<int64_t>::max();
    for (int64_t waves = least; waves < least + kWaves; ++waves) {
      const int64_t blocks = std::clamp<int64_t>(waves * resident / shape.channels, 1, work);
      const int64_t time = waves * ((work + blocks - 1) / blocks + kStart);
      if (time < best_time) {
        best = blocks;
        best_time = time;
      }
    }
    return best;
  }
};

template <typename T>
T* data_of(const Tensor& t) {
  return t.defined() ? static_cast<T*>(const_cast<void*>(t.const_data_ptr())) : nullptr;
}

template <auto Kernel, typename... Arguments>
void start(const Form& form, dim3 blocks, Arguments... arguments) {
  Kernel<<<blocks, form.threads, 0, current_stream()>>>(arguments...);
  MONET_CUDA(cudaGetLastError());
}

TensorOptions options_of_sums(const Tensor& x) {  // and of statistics
  return x.options().dtype(opmath_type(x));
}

// Memory for the sums of `parts` blocks for each channel: two numbers for each part, and one for each channel.
template <typename O>
Sums<O> sums_of(const Form& form, dim3 blocks, const Tensor& x, Tensor& partial) {
  const int64_t parts = blocks.y;
  partial = empty({2 * parts + 1, form.shape.channels}, options_of_sums(x));
  return {data_of<const O>(partial), static_cast<int>(parts), static_cast<int>(form.shape.channels)};
}

// Parameters and statistics of a batch norm, and the activation after it.
struct Known {
  MaybeTensor weight, bias;
  Tensor mean, invstd;
  Activation activation;
  double lo, hi;

  // The same for some of the channels.
  Known channels(int64_t first, int64_t count) const {
    const auto some = [&](const MaybeTensor& t) {
      return given(t) ? std::make_optional(t->narrow(0, first, count)) : std::nullopt;
    };
    return {some(weight), some(bias), mean.narrow(0, first, count), invstd.narrow(0, first, count), activation, lo, hi};
  }
};

// Calls run.operator()<kernel>(planes or columns, activation) with the kernel of this name for that form.
#define MONET_WITH_KERNEL(name, T, form, known, bounds, run)                                                     \
  with_follow<T>(form, known, bounds, [&](auto follow) {                                                         \
    if constexpr (std::is_same_v<decltype(follow), FollowAny<op_type<T>>>) {                                     \
      (form).in_columns ? run.template operator()<any_##name##_columns_kernel<T>>((form).columns, follow)        \
                        : run.template operator()<any_##name##_planes_kernel<T>>((form).planes, follow);         \
    } else {                                                                                                     \
      constexpr Activation A = decltype(follow)::kActivation;                                                    \
      (form).in_columns ? run.template operator()<name##_columns_kernel<A, T>>((form).columns, follow)           \
                        : run.template operator()<name##_planes_kernel<A, T>>((form).planes, follow);            \
    }                                                                                                            \
  })

// The bounds of a clamp, in the form for its result or in the form for passes_clamp.
enum class BoundsOf { Result, Gradient };

template <typename T, typename F>
void with_follow(const Form& form, const Known& known, BoundsOf what, const F& f) {
  using O = op_type<T>;
  const bool open = what == BoundsOf::Gradient && known.activation == Activation::Clamp;
  const O lo = static_cast<O>(open ? open_bound(known.lo) : known.lo);
  const O hi = static_cast<O>(open ? open_bound(known.hi) : known.hi);
  if constexpr (!std::is_same_v<T, double>) {
    if (form.in_vectors) {
      with_activation(known.activation, [&](auto chosen) { f(Follow<decltype(chosen)::value, O>{lo, hi}); });
      return;
    }
  }
  f(FollowAny<O>{known.activation, lo, hi});
}

int pitch_in(const Form& form, const Tensor& t) {
  return t.defined() ? narrow(pitch_of(t, form.rows_first)) : 0;
}

template <typename O>
Statistics<O> statistics_of(const Known& known) {
  const Tensor none;
  return {Statistics<O>::Saved,  Numbers(known.weight), Numbers(known.bias), Numbers(known.mean),
          Numbers(known.invstd), {nullptr, 0, 0},       0,                   0,
          0,                     Numbers(none),         Numbers(none),       Numbers(none),
          Numbers(none)};
}

template <typename T>
void normalise(
    const Form& form, const Tensor& x, const Known& known, const Statistics<op_type<T>>& statistics,
    const Tensor& residual, const Tensor& out) {
  const auto run = [&]<auto Kernel>(const auto& shape, const auto& follow) {
    start<Kernel>(
        form, form.blocks<Kernel>(), data_of<const T>(x), pitch_in(form, x), data_of<const T>(residual),
        pitch_in(form, residual), data_of<T>(out), pitch_in(form, out), statistics, shape, follow);
  };
  MONET_WITH_KERNEL(normalise, T, form, known, BoundsOf::Result, run);
}

// Sums of x - shift and of its square for each channel.
template <typename T>
Sums<op_type<T>> moments(const Form& form, const Tensor& x, Tensor& partial) {
  using O = op_type<T>;
  Sums<O> sums{};
  const auto run = [&]<auto Kernel>(const auto& shape) {
    const dim3 blocks = form.blocks<Kernel>();
    sums = sums_of<O>(form, blocks, x, partial);
    start<Kernel>(form, blocks, data_of<const T>(x), pitch_in(form, x), data_of<O>(partial), shape);
  };
  if constexpr (!std::is_same_v<T, double>) {
    if (form.in_vectors) {
      form.in_columns ? run.template operator()<moments_columns_kernel<T>>(form.columns)
                      : run.template operator()<moments_planes_kernel<T>>(form.planes);
      return sums;
    }
  }
  form.in_columns ? run.template operator()<any_moments_columns_kernel<T>>(form.columns)
                  : run.template operator()<any_moments_planes_kernel<T>>(form.planes);
  return sums;
}

// The tensor to add, copied unless it is laid out as x or is channels of such a tensor; undefined if there is none.
Tensor added(const MaybeTensor& residual, const Tensor& x, const NormShape& shape) {
  if (!given(residual)) {
    return Tensor();
  }
  return pitch_of(*residual, by_rows(x, shape)) >= 0 ? *residual : residual->contiguous(norm_format(x));
}

// Normalises into `out`: laid out as x, or channels of a contiguous tensor if x is contiguous.
void apply_to(
    const Tensor& x, const NormShape& shape, const Known& known, const Tensor& residual, const Tensor& out) {
  if (x.numel() == 0) {
    return;
  }
  const Form form(x, shape, {residual, out});
  MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
    normalise<scalar_t>(form, x, known, statistics_of<op_type<scalar_t>>(known), residual, out);
  });
}

Tensor batch_norm_apply(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor& mean, const Tensor& invstd, const MaybeTensor& residual,
    std::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_residual(op, x, residual);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const DeviceGuard guard(x.device());
  const auto format = norm_format(x);
  const Tensor in = x.contiguous(format), out = empty(x.sizes(), x.options().memory_format(format));
  apply_to(in, shape, known, added(residual, in, shape), out);
  return out;
}

Tensor batch_norm_apply_joined(
    TensorList parts, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor& mean, const Tensor& invstd, std::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_apply(cat(parts, 1), weight, bias, mean, invstd, std::nullopt, activation, lo, hi);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const DeviceGuard guard(parts[0].device());
  Tensor out = empty(joined_sizes(parts), parts[0].options());
  int64_t first = 0;
  for (const Tensor& part : parts) {
    const int64_t count = part.size(1);
    apply_to(
        part, {shape.batch, count, shape.image}, known.channels(first, count), Tensor(), out.narrow(1, first, count));
    first += count;
  }
  return out;
}

// The running averages, and the parameters with which they and the statistics are computed.
struct Training {
  MaybeTensor running_mean, running_var;
  double momentum, eps;
  bool exact;

  Training channels(int64_t first, int64_t count) const {
    const auto some = [&](const MaybeTensor& t) {
      return given(t) ? std::make_optional(t->narrow(0, first, count)) : std::nullopt;
    };
    return {some(running_mean), some(running_var), momentum, eps, exact};
  }
};

// Normalises into `out` and stores the statistics in the tensors of `known`.
void train_to(
    const Tensor& x, const NormShape& shape, const Known& known, const Training& training, const Tensor& residual,
    const Tensor& out) {
  const Form form(x, shape, {residual, out});
  MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
    using O = op_type<scalar_t>;
    Statistics<O> statistics = statistics_of<O>(known);
    statistics.made_mean = Numbers(known.mean);
    statistics.made_invstd = Numbers(known.invstd);
    statistics.eps = static_cast<O>(training.eps);
    Tensor mean, variance, partial;
    if (training.exact) {
      std::tie(mean, variance) =
          batch_norm_update_stats(x, training.running_mean, training.running_var, training.momentum);
      statistics.source = Statistics<O>::Variance;
      statistics.mean = Numbers(mean);
      statistics.spread = Numbers(variance);
    } else {
      statistics.source = Statistics<O>::Moments;
      statistics.mean = statistics.spread = Numbers(Tensor());
      statistics.moments = moments<scalar_t>(form, x, partial);
      statistics.count = static_cast<double>(shape.batch * shape.image);
      statistics.momentum = static_cast<O>(training.momentum);
      statistics.running_mean = Numbers(training.running_mean);
      statistics.running_var = Numbers(training.running_var);
    }
    normalise<scalar_t>(form, x, known, statistics, residual, out);
  });
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_train(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
    double eps, const MaybeTensor& residual, std::string_view activation, double lo, double hi,
    bool exact) {
  const char* op = "batch_norm_train";
  const NormShape shape = check_norm(op, x, weight, bias, nullptr, nullptr);
  check_residual(op, x, residual);
  const DeviceGuard guard(x.device());
  if (x.numel() == 0) {
    return native_batch_norm(x, weight, bias, running_mean, running_var, momentum, eps);
  }
  const auto format = norm_format(x);
  const Tensor in = x.contiguous(format), out = empty(x.sizes(), x.options().memory_format(format));
  const Tensor mean = empty({shape.channels}, options_of_sums(x)), invstd = empty_like(mean);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  train_to(in, shape, known, {running_mean, running_var, momentum, eps, exact}, added(residual, in, shape), out);
  return {out, mean, invstd};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_train_joined(
    TensorList parts, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum,
    double eps, std::string_view activation, double lo, double hi, bool exact) {
  const char* op = "batch_norm_train_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_train(
        cat(parts, 1), weight, bias, running_mean, running_var, momentum, eps, std::nullopt, activation, lo, hi,
        exact);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, nullptr, nullptr);
  const DeviceGuard guard(parts[0].device());
  Tensor out = empty(joined_sizes(parts), parts[0].options());
  const Tensor mean = empty({shape.channels}, options_of_sums(out)), invstd = empty_like(mean);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const Training training{running_mean, running_var, momentum, eps, exact};
  int64_t first = 0;
  for (const Tensor& part : parts) {
    const int64_t count = part.size(1);
    train_to(
        part, {shape.batch, count, shape.image}, known.channels(first, count), training.channels(first, count),
        Tensor(), out.narrow(1, first, count));
    first += count;
  }
  return {out, mean, invstd};
}

// Computes `grad_input`, `of_weight` and `of_bias`, those that are defined. Tensors are laid out as x, or are channels of
// contiguous ones if x is contiguous.
void backward_to(
    const Tensor& grad, const Tensor& x, const NormShape& shape, const Known& known, const Tensor& grad_input,
    const Tensor& residual, const Tensor& of_weight, const Tensor& of_bias) {
  if (!grad_input.defined() && !of_weight.defined() && !of_bias.defined()) {
    return;
  }
  // The residual gradient does not change the sums.
  const Form form(x, shape, {grad});
  Form last(x, shape, {grad, grad_input, residual});
  MONET_DISPATCH_FLOATS(x.scalar_type(), [&] {
    using T = scalar_t;
    using O = op_type<T>;
    const Statistics<O> statistics = statistics_of<O>(known);
    Tensor partial;
    Gradients<O> gradients{{}, static_cast<double>(shape.batch * shape.image), Numbers(of_weight), Numbers(of_bias)};
    const auto add_up = [&]<auto Kernel>(const auto& seen, const auto& follow) {
      const dim3 blocks = form.blocks<Kernel>();
      gradients.sums = sums_of<O>(form, blocks, x, partial);
      start<Kernel>(
          form, blocks, data_of<const T>(grad), pitch_in(form, grad), data_of<const T>(x), pitch_in(form, x), statistics,
          data_of<O>(partial), seen, follow);
    };
    MONET_WITH_KERNEL(sums, T, form, known, BoundsOf::Gradient, add_up);
    if (!grad_input.defined()) {
      last.planes.batch = last.columns.rows = 0;  // the pass only writes the parameters' gradients
    }
    const auto pass = [&]<auto Kernel>(const auto& seen, const auto& follow) {
      start<Kernel>(
          last, last.blocks<Kernel>(), data_of<const T>(grad), pitch_in(last, grad), data_of<const T>(x),
          pitch_in(last, x), data_of<const T>(residual), pitch_in(last, residual), data_of<T>(grad_input),
          pitch_in(last, grad_input), statistics, gradients, seen, follow);
    };
    MONET_WITH_KERNEL(input_grad, T, last, known, BoundsOf::Gradient, pass);
  });
}

// The requested gradients of weight and bias, in the type of the weight.
std::array<Tensor, 2> parameter_gradients(
    const NormShape& shape, const MaybeTensor& weight, const Tensor& mean, std::array<bool, 3> mask) {
  const TensorOptions options = given(weight) ? weight->options() : mean.options();
  std::array<Tensor, 2> made;
  for (const int i : {0, 1}) {
    if (mask[i + 1]) {
      made[i] = empty({shape.channels}, options);
    }
  }
  return made;
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_activation_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& invstd,
    std::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const MaybeTensor& residual) {
  const char* op = "batch_norm_activation_backward";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_gradient(op, grad, x.sizes(), x.scalar_type());
  check_residual(op, x, residual);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const DeviceGuard guard(x.device());
  const auto format = norm_format(x);
  Tensor grad_input;
  if (mask[0]) {
    grad_input = empty(x.sizes(), x.options().memory_format(format));
  }
  const auto [of_weight, of_bias] = parameter_gradients(shape, weight, mean, mask);
  if (x.numel() > 0) {
    const Tensor in = x.contiguous(format);
    backward_to(
        grad.contiguous(format), in, shape, known, grad_input, mask[0] ? added(residual, in, shape) : Tensor(),
        of_weight, of_bias);
  } else {
    for (const Tensor& t : {of_weight, of_bias}) {
      if (t.defined()) {
        t.zero_();
      }
    }
  }
  return {grad_input, of_weight, of_bias};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_activation_backward_joined(
    const Tensor& grad, TensorList parts, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& invstd,
    std::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const MaybeTensor& residual) {
  const char* op = "batch_norm_activation_backward_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_activation_backward(
        grad, cat(parts, 1), weight, bias, mean, invstd, activation, lo, hi, mask, residual);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  const std::vector<int64_t> sizes = joined_sizes(parts);
  check_gradient(op, grad, sizes, parts[0].scalar_type());
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const DeviceGuard guard(parts[0].device());
  const Tensor upstream = grad.contiguous();
  Tensor grad_input, other;
  if (mask[0]) {
    grad_input = empty(sizes, parts[0].options());
    check_residual(op, grad_input, residual);
    other = added(residual, grad_input, shape);
  }
  const auto [of_weight, of_bias] = parameter_gradients(shape, weight, mean, mask);
  int64_t first = 0;
  for (const Tensor& part : parts) {
    const int64_t count = part.size(1);
    const auto channels = [&](const Tensor& t, int64_t dim) {
      return t.defined() ? t.narrow(dim, first, count) : t;
    };
    backward_to(
        channels(upstream, 1), part, {shape.batch, count, shape.image}, known.channels(first, count),
        channels(grad_input, 1), channels(other, 1), channels(of_weight, 0), channels(of_bias, 0));
    first += count;
  }
  return {grad_input, of_weight, of_bias};
}

}  // namespace

MONET_KERNELS(CUDA, m) {
  m.add<&batch_norm_apply>("batch_norm_apply");
  m.add<&batch_norm_train>("batch_norm_train");
  m.add<&batch_norm_activation_backward>("batch_norm_activation_backward");
  m.add<&batch_norm_train_joined>("batch_norm_train_joined");
  m.add<&batch_norm_apply_joined>("batch_norm_apply_joined");
  m.add<&batch_norm_activation_backward_joined>("batch_norm_activation_backward_joined");
}

}  // namespace monet_like
