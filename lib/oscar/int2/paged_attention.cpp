// Token by token through pages: the lengths of every step, and the calls.
#include "oscar/int2/paged_attention.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"

namespace oscar {
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
  throw Error({.what = "a paged cache does not answer whole chunks of queries",
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
  if (positions.defined()) params.centres.first_position = positions.data_ptr<int32_t>();
  params.history = cache.history();
  params.windows = cache.windows();
  params.k = contiguous_rows(bf16_data(new_k), params.num_kv_heads, writer.format.head_dim);
  params.v = contiguous_rows(bf16_data(new_v), params.num_kv_heads, writer.format.head_dim);
  params.rows_indptr = starts.data_ptr<int32_t>();
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
  if (positions.defined()) append.centres.first_position = positions.data_ptr<int32_t>();
  append.history = cache.history();
  append.windows = cache.windows();
  append.rows_indptr = starts.data_ptr<int32_t>();
  append.status = cache.status().data_ptr<int32_t>();
  append.batch = static_cast<int>(batch);
  AttentionParams attention;
  attention.format = writer.format;
  attention.windows = append.windows;
  attention.centres = append.centres;
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
    attention.seq_len = now + kNewLength * batch;
    attention.q = bf16_data(rows.q) + row * qo_row;
    attention.o = bf16_data(rows.o) + row * qo_row;
    ops_->attend(attention);
    cache.set_length(length + 1);
  }
}

torch::Tensor PagedAttention::first_positions(const PageWriter& writer, int64_t batch) const {
  if (!writer.centres_k.defined()) return {};
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
