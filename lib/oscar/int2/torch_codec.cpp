// Clip thresholds by sorting, scales by true division.
#include "oscar/int2/torch_codec.h"

#include <limits>

#include "oscar/cache/codec.h"

namespace oscar {

torch::Tensor clip_thresholds(const std::vector<float>& clip_ratio, const torch::Tensor& spans) {
  std::vector<int64_t> ranks;
  bool clipped = false;
  for (const float ratio : clip_ratio) {
    ranks.push_back(clip_threshold_index(ratio, static_cast<int>(spans.size(-1))));
    clipped = clipped || ranks.back() >= 0;
  }
  if (!clipped) return {};
  const auto sorted = std::get<0>(spans.abs().sort(-1));
  std::vector<torch::Tensor> thresholds;
  for (size_t h = 0; h < ranks.size(); ++h) {
    const auto head = sorted.select(1, static_cast<int64_t>(h));
    thresholds.push_back(
        ranks[h] < 0 ? torch::full_like(head.select(-1, 0), std::numeric_limits<float>::infinity())
                     : head.select(-1, ranks[h]));
  }
  return torch::stack(thresholds, 1).unsqueeze(-1);
}

torch::Tensor scale_of_range(const torch::Tensor& lo, const torch::Tensor& hi) {
  // On CUDA torch multiplies by the reciprocal of a number, and divides by a tensor.
  return hi.sub(lo).div_(torch::full_like(lo, 3.0f)).clamp_min_(kMinScale);
}

torch::Tensor round_to_metadata(const torch::Tensor& x, MetadataDtype dtype) {
  if (dtype == MetadataDtype::kFp32) return x;
  return x.to(dtype == MetadataDtype::kFp16 ? torch::kFloat16 : torch::kBFloat16)
      .to(torch::kFloat32);
}

}  // namespace oscar
