// What loops need besides isa.h. The files of this folder see no header of ATen: those take seconds to compile in each file.
// ../aten.cpp passes on to ATen what is declared here.

#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <vector>

#include "../isa.h"

namespace monet_like {

// Refers to a function of a range [begin, end).
class RangeFunction {
 public:
  template <typename F>
  RangeFunction(const F& f)
      : function_(&f), call_([](const void* function, int64_t begin, int64_t end) {
          (*static_cast<const F*>(function))(begin, end);
        }) {}
  void operator()(int64_t begin, int64_t end) const { call_(function_, begin, end); }

 private:
  const void* function_;
  void (*call_)(const void*, int64_t, int64_t);
};

// at::parallel_for, at::get_num_threads and at::get_thread_num.
void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFunction f);
int64_t thread_count();
int64_t thread_number();

// Calls f(a zero of the type), for the types that `check_floating` admits.
template <typename F>
void with_dtype(c10::ScalarType type, const F& f) {
  switch (type) {
    case c10::ScalarType::Float:
      return f(float(0));
    case c10::ScalarType::Double:
      return f(double(0));
    case c10::ScalarType::Half:
      return f(c10::Half());
    default:
      return f(c10::BFloat16());
  }
}

}  // namespace monet_like
