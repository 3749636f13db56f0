// Training-mode batch norm on the GPU, alone or with what follows it, and the gradient of both.

#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "common.cuh"

namespace monet_like {
namespace {

// The constants of all channels, [4, C]: weight, bias, mean, invstd in the type of the computation. They are few;
// gathering them with ATen costs a handful of small launches and spares a kernel per mixture of dtypes.
at::Tensor constants(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& invstd) {
  const auto type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor k = at::empty({4, x.size(1)}, x.options().dtype(type).memory_format(at::MemoryFormat::Contiguous));
  const auto fill = [&](int64_t row, const std::optional<at::Tensor>& t, double otherwise) {
    if (t.has_value() && t->defined()) {
      k.select(0, row).copy_(*t);
    } else {
      k.select(0, row).fill_(otherwise);
    }
  };
  fill(0, weight, 1);
  fill(1, bias, 0);
  fill(2, mean, 0);
  fill(3, invstd, 0);
  return k;
}

template <typename O>
__device__ __forceinline__ Channel<O> channel_at(const O* k, int64_t c, int64_t channels) {
  return {k[c], k[channels + c], k[2 * channels + c], k[3 * channels + c]};
}

template <typename O>
__device__ __forceinline__ O value_of(O x, const Channel<O>& k) {
  return normalised<Formula::Cuda>(x, k.a, k.b, k.mean, k.invstd);
}

// `inner` elements of one channel lie next to each other: the image if contiguous, one if channels last.
__device__ __forceinline__ int64_t channel_of(int64_t i, int64_t inner, int64_t channels) {
  return (inner == 1 ? i : i / inner) % channels;
}

// Where element i lies in channels of a larger tensor, of which `run` elements are adjacent, `pitch` apart.
__device__ __forceinline__ int64_t placed(int64_t i, int64_t run, int64_t pitch) {
  return i < run ? i : i / run * pitch + i % run;
}

// Each step sees what the one before would have stored; without a residual its pointer is null.
template <Activation A, typename T>
__global__ void apply_kernel(
    const T* in, const T* residual, T* out, int64_t run, int64_t pitch, const op_type<T>* k, int64_t channels,
    int64_t inner, int64_t numel, op_type<T> lo, op_type<T> hi) {
  using O = op_type<T>;
  MONET_GRID_STRIDE(i, numel) {
    const Channel<O> channel = channel_at(k, channel_of(i, inner, channels), channels);
    O y = static_cast<O>(static_cast<T>(value_of(static_cast<O>(in[i]), channel)));
    if (residual != nullptr) {
      y = static_cast<O>(static_cast<T>(y + static_cast<O>(residual[i])));
    }
    out[placed(i, run, pitch)] = static_cast<T>(activated<A, Formula::Cuda>(y, lo, hi));
  }
}

template <Activation A, typename T>
__device__ __forceinline__ op_type<T> gradient_through(
    T grad, op_type<T> x, const Channel<op_type<T>>& k, op_type<T> lo, op_type<T> hi) {
  const op_type<T> y = static_cast<op_type<T>>(static_cast<T>(value_of(x, k)));  // as it was stored
  return activation_gradient<A, Formula::Cuda>(static_cast<op_type<T>>(grad), y, lo, hi);
}

constexpr int kLanes = 32;  // blocks are kLanes x kRows threads
constexpr int kRows = kThreads / kLanes;

// partial[split, 0 and 1, channel] = sum g and sum (x - m) g over one part of one channel.
// Planes: a block has one channel; its threads walk along the image. blockIdx = (channel, split).
template <Activation A, typename T>
__global__ void reduce_planes_kernel(
    const T* grad, int64_t grad_pitch, const T* x, const op_type<T>* k, double* partial, int64_t batch, int64_t channels,
    int64_t image, op_type<T> lo, op_type<T> hi) {
  using O = op_type<T>;
  const int64_t c = blockIdx.x;
  const Channel<O> channel = channel_at(k, c, channels);
  double sum = 0, dot = 0;
  for (int64_t n = blockIdx.y; n < batch; n += gridDim.y) {
    const int64_t base = (n * channels + c) * image, grad_base = n * grad_pitch + c * image;
    O image_sum = 0, image_dot = 0;
    for (int64_t i = threadIdx.y * kLanes + threadIdx.x; i < image; i += kThreads) {
      const O value = static_cast<O>(x[base + i]), g = gradient_through<A>(grad[grad_base + i], value, channel, lo, hi);
      image_sum += g;
      image_dot += (value - channel.mean) * g;
    }
    sum += image_sum;
    dot += image_dot;
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, step);
    dot += __shfl_down_sync(0xffffffffu, dot, step);
  }
  __shared__ double shared[2][kRows];
  if (threadIdx.x == 0) {
    shared[0][threadIdx.y] = sum;
    shared[1][threadIdx.y] = dot;
  }
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y < 2) {
    double total = 0;
    for (int r = 0; r < kRows; ++r) {
      total += shared[threadIdx.y][r];
    }
    partial[(static_cast<int64_t>(blockIdx.y) * 2 + threadIdx.y) * channels + c] = total;
  }
}

