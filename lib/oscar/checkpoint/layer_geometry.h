// The shape of one layer's attention, as the fit and the file need it.
#pragma once

namespace oscar {

// A local layer is a sliding one that keeps its whole window in BF16 whatever the recent tokens
// are: nothing is collected of it and it has no transforms.
enum class AttentionKind { kFull, kSliding, kLocal };

struct LayerGeometry {
  int layer_id = 0;  // global index in the checkpoint
  AttentionKind attention = AttentionKind::kFull;
  int sliding_window = 0;  // keys visible to a query; 0 for full attention
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim_k = 0;
  int head_dim_v = 0;
  bool quantized = true;  // as of quantized_beyond

  // Whether there are statistics and transforms of the layer.
  bool fitted() const { return attention != AttentionKind::kLocal; }
  // Whether rows ever leave the exact windows: the window of a sliding layer may fit into the
  // recent tokens that stay in BF16.
  bool quantized_beyond(int recent_tokens) const {
    return fitted() && (sliding_window == 0 || sliding_window > recent_tokens);
  }
  bool operator==(const LayerGeometry&) const = default;
};

}  // namespace oscar
