// What one small layer's attention might have seen.
#pragma once

#include <cmath>

#include "oscar/model/checkpoint/config.h"
#include "oscar/model/transformer.h"

namespace oscar {

inline constexpr LayerGeometry kSmallGeometry{.layer_id = 3,
                                              .attention = AttentionKind::kFull,
                                              .sliding_window = 0,
                                              .num_qo_heads = 6,
                                              .num_kv_heads = 2,
                                              .head_dim_k = 8,
                                              .head_dim_v = 4,
                                              .quantized = true};

inline const double kSmScale = 1 / std::sqrt(8.0);

inline AttentionRecord random_record(int64_t batch, int64_t tokens, uint64_t seed) {
  torch::manual_seed(seed);
  const auto values = [&](int64_t heads, int64_t d) {
    return torch::randn({batch, heads, tokens, d}).to(torch::kBFloat16);
  };
  return {.layer = 3,
          .sm_scale = kSmScale,
          .q = values(6, 8),
          .k = values(2, 8),
          .v = values(2, 4),
          .o = values(6, 4)};
}

}  // namespace oscar
