// A side's recipe as the arrays that a writer of rows takes.
#pragma once

#include "oscar/cache/page_layout.h"
#include "oscar/model/torch.h"

namespace oscar {

// The columns of a SideRecipe in the memory of `device`.
class DeviceRecipe {
 public:
  DeviceRecipe() = default;
  DeviceRecipe(const SideRecipe& recipe, torch::Device device)
      : clip_ratio_(torch::tensor(recipe.clip_ratio, torch::kFloat32).to(device)),
        correction_(codes(recipe.scale_correction, device)),
        rounding_(codes(recipe.rounding, device)) {}

  int64_t heads() const { return clip_ratio_.size(0); }
  // Points into this object and to the given matrices, [heads, d, d] each; null: no head needs it.
  SideWriter writer(const float* feedback, const float* metric) const {
    return {.clip_ratios = clip_ratio_.data_ptr<float>(),
            .corrections = correction_.data_ptr<uint8_t>(),
            .roundings = rounding_.data_ptr<uint8_t>(),
            .feedback = feedback,
            .metric = metric};
  }

 private:
  template <typename Choice>
  static torch::Tensor codes(const std::vector<Choice>& choices, torch::Device device) {
    auto all = torch::empty({static_cast<int64_t>(choices.size())}, torch::kUInt8);
    for (size_t i = 0; i < choices.size(); ++i) {
      all.data_ptr<uint8_t>()[i] = static_cast<uint8_t>(choices[i]);
    }
    return all.to(device);
  }
  torch::Tensor clip_ratio_, correction_, rounding_;
};

}  // namespace oscar
