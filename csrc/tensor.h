// PyTorch as these sources see it: tensors, some of ATen's operators, registration, errors. All of it is made of the C functions of
// PyTorch's stable ABI, as of 2.11: a library compiled with the headers of one PyTorch runs in all from 2.11 on.
//
// Names and meanings are ATen's. An operator without a C function of its own is called through the dispatcher (`call`), which costs a
// microsecond; what takes place in each call of ours (sizes, empty tensors, views) does not.

#pragma once

#define TORCH_TARGET_VERSION ((2ULL << 56) | (11ULL << 48))
#define USE_CUDA  // the C functions for CUDA are declared, too

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/MemoryFormat.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace monet_like {

using c10::MemoryFormat;
using c10::ScalarType;
using IntArrayRef = c10::HeaderOnlyArrayRef<int64_t>;

// PyTorch 2.11 compares by a member alone. As a template it gives way to newer ones' own.
template <typename T>
bool operator==(c10::HeaderOnlyArrayRef<T> a, c10::HeaderOnlyArrayRef<T> b) {
  return a.equals(b);
}

inline constexpr ScalarType kByte = ScalarType::Byte, kBool = ScalarType::Bool, kInt = ScalarType::Int,
                            kLong = ScalarType::Long, kHalf = ScalarType::Half, kBFloat16 = ScalarType::BFloat16,
                            kFloat = ScalarType::Float, kDouble = ScalarType::Double;

// ---- errors ----

inline std::ostream& operator<<(std::ostream& to, IntArrayRef numbers) {
  to << "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    to << (i == 0 ? "" : ", ") << numbers[i];
  }
  return to << "]";
}

// Python sees a RuntimeError: PyTorch passes on the text of an error alone.
template <typename... Words>
[[noreturn]] void refuse(const Words&... words) {
  std::ostringstream text;
  (text << ... << words);
  throw std::runtime_error(text.str());
}

#define MONET_CHECK(holds, ...)          \
  do {                                   \
    if (!(holds)) {                      \
      ::monet_like::refuse(__VA_ARGS__); \
    }                                    \
  } while (false)

// Throws what PyTorch says of its last error, which it has kept since 2.13.
[[noreturn]] inline void fail(const std::string& otherwise) {
  using What = const char* (*)();
  static const What what = reinterpret_cast<What>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  throw std::runtime_error(what != nullptr && what() != nullptr ? what() : otherwise);
}

#define MONET_TORCH(function, ...)                                                                        \
  do {                                                                                                    \
    if (function(__VA_ARGS__) != AOTI_TORCH_SUCCESS) {                                                    \
      ::monet_like::fail("PyTorch's " #function " failed; what it has printed before says why");          \
    }                                                                                                     \
  } while (false)

// ---- tensors ----

struct Device {
  int32_t type, index;

  bool operator==(const Device&) const = default;
  friend std::ostream& operator<<(std::ostream& to, Device device) {
    if (device.type == aoti_torch_device_type_cpu()) {
      return to << "cpu";
    }
    return (device.type == aoti_torch_device_type_cuda() ? to << "cuda:" : to << "device " << device.type << ":")
        << device.index;
  }
};

struct TensorOptions {
  ScalarType type;
  Device device;
  MemoryFormat format = MemoryFormat::Contiguous;

  TensorOptions dtype(ScalarType other) const { return {other, device, format}; }
  TensorOptions memory_format(MemoryFormat other) const { return {type, device, other}; }
};

// Bytes of an element.
inline int64_t element_size(ScalarType type) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(static_cast<int32_t>(type)));
}

