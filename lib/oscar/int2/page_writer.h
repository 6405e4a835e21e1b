// A layer's codec as the arrays that an append takes, and what a page cannot hold.
#pragma once

#include <string>

#include "oscar/cache/page_layout.h"
#include "oscar/int2/cache_engine.h"

namespace oscar {

// How one layer's rows become INT2. Tensors float32 on the device of the pages.
struct PageWriter {
  PageFormat format;
  torch::Tensor clip_k, clip_v;          // [num_kv_heads]
  torch::Tensor feedback_k, feedback_v;  // [num_kv_heads, d, d]; undefined: plain rounding
  torch::Tensor metric_k, metric_v;      // the same; undefined: no scale correction in any head

  // The writer's part of the parameters of an append.
  AppendParams parameters() const;
};

// Throws Error naming what a page cannot hold: one side alone as INT2, or head dimensions of keys
// and values that differ. `where` names method and layer. Heads may round and correct in different
// ways: pages then hold the bytes of the side's codec, as they do when all heads agree.
PageWriter make_page_writer(const LayerCodec& codec, const std::string& where,
                            torch::Device device);

}  // namespace oscar
