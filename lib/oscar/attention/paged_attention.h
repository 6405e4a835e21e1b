// Attention token by token through the pages of a cache.
#pragma once

#include <string>

#include "oscar/attention/int2_attention.h"
#include "oscar/attention/paged_ops.h"
#include "oscar/cache/pages.h"
#include "oscar/model/torch.h"

namespace oscar {

// Pages, block table and exact windows of one layer, for a batch of equally long sequences.

struct PagedCacheSize {
  int64_t batch = 0;    // sequences
  int64_t longest = 0;  // tokens of each
};

// The words of a bf16 tensor, as the cache layer takes them.
uint16_t* bf16_data(const torch::Tensor& t);

// Memory is taken once and poisoned with NaN, so that reading a row that was never written shows.
// Pages and window slots are dealt to sequences in a shuffled order, as a server's would be after a
// while. Appending and attending are PagedOps' part.
class PagedCache {
 public:
  // The windows and demotion block of `view`. All memory lies on `device`.
  PagedCache(const PageFormat& format, const CacheView& view, int num_kv_heads, PagedCacheSize size,
             torch::Device device);

  // Forgets everything; the next sequences may be fewer or shorter than `size`.
  void clear(int64_t batch);
  bool has_room(PagedCacheSize size) const;

  int64_t length() const { return length_; }
  void set_length(int64_t tokens) { length_ = tokens; }
  // INT2 tokens once `length` tokens are final.
  int history_at(int64_t length) const;

  // All pages of every sequence; history_len is the caller's.
  PagedHistory history() const;
  ExactWindows windows() const;
  // int32 [slots of the windows]: where an append notes refused rows; zeros after clear().
  torch::Tensor& status() { return status_; }
  const PageFormat& format() const { return format_; }

  // For tests, in the order of the sequences: the pages of a history of `tokens`, uint8
  // [batch, pages, num_kv_heads, page_bytes], and the exact rows of one side (0 = keys), bf16
  // [batch, num_kv_heads, sink + ring, head_dim].
  torch::Tensor page_data(int tokens) const;
  torch::Tensor exact_rows(int side) const;

 private:
  PageFormat format_;
  CacheView view_;
  int num_kv_heads_;
  PagedCacheSize size_;
  int64_t batch_ = 0, length_ = 0;
  torch::Tensor pool_;   // uint8 [pages, num_kv_heads, page_bytes]
  torch::Tensor k_, v_;  // bf16 [batch, num_kv_heads, sink + ring, head_dim]
  torch::Tensor pages_;  // int32 [batch, pages of a sequence], a permutation
  torch::Tensor slots_;  // int32 [batch], a permutation
  torch::Tensor status_;
};

// A layer's codec as the arrays that an append takes, and what a page cannot hold.

// How one layer's rows become INT2. Tensors float32 on the device of the pages.
struct PageWriter {
  PageFormat format;
  DeviceRecipe key, value;
  torch::Tensor feedback_k, feedback_v;  // [num_kv_heads, d, d]; undefined: no head needs it
  torch::Tensor metric_k, metric_v;      // the same
  torch::Tensor centers_k;               // bf16 [segments, num_kv_heads, 2, d]; undefined: none

  // The writer's part of the parameters of an append.
  AppendParams parameters() const;
};

// Throws Error naming what a page cannot hold: one side alone as INT2, or head dimensions of keys
// and values that differ. `where` names method and layer.
PageWriter make_page_writer(const LayerCodec& codec, const std::string& where,
                            torch::Device device);

// The engines `reference` and `kernel`: attention as a server decodes, through a paged INT2 cache.

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
  // Throws Error naming what a page cannot hold (see make_page_writer; sliding windows), and, after
  // a trial on three tokens, what `ops` cannot run.
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
  // Of a batch, [batch] int32, for keys with centers; undefined without.
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