// A reference to a tensor of PyTorch, or to none.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle owned) : handle_(owned) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor(const Tensor& other) : handle_(other.new_handle()) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) {
      aoti_torch_delete_tensor_object(handle_);
    }
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  // Another handle of the same tensor; null for none.
  AtenTensorHandle new_handle() const {
    AtenTensorHandle made = nullptr;
    if (handle_ != nullptr) {
      MONET_TORCH(aoti_torch_new_tensor_handle, handle_, &made);
    }
    return made;
  }
  bool defined() const { return handle_ != nullptr; }
  // Whether both are of the same memory and layout; they have the same dtype wherever this is asked.
  bool is_same(const Tensor& other) const {
    return const_data_ptr() == other.const_data_ptr() && strides() == other.strides();
  }

  int64_t dim() const { return of(aoti_torch_get_dim); }
  int64_t numel() const { return of(aoti_torch_get_numel); }
  int64_t storage_offset() const { return of(aoti_torch_get_storage_offset); }
  IntArrayRef sizes() const { return {numbers(aoti_torch_get_sizes), static_cast<size_t>(dim())}; }
  IntArrayRef strides() const { return {numbers(aoti_torch_get_strides), static_cast<size_t>(dim())}; }
  int64_t size(int64_t d) const { return sizes()[static_cast<size_t>(d < 0 ? d + dim() : d)]; }
  int64_t stride(int64_t d) const { return strides()[static_cast<size_t>(d)]; }
  ScalarType scalar_type() const {
    int32_t found = 0;
    MONET_TORCH(aoti_torch_get_dtype, handle_, &found);
    return static_cast<ScalarType>(found);
  }
  int64_t element_size() const { return ::monet_like::element_size(scalar_type()); }
  Device device() const {
    Device found{};
    MONET_TORCH(aoti_torch_get_device_type, handle_, &found.type);
    MONET_TORCH(aoti_torch_get_device_index, handle_, &found.index);
    return found;
  }
  TensorOptions options() const { return {scalar_type(), device()}; }
  bool is_contiguous(MemoryFormat format = MemoryFormat::Contiguous) const;
  MemoryFormat suggest_memory_format() const;

  const void* const_data_ptr() const {
    const void* found = nullptr;
    MONET_TORCH(torch_get_const_data_ptr, handle_, &found);
    return found;
  }
  void* mutable_data_ptr() const {
    void* found = nullptr;
    MONET_TORCH(torch_get_mutable_data_ptr, handle_, &found);
    return found;
  }
  template <typename T>
  const T* const_data_ptr() const {
    return static_cast<const T*>(const_data_ptr());
  }
  template <typename T>
  T* mutable_data_ptr() const {
    return static_cast<T*>(mutable_data_ptr());
  }

  // Views; `first` counts elements from this tensor's first one.
  Tensor as_strided(IntArrayRef size, IntArrayRef stride, int64_t first) const {
    AtenTensorHandle made = nullptr;
    MONET_TORCH(
        aoti_torch__reinterpret_tensor, handle_, static_cast<int64_t>(size.size()), size.data(), stride.data(), first,
        &made);
    return Tensor(made);
  }
  Tensor narrow(int64_t d, int64_t first, int64_t count) const {
    std::vector<int64_t> size = sizes().vec();
    size[static_cast<size_t>(d)] = count;
    return as_strided(size, strides(), first * stride(d));
  }
  Tensor t() const {
    return as_strided(
        std::array<int64_t, 2>{size(1), size(0)}, std::array<int64_t, 2>{stride(1), stride(0)}, 0);
  }
  // Of a contiguous tensor, and without -1.
  Tensor view(IntArrayRef size) const;

  // By ATen's operators.
  Tensor contiguous(MemoryFormat format = MemoryFormat::Contiguous) const;
  Tensor to(ScalarType type) const;
  const Tensor& copy_(const Tensor& from) const {
    MONET_TORCH(aoti_torch_copy_, handle_, from.handle_, 0);
    return *this;
  }
  const Tensor& zero_() const {
    MONET_TORCH(aoti_torch_zero_, handle_);
    return *this;
  }

 private:
  template <typename F>
  int64_t of(const F& function) const {
    int64_t found = 0;
    MONET_TORCH(function, handle_, &found);
    return found;
  }
  template <typename F>
  int64_t* numbers(const F& function) const {
    int64_t* found = nullptr;
    MONET_TORCH(function, handle_, &found);
    return found;
  }

  AtenTensorHandle handle_ = nullptr;
};

