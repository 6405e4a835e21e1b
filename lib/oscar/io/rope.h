// Rotary position embedding as the model runs it: inverse frequencies in float64 and their scaling.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// theta_i = rope_theta^(-2i/rotary_dim), i < rotary_dim/2, after the scaling of rope type "llama3",
// "linear" or "yarn"; the pair of dimensions (i, i + rotary_dim/2) turns by position * theta_i.
struct Rope {
  std::string type = "default";
  double theta = 10000.0;
  int rotary_dim = 0;             // dimensions that turn; the rest of the head passes through
  std::vector<double> inv_freq;   // [rotary_dim / 2], radians per position
  double attention_factor = 1.0;  // factor on cos and sin (yarn); 1 otherwise
  int max_positions = 0;          // max_position_embeddings after scaling: positions served
  Json as_run;                    // the parameters that produced this, as stored in bundles
};

}  // namespace oscar
