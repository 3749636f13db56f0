// Convolutions by an algorithm that the caller names, through cuDNN's API of explicit algorithms; its workspace comes
// from PyTorch's allocator. An algorithm that cuDNN does not support for these shapes raises an error.
//
// Descriptors and the workspace's size are kept between calls. cuDNN's own function still makes a plan in every call.
// Its graph API would keep that, too, but there an engine is a number, and no header or manual says which number stands
// for which of the algorithms that are named here.
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

#include <array>
#include <compare>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

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

using Pair = std::array<int64_t, 2>;

struct Settings {
  Pair stride, padding, dilation;
  int64_t groups;
  bool channels_last;

  auto operator<=>(const Settings&) const = default;
};

Settings settings_of(
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, bool channels_last,
    const Where& where) {
  const auto pair = [&](at::IntArrayRef list) {  // one number is of both extents, as for PyTorch
    TORCH_CHECK_VALUE(
        list.size() == 1 || list.size() == 2, "monet_like::", where.op,
        ": stride, padding and dilation must be one number or two, got ", list);
    return Pair{list.front(), list.back()};
  };
  return {pair(stride), pair(padding), pair(dilation), groups, channels_last};
}

// A convolution of x [N, C, H, W] with weight [K, C / groups, R, S] into y, or a gradient of it: everything that cuDNN
// is told and that its answers depend on.
struct Problem {
  cudnnHandle_t handle;  // belongs to one device
  std::variant<cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdFilterAlgo_t> algorithm;
  at::ScalarType type;
  cudnnMathType_t math;
  std::vector<int64_t> x, weight, y;
  Settings given;

  auto operator<=>(const Problem&) const = default;
};

// The descriptors of a problem, and the size of its workspace.
struct Plan {
  TensorDescriptor x, y;
  FilterDescriptor weight;
  ConvolutionDescriptor settings;
  size_t workspace_bytes = 0;

  Plan(const Problem& problem, const Where& where) : x(where), y(where), weight(where), settings(where) {
    const auto& [stride, padding, dilation, groups, channels_last] = problem.given;
    const at::IntArrayRef x_size = problem.x, weight_size = problem.weight, y_size = problem.y;
    const cudnnDataType_t data = data_type(problem.type, where);
    TORCH_CHECK_VALUE(
        x_size.size() == 4 && weight_size.size() == 4 && y_size.size() == 4 && x_size[0] == y_size[0] && groups > 0 &&
            x_size[1] == weight_size[1] * groups && y_size[1] == weight_size[0],
        "monet_like::", where.op, ": ", x_size, ", ", weight_size, " and ", y_size, " in ", groups,
        " groups are no convolution of [N, C, H, W]");
    for (const int64_t axis : {2, 3}) {
      const int64_t d = axis - 2, span = dilation[d] * (weight_size[axis] - 1) + 1;
      TORCH_CHECK_VALUE(
          stride[d] > 0 && dilation[d] > 0 && padding[d] >= 0 &&
              y_size[axis] == (x_size[axis] + 2 * padding[d] - span) / stride[d] + 1,
          "monet_like::", where.op, ": a stride of ", at::IntArrayRef(stride), ", a padding of ",
          at::IntArrayRef(padding), " and a dilation of ", at::IntArrayRef(dilation), " do not make ", y_size, " of ",
          x_size, " and ", weight_size);
    }
    describe(x, x_size, data, channels_last, where);
    describe(y, y_size, data, channels_last, where);
    where.check(cudnnSetFilter4dDescriptor(
        weight.it, data, channels_last ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW, static_cast<int>(weight_size[0]),
        static_cast<int>(weight_size[1]), static_cast<int>(weight_size[2]), static_cast<int>(weight_size[3])));
    const auto entry = [](const Pair& pair, size_t d) { return static_cast<int>(pair[d]); };
    where.check(cudnnSetConvolution2dDescriptor(
        settings.it, entry(padding, 0), entry(padding, 1), entry(stride, 0), entry(stride, 1), entry(dilation, 0),
        entry(dilation, 1), CUDNN_CROSS_CORRELATION,
        problem.type == at::kDouble ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT));
    where.check(cudnnSetConvolutionGroupCount(settings.it, static_cast<int>(groups)));
    where.check(cudnnSetConvolutionMathType(settings.it, problem.math));
  }
};

