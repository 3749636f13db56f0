// Convolutions by an algorithm that the caller names, through cuDNN's API of explicit algorithms; its workspace comes
// from PyTorch's allocator. An algorithm that cuDNN does not support for these shapes raises an error.
//
// It is a separate library, because it needs cuDNN's headers; everything else works without it.

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // cuDNN prefers its graphs, which have no fixed algorithms

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/cudnn/Handle.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <cudnn.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace monet_like {
namespace {

template <typename Algorithm>
struct Known {
  const char* name;
  Algorithm algorithm;
  bool in_fixed_order;  // else sums are made by atomic additions
};

// cuDNN's enumerators, without their common beginning. Its DIRECT and the weight gradient's WINOGRAD do not exist.
constexpr Known<cudnnConvolutionFwdAlgo_t> kForward[] = {
    {"implicit_gemm", CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, true},
    {"implicit_precomp_gemm", CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, true},
    {"gemm", CUDNN_CONVOLUTION_FWD_ALGO_GEMM, true},
    {"fft", CUDNN_CONVOLUTION_FWD_ALGO_FFT, true},
    {"fft_tiling", CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING, true},
    {"winograd", CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD, true},
    {"winograd_nonfused", CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED, true},
};
constexpr Known<cudnnConvolutionBwdDataAlgo_t> kBackwardInput[] = {
    {"0", CUDNN_CONVOLUTION_BWD_DATA_ALGO_0, false},
    {"1", CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, true},
    {"fft", CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT, true},
    {"fft_tiling", CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT_TILING, true},
    {"winograd", CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD, true},
    {"winograd_nonfused", CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD_NONFUSED, true},
};
constexpr Known<cudnnConvolutionBwdFilterAlgo_t> kBackwardWeight[] = {
    {"0", CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0, false},
    {"1", CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, true},
    {"3", CUDNN_CONVOLUTION_BWD_FILTER_ALGO_3, false},
    {"fft", CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT, true},
    {"fft_tiling", CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT_TILING, true},
    {"winograd_nonfused", CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD_NONFUSED, true},
};

// The name of the computation, for messages.
struct Where {
  const char* op;
  std::string algorithm;

  void check(cudnnStatus_t status) const {
    TORCH_CHECK(
        status == CUDNN_STATUS_SUCCESS, "monet_like::", op, ": cuDNN's algorithm ", algorithm,
        " is not to be had for these shapes, dtypes and layouts here: ", cudnnGetErrorString(status));
  }
};

template <typename Algorithm, size_t count>
Algorithm find(const Known<Algorithm> (&known)[count], const Where& where) {
  for (const auto& one : known) {
    if (where.algorithm == one.name) {
      if (!one.in_fixed_order) {
        at::globalContext().alertNotDeterministic(std::string("monet_like::") + where.op + " by " + one.name);
        TORCH_CHECK(
            !at::globalContext().deterministicCuDNN(), "monet_like::", where.op, ": cuDNN's algorithm ", one.name,
            " adds in no fixed order, and torch.backends.cudnn.deterministic is set");
      }
      return one.algorithm;
    }
  }
  TORCH_CHECK_VALUE(false, "monet_like::", where.op, ": there is no algorithm ", where.algorithm);
}

// A cuDNN descriptor that is destroyed with its scope.
template <typename T, cudnnStatus_t (*create)(T*), cudnnStatus_t (*destroy)(T)>
struct Descriptor {
  T it{};

  explicit Descriptor(const Where& where) { where.check(create(&it)); }
  ~Descriptor() { destroy(it); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};
using TensorDescriptor = Descriptor<cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor>;
using FilterDescriptor = Descriptor<cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor>;
using ConvolutionDescriptor =
    Descriptor<cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor, cudnnDestroyConvolutionDescriptor>;

cudnnDataType_t data_type(at::ScalarType type, const Where& where) {
  switch (type) {
    case at::kFloat:
      return CUDNN_DATA_FLOAT;
    case at::kDouble:
      return CUDNN_DATA_DOUBLE;
    case at::kHalf:
      return CUDNN_DATA_HALF;
    case at::kBFloat16:
      return CUDNN_DATA_BFLOAT16;
    default:
      TORCH_CHECK_TYPE(
          false, "monet_like::", where.op, ": tensors must be float32, float64, float16 or bfloat16, got ", type);
  }
}

// A dense tensor [N, C, H, W], with strides that fit 32 bits.
void describe(const TensorDescriptor& descriptor, at::IntArrayRef size, cudnnDataType_t type, bool channels_last,
              const Where& where) {
  int64_t elements = 1;
  for (const int64_t extent : size) {
    elements *= extent;
    TORCH_CHECK_VALUE(
        extent > 0 && elements <= std::numeric_limits<int>::max(), "monet_like::", where.op,
        ": tensors must have from 1 to 2^31 - 1 elements, got ", size);
  }
  const auto format = channels_last ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW;
  where.check(cudnnSetTensor4dDescriptor(
      descriptor.it, format, type, static_cast<int>(size[0]), static_cast<int>(size[1]), static_cast<int>(size[2]),
      static_cast<int>(size[3])));
}

struct Settings {
  at::IntArrayRef stride, padding, dilation;
  int64_t groups;
  bool channels_last;
};

// Descriptors of a convolution of x [N, C, H, W] with weight [K, C / groups, R, S] into y.
struct Convolution {
  TensorDescriptor x, y;
  FilterDescriptor weight;
  ConvolutionDescriptor settings;
  at::ScalarType type;

  Convolution(
      at::IntArrayRef x_size, at::IntArrayRef weight_size, at::IntArrayRef y_size, const Settings& given,
      at::ScalarType scalar_type, const Where& where)
      : x(where), y(where), weight(where), settings(where), type(scalar_type) {
    const cudnnDataType_t data = data_type(type, where);
    TORCH_CHECK_VALUE(
        x_size.size() == 4 && weight_size.size() == 4 && y_size.size() == 4 && x_size[0] == y_size[0] &&
            given.groups > 0 && x_size[1] == weight_size[1] * given.groups && y_size[1] == weight_size[0],
        "monet_like::", where.op, ": ", x_size, ", ", weight_size, " and ", y_size, " in ", given.groups,
        " groups are no convolution of [N, C, H, W]");
    for (const int64_t axis : {2, 3}) {
      const int64_t d = axis - 2, span = given.dilation[d] * (weight_size[axis] - 1) + 1;
      TORCH_CHECK_VALUE(
          given.stride[d] > 0 && given.dilation[d] > 0 && given.padding[d] >= 0 &&
              y_size[axis] == (x_size[axis] + 2 * given.padding[d] - span) / given.stride[d] + 1,
          "monet_like::", where.op, ": a stride of ", given.stride, ", a padding of ", given.padding,
          " and a dilation of ", given.dilation, " do not make ", y_size, " of ", x_size, " and ", weight_size);
    }
    describe(x, x_size, data, given.channels_last, where);
    describe(y, y_size, data, given.channels_last, where);
    where.check(cudnnSetFilter4dDescriptor(
        weight.it, data, given.channels_last ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW, static_cast<int>(weight_size[0]),
        static_cast<int>(weight_size[1]), static_cast<int>(weight_size[2]), static_cast<int>(weight_size[3])));
    const auto entry = [](at::IntArrayRef pair, size_t d) { return static_cast<int>(pair[d]); };
    where.check(cudnnSetConvolution2dDescriptor(
        settings.it, entry(given.padding, 0), entry(given.padding, 1), entry(given.stride, 0), entry(given.stride, 1),
        entry(given.dilation, 0), entry(given.dilation, 1), CUDNN_CROSS_CORRELATION,
        type == at::kDouble ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT));
    where.check(cudnnSetConvolutionGroupCount(settings.it, static_cast<int>(given.groups)));
    // Like PyTorch's own convolutions, float32 uses tensor cores only if PyTorch allows TF32.
    const bool exact = type == at::kFloat && !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
    const auto math = exact ? CUDNN_FMA_MATH : type == at::kHalf ? CUDNN_TENSOR_OP_MATH : CUDNN_DEFAULT_MATH;
    where.check(cudnnSetConvolutionMathType(settings.it, math));
  }
};

at::MemoryFormat format_of(const Settings& given) {
  return given.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

// Asks for the workspace's size, allocates that, and runs `call` with it and the two scales, 1 and 0.
template <typename SizeOf, typename Run>
void with_workspace(const Where& where, const at::Tensor& like, const SizeOf& size_of, const Run& run) {
  size_t bytes = 0;
  where.check(size_of(&bytes));
  const at::Tensor workspace = at::empty(
      {static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
  void* space = bytes > 0 ? workspace.mutable_data_ptr() : nullptr;
  const float one = 1, zero = 0;
  const double wide_one = 1, wide_zero = 0;
  const bool wide = like.scalar_type() == at::kDouble;
  where.check(run(
      wide ? static_cast<const void*>(&wide_one) : &one, wide ? static_cast<const void*>(&wide_zero) : &zero, space,
      bytes));
}

void check_alike(const at::Tensor& one, const at::Tensor& other, const Where& where) {
  TORCH_CHECK_TYPE(
      one.scalar_type() == other.scalar_type(), "monet_like::", where.op, ": tensors must have one dtype, got ",
      one.scalar_type(), " and ", other.scalar_type());
  TORCH_CHECK_VALUE(
      one.device() == other.device(), "monet_like::", where.op, ": tensors must be on one device, got ", one.device(),
      " and ", other.device());
  TORCH_CHECK_VALUE(
      one.dim() == 4 && other.dim() == 4, "monet_like::", where.op, ": tensors must have four dimensions, got ",
      one.sizes(), " and ", other.sizes());
}

int64_t extent(int64_t in, int64_t window, size_t d, const Settings& given) {
  return (in + 2 * given.padding[d] - given.dilation[d] * (window - 1) - 1) / given.stride[d] + 1;
}

at::Tensor cudnn_convolution(
    const at::Tensor& x_given, const at::Tensor& weight_given, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, bool channels_last,
    c10::string_view algorithm_name) {
  const Where where{"cudnn_convolution", std::string(algorithm_name)};
  const auto algorithm = find(kForward, where);
  const Settings given{stride, padding, dilation, groups, channels_last};
  check_alike(x_given, weight_given, where);
  const c10::cuda::CUDAGuard guard(x_given.device());
  const at::Tensor x = x_given.contiguous(format_of(given)), weight = weight_given.contiguous(format_of(given));
  const int64_t size[] = {
      x.size(0), weight.size(0), extent(x.size(2), weight.size(2), 0, given), extent(x.size(3), weight.size(3), 1, given)};
  const Convolution made(x.sizes(), weight.sizes(), size, given, x.scalar_type(), where);
  at::Tensor y = at::empty(size, x.options().memory_format(format_of(given)));
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  with_workspace(
      where, x,
      [&](size_t* bytes) {
        return cudnnGetConvolutionForwardWorkspaceSize(
            handle, made.x.it, made.weight.it, made.settings.it, made.y.it, algorithm, bytes);
      },
      [&](const void* one, const void* zero, void* space, size_t bytes) {
        return cudnnConvolutionForward(
            handle, one, made.x.it, x.const_data_ptr(), made.weight.it, weight.const_data_ptr(), made.settings.it,
            algorithm, space, bytes, zero, made.y.it, y.mutable_data_ptr());
      });
  if (bias.has_value() && bias->defined()) {
    y.add_(bias->view({1, -1, 1, 1}));
  }
  return y;
}

at::Tensor cudnn_convolution_backward_input(
    const at::Tensor& grad_given, const at::Tensor& weight_given, at::IntArrayRef input_size, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, bool channels_last,
    c10::string_view algorithm_name) {
  const Where where{"cudnn_convolution_backward_input", std::string(algorithm_name)};
  const auto algorithm = find(kBackwardInput, where);
  const Settings given{stride, padding, dilation, groups, channels_last};
  check_alike(grad_given, weight_given, where);
  const c10::cuda::CUDAGuard guard(grad_given.device());
  const at::Tensor grad = grad_given.contiguous(format_of(given)), weight = weight_given.contiguous(format_of(given));
  const Convolution made(input_size, weight.sizes(), grad.sizes(), given, grad.scalar_type(), where);
  at::Tensor out = at::empty(input_size, grad.options().memory_format(format_of(given)));
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  with_workspace(
      where, grad,
      [&](size_t* bytes) {
        return cudnnGetConvolutionBackwardDataWorkspaceSize(
            handle, made.weight.it, made.y.it, made.settings.it, made.x.it, algorithm, bytes);
      },
      [&](const void* one, const void* zero, void* space, size_t bytes) {
        return cudnnConvolutionBackwardData(
            handle, one, made.weight.it, weight.const_data_ptr(), made.y.it, grad.const_data_ptr(), made.settings.it,
            algorithm, space, bytes, zero, made.x.it, out.mutable_data_ptr());
      });
  return out;
}

at::Tensor cudnn_convolution_backward_weight(
    const at::Tensor& grad_given, const at::Tensor& x_given, at::IntArrayRef weight_size, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, bool channels_last,
    c10::string_view algorithm_name) {
  const Where where{"cudnn_convolution_backward_weight", std::string(algorithm_name)};
  const auto algorithm = find(kBackwardWeight, where);
  const Settings given{stride, padding, dilation, groups, channels_last};
  check_alike(grad_given, x_given, where);
  const c10::cuda::CUDAGuard guard(grad_given.device());
  const at::Tensor grad = grad_given.contiguous(format_of(given)), x = x_given.contiguous(format_of(given));
  const Convolution made(x.sizes(), weight_size, grad.sizes(), given, grad.scalar_type(), where);
  at::Tensor out = at::empty(weight_size, grad.options().memory_format(format_of(given)));
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  with_workspace(
      where, grad,
      [&](size_t* bytes) {
        return cudnnGetConvolutionBackwardFilterWorkspaceSize(
            handle, made.x.it, made.y.it, made.settings.it, made.weight.it, algorithm, bytes);
      },
      [&](const void* one, const void* zero, void* space, size_t bytes) {
        return cudnnConvolutionBackwardFilter(
            handle, one, made.x.it, x.const_data_ptr(), made.y.it, grad.const_data_ptr(), made.settings.it, algorithm,
            space, bytes, zero, made.weight.it, out.mutable_data_ptr());
      });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(monet_like, CUDA, m) {
  m.impl("cudnn_convolution", &cudnn_convolution);
  m.impl("cudnn_convolution_backward_input", &cudnn_convolution_backward_input);
  m.impl("cudnn_convolution_backward_weight", &cudnn_convolution_backward_weight);
}

}  // namespace monet_like
