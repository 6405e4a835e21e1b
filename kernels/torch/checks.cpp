// Checks of dtype, shape, layout, device and alignment, and the texts of their errors.
#include "checks.h"

#include <algorithm>
#include <vector>

#include "oscar/base/error.h"

namespace oscar::torch_ops {
namespace {

std::string joined(const std::vector<std::string>& parts) {
  std::string text = "[";
  for (size_t i = 0; i < parts.size(); ++i) text += (i ? ", " : "") + parts[i];
  return text + "]";
}

std::string shape_text(std::initializer_list<Extent> shape) {
  std::vector<std::string> names, sizes;
  for (const Extent& extent : shape) {
    names.push_back(extent.name);
    sizes.push_back(extent.size == kAnySize ? "any" : std::to_string(extent.size));
  }
  return joined(names) + " = " + joined(sizes);
}

bool has_shape(const Tensor& tensor, std::initializer_list<Extent> shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t dim = 0;
  for (const Extent& extent : shape) {
    if (extent.size != kAnySize && tensor.size(dim) != extent.size) return false;
    ++dim;
  }
  return true;
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.get_device_index() == b.get_device_index() && a.is_cuda() == b.is_cuda() &&
         a.is_cpu() == b.is_cpu();
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  std::vector<std::string> sizes;
  for (int64_t i = 0; i < tensor.dim(); ++i) sizes.push_back(std::to_string(tensor.size(i)));
  return joined(sizes);
}

std::string stride_text(const Tensor& tensor) {
  std::vector<std::string> strides;
  for (int64_t i = 0; i < tensor.dim(); ++i) strides.push_back(std::to_string(tensor.stride(i)));
  return joined(strides);
}

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  const std::string index = std::to_string(tensor.get_device_index());
  return (tensor.is_cuda() ? "cuda:" : "another device, index ") + index;
}

void refuse(const char* op, const std::string& what, const std::string& where,
            const std::string& expected, const std::string& found, const std::string& hint) {
  throw Error({.what = std::string("oscar_int2::") + op + ": " + what,
               .where = where,
               .expected = expected,
               .found = found,
               .hint = hint});
}

void* checked_view(const Argument& argument, ScalarType dtype, std::initializer_list<Extent> shape,
                   const Tensor& neighbour, int alignment) {
  const Tensor& t = argument.tensor;
  if (t.scalar_type() != dtype) {
    refuse(argument.op, "wrong dtype", argument.name, torch::headeronly::toString(dtype),
           torch::headeronly::toString(t.scalar_type()));
  }
  if (!has_shape(t, shape)) {
    refuse(argument.op, "wrong shape", argument.name, shape_text(shape), shape_text(t));
  }
  if (!same_device(t, neighbour)) {
    refuse(argument.op, "tensors on different devices", argument.name, device_text(neighbour),
           device_text(t));
  }
  void* const data = t.data_ptr();
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) != 0) {
    refuse(argument.op, "not aligned", argument.name,
           "an address that is a multiple of " + std::to_string(alignment) + " bytes",
           "a view that begins elsewhere", "call .clone() first");
  }
  return data;
}

void* checked_data(const Argument& argument, ScalarType dtype, std::initializer_list<Extent> shape,
                   const Tensor& neighbour, int alignment) {
  void* const data = checked_view(argument, dtype, shape, neighbour, alignment);
  if (!argument.tensor.is_contiguous()) {
    refuse(argument.op, "not contiguous", argument.name, "rows one after another",
           "strides that skip or repeat elements", "call .contiguous() first");
  }
  return data;
}

int64_t checked_size(const Argument& argument, int64_t dims, int64_t dim) {
  if (argument.tensor.dim() != dims) {
    refuse(argument.op, "wrong number of dimensions", argument.name, std::to_string(dims),
           shape_text(argument.tensor));
  }
  return argument.tensor.size(dim);
}

int checked_int(const char* op, const char* name, int64_t value, int64_t lowest, int64_t highest) {
  highest = std::min(highest, kMaxInt);
  if (value < lowest || value > highest) {
    refuse(op, "number out of range", name,
           std::to_string(lowest) + " to " + std::to_string(highest), std::to_string(value));
  }
  return static_cast<int>(value);
}

}  // namespace oscar::torch_ops
