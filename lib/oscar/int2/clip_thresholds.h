// The clip threshold of rows and rounding to the metadata dtype, as torch operations.
#pragma once

#include <vector>

#include "oscar/cache/metadata.h"
#include "oscar/model/torch.h"

namespace oscar {

// spans [batch, Hkv, tokens, spans, values] -> [batch, Hkv, tokens, spans, 1] the magnitude at
// which each span is clipped, infinite for heads with ratio 0; undefined when no head clips.
torch::Tensor clip_thresholds(const std::vector<float>& clip_ratio, const torch::Tensor& spans);

torch::Tensor round_to_metadata(const torch::Tensor& x, MetadataDtype dtype);

}  // namespace oscar
