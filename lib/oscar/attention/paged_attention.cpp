// Attention token by token through the pages of a cache.
#include "oscar/attention/paged_attention.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "oscar/base/error.h"
#include "oscar/base/process.h"

namespace oscar {

// Allocation and shuffling.

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
  pool_ = torch::empty({all, num_kv_heads, page_bytes(format)}, on.dtype(torch::kUInt8));
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

torch::Tensor PagedCache::page_data(int tokens) const {
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

// Checks of a codec against what pages hold, and its arrays.

namespace {

constexpr const char* kWayOut = "use --engine simulate for this method";

const float* data_or_null(const torch::Tensor& t) {
  return t.defined() ? t.data_ptr<float>() : nullptr;
}

torch::Tensor on(const torch::Tensor& t, torch::Device device) {
  return t.defined() ? t.to(device, torch::kFloat32).contiguous() : t;
}

}  // namespace

AppendParams PageWriter::parameters() const {
  AppendParams params;
  params.format = format;
  params.key = key.writer(data_or_null(feedback_k), data_or_null(metric_k));
  params.value = value.writer(data_or_null(feedback_v), data_or_null(metric_v));
  if (centers_k.defined()) {
    params.centers.rows = static_cast<const uint16_t*>(centers_k.data_ptr());
    params.centers.segments = static_cast<int>(centers_k.size(0));
  }
  params.num_kv_heads = static_cast<int>(key.heads());
  return params;
}

PageWriter make_page_writer(const LayerCodec& codec, const std::string& where,
                            torch::Device device) {
  const SideCodec &key = codec.key, &value = codec.value;
  if (!codec.int2_keys || !codec.int2_values) {
    throw Error({.what = "a page holds both keys and values as INT2",
                 .where = where,
                 .found = codec.int2_keys ? "exact values" : "exact keys",
                 .hint = kWayOut});
  }
  if (key.forward.size(-1) != value.forward.size(-1)) {
    throw Error({.what = "a page holds keys and values of one head dimension",
                 .where = where,
                 .found = std::to_string(key.forward.size(-1)) + " and " +
                          std::to_string(value.forward.size(-1)),
                 .hint = kWayOut});
  }
  PageWriter writer;
  writer.format = {.head_dim = static_cast<int>(key.forward.size(-1)), .rows = key.format};
  writer.key = DeviceRecipe(key.recipe, device);
  writer.value = DeviceRecipe(value.recipe, device);
  writer.feedback_k = on(key.feedback, device);
  writer.feedback_v = on(value.feedback, device);
  writer.metric_k = on(key.metric, device);
  writer.metric_v = on(value.metric, device);
  if (key.centers.defined())
    writer.centers_k = key.centers.to(device, torch::kBFloat16).contiguous();
  return writer;
}

// Token by token through pages: the lengths of every step, and the calls.

namespace {

enum StepLength { kOldLength, kOldHistory, kNewHistory, kNewLength, kStepLengths };

// [batch, heads, tokens, d] -> bf16 [tokens, batch, heads, d].
torch::Tensor by_token(const torch::Tensor& x, torch::Device device) {
  return x.to(device, torch::kBFloat16).permute({2, 0, 1, 3}).contiguous();
}

// The first tokens of [tokens, batch, heads, d] as float32 [batch, heads, tokens, d].
torch::Tensor by_head(const torch::Tensor& rows, int64_t tokens) {
  return rows.slice(0, 0, tokens).permute({1, 2, 0, 3}).to(torch::kFloat32).contiguous();
}

// The lengths that one step of a batch of equally long sequences reads, each [batch]:
// int32 [steps, kStepLengths, batch] for steps from `length` tokens on, `added` tokens a step.
torch::Tensor step_lengths(const PagedCache& cache, int64_t steps, int64_t added, int64_t batch,
                           torch::Device device) {
  auto table = torch::empty({steps, kStepLengths, 1}, torch::kInt32);
  auto* out = table.data_ptr<int32_t>();
  for (int64_t step = 0; step < steps; ++step, out += kStepLengths) {
    const int64_t length = cache.length() + step * added;
    out[kOldLength] = static_cast<int32_t>(length);
    out[kOldHistory] = cache.history_at(length);
    out[kNewHistory] = cache.history_at(length + added);
    out[kNewLength] = static_cast<int32_t>(length + added);
  }
  return table.expand({steps, kStepLengths, batch}).contiguous().to(device);
}

void set_lengths(const int32_t* lengths, int64_t batch, AppendParams& params) {
  params.old_len = lengths + kOldLength * batch;
  params.old_history = lengths + kOldHistory * batch;
  params.new_history = lengths + kNewHistory * batch;
  params.history.history_len = params.new_history;
}

// Where each sequence's new rows begin, [batch + 1].
torch::Tensor row_starts(int64_t batch, int64_t rows, torch::Device device) {
  return torch::arange(batch + 1, torch::dtype(torch::kInt32).device(device))
      .mul_(rows)
      .to(torch::kInt32);
}

}  // namespace

void check_paged_mode(const CacheView& view) {
  if (view.mode != CacheModeKind::kChunked) return;
  throw Error({.what = "a paged cache does not answer whole prefill chunks",
               .where = "--engine, --mode",
               .expected = "mode decode or prefill",
               .found = cache_mode_name(view),
               .hint = "use --engine simulate with this mode"});
}

PagedAttention::PagedAttention(PagedMethod method, std::unique_ptr<PagedOps> ops)
    : method_(std::move(method)),
      ops_(std::move(ops)),
      exact_(std::vector<std::shared_ptr<const LayerCodec>>(method_.layers.size()), method_.view,
             method_.sliding_windows),
      writers_(method_.layers.size()),
      caches_(method_.layers.size()) {
  check_paged_mode(method_.view);
  bool tried = false;
  for (int layer = 0; layer < static_cast<int>(method_.layers.size()); ++layer) {
    const LayerCodec* const codec = method_.layers[layer].get();
    if (!codec) continue;
    if (method_.sliding_windows[layer] > 0) {
      throw Error({.what = "paged decode attention has no sliding windows",
                   .where = where(layer),
                   .found = "a window of " + std::to_string(method_.sliding_windows[layer]),
                   .hint = "use --engine simulate for this model"});
    }
    writers_[layer] = make_page_writer(*codec, where(layer), ops_->device());
    if (!tried) try_out(layer);
    tried = true;
  }
}

std::string PagedAttention::where(int layer) const {
  return "method '" + method_.name + "', layer " + std::to_string(layer);
}

// Three tokens of zeros with a window of one: every operation runs before any long work.
void PagedAttention::try_out(int layer) {
  const c10::InferenceMode guard;
  const PageWriter& writer = writers_[layer];
  const int64_t kv_heads = writer.key.heads();
  PagedCache cache(writer.format, {.sink = 0, .recent = 1}, static_cast<int>(kv_heads),
                   {.batch = 1, .longest = 3}, ops_->device());
  const auto zeros = [&](int64_t heads) {
    return torch::zeros({3, 1, heads, writer.format.head_dim},
                        torch::dtype(torch::kBFloat16).device(ops_->device()));
  };
  Rows rows{zeros(method_.num_qo_heads), zeros(kv_heads), zeros(kv_heads),
            zeros(method_.num_qo_heads)};
  decode(writer, cache, rows, 0);
  check_rows(cache, where(layer));
}

void PagedAttention::keep_cache(int64_t longest) {
  keep_ = true;
  longest_ = longest;
  filled_.assign(method_.layers.size(), false);
  exact_.keep_cache(longest);
}

PagedCache& PagedAttention::cache_for(int layer, const torch::Tensor& k) {
  auto& cache = caches_[keep_ ? layer : 0];
  if (keep_ && filled_[layer]) return *cache;
  const PagedCacheSize size{k.size(0), keep_ ? longest_ : k.size(2)};
  if (!cache || !cache->has_room(size)) {
    cache = std::make_unique<PagedCache>(writers_[layer].format, method_.view,
                                         static_cast<int>(k.size(1)), size, ops_->device());
  }
  cache->clear(size.batch);
  if (keep_) filled_[layer] = true;
  return *cache;
}

void PagedAttention::prefill(const PageWriter& writer, PagedCache& cache, Rows& rows,
                             int64_t tokens) {
  const auto k = by_head(rows.k, tokens), v = by_head(rows.v, tokens);
  const CacheView everything{.sink = tokens};
  const auto o =
      attend_cache_rows(everything, by_head(rows.q, tokens), {k, k, v, v}, rows.sm_scale);
  rows.o.slice(0, 0, tokens).copy_(o.permute({2, 0, 1, 3}));

  // A prompt's rows follow each other: [batch, tokens, heads, d].
  const auto by_sequence = [&](const torch::Tensor& x) {
    return x.slice(0, 0, tokens).transpose(0, 1).contiguous();
  };
  const auto new_k = by_sequence(rows.k), new_v = by_sequence(rows.v);
  const int64_t batch = new_k.size(0);
  const auto starts = row_starts(batch, tokens, ops_->device());
  const auto lengths = step_lengths(cache, 1, tokens, batch, ops_->device());
  AppendParams params = writer.parameters();
  const auto positions = first_positions(writer, batch);
  if (positions.defined()) params.centers.first_position = positions.data_ptr<int32_t>();
  params.history = cache.history();
  params.windows = cache.windows();
  params.k = contiguous_rows(bf16_data(new_k), params.num_kv_heads, writer.format.head_dim);
  params.v = contiguous_rows(bf16_data(new_v), params.num_kv_heads, writer.format.head_dim);
  params.query_start_loc = starts.data_ptr<int32_t>();
  set_lengths(lengths.data_ptr<int32_t>(), batch, params);
  params.status = cache.status().data_ptr<int32_t>();
  params.batch = static_cast<int>(batch);
  ops_->append(params, static_cast<int>(tokens), cache.history_at(tokens));
  cache.set_length(tokens);
}

void PagedAttention::decode(const PageWriter& writer, PagedCache& cache, Rows& rows,
                            int64_t first) {
  const int64_t steps = rows.k.size(0) - first, batch = rows.k.size(1);
  const int64_t qo_row = rows.q.stride(0);
  const auto starts = row_starts(batch, 1, ops_->device());
  const auto lengths = step_lengths(cache, steps, 1, batch, ops_->device());
  AppendParams append = writer.parameters();
  const auto positions = first_positions(writer, batch);
  if (positions.defined()) append.centers.first_position = positions.data_ptr<int32_t>();
  append.history = cache.history();
  append.windows = cache.windows();
  append.query_start_loc = starts.data_ptr<int32_t>();
  append.status = cache.status().data_ptr<int32_t>();
  append.batch = static_cast<int>(batch);
  AttentionParams attention;
  attention.format = writer.format;
  attention.windows = append.windows;
  attention.centers = append.centers;
  attention.sm_scale = rows.sm_scale;
  attention.batch = append.batch;
  attention.num_qo_heads = static_cast<int>(rows.q.size(2));
  attention.num_kv_heads = append.num_kv_heads;
  for (int64_t step = 0; step < steps; ++step) {
    stop_if_requested(kStoppedEvaluation);
    const int64_t row = first + step, length = cache.length();
    const int32_t* const now = lengths.data_ptr<int32_t>() + step * kStepLengths * batch;
    set_lengths(now, batch, append);
    const int d = writer.format.head_dim;
    append.k = contiguous_rows(bf16_data(rows.k[row]), append.num_kv_heads, d);
    append.v = contiguous_rows(bf16_data(rows.v[row]), append.num_kv_heads, d);
    ops_->append(append, 1, cache.history_at(length + 1) - cache.history_at(length));
    attention.history = append.history;
    attention.seq_lens = now + kNewLength * batch;
    attention.q = bf16_data(rows.q) + row * qo_row;
    attention.o = bf16_data(rows.o) + row * qo_row;
    ops_->attend(attention);
    cache.set_length(length + 1);
  }
}

torch::Tensor PagedAttention::first_positions(const PageWriter& writer, int64_t batch) const {
  if (!writer.centers_k.defined()) return {};
  return torch::full({batch}, first_position_, torch::dtype(torch::kInt32).device(ops_->device()));
}

void PagedAttention::check_rows(PagedCache& cache, const std::string& place) {
  const torch::Tensor status = cache.status().cpu();
  const auto has = [&](RowStatus bit) {
    return status.bitwise_and(static_cast<int>(bit)).any().item<bool>();
  };
  const bool non_finite = has(RowStatus::kNonFinite);
  if (!non_finite && !has(RowStatus::kMetadataOverflow)) return;
  cache.status().zero_();
  refuse_rows(place, non_finite ? RowStatus::kNonFinite : RowStatus::kMetadataOverflow);
}

torch::Tensor PagedAttention::attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                                     const torch::Tensor& v, double sm_scale) {
  const LayerCodec* const codec = method_.layers[layer].get();
  if (!codec) return exact_.attend(layer, q, k, v, sm_scale);
  const torch::Device device = ops_->device();
  PagedCache& cache = cache_for(layer, k);
  Rows rows{by_token(to_query_basis(*codec, q), device),
            by_token(to_cache_basis(codec->key, k), device),
            by_token(to_cache_basis(codec->value, v), device),
            {},
            static_cast<float>(sm_scale)};
  rows.o = torch::empty_like(rows.q);
  int64_t prompt = 0;
  if (method_.view.mode == CacheModeKind::kPrefill && cache.length() == 0) {
    prompt = std::min(method_.view.prompt, k.size(2));
  }
  if (prompt > 0) prefill(writers_[layer], cache, rows, prompt);
  decode(writers_[layer], cache, rows, prompt);
  check_rows(cache, where(layer));
  const auto o = rows.o.permute({1, 2, 0, 3}).to(q.device(), torch::kFloat32);
  return from_value_basis(*codec, o).to(q.scalar_type());
}

}  // namespace oscar
