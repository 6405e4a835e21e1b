// What an operator needs of a tensor, checked before its address is taken.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

namespace oscar::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kAnySize = -1;
inline constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
inline constexpr int kRowAlignment = 16;  // bytes; what the kernels load at once

// One dimension of a shape: the name of its length, and the length itself where it is known.
struct Extent {
  const char* name = "";
  int64_t size = kAnySize;
};

// An argument of an operator, with the names that its errors use.
struct Argument {
  const char* op = "";
  const char* name = "";
  const Tensor& tensor;
};

// Throws Error, named after the operator.
[[noreturn]] void refuse(const char* op, const std::string& what, const std::string& where,
                         const std::string& expected, const std::string& found,
                         const std::string& hint = {});

// Throws Error unless the tensor has the dtype and shape, and lies on the device of `neighbour`, at
// an address that is a multiple of `alignment`. Returns that address. Strides are the caller's to
// check.
void* checked_view(const Argument& argument, ScalarType dtype, std::initializer_list<Extent> shape,
                   const Tensor& neighbour, int alignment = 1);

// The same of a tensor that is contiguous.
void* checked_data(const Argument& argument, ScalarType dtype, std::initializer_list<Extent> shape,
                   const Tensor& neighbour, int alignment = 1);

// The dimension, after a check that there are `dims` of them.
int64_t checked_size(const Argument& argument, int64_t dims, int64_t dim);

// `value` as an int; throws Error unless it lies in [lowest, highest].
int checked_int(const char* op, const char* name, int64_t value, int64_t lowest,
                int64_t highest = kMaxInt);

// "[2, 8, 128]", its strides likewise, and "cuda:0", for errors.
std::string shape_text(const Tensor& tensor);
std::string stride_text(const Tensor& tensor);
std::string device_text(const Tensor& tensor);

}  // namespace oscar::torch_ops
