// One key row of real text, as the model writes it and as each method's cache holds it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/eval/methods.h"
#include "oscar/model/transformer.h"

namespace oscar {

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

}  // namespace oscar
