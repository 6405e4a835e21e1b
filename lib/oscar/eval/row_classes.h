// Which rows of the 2-bit history draw the attention, and on which of them a cache errs.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/eval/methods.h"
#include "oscar/model/transformer.h"

namespace oscar {

enum class RowClass : uint8_t {
  kSeparators,  // of tokens that end documents or turns
  kSinks,       // of other tokens, keys that draw kSinkFactor times the mean
  kOthers
};
inline constexpr int kRowClasses = 3;
const char* row_class_name(RowClass row_class);  // "separators", "sinks", "others"

using ByRowClass = std::array<double, kRowClasses>;

// Sums over layers, KV heads and rows, of shares of each layer; only their proportions mean
// something.
struct RowClassSums {
  ByRowClass rows{}, attention{};
  // [methods]: of key rows the attention-weighted square of what their error does to a logit, of
  // value rows that of what it does to the output (math 2.6); zeros where a method has no INT2
  // rows.
  std::vector<ByRowClass> key_error, value_error;
};

// One forward pass of the reference over ids [sequences, tokens], each method's rows written beside
// it. `separators`: token ids.
RowClassSums measure_row_classes(Transformer& model, const std::vector<Method>& methods,
                                 const torch::Tensor& ids, const std::vector<int32_t>& separators,
                                 int64_t position_offset);

// For each class its share of rows and of attention, and of each method's errors.
Json row_classes_json(const RowClassSums& sums, const std::vector<Method>& methods);

}  // namespace oscar