// Channels last: 32 threads take 32 adjacent channels, the block's rows and the splits share the pixels.
template <Activation A, typename T>
__global__ void reduce_rows_kernel(
    const T* grad, const T* x, const op_type<T>* k, double* partial, int64_t rows, int64_t channels, op_type<T> lo,
    op_type<T> hi) {
  using O = op_type<T>;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x;
  double sum = 0, dot = 0;
  if (c < channels) {
    const Channel<O> channel = channel_at(k, c, channels);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows + threadIdx.y;
    const int64_t step = static_cast<int64_t>(gridDim.y) * kRows;
    O some_sum = 0, some_dot = 0;
    int pending = 0;
    for (int64_t r = first; r < rows; r += step) {
      const O value = static_cast<O>(x[r * channels + c]);
      const O g = gradient_through<A>(grad[r * channels + c], value, channel, lo, hi);
      some_sum += g;
      some_dot += (value - channel.mean) * g;
      if (++pending == 64) {
        sum += some_sum;
        dot += some_dot;
        some_sum = some_dot = 0;
        pending = 0;
      }
    }
    sum += some_sum;
    dot += some_dot;
  }
  __shared__ double shared[2][kRows][kLanes];
  shared[0][threadIdx.y][threadIdx.x] = sum;
  shared[1][threadIdx.y][threadIdx.x] = dot;
  __syncthreads();
  if (c < channels && threadIdx.y < 2) {
    double total = 0;
    for (int r = 0; r < kRows; ++r) {
      total += shared[threadIdx.y][r][threadIdx.x];
    }
    partial[(static_cast<int64_t>(blockIdx.y) * 2 + threadIdx.y) * channels + c] = total;
  }
}

// Adds the parts in a fixed order and derives what the second pass needs: d = [3, C] of mean_g, slope, scale.
template <typename O>
__global__ void finish_sums_kernel(
    const double* partial, const O* k, double* sums, O* d, int64_t splits, int64_t channels, int64_t count) {
  MONET_GRID_STRIDE(c, channels) {
    double sum = 0, dot = 0;
    for (int64_t s = 0; s < splits; ++s) {
      sum += partial[(s * 2) * channels + c];
      dot += partial[(s * 2 + 1) * channels + c];
    }
    const double weight = k[c], invstd = k[3 * channels + c];
    sums[c] = sum;
    sums[channels + c] = dot * invstd;
    d[c] = static_cast<O>(sum / count);
    d[channels + c] = static_cast<O>(dot / count * invstd * invstd);
    d[2 * channels + c] = static_cast<O>(invstd * weight);
  }
}

template <Activation A, typename T>
__global__ void input_grad_kernel(
    const T* grad, const T* x, T* out, int64_t run, int64_t pitch, const T* residual, int64_t residual_run,
    int64_t residual_pitch, const op_type<T>* k, const op_type<T>* d, int64_t channels, int64_t inner, int64_t numel,
    op_type<T> lo, op_type<T> hi) {
  using O = op_type<T>;
  MONET_GRID_STRIDE(i, numel) {
    const int64_t c = channel_of(i, inner, channels);
    const Channel<O> channel = channel_at(k, c, channels);
    const int64_t place = placed(i, run, pitch);
    const O value = static_cast<O>(x[i]), g = gradient_through<A>(grad[place], value, channel, lo, hi);
    const T own = static_cast<T>((g - d[c] - (value - channel.mean) * d[channels + c]) * d[2 * channels + c]);
    out[place] = residual == nullptr
        ? own
        : static_cast<T>(static_cast<O>(own) + static_cast<O>(residual[placed(i, residual_run, residual_pitch)]));
  }
}

