// The engines `reference` and `kernel`: attention as a server decodes, through a paged INT2 cache.
#pragma once

#include "oscar/int2/int2_attention.h"
#include "oscar/int2/page_writer.h"
#include "oscar/int2/paged_cache.h"
#include "oscar/int2/paged_ops.h"

namespace oscar {

// What a paged engine needs of a method.
struct PagedMethod {
  std::string name;                                       // for messages
  std::vector<std::shared_ptr<const LayerCodec>> layers;  // null: the layer stays exact
  CacheView view;                                         // windows and mode
  std::vector<int> sliding_windows;                       // [num_layers]
  int num_qo_heads = 0;
};

// Throws Error for the mode that no paged engine runs: `chunked:N` would need attention of many
// queries over INT2 pages.
void check_paged_mode(const CacheView& view);

// Each call runs its tokens one after another: the row that leaves the exact windows is quantized
// into a page, the token's own row enters them, and one call of decode attention answers the query.
// In mode `prefill` the prompt's queries read its exact rows in one block, and its rows enter the
// cache in one append. Queries, exact rows and outputs are bf16, as the kernels take them. A layer
// without codec runs in Int2Attention.
class PagedAttention final : public CacheEngine {
 public:
  // Throws Error naming what a page cannot hold (page_writer.h, sliding windows), and, after a
  // trial on three tokens, what `ops` cannot run.
  PagedAttention(PagedMethod method, std::unique_ptr<PagedOps> ops);

  // Throws Error for rows that the codec refuses, and Interrupted.
  torch::Tensor attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v, double sm_scale) override;
  void keep_cache(int64_t longest) override;
  void set_prompt(int64_t tokens) override { method_.view.prompt = tokens; }
  void set_first_position(int64_t position) override { first_position_ = position; }
  bool quantizes(int layer) const override { return method_.layers[layer] != nullptr; }

  // What the last call left of a layer, for tests; before keep_cache() that of the last layer run.
  PagedCache& cache(int layer) { return *caches_[keep_ ? layer : 0]; }

 private:
  // bf16 rows on the device of the pages, those of one token together: [tokens, batch, heads, d].
  struct Rows {
    torch::Tensor q, k, v, o;
    float sm_scale = 1.0f;
  };
  PagedCache& cache_for(int layer, const torch::Tensor& k);
  void prefill(const PageWriter& writer, PagedCache& cache, Rows& rows, int64_t tokens);
  void decode(const PageWriter& writer, PagedCache& cache, Rows& rows, int64_t first);
  // Of a batch, [batch] int32, for keys with centres; undefined without.
  torch::Tensor first_positions(const PageWriter& writer, int64_t batch) const;
  // Throws Error for rows that the codec has refused.
  static void check_rows(PagedCache& cache, const std::string& where);
  void try_out(int layer);
  std::string where(int layer) const;

  PagedMethod method_;
  std::unique_ptr<PagedOps> ops_;
  Int2Attention exact_;
  std::vector<PageWriter> writers_;  // [num_layers]
  std::vector<std::unique_ptr<PagedCache>> caches_;
  int64_t first_position_ = 0;
  bool keep_ = false;
  int64_t longest_ = 0;
  std::vector<bool> filled_;  // [num_layers] since keep_cache()
};

}  // namespace oscar
