// RoPE: frequencies of every published kind of scaling.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// Rotary position embedding as the model runs it: inverse frequencies in float64 and their scaling.

// theta_i = rope_theta^(-2i/rotary_dim), i < rotary_dim/2, after the scaling of rope type "llama3",
// "linear", "yarn" or "freq_factors" (a divisor for each i); pair i of dimensions turns by position
// * theta_i.
struct Rope {
  std::string type = "default";
  double theta = 10000.0;
  int rotary_dim = 0;            // the head's first dimensions, which turn; the rest passes through
  std::vector<double> inv_freq;  // [rotary_dim / 2], radians per position
  double attention_factor = 1.0;  // factor on cos and sin (yarn); 1 otherwise
  bool interleaved = false;       // pair i is (2i, 2i + 1), else (i, i + rotary_dim / 2)
  int max_positions = 0;          // max_position_embeddings after scaling: positions served
  // The parameters that produced this with every default filled in, in transformers' own names, as
  // stored in bundles: equal text means equal frequencies.
  Json as_run;

  int first_of_pair(int i) const { return interleaved ? 2 * i : i; }
  int second_of_pair(int i) const { return interleaved ? 2 * i + 1 : i + rotary_dim / 2; }
};

// Builds the frequencies from `parameters`, a dictionary in the manner of rope_parameters that
// holds rope_theta; "type" stands for rope_type; partial_rotary_factor is the share of head_dim
// that turns, 1 where it is absent. Frequencies are float64 (transformers rounds to float32 on the
// way). max_positions is what servers make of it: "yarn" and "linear" multiply the length before
// scaling by factor, "llama3" serves max_position_embeddings. linear: Chen et al., arXiv
// 2306.15595; yarn: Peng et al., arXiv 2309.00071. Throws Error naming `where` and the key for an
// unknown type or key and for values out of range.
Rope make_rope(const Json& parameters, int head_dim, int max_position_embeddings,
               const std::string& where);

}  // namespace oscar