bool by_rows(const at::Tensor& dense, const NormShape& shape) {
  return norm_layout(dense) == NormLayout::ChannelsLast || shape.image == 1;
}

// What a batch norm and what follows it are known by.
struct Known {
  std::optional<at::Tensor> weight, bias;
  at::Tensor mean, invstd;
  Activation activation;
  double lo, hi;

  // Of these channels.
  Known channels(int64_t first, int64_t count) const {
    const auto some = [&](const std::optional<at::Tensor>& t) {
      return given(t) ? std::make_optional(t->narrow(0, first, count)) : std::nullopt;
    };
    return {some(weight), some(bias), mean.narrow(0, first, count), invstd.narrow(0, first, count), activation, lo, hi};
  }
};

// Into `out`: laid out as x, or channels of a contiguous tensor if x is contiguous.
void apply_to(
    const at::Tensor& x, const NormShape& shape, const Known& known, const at::Tensor& residual, at::Tensor out) {
  if (x.numel() == 0) {
    return;
  }
  const at::Tensor k = constants(x, known.weight, known.bias, known.mean, known.invstd);
  const bool rows_first = by_rows(x, shape);
  const int64_t run = rows_first ? x.numel() : shape.channels * shape.image;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_apply", [&] {
    using O = op_type<scalar_t>;
    with_activation(known.activation, [&](auto chosen) {
      constexpr Activation A = decltype(chosen)::value;
      apply_kernel<A, scalar_t><<<blocks_for(x.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          x.const_data_ptr<scalar_t>(), residual.defined() ? residual.const_data_ptr<scalar_t>() : nullptr,
          out.mutable_data_ptr<scalar_t>(), out.is_contiguous() ? x.numel() : run, out.stride(0), k.const_data_ptr<O>(),
          shape.channels, rows_first ? 1 : shape.image, x.numel(), static_cast<O>(known.lo),
          static_cast<O>(known.hi));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

at::Tensor batch_norm_apply(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& invstd, const std::optional<at::Tensor>& residual,
    c10::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_residual(op, x, residual);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const c10::cuda::CUDAGuard guard(x.device());
  const auto format = norm_format(x);
  at::Tensor out = at::empty(x.sizes(), x.options().memory_format(format));
  apply_to(x.contiguous(format), shape, known, given(residual) ? residual->contiguous(format) : at::Tensor(), out);
  return out;
}

at::Tensor batch_norm_apply_joined(
    at::TensorList parts, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& mean, const at::Tensor& invstd, c10::string_view activation, double lo, double hi) {
  const char* op = "batch_norm_apply_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_apply(at::cat(parts, 1), weight, bias, mean, invstd, std::nullopt, activation, lo, hi);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const c10::cuda::CUDAGuard guard(parts[0].device());
  at::Tensor out = at::empty(joined_sizes(parts), parts[0].options().memory_format(at::MemoryFormat::Contiguous));
  int64_t first = 0;
  for (const at::Tensor& part : parts) {
    const int64_t count = part.size(1);
    apply_to(
        part, {shape.batch, count, shape.image}, known.channels(first, count), at::Tensor(), out.narrow(1, first, count));
    first += count;
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_train(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps, const std::optional<at::Tensor>& residual, c10::string_view activation, double lo, double hi,
    bool /*exact*/) {  // ATen's statistics are as fast as any here
  check_norm("batch_norm_train", x, weight, bias, nullptr, nullptr);
  const c10::cuda::CUDAGuard guard(x.device());
  if (x.numel() == 0) {
    return at::native_batch_norm(x, weight, bias, running_mean, running_var, true, momentum, eps);
  }
  auto [mean, invstd] = at::batch_norm_update_stats(x, running_mean, running_var, momentum);
  invstd.add_(eps).rsqrt_();  // it held the variance
  return {batch_norm_apply(x, weight, bias, mean, invstd, residual, activation, lo, hi), mean, invstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_train_joined(
    at::TensorList parts, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps, c10::string_view activation, double lo, double hi, bool exact) {
  const char* op = "batch_norm_train_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_train(
        at::cat(parts, 1), weight, bias, running_mean, running_var, momentum, eps, std::nullopt, activation, lo, hi,
        exact);
  }
  check_norm_joined(op, parts, weight, bias, nullptr, nullptr);
  const c10::cuda::CUDAGuard guard(parts[0].device());
  std::vector<at::Tensor> means, variances;
  int64_t first = 0;
  for (const at::Tensor& part : parts) {
    const int64_t count = part.size(1);
    const auto channels = [&](const std::optional<at::Tensor>& t) {
      return given(t) ? std::make_optional(t->narrow(0, first, count)) : std::nullopt;
    };
    const auto [mean, variance] =
        at::batch_norm_update_stats(part, channels(running_mean), channels(running_var), momentum);
    means.push_back(mean);
    variances.push_back(variance);
    first += count;
  }
  const at::Tensor mean = at::cat(means), invstd = at::cat(variances).add_(eps).rsqrt_();
  return {batch_norm_apply_joined(parts, weight, bias, mean, invstd, activation, lo, hi), mean, invstd};
}

// Into `grad_input`, if it is defined, and `sums`, [2, C]: sum g, and sum (x - m) g times invstd. Tensors are laid out as
// x is, or channels of contiguous ones if x is contiguous.
void backward_to(
    const at::Tensor& grad, const at::Tensor& x, const NormShape& shape, const Known& known, const at::Tensor& grad_input,
    const at::Tensor& residual, at::Tensor sums) {
  const int64_t C = shape.channels, rows = shape.batch * shape.image;
  const at::Tensor k = constants(x, known.weight, known.bias, known.mean, known.invstd);
  const bool channels_last = by_rows(x, shape);
  const int64_t image = C * shape.image;  // elements that are adjacent in channels of a contiguous tensor
  const int64_t run = grad.is_contiguous() || channels_last ? x.numel() : image;
  const int64_t groups = channels_last ? (C + kLanes - 1) / kLanes : C;
  // Few channels still fill the GPU: split each over several blocks, about 1024 blocks in all.
  const int64_t most = channels_last ? (rows + kRows - 1) / kRows : shape.batch;
  const int64_t splits = std::clamp<int64_t>((1024 + groups - 1) / groups, 1, std::min<int64_t>(most, 65535));
  const dim3 blocks(static_cast<unsigned int>(groups), static_cast<unsigned int>(splits)), threads(kLanes, kRows);
  const at::Tensor partial = at::empty({splits, 2, C}, sums.options()), d = at::empty({3, C}, k.options());
  const at::Tensor own = at::empty({2, C}, sums.options());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "batch_norm_activation_backward", [&] {
    using O = op_type<scalar_t>;
    const scalar_t* g = grad.const_data_ptr<scalar_t>();
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    const O* constants_data = k.const_data_ptr<O>();
    double* parts = partial.mutable_data_ptr<double>();
    const bool clamps = known.activation == Activation::Clamp;
    const O low = static_cast<O>(clamps ? open_bound(known.lo) : known.lo);
    const O high = static_cast<O>(clamps ? open_bound(known.hi) : known.hi);
    with_activation(known.activation, [&](auto chosen) {
      constexpr Activation A = decltype(chosen)::value;
      if (channels_last) {
        reduce_rows_kernel<A, scalar_t>
            <<<blocks, threads, 0, stream>>>(g, from, constants_data, parts, rows, C, low, high);
      } else {
        reduce_planes_kernel<A, scalar_t><<<blocks, threads, 0, stream>>>(
            g, pitch_of(grad, false), from, constants_data, parts, shape.batch, C, shape.image, low, high);
      }
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      finish_sums_kernel<O><<<blocks_for(C), kThreads, 0, stream>>>(
          parts, constants_data, own.mutable_data_ptr<double>(), d.mutable_data_ptr<O>(), splits, C, rows);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      if (grad_input.defined()) {
        input_grad_kernel<A, scalar_t><<<blocks_for(x.numel()), kThreads, 0, stream>>>(
            g, from, grad_input.mutable_data_ptr<scalar_t>(), run, grad.stride(0),
            residual.defined() ? residual.const_data_ptr<scalar_t>() : nullptr, channels_last ? C : image,
            residual.defined() ? pitch_of(residual, channels_last) : 0, constants_data, d.const_data_ptr<O>(), C,
            channels_last ? 1 : shape.image, x.numel(), low, high);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      }
    });
  });
  sums.copy_(own);
}

// Gradients by weight and bias from the sums.
std::tuple<at::Tensor, at::Tensor> parameter_gradients(
    const at::Tensor& sums, const std::optional<at::Tensor>& weight, const at::Tensor& mean, std::array<bool, 3> mask) {
  const auto type = given(weight) ? weight->scalar_type() : mean.scalar_type();
  const auto row = [&](int64_t i) { return sums.select(0, i).to(type, /*non_blocking=*/false, /*copy=*/true); };
  return {mask[1] ? row(1) : at::Tensor(), mask[2] ? row(0) : at::Tensor()};
}

// A gradient to be added, copied if it is neither laid out as x nor channels of what is; undefined if there is none.
at::Tensor added(const std::optional<at::Tensor>& residual, const at::Tensor& x, const NormShape& shape) {
  if (!given(residual)) {
    return at::Tensor();
  }
  return pitch_of(*residual, by_rows(x, shape)) >= 0 ? *residual : residual->contiguous(norm_format(x));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_activation_backward(
    const at::Tensor& grad, const at::Tensor& x, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd,
    c10::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const std::optional<at::Tensor>& residual) {
  const char* op = "batch_norm_activation_backward";
  const NormShape shape = check_norm(op, x, weight, bias, &mean, &invstd);
  check_gradient(op, grad, x.sizes(), x.scalar_type());
  check_residual(op, x, residual);
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const c10::cuda::CUDAGuard guard(x.device());
  const auto format = norm_format(x);
  at::Tensor grad_input;
  if (mask[0]) {
    grad_input = at::empty(x.sizes(), x.options().memory_format(format));
  }
  at::Tensor sums = at::zeros({2, shape.channels}, x.options().dtype(at::kDouble).memory_format(at::MemoryFormat::Contiguous));
  if (x.numel() > 0) {
    const at::Tensor in = x.contiguous(format);
    backward_to(
        grad.contiguous(format), in, shape, known, grad_input, mask[0] ? added(residual, in, shape) : at::Tensor(), sums);
  }
  const auto [grad_weight, grad_bias] = parameter_gradients(sums, weight, mean, mask);
  return {grad_input, grad_weight, grad_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_activation_backward_joined(
    const at::Tensor& grad, at::TensorList parts, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd,
    c10::string_view activation, double lo, double hi, std::array<bool, 3> mask,
    const std::optional<at::Tensor>& residual) {
  const char* op = "batch_norm_activation_backward_joined";
  if (!check_parts(op, parts)) {
    return batch_norm_activation_backward(
        grad, at::cat(parts, 1), weight, bias, mean, invstd, activation, lo, hi, mask, residual);
  }
  const NormShape shape = check_norm_joined(op, parts, weight, bias, &mean, &invstd);
  const std::vector<int64_t> sizes = joined_sizes(parts);
  check_gradient(op, grad, sizes, parts[0].scalar_type());
  const Known known{weight, bias, mean, invstd, check_activation(op, activation), lo, hi};
  const c10::cuda::CUDAGuard guard(parts[0].device());
  const at::TensorOptions options = parts[0].options().memory_format(at::MemoryFormat::Contiguous);
  const at::Tensor upstream = grad.contiguous();
  at::Tensor grad_input, other;
  if (mask[0]) {
    grad_input = at::empty(sizes, options);
    check_residual(op, grad_input, residual);
    other = added(residual, grad_input, shape);
  }
  const at::Tensor sums = at::empty({2, shape.channels}, options.dtype(at::kDouble));
  int64_t first = 0;
  for (const at::Tensor& part : parts) {
    const int64_t count = part.size(1);
    const auto channels = [&](const at::Tensor& t) { return t.defined() ? t.narrow(1, first, count) : t; };
    backward_to(
        channels(upstream), part, {shape.batch, count, shape.image}, known.channels(first, count), channels(grad_input),
        channels(other), channels(sums));
    first += count;
  }
  const auto [grad_weight, grad_bias] = parameter_gradients(sums, weight, mean, mask);
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CUDA, m) {
  m.impl("batch_norm_apply", &batch_norm_apply);
  m.impl("batch_norm_train", &batch_norm_train);
  m.impl("batch_norm_activation_backward", &batch_norm_activation_backward);
  m.impl("batch_norm_train_joined", &batch_norm_train_joined);
  m.impl("batch_norm_apply_joined", &batch_norm_apply_joined);
  m.impl("batch_norm_activation_backward_joined", &batch_norm_activation_backward_joined);
}

}  // namespace monet_like