using TensorList = c10::HeaderOnlyArrayRef<Tensor>;
using MaybeTensor = std::optional<Tensor>;

// ---- layouts ----

// The strides of a new tensor in a memory format, those of tensors without elements as ATen's.
inline std::vector<int64_t> strides_of(IntArrayRef size, MemoryFormat format) {
  std::vector<int64_t> stride(size.size());
  int64_t expected = 1;
  const bool channels_last = format != MemoryFormat::Contiguous;
  const auto lay = [&](size_t d) {
    stride[d] = expected;
    expected *= channels_last ? size[d] : std::max<int64_t>(size[d], 1);
  };
  if (channels_last) {
    lay(1);
  }
  for (size_t d = size.size(); d-- > 0;) {
    if (!channels_last || d != 1) {
      lay(d);
    }
  }
  return stride;
}

inline bool Tensor::is_contiguous(MemoryFormat format) const {
  if (format == MemoryFormat::Contiguous) {
    bool found = false;
    MONET_TORCH(aoti_torch_is_contiguous, handle_, &found);
    return found;
  }
  const IntArrayRef size = sizes(), stride = strides();
  if (size.size() != (format == MemoryFormat::ChannelsLast ? 4u : 5u)) {
    return false;
  }
  const std::vector<int64_t> wanted = strides_of(size, format);
  for (size_t d = 0; d < size.size(); ++d) {
    if (size[d] != 1 && stride[d] != wanted[d]) {
      return false;
    }
  }
  return true;
}

// ATen's: channels last if the strides say so, ambiguous ones included.
inline MemoryFormat Tensor::suggest_memory_format() const {
  const IntArrayRef size = sizes(), stride = strides();
  if (size.size() != 4 && size.size() != 5) {
    return MemoryFormat::Contiguous;
  }
  int64_t least = 0;
  const auto grows = [&](size_t d) {
    if (size[d] == 0 || stride[d] < least || (d == 0 && least == stride[1])) {
      return false;
    }
    least = stride[d] * (size[d] > 1 ? size[d] : 1);
    return true;
  };
  bool follows = stride[1] != 0 && grows(1);
  for (size_t d = size.size() - 1; follows && d >= 2; --d) {
    follows = grows(d);
  }
  follows = follows && grows(0);
  return !follows             ? MemoryFormat::Contiguous
         : size.size() == 4 ? MemoryFormat::ChannelsLast
                              : MemoryFormat::ChannelsLast3d;
}

inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, const TensorOptions& options) {
  AtenTensorHandle made = nullptr;
  const Device device = options.device;
  if (aoti_torch_empty_strided(
          static_cast<int64_t>(size.size()), size.data(), stride.data(), static_cast<int32_t>(options.type), device.type,
          device.index, &made) != AOTI_TORCH_SUCCESS) {
    std::ostringstream text;  // nothing else fails there
    text << (device.type == aoti_torch_device_type_cpu() ? "cannot allocate memory" : "CUDA out of memory")
         << ". Tried to allocate a tensor of shape " << size << " on " << device << ".";
    fail(text.str());
  }
  return Tensor(made);
}

inline Tensor empty(IntArrayRef size, const TensorOptions& options) {
  return empty_strided(size, strides_of(size, options.format), options);
}
inline Tensor empty(std::initializer_list<int64_t> size, const TensorOptions& options) {
  return empty(IntArrayRef(size.begin(), size.size()), options);
}

inline Tensor Tensor::view(IntArrayRef size) const {
  return as_strided(size, strides_of(size, MemoryFormat::Contiguous), 0);
}

// ---- values on the dispatcher's stack ----

// Each is 64 bits: a number, or a pointer to what its reader owns from then on.
template <typename T>
struct Stacked {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_pointer_v<T>);
  static StableIValue put(T value) {
    StableIValue made = 0;
    std::memcpy(&made, &value, sizeof(value));
    return made;
  }
  static T take(StableIValue value) {
    T made;
    std::memcpy(&made, &value, sizeof(made));
    return made;
  }
};

