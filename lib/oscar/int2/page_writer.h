// A layer's codec as the arrays that an append takes, and what a page cannot hold.
#pragma once

#include <string>

#include "oscar/cache/page_layout.h"
#include "oscar/int2/cache_engine.h"
#include "oscar/int2/device_recipe.h"

namespace oscar {

// How one layer's rows become INT2. Tensors float32 on the device of the pages.
struct PageWriter {
  PageFormat format;
  DeviceRecipe key, value;
  torch::Tensor feedback_k, feedback_v;  // [num_kv_heads, d, d]; undefined: no head needs it
  torch::Tensor metric_k, metric_v;      // the same
  torch::Tensor centres_k;               // bf16 [segments, num_kv_heads, 2, d]; undefined: none

  // The writer's part of the parameters of an append.
  AppendParams parameters() const;
};

// Throws Error naming what a page cannot hold: one side alone as INT2, or head dimensions of keys
// and values that differ. `where` names method and layer.
PageWriter make_page_writer(const LayerCodec& codec, const std::string& where,
                            torch::Device device);

}  // namespace oscar
