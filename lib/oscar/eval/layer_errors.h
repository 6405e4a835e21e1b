// What a 2-bit cache does to each layer's attention output by itself, all that enters the layer
// being exact: the loss that a search predicts on its held-back text (math 9.2), measured on the
// evaluated one.
#pragma once

#include <vector>

#include "oscar/base/json.h"
#include "oscar/eval/methods.h"
#include "oscar/model/transformer.h"

namespace oscar {

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
