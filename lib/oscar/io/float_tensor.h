// Arrays of numbers as files of other tools hold them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace oscar {

// Row-major; `values` has the product of `shape` entries, one for a scalar.
struct FloatTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;

  bool operator==(const FloatTensor&) const = default;
};

using FloatTensors = std::map<std::string, FloatTensor>;

}  // namespace oscar
