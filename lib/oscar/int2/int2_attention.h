// Attention over a cache whose old rows are INT2, block by block, and the engine `simulate`.
#pragma once

#include <memory>
#include <vector>

#include "oscar/int2/cache_engine.h"
#include "oscar/int2/cache_view.h"

namespace oscar {

// One layer's cache content in the cache's basis, float32: every row exactly and as INT2.
// Keys [batch, Hkv, tokens, d_k], values [batch, Hkv, tokens, d_v].
struct CacheRows {
  torch::Tensor k_exact, k_int2, v_exact, v_int2;
};

// Softmax attention of the last q.size(2) positions over `rows` under `view`'s rule, in float32.
// q [batch, Hq, queries, d_k] in the cache's basis -> [batch, Hq, queries, d_v] in the values'
// basis. Memory beyond the inputs is a few blocks, never queries x tokens.
torch::Tensor attend_cache_rows(const CacheView& view, const torch::Tensor& q,
                                const CacheRows& rows, double sm_scale);

// The INT2 forward of one method. A layer without codec runs exactly in the original basis.
class Int2Attention final : public CacheEngine {
 public:
  // layers[l] may be null. `view` holds the windows and mode; `sliding_windows` [num_layers].
  Int2Attention(std::vector<std::shared_ptr<const LayerCodec>> layers, CacheView view,
                std::vector<int> sliding_windows);

  torch::Tensor attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v, double sm_scale) override;
  void keep_cache(int64_t longest) override;
  void set_prompt(int64_t tokens) override { view_.prompt = tokens; }
  void set_first_position(int64_t position) override { first_position_ = position; }
  bool quantizes(int layer) const override { return layers_[layer] != nullptr; }

 private:
  CacheRows append(int layer, const CacheRows& rows);

  std::vector<std::shared_ptr<const LayerCodec>> layers_;
  CacheView view_;
  std::vector<int> sliding_windows_;
  int64_t first_position_ = 0;
  bool keep_ = false;
  std::vector<CacheRows> kept_;
};

}  // namespace oscar