template <>
struct Stacked<ScalarType> {
  static StableIValue put(ScalarType value) { return Stacked<int32_t>::put(static_cast<int32_t>(value)); }
  static ScalarType take(StableIValue value) { return static_cast<ScalarType>(Stacked<int32_t>::take(value)); }
};

template <>
struct Stacked<Tensor> {
  static StableIValue put(const Tensor& value) {
    AtenTensorHandle handle = value.new_handle();
    if (handle == nullptr) {
      MONET_TORCH(aoti_torch_new_uninitialized_tensor, &handle);
    }
    return Stacked<AtenTensorHandle>::put(handle);
  }
  static Tensor take(StableIValue value) {
    Tensor made(Stacked<AtenTensorHandle>::take(value));
    bool defined = false;
    MONET_TORCH(aoti_torch_is_defined, made.get(), &defined);
    return defined ? std::move(made) : Tensor();
  }
};

template <typename T>
struct Stacked<std::optional<T>> {
  static StableIValue put(const std::optional<T>& value) {
    return Stacked<StableIValue*>::put(value ? new StableIValue(Stacked<T>::put(*value)) : nullptr);
  }
  static std::optional<T> take(StableIValue value) {
    StableIValue* const there = Stacked<StableIValue*>::take(value);
    if (there == nullptr) {
      return std::nullopt;
    }
    std::optional<T> made(Stacked<T>::take(*there));
    delete there;
    return made;
  }
};

template <typename T>
struct Stacked<std::vector<T>> {
  static StableIValue put(const std::vector<T>& values) {
    StableListHandle list = nullptr;
    MONET_TORCH(torch_new_list_reserve_size, values.size(), &list);
    for (const T& value : values) {
      MONET_TORCH(torch_list_push_back, list, Stacked<T>::put(value));
    }
    return Stacked<StableListHandle>::put(list);
  }
  static std::vector<T> take(StableIValue value) {
    const StableListHandle list = Stacked<StableListHandle>::take(value);
    size_t size = 0;
    MONET_TORCH(torch_list_size, list, &size);
    std::vector<T> made;
    made.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue one = 0;
      MONET_TORCH(torch_list_get_item, list, i, &one);
      made.push_back(Stacked<T>::take(one));
    }
    MONET_TORCH(torch_delete_list, list);
    return made;
  }
};

template <size_t N>
struct Stacked<std::array<bool, N>> {
  static std::array<bool, N> take(StableIValue value) {
    const std::vector<bool> all = Stacked<std::vector<bool>>::take(value);
    MONET_CHECK(all.size() == N, "expected ", N, " entries, got ", all.size());
    std::array<bool, N> made;
    std::copy(all.begin(), all.end(), made.begin());
    return made;
  }
};

template <>
struct Stacked<std::string> {
  static std::string take(StableIValue value) {
    const StringHandle there = Stacked<StringHandle>::take(value);
    size_t length = 0;
    const char* text = nullptr;
    MONET_TORCH(torch_string_length, there, &length);
    MONET_TORCH(torch_string_c_str, there, &text);
    std::string made(text, length);
    MONET_TORCH(torch_delete_string, there);
    return made;
  }
};

// ---- ATen's operators ----

// Numbers ("Scalar" in a schema) do not go through the dispatcher. A tensor of float64 without dimensions takes part in the computation as a
// number does.
inline Tensor number(double value) {
  const Tensor made = empty({}, {kDouble, {aoti_torch_device_type_cpu(), 0}});
  *made.mutable_data_ptr<double>() = value;
  return made;
}

