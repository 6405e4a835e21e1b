// Pages, block table and exact windows of one layer, for a batch of equally long sequences.
#pragma once

#include "oscar/cache/page_layout.h"
#include "oscar/int2/cache_view.h"
#include "oscar/model/torch.h"

namespace oscar {

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

  // For tests, in the order of the sequences: the chunks of a history of `tokens`, uint8
  // [batch, pages, num_kv_heads, chunk_bytes], and the exact rows of one side (0 = keys), bf16
  // [batch, num_kv_heads, sink + ring, head_dim].
  torch::Tensor chunks(int tokens) const;
  torch::Tensor exact_rows(int side) const;

 private:
  PageFormat format_;
  CacheView view_;
  int num_kv_heads_;
  PagedCacheSize size_;
  int64_t batch_ = 0, length_ = 0;
  torch::Tensor pool_;   // uint8 [pages, num_kv_heads, chunk_bytes]
  torch::Tensor k_, v_;  // bf16 [batch, num_kv_heads, sink + ring, head_dim]
  torch::Tensor pages_;  // int32 [batch, pages of a sequence], a permutation
  torch::Tensor slots_;  // int32 [batch], a permutation
  torch::Tensor status_;
};

}  // namespace oscar
