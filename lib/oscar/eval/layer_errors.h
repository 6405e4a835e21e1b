// Errors of attention outputs by layer and KV head, and by kind of row.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/eval/methods.h"
#include "oscar/model/transformer.h"

namespace oscar {

// Which rows of the 2-bit history draw the attention, and on which of them a cache errs.

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
// it but those of rivals, whose windows differ. `separators`: token ids.
RowClassSums measure_row_classes(Transformer& model, const std::vector<Method>& methods,
                                 const torch::Tensor& ids, const std::vector<int32_t>& separators,
                                 int64_t position_offset);

// For each class its share of rows and of attention, and of each method's errors; null without
// rows.
Json row_classes_json(const RowClassSums& sums, const std::vector<Method>& methods);

// One key row of real text, as the model writes it and as each method's cache holds it.

struct KeyRow {
  int layer = 0, head = 0;
  int64_t token = 0;      // of its sequence
  double peak = 0;        // the head's largest channel over its median one
  torch::Tensor written;  // [head_dim] float32, after norm and RoPE

  struct Cached {
    size_t method = 0;
    torch::Tensor transformed;  // [head_dim] float32, (k - mean) T
    torch::Tensor read_back;    // the same from 2 bits
  };
  std::vector<Cached> cached;  // of the methods with 2-bit keys in that layer, no variants
};

// The layer and KV head with the largest outlier channel (root mean squares of the 2-bit rows), and
// of it the row in the middle of those, unselected. One forward pass of the reference over the
// beginning of `sequence`; none where no row of it becomes INT2. Windows are those of the first
// method with 2-bit keys.
std::optional<KeyRow> measure_key_row(Transformer& model, const std::vector<Method>& methods,
                                      const std::vector<int32_t>& sequence,
                                      int64_t position_offset);

// Adds report["key_row"] and, of its methods, report["methods"][name]["key_row"] (SCHEMA.md).
void add_key_row(const KeyRow& row, const std::vector<Method>& methods, int64_t position_offset,
                 Json& report);

// What a 2-bit cache does to each layer's attention output by itself, all that enters the layer
// being exact: the loss that a search predicts on its held-back text (math 9.2), measured on the
// evaluated one.

// Queries of a sequence that are looked at, evenly spaced behind the exact windows.
inline constexpr int64_t kLayerErrorQueries = 128;

using ByLayerAndHead = std::vector<std::vector<double>>;  // [layers][KV heads]

// Sums over queries and query heads of |(o^ - o) W_O|^2 with keys alone, values alone and both at
// INT2, and of |o W_O|^2. Zeros where a method leaves a side or a layer exact.
struct LayerErrorSums {
  ByLayerAndHead key, value, both, energy;
};

// [methods], from one forward pass of the reference over ids [sequences, tokens]. Throws Error when
// a sum is not finite.
std::vector<LayerErrorSums> measure_layer_errors(Transformer& model,
                                                 const std::vector<Method>& methods,
                                                 const torch::Tensor& ids, int64_t position_offset);

// Adds to methods.<name> of `report`, of each method with INT2 rows, `layer_errors`: the sums over
// their energies.
void add_layer_errors(const std::vector<LayerErrorSums>& sums, const std::vector<Method>& methods,
                      Json& report);

}  // namespace oscar