// Calls an operator with all arguments of its schema; returns its first result, or a tuple of them.
template <typename Result = Tensor, typename... Arguments>
Result call(const char* name, const char* overload, const Arguments&... arguments) {
  constexpr size_t kMostResults = 3;
  std::array<StableIValue, std::max(sizeof...(Arguments), kMostResults)> stack{Stacked<Arguments>::put(arguments)...};
  MONET_TORCH(torch_call_dispatcher, name, overload, stack.data(), TORCH_TARGET_VERSION);
  if constexpr (std::is_same_v<Result, Tensor>) {
    return Stacked<Tensor>::take(stack[0]);
  } else {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return Result{Stacked<Tensor>::take(stack[I])...};
    }(std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

// Of a tensor without gaps.
inline Tensor empty_like(const Tensor& t) {
  return empty_strided(t.sizes(), t.strides(), t.options());
}

inline Tensor Tensor::contiguous(MemoryFormat format) const {
  return is_contiguous(format) ? *this : empty(sizes(), options().memory_format(format)).copy_(*this);
}

inline Tensor Tensor::to(ScalarType type) const {
  return scalar_type() == type ? *this : empty(sizes(), options().dtype(type)).copy_(*this);
}

inline Tensor cat(TensorList parts, int64_t d = 0) {
  return call("aten::cat", "", parts.vec(), d);
}

inline Three native_batch_norm(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, double momentum, double eps) {
  return call<Three>("aten::native_batch_norm", "", x, weight, bias, running_mean, running_var, true, momentum, eps);
}

inline std::tuple<Tensor, Tensor> batch_norm_update_stats(
    const Tensor& x, const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum) {
  return call<std::tuple<Tensor, Tensor>>("aten::batch_norm_update_stats", "", x, running_mean, running_var, momentum);
}

// ---- registration ----

// How an argument of a kernel is kept between the stack and the call.
template <typename T>
struct KeptOf {
  using type = T;
};
template <typename T>
struct KeptOf<c10::HeaderOnlyArrayRef<T>> {
  using type = std::vector<T>;
};
template <>
struct KeptOf<std::string_view> {
  using type = std::string;
};

template <auto Kernel>
struct Boxed;

template <typename Result, typename... Arguments, Result (*Kernel)(Arguments...)>
struct Boxed<Kernel> {
  // Takes its arguments off the stack and puts its results there.
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      std::tuple<typename KeptOf<std::remove_cvref_t<Arguments>>::type...> arguments{
          Stacked<typename KeptOf<std::remove_cvref_t<Arguments>>::type>::take(stack[I])...};
      put(stack, Kernel(std::get<I>(arguments)...));
    }(std::index_sequence_for<Arguments...>());
  }

 private:
  static void put(StableIValue* stack, const Tensor& made) { stack[0] = Stacked<Tensor>::put(made); }
  template <typename... Tensors>
  static void put(StableIValue* stack, const std::tuple<Tensors...>& made) {
    [&]<size_t... I>(std::index_sequence<I...>) {
      ((stack[I] = Stacked<Tensor>::put(std::get<I>(made))), ...);
    }(std::index_sequence_for<Tensors...>());
  }
};

// Registers kernels of the operators of `torch.ops.monet_like`, whose schemas monet_like/ops defines, for a device.
class Kernels {
 public:
  explicit Kernels(const char* device) {
    MONET_TORCH(aoti_torch_library_init_impl, "monet_like", device, __FILE__, __LINE__, &library_);
  }
  Kernels(const Kernels&) = delete;

  template <auto Kernel>
  void add(const char* name) {
    MONET_TORCH(torch_library_impl, library_, name, &Boxed<Kernel>::call, TORCH_TARGET_VERSION);
  }

 private:
  TorchLibraryHandle library_ = nullptr;
};

// MONET_KERNELS(CPU, m) { m.add<&kernel>("operator"); }, when the library is loaded and until the process ends.
#define MONET_KERNELS(device, m) MONET_KERNELS_NUMBERED(device, m, __COUNTER__)
#define MONET_KERNELS_NUMBERED(device, m, number) MONET_KERNELS_NAMED(device, m, number)
#define MONET_KERNELS_NAMED(device, m, number)                           \
  static void add_kernels_##number(::monet_like::Kernels& m);            \
  [[maybe_unused]] static const bool added_kernels_##number =            \
      (add_kernels_##number(*new ::monet_like::Kernels(#device)), true); \
  static void add_kernels_##number(::monet_like::Kernels& m)

}  // namespace monet_like
