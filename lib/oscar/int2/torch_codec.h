// Steps that the codecs of rows share, as torch operations with the bits of oscar/cache.
#pragma once

#include <vector>

#include "oscar/cache/metadata.h"
#include "oscar/model/torch.h"

namespace oscar {

// spans [batch, Hkv, tokens, spans, values] -> [batch, Hkv, tokens, spans, 1] the magnitude at
// which each span is clipped, infinite for heads with ratio 0; undefined when no head clips.
torch::Tensor clip_thresholds(const std::vector<float>& clip_ratio, const torch::Tensor& spans);

// (hi - lo) / 3, at least kMinScale.
torch::Tensor scale_of_range(const torch::Tensor& lo, const torch::Tensor& hi);

torch::Tensor round_to_metadata(const torch::Tensor& x, MetadataDtype dtype);

}  // namespace oscar