// Like PyTorch's own convolutions, float32 uses tensor cores only if PyTorch allows TF32.
cudnnMathType_t math_of(at::ScalarType type) {
  const bool exact = type == at::kFloat && !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
  return exact ? CUDNN_FMA_MATH : type == at::kHalf ? CUDNN_TENSOR_OP_MATH : CUDNN_DEFAULT_MATH;
}

// Plans of earlier calls of all threads. Never destroyed: at the end of a process cuDNN may be unloaded before them.
struct Plans {
  static constexpr size_t kMost = 4096;  // many times the convolutions of one step

  std::mutex mutex;
  std::map<Problem, std::shared_ptr<const Plan>> of;

  static Plans& all() {
    static Plans& plans = *new Plans;
    return plans;
  }
};

// The plan of an earlier call with an equal problem, or a new one, for which `size_of` asks the workspace's size. A
// refused problem is not kept: it is refused again.
//
// One map for all threads, not one for each: PyTorch lends a cuDNN handle to one thread at a time, and to another one
// when that thread ends. The handle is part of the problem. So two threads never use one plan at the same time, and a
// new thread, as DataParallel starts in every step, finds the plans of the thread that had its handle before.
template <typename SizeOf>
std::shared_ptr<const Plan> plan_of(const Problem& problem, const Where& where, const SizeOf& size_of) {
  Plans& plans = Plans::all();
  {
    const std::lock_guard<std::mutex> lock(plans.mutex);
    if (const auto found = plans.of.find(problem); found != plans.of.end()) {
      return found->second;
    }
  }
  const auto made = std::make_shared<Plan>(problem, where);
  where.check(size_of(*made, &made->workspace_bytes));
  const std::lock_guard<std::mutex> lock(plans.mutex);
  if (plans.of.size() == Plans::kMost) {
    plans.of.clear();  // a call that uses one of them has a share in it
  }
  plans.of.emplace(problem, made);
  return made;
}

