// Sampling from the model with a plain key-value cache.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/base/progress.h"
#include "oscar/model/transformer.h"

namespace oscar {

struct GenerateOptions {
  int64_t num_sequences = 1;
  int64_t length = 0;        // tokens of each sequence, the first one included
  int32_t first_token = 0;   // starts every sequence
  double temperature = 1.0;  // 1 = the model's own distribution
  uint64_t seed = 0;
};

// Samples [num_sequences, length] tokens. All layers' weights stay on the device. The same seed,
// device and thread count give the same tokens.
std::vector<std::vector<int32_t>> generate(Transformer& model, const GenerateOptions& options,
                                           Progress& progress);

}  // namespace oscar
