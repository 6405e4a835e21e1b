// The recipe of a layer as operators take it: one list of tensors, keys' before values'.
#pragma once

#include <cstdint>

#include "oscar/cache/pages.h"

namespace oscar::torch_ops {

// What all KV heads of one side have, by address; null: absent.
struct SideRecipe {
  const float* forward = nullptr;  // [Hkv, d, d] T: a row is (x - mean) T
  // [Hkv, d, d] T^-T of keys, which queries are multiplied with; T^-1 of values, for outputs.
  const float* partner = nullptr;
  const float* mean = nullptr;        // [Hkv, d]
  KeyCenters key_centers = {};        // of keys: [segments, Hkv, 2, d]
  const float* clip_ratio = nullptr;  // [Hkv] <= 0: off
  const uint8_t* scale_correction =
      nullptr;                        // [Hkv] ScaleCorrection; absent: kMetric with a metric
  const uint8_t* rounding = nullptr;  // [Hkv] Rounding; absent: kShaped with feedback
  const float* feedback = nullptr;    // [Hkv, d, d] U, unit upper triangular
  const float* metric = nullptr;      // [Hkv, d, d] M, undamped
};
struct LayerRecipe {
  SideRecipe key, value;
};

// What a property is of one head.
enum class HeadShape : uint8_t { kNumber, kVector, kMatrix, kKeyCenters };

// The properties of a side in the order of the list, once: visit(name, shape, member).
template <typename Recipe, typename Visit>
void visit_recipe(Recipe& recipe, Visit&& visit) {
  visit("forward", HeadShape::kMatrix, recipe.forward);
  visit("partner", HeadShape::kMatrix, recipe.partner);
  visit("mean", HeadShape::kVector, recipe.mean);
  visit("key_centers", HeadShape::kKeyCenters, recipe.key_centers);
  visit("clip_ratio", HeadShape::kNumber, recipe.clip_ratio);
  visit("scale_correction", HeadShape::kNumber, recipe.scale_correction);
  visit("rounding", HeadShape::kNumber, recipe.rounding);
  visit("feedback", HeadShape::kMatrix, recipe.feedback);
  visit("metric", HeadShape::kMatrix, recipe.metric);
}

// What writes the rows of a side.
inline SideWriter writer_of(const SideRecipe& side) {
  return {.clip_ratios = side.clip_ratio,
          .corrections = side.scale_correction,
          .roundings = side.rounding,
          .feedback = side.feedback,
          .metric = side.metric};
}

// A format as operators take it: numbers in the order of visit_format.
struct GivenFormat {
  PageFormat page;
  int sink_tokens = 0;
};
template <typename Format, typename Visit>
void visit_format(Format& format, Visit&& visit) {
  visit("quant_group_size", format.page.rows.quant_group_size);  // 0: head_dim
  visit("metadata_dtype", format.page.rows.metadata);
  visit("sink_tokens", format.sink_tokens);
}

}  // namespace oscar::torch_ops
