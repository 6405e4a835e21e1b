// The shape of one layer's attention, as the fit and the file need it.
#pragma once

namespace oscar {

enum class AttentionKind { kFull, kSliding };

struct LayerGeometry {
  int layer_id = 0;  // global index in the checkpoint
  AttentionKind attention = AttentionKind::kFull;
  int sliding_window = 0;  // keys visible to a query in a sliding layer; 0 for full attention
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim_k = 0;
  int head_dim_v = 0;
  bool quantized = true;  // false when a sliding window fits into the recent BF16 window
  bool operator==(const LayerGeometry&) const = default;
};

}  // namespace oscar
