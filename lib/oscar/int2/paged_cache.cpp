// Allocation and shuffling.
#include "oscar/int2/paged_cache.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

namespace oscar {
namespace {

torch::Tensor shuffled(int64_t count, torch::Device device) {
  std::vector<int32_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(count));
  return torch::tensor(order, torch::kInt32).to(device);
}

}  // namespace

uint16_t* bf16_data(const torch::Tensor& t) { return static_cast<uint16_t*>(t.data_ptr()); }

PagedCache::PagedCache(const PageFormat& format, const CacheView& view, int num_kv_heads,
                       PagedCacheSize size, torch::Device device)
    : format_(format), view_(view), num_kv_heads_(num_kv_heads), size_(size) {
  const int64_t pages = (history_at(size.longest) + kPageTokens - 1) / kPageTokens;
  const int64_t all = std::max<int64_t>(1, pages * size.batch);
  // recent + demote_block + one token a step (ExactWindows).
  const int64_t rows = view.sink + view.recent + view.demote_block + 1;
  const auto on = torch::TensorOptions().device(device);
  pool_ = torch::empty({all, num_kv_heads, chunk_bytes(format)}, on.dtype(torch::kUInt8));
  k_ = torch::empty({size.batch, num_kv_heads, rows, format.head_dim}, on.dtype(torch::kBFloat16));
  v_ = torch::empty_like(k_);
  pages_ = shuffled(pages * size.batch, device).view({size.batch, pages});
  slots_ = shuffled(size.batch, device);
  status_ = torch::zeros({size.batch}, on.dtype(torch::kInt32));
  clear(size.batch);
}

void PagedCache::clear(int64_t batch) {
  batch_ = batch;
  length_ = 0;
  pool_.fill_(0xff);  // NaN in every metadata dtype
  k_.fill_(std::numeric_limits<float>::quiet_NaN());
  v_.fill_(std::numeric_limits<float>::quiet_NaN());
  status_.zero_();
}

bool PagedCache::has_room(PagedCacheSize size) const {
  return size.batch <= size_.batch && size.longest <= size_.longest;
}

int PagedCache::history_at(int64_t length) const {
  return history_for_length(static_cast<int>(length), static_cast<int>(view_.sink),
                            static_cast<int>(view_.recent), static_cast<int>(view_.demote_block));
}

PagedHistory PagedCache::history() const {
  return {pool_.data_ptr<uint8_t>(), pages_.data_ptr<int32_t>(), pages_.size(1), nullptr};
}

torch::Tensor PagedCache::chunks(int tokens) const {
  const int64_t pages = (tokens + kPageTokens - 1) / kPageTokens;
  const auto used = pages_.slice(0, 0, batch_).slice(1, 0, pages).flatten();
  return pool_.index_select(0, used).view({batch_, pages, num_kv_heads_, -1});
}

torch::Tensor PagedCache::exact_rows(int side) const {
  return (side ? v_ : k_).index_select(0, slots_.slice(0, 0, batch_));
}

ExactWindows PagedCache::windows() const {
  return {bf16_data(k_), bf16_data(v_), slots_.data_ptr<int32_t>(), static_cast<int>(view_.sink),
          static_cast<int>(k_.size(2) - view_.sink)};
}

}  // namespace oscar