at::MemoryFormat format_of(const Settings& given) {
  return given.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

// Allocates the workspace, and calls `run` with the two scales, 1 and 0, and with it.
template <typename Run>
void with_workspace(const Where& where, const at::Tensor& like, size_t bytes, const Run& run) {
  const at::Tensor workspace = at::empty(
      {static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
  void* space = bytes > 0 ? workspace.mutable_data_ptr() : nullptr;
  const float one = 1, zero = 0;
  const double wide_one = 1, wide_zero = 0;
  const bool wide = like.scalar_type() == at::kDouble;
  where.check(run(
      wide ? static_cast<const void*>(&wide_one) : &one, wide ? static_cast<const void*>(&wide_zero) : &zero, space));
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

// 0, an extent that is refused later, for a stride that is not positive.
int64_t extent(int64_t in, int64_t window, size_t d, const Settings& given) {
  const int64_t stride = given.stride[d];
  return stride > 0 ? (in + 2 * given.padding[d] - given.dilation[d] * (window - 1) - 1) / stride + 1 : 0;
}

at::Tensor cudnn_convolution(
    const at::Tensor& x_given, const at::Tensor& weight_given, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, bool channels_last,
    c10::string_view algorithm_name) {
  const Where where{"cudnn_convolution", std::string(algorithm_name)};
  const auto algorithm = find(kForward, where);
  const Settings given = settings_of(stride, padding, dilation, groups, channels_last, where);
  check_alike(x_given, weight_given, where);
  const c10::cuda::CUDAGuard guard(x_given.device());
  const at::Tensor x = x_given.contiguous(format_of(given)), weight = weight_given.contiguous(format_of(given));
  const std::vector<int64_t> size{
      x.size(0), weight.size(0), extent(x.size(2), weight.size(2), 0, given),
      extent(x.size(3), weight.size(3), 1, given)};
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  const auto type = x.scalar_type();
  const Problem problem{handle, algorithm, type, math_of(type), x.sizes().vec(), weight.sizes().vec(), size, given};
  const auto plan = plan_of(problem, where, [&](const Plan& made, size_t* bytes) {
    return cudnnGetConvolutionForwardWorkspaceSize(
        handle, made.x.it, made.weight.it, made.settings.it, made.y.it, algorithm, bytes);
  });
  at::Tensor y = at::empty(size, x.options().memory_format(format_of(given)));
  with_workspace(where, x, plan->workspace_bytes, [&](const void* one, const void* zero, void* space) {
    return cudnnConvolutionForward(
        handle, one, plan->x.it, x.const_data_ptr(), plan->weight.it, weight.const_data_ptr(), plan->settings.it,
        algorithm, space, plan->workspace_bytes, zero, plan->y.it, y.mutable_data_ptr());
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
  const Settings given = settings_of(stride, padding, dilation, groups, channels_last, where);
  check_alike(grad_given, weight_given, where);
  const c10::cuda::CUDAGuard guard(grad_given.device());
  const at::Tensor grad = grad_given.contiguous(format_of(given)), weight = weight_given.contiguous(format_of(given));
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  const auto type = grad.scalar_type();
  const Problem problem{
      handle, algorithm, type, math_of(type), input_size.vec(), weight.sizes().vec(), grad.sizes().vec(), given};
  const auto plan = plan_of(problem, where, [&](const Plan& made, size_t* bytes) {
    return cudnnGetConvolutionBackwardDataWorkspaceSize(
        handle, made.weight.it, made.y.it, made.settings.it, made.x.it, algorithm, bytes);
  });
  at::Tensor out = at::empty(input_size, grad.options().memory_format(format_of(given)));
  with_workspace(where, grad, plan->workspace_bytes, [&](const void* one, const void* zero, void* space) {
    return cudnnConvolutionBackwardData(
        handle, one, plan->weight.it, weight.const_data_ptr(), plan->y.it, grad.const_data_ptr(), plan->settings.it,
        algorithm, space, plan->workspace_bytes, zero, plan->x.it, out.mutable_data_ptr());
  });
  return out;
}

at::Tensor cudnn_convolution_backward_weight(
    const at::Tensor& grad_given, const at::Tensor& x_given, at::IntArrayRef weight_size, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, bool channels_last,
    c10::string_view algorithm_name) {
  const Where where{"cudnn_convolution_backward_weight", std::string(algorithm_name)};
  const auto algorithm = find(kBackwardWeight, where);
  const Settings given = settings_of(stride, padding, dilation, groups, channels_last, where);
  check_alike(grad_given, x_given, where);
  const c10::cuda::CUDAGuard guard(grad_given.device());
  const at::Tensor grad = grad_given.contiguous(format_of(given)), x = x_given.contiguous(format_of(given));
  const cudnnHandle_t handle = at::native::getCudnnHandle();
  const auto type = grad.scalar_type();
  const Problem problem{
      handle, algorithm, type, math_of(type), x.sizes().vec(), weight_size.vec(), grad.sizes().vec(), given};
  const auto plan = plan_of(problem, where, [&](const Plan& made, size_t* bytes) {
    return cudnnGetConvolutionBackwardFilterWorkspaceSize(
        handle, made.x.it, made.y.it, made.settings.it, made.weight.it, algorithm, bytes);
  });
  at::Tensor out = at::empty(weight_size, grad.options().memory_format(format_of(given)));
  with_workspace(where, grad, plan->workspace_bytes, [&](const void* one, const void* zero, void* space) {
    return cudnnConvolutionBackwardFilter(
        handle, one, plan->x.it, x.const_data_ptr(), plan->y.it, grad.const_data_ptr(), plan->settings.it, algorithm,
        space, plan->workspace_bytes, zero, plan->weight.it, out.mutable_data_ptr());
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
