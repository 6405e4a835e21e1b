// Weights by their role in a layer, FP8 with its scales included.
#include "oscar/model/checkpoint/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"

namespace oscar {

// Which scales belong to which weight, and whether they fit.

namespace {

constexpr const char* kFp8 = "F8_E4M3";
constexpr const char* kDamaged = "the checkpoint is damaged or of another tool; fetch it again";

// Scales of what goes into a product or into the cache, not of weights.
constexpr std::string_view kOtherScales[] = {".input_scale", ".activation_scale", ".output_scale",
                                             ".q_scale",     ".k_scale",          ".v_scale",
                                             ".kv_scale"};

// Tensors that only make sense beside a quantized weight.
constexpr std::string_view kWeightScales[] = {"_scale", "_scale_inv"};

template <typename Suffixes>
bool ends_with_any(const std::string& name, const Suffixes& suffixes) {
  return std::any_of(std::begin(suffixes), std::end(suffixes),
                     [&](const auto& suffix) { return name.ends_with(suffix); });
}

int64_t count_blocks(int64_t size, int64_t block) {
  return size / block + (size % block != 0 ? 1 : 0);
}

std::optional<Dtype> scale_dtype(const std::string& dtype) {
  for (const Dtype candidate : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
    if (dtype == dtype_name(candidate)) return candidate;
  }
  return std::nullopt;
}

std::vector<float> read_numbers(const SafetensorsWeights::Stored& stored) {
  const Dtype dtype = *scale_dtype(stored.dtype);
  std::vector<float> numbers(stored.bytes / dtype_bytes(dtype));
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = stored_float(dtype, stored.data + i * dtype_bytes(dtype));
  }
  return numbers;
}

}  // namespace

Fp8Weights::Fp8Weights(std::shared_ptr<const SafetensorsWeights> files, Fp8Layout layout)
    : files_(std::move(files)), layout_(std::move(layout)) {
  const std::vector<std::string> names = files_->names();
  for (const std::string& name : names) {
    if (layout_.layout == ScaleLayout::kNone || files_->stored(name).dtype != kFp8) continue;
    const std::string scale = find_scale(name);
    check_scale(name, scale);
    scales_[name] = scale;
    hidden_.insert(scale);
  }
  if (scales_.empty() && layout_.layout != ScaleLayout::kNone) {
    throw Error({.what = "config.json speaks of FP8 weights, and no tensor is stored in FP8",
                 .where = files_->shards().front().parent_path().string(),
                 .expected = std::string("tensors of dtype ") + kFp8,
                 .hint = "remove quantization_config from a copy of the folder's config.json if "
                         "the weights are those of the plain model"});
  }
  for (const std::string& name : names) {
    if (hidden_.contains(name)) continue;
    if (ends_with_any(name, kOtherScales)) {
      hidden_.insert(name);
    } else if (ends_with_any(name, kWeightScales)) {
      throw Error({.what = "scales belong to no tensor that is stored in FP8",
                   .where = place(name),
                   .hint = "without them the weights would be other numbers than the model's"});
    }
  }
}

std::string Fp8Weights::find_scale(const std::string& weight) const {
  const size_t dot = weight.rfind('.');
  const auto& left_out = layout_.left_out;
  if (dot != std::string::npos &&
      std::find(left_out.begin(), left_out.end(), weight.substr(0, dot)) != left_out.end()) {
    throw Error({.what = "a weight is stored in FP8 whose module config.json leaves out",
                 .where = place(weight),
                 .hint = kDamaged});
  }
  std::vector<std::string> wanted, found;
  for (const std::string& suffix : layout_.scale_suffixes) {
    wanted.push_back(weight + suffix);
    if (files_->contains(wanted.back())) found.push_back(wanted.back());
  }
  if (found.size() == 1) return found.front();
  throw Error({.what = found.empty() ? "a weight in FP8 has no scales"
                                     : "a weight in FP8 has scales under two names",
               .where = place(weight),
               .expected = fmt::format("{}", fmt::join(wanted, " or ")),
               .hint = kDamaged});
}

std::vector<int64_t> Fp8Weights::grid(const std::vector<int64_t>& shape) const {
  switch (layout_.layout) {
    case ScaleLayout::kTensor:
      return {1, 1};
    case ScaleLayout::kChannel:
      return {shape[0], 1};
    case ScaleLayout::kBlock:
    case ScaleLayout::kNone:
      break;
  }
  return {count_blocks(shape[0], layout_.block_rows),
          count_blocks(shape[1], layout_.block_columns)};
}

void Fp8Weights::check_scale(const std::string& weight, const std::string& scale) const {
  const SafetensorsWeights::Stored codes = files_->stored(weight), found = files_->stored(scale);
  if (codes.shape.size() != 2 || codes.shape[0] == 0 || codes.shape[1] == 0) {
    throw Error({.what = "a tensor in FP8 is no matrix",
                 .where = place(weight),
                 .expected = "[rows, columns]",
                 .found = fmt::format("{}", codes.shape)});
  }
  if (!scale_dtype(found.dtype)) {
    throw Error({.what = "scales of this dtype are not implemented",
                 .where = place(scale),
                 .expected = "F32, BF16 or F16",
                 .found = found.dtype});
  }
  const std::vector<int64_t> expected = grid(codes.shape);
  // One scale is written as a number or as a vector of one, one a channel as a vector too.
  const bool one = layout_.layout == ScaleLayout::kTensor &&
                   (found.shape.empty() || found.shape == std::vector<int64_t>{1});
  const bool vector =
      layout_.layout == ScaleLayout::kChannel && found.shape == std::vector<int64_t>{expected[0]};
  if (!one && !vector && found.shape != expected) {
    throw Error({.what = "the shape of scales does not fit their weight",
                 .where = place(scale),
                 .expected = fmt::format("{} ({}) for a weight of {}", expected, describe(layout_),
                                         codes.shape),
                 .found = fmt::format("{}", found.shape),
                 .hint = kDamaged});
  }
}

bool Fp8Weights::contains(const std::string& name) const {
  return files_->contains(name) && !hidden_.contains(name);
}

TensorView Fp8Weights::get(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = scales_.find(name);
  if (found == scales_.end()) return files_->get(name, shape);
  const SafetensorsWeights::Stored codes = files_->stored(name);
  if (codes.shape != shape) {
    throw Error({.what = "a tensor has another shape than the configuration asks for",
                 .where = place(name),
                 .expected = fmt::format("{}", shape),
                 .found = fmt::format("{}", codes.shape)});
  }
  auto scales = std::make_shared<BlockScales>();
  const bool block = layout_.layout == ScaleLayout::kBlock;
  scales->block_rows = block                                     ? layout_.block_rows
                       : layout_.layout == ScaleLayout::kChannel ? 1
                                                                 : shape[0];
  scales->block_columns = block ? layout_.block_columns : shape[1];
  scales->scales = read_numbers(files_->stored(found->second));
  for (size_t i = 0; i < scales->scales.size(); ++i) {
    const float scale = scales->scales[i];
    if (std::isfinite(scale) && scale > 0) continue;
    throw Error({.what = "a scale of weights in FP8 is no positive number",
                 .where = fmt::format("{}, number {}", place(found->second), i),
                 .expected = "a finite number above 0",
                 .found = fmt::format("{}", scale),
                 .hint = kDamaged});
  }
  return {.name = name,
          .shape = shape,
          .data = codes.data,
          .bytes = codes.bytes,
          .fp8 = std::move(scales)};
}

std::vector<std::string> Fp8Weights::names() const {
  std::vector<std::string> names = files_->names();
  std::erase_if(names, [this](const std::string& name) { return hidden_.contains(name); });
  return names;
}

std::string Fp8Weights::quantization() const {
  if (layout_.layout == ScaleLayout::kNone) return "";
  std::map<std::string, int> counts;
  for (const std::string& name : names()) ++counts[files_->stored(name).dtype];
  std::string text =
      fmt::format("{} with {} ({} tensors)", kFp8, describe(layout_), scales_.size());
  for (const auto& [dtype, count] : counts) {
    if (dtype != kFp8) text += fmt::format(", {} ({})", dtype, count);
  }
  if (const std::string others = unused_scales(); !others.empty()) text += "; " + others;
  return text;
}

std::string Fp8Weights::unused_scales() const {
  const size_t count = hidden_.size() - scales_.size();
  if (count == 0) return "";
  return fmt::format("{} scales of activations or of the cache not used", count);
}

bool has_other_scales(const WeightSource& weights) {
  return std::ranges::any_of(
      weights.names(), [](const std::string& name) { return ends_with_any(name, kOtherScales); });
}

// The table of tensor names.

namespace {

enum class Size {
  kNone,
  kVocab,
  kHidden,
  kIntermediate,
  kQueries,
  kQueryRows,
  kKeys,
  kQNormed,
  kKNormed,
  kExperts,
  kOne,
  kChannels,
  kValueRows,
  kValueHeads,
  kChannelsAndZ,
  kBetaAndDecay,
  kValueDim
};

// Where a row of the table is asked for: outside the layers, in one of them, or in one expert.
struct Place {
  const ModelConfig& config;
  const LayerSpec* layer = nullptr;
  int layer_index = 0, expert = -1;
};

using Condition = bool (*)(const Place&);
constexpr Condition kAlways = [](const Place&) { return true; };
constexpr Condition kUntied = [](const Place& p) { return !p.config.tie_word_embeddings; };
constexpr Condition kQkvBias = [](const Place& p) { return p.layer->attention.qkv_bias; };
constexpr Condition kWithOBias = [](const Place& p) { return p.layer->attention.o_bias; };
constexpr Condition kQkNorm = [](const Place& p) { return p.layer->attention.qk_norm; };
constexpr Condition kInputNormsOnly = [](const Place& p) { return !p.layer->output_norms; };
constexpr Condition kOutputNorms = [](const Place& p) { return p.layer->output_norms; };
constexpr Condition kMlpBias = [](const Place& p) {
  return std::get<DenseSpec>(p.layer->mlp).bias;
};
constexpr Condition kByPart = [](const Place& p) { return !p.layer->delta_net->rows_by_head; };
constexpr Condition kByHead = [](const Place& p) { return p.layer->delta_net->rows_by_head; };
constexpr Condition kGatedShared = [](const Place& p) { return p.layer->experts()->shared_gate; };
constexpr Condition kChoiceBias = [](const Place& p) { return p.layer->experts()->choice_bias; };

struct Row {
  WeightRole role;
  const char* name;       // the first {} stands for the layer, the second for the expert
  const char* gguf_name;  // in GGUF files; null: not read from them
  Size rows, cols;
  Condition required;
};

using enum WeightRole;
using enum Size;
constexpr Row kModelRows[] = {
    {kEmbedding, "model.embed_tokens.weight", "token_embd.weight", kVocab, kHidden, kAlways},
    {kFinalNorm, "model.norm.weight", "output_norm.weight", kHidden, kNone, kAlways},
    {kOutput, "lm_head.weight", "output.weight", kVocab, kHidden, kUntied},
};
// Before and behind attention, or what stands in its place.
constexpr Row kNormRows[] = {
    {kAttentionNorm, "model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", kHidden,
     kNone, kAlways},
    {kMlpNorm, "model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", kHidden,
     kNone, kInputNormsOnly},
};
constexpr Row kAttentionRows[] = {
    {kQ, "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", kQueryRows, kHidden,
     kAlways},
    {kK, "model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", kKeys, kHidden,
     kAlways},
    {kV, "model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", kKeys, kHidden,
     kAlways},
    {kQBias, "model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", kQueries, kNone,
     kQkvBias},
    {kKBias, "model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", kKeys, kNone, kQkvBias},
    {kVBias, "model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", kKeys, kNone, kQkvBias},
    {kQNorm, "model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", kQNormed,
     kNone, kQkNorm},
    {kKNorm, "model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", kKNormed,
     kNone, kQkNorm},
    {kO, "model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", kHidden, kQueries,
     kAlways},
    {kOBias, "model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias", kHidden, kNone,
     kWithOBias},
};
// Of linear layers. Not read from GGUF files.
constexpr Row kDeltaRows[] = {
    {kDeltaChannels, "model.layers.{}.linear_attn.in_proj_qkv.weight", nullptr, kChannels, kHidden,
     kByPart},
    {kDeltaZ, "model.layers.{}.linear_attn.in_proj_z.weight", nullptr, kValueRows, kHidden,
     kByPart},
    {kDeltaBeta, "model.layers.{}.linear_attn.in_proj_b.weight", nullptr, kValueHeads, kHidden,
     kByPart},
    {kDeltaDecay, "model.layers.{}.linear_attn.in_proj_a.weight", nullptr, kValueHeads, kHidden,
     kByPart},
    {kDeltaChannelsByHead, "model.layers.{}.linear_attn.in_proj_qkvz.weight", nullptr,
     kChannelsAndZ, kHidden, kByHead},
    {kDeltaSharesByHead, "model.layers.{}.linear_attn.in_proj_ba.weight", nullptr, kBetaAndDecay,
     kHidden, kByHead},
    {kDeltaConvolution, "model.layers.{}.linear_attn.conv1d.weight", nullptr, kChannels, kNone,
     kAlways},
    {kDeltaLogRate, "model.layers.{}.linear_attn.A_log", nullptr, kValueHeads, kNone, kAlways},
    {kDeltaStepBias, "model.layers.{}.linear_attn.dt_bias", nullptr, kValueHeads, kNone, kAlways},
    {kDeltaNorm, "model.layers.{}.linear_attn.norm.weight", nullptr, kValueDim, kNone, kAlways},
    {kDeltaOut, "model.layers.{}.linear_attn.out_proj.weight", nullptr, kHidden, kValueRows,
     kAlways},
};
// Of layers with norms behind attention and the MLP as well.
constexpr Row kOutputNormRows[] = {
    {kAttentionOutputNorm, "model.layers.{}.post_attention_layernorm.weight", nullptr, kHidden,
     kNone, kOutputNorms},
    {kMlpNorm, "model.layers.{}.pre_feedforward_layernorm.weight", nullptr, kHidden, kNone,
     kOutputNorms},
    {kMlpOutputNorm, "model.layers.{}.post_feedforward_layernorm.weight", nullptr, kHidden, kNone,
     kOutputNorms},
};
constexpr Row kDenseRows[] = {
    {kGate, "model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", kIntermediate,
     kHidden, kAlways},
    {kUp, "model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", kIntermediate, kHidden,
     kAlways},
    {kDown, "model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", kHidden,
     kIntermediate, kAlways},
    {kGateBias, "model.layers.{}.mlp.gate_proj.bias", "blk.{}.ffn_gate.bias", kIntermediate, kNone,
     kMlpBias},
    {kUpBias, "model.layers.{}.mlp.up_proj.bias", "blk.{}.ffn_up.bias", kIntermediate, kNone,
     kMlpBias},
    {kDownBias, "model.layers.{}.mlp.down_proj.bias", "blk.{}.ffn_down.bias", kHidden, kNone,
     kMlpBias},
};

constexpr Row kRouterRows[] = {
    {kRouter, "model.layers.{}.mlp.gate.weight", nullptr, kExperts, kHidden, kAlways},
    {kRouterChoiceBias, "model.layers.{}.mlp.gate.e_score_correction_bias", nullptr, kExperts,
     kNone, kChoiceBias},
};
constexpr Row kExpertRows[] = {
    {kExpertGate, "model.layers.{}.mlp.experts.{}.gate_proj.weight", nullptr, kIntermediate,
     kHidden, kAlways},
    {kExpertUp, "model.layers.{}.mlp.experts.{}.up_proj.weight", nullptr, kIntermediate, kHidden,
     kAlways},
    {kExpertDown, "model.layers.{}.mlp.experts.{}.down_proj.weight", nullptr, kHidden,
     kIntermediate, kAlways},
};
constexpr Row kSharedRows[] = {
    {kGate, "model.layers.{}.mlp.shared_experts.gate_proj.weight", nullptr, kIntermediate, kHidden,
     kAlways},
    {kUp, "model.layers.{}.mlp.shared_experts.up_proj.weight", nullptr, kIntermediate, kHidden,
     kAlways},
    {kDown, "model.layers.{}.mlp.shared_experts.down_proj.weight", nullptr, kHidden, kIntermediate,
     kAlways},
    {kSharedGate, "model.layers.{}.mlp.shared_expert_gate.weight", nullptr, kOne, kHidden,
     kGatedShared},
};

int64_t extent(const Place& place, Size size) {
  const ModelConfig& config = place.config;
  switch (size) {
    case kVocab:
      return config.vocab_size;
    case kHidden:
      return config.hidden_size;
    case kIntermediate:
      return place.expert >= 0 ? place.layer->experts()->intermediate_size
                               : place.layer->dense_intermediate_size();
    case kQueries:
      return int64_t{config.num_qo_heads} * config.head_dim;
    case kQueryRows:
      return (place.layer->attention.gated ? 2 : 1) * extent(place, kQueries);
    case kKeys:
      return int64_t{config.num_kv_heads} * config.head_dim;
    case kQNormed:
      return place.layer->attention.joint_norm ? extent(place, kQueries) : config.head_dim;
    case kKNormed:
      return place.layer->attention.joint_norm ? extent(place, kKeys) : config.head_dim;
    case kExperts:
      return place.layer->experts()->num_experts;
    case kOne:
      return 1;
    case kChannels:
      return place.layer->delta_net->channels();
    case kValueRows:
      return place.layer->delta_net->value_rows();
    case kValueHeads:
      return place.layer->delta_net->num_value_heads;
    case kChannelsAndZ:
      return extent(place, kChannels) + extent(place, kValueRows);
    case kBetaAndDecay:
      return 2 * extent(place, kValueHeads);
    case kValueDim:
      return place.layer->delta_net->value_dim;
    case kNone:
      break;
  }
  return 0;
}

bool is_norm(WeightRole role) {
  return role == kFinalNorm || role == kAttentionNorm || role == kAttentionOutputNorm ||
         role == kMlpNorm || role == kMlpOutputNorm || role == kQNorm || role == kKNorm;
}

template <size_t n>
void resolve(const Row (&rows)[n], const Place& place, std::vector<WeightSpec>& specs) {
  for (const Row& row : rows) {
    if (!row.required(place)) continue;
    WeightSpec spec{row.role,
                    fmt::format(fmt::runtime(row.name), place.layer_index, place.expert),
                    {},
                    place.expert,
                    is_norm(row.role) ? place.config.norm_offset : 0.0};
    for (const Size size : {row.rows, row.cols}) {
      if (size != kNone) spec.shape.push_back(extent(place, size));
    }
    if (row.role == kDeltaConvolution) {
      spec.shape.insert(spec.shape.end(), {1, place.layer->delta_net->taps});
    }
    specs.push_back(std::move(spec));
  }
}

// Buffers that old checkpoints store and that follow from config.json, and a tied output matrix
// that is stored twice.
bool redundant(const std::string& name, const ModelConfig& config) {
  const std::string buffer = ".rotary_emb.inv_freq";
  return (name.size() > buffer.size() &&
          name.compare(name.size() - buffer.size(), buffer.size(), buffer) == 0) ||
         (name == "lm_head.weight" && config.tie_word_embeddings);
}

}  // namespace

std::vector<WeightNames> weight_names(int num_layers) {
  std::vector<WeightNames> names;
  const auto add = [&names](const Row& row, int layer) {
    names.push_back({row.role, fmt::format(fmt::runtime(row.name), layer),
                     fmt::format(fmt::runtime(row.gguf_name), layer)});
  };
  for (const Row& row : kModelRows) add(row, 0);
  for (int layer = 0; layer < num_layers; ++layer) {
    for (const Row& row : kNormRows) add(row, layer);
    for (const Row& row : kAttentionRows) add(row, layer);
    for (const Row& row : kDenseRows) add(row, layer);
  }
  return names;
}

std::vector<WeightSpec> model_weights(const ModelConfig& config) {
  std::vector<WeightSpec> specs;
  resolve(kModelRows, {config}, specs);
  return specs;
}

std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) {
  std::vector<WeightSpec> specs;
  Place place{config, &config.layer(layer), layer};
  resolve(kNormRows, place, specs);
  if (place.layer->delta_net) {
    resolve(kDeltaRows, place, specs);
  } else {
    resolve(kAttentionRows, place, specs);
  }
  resolve(kOutputNormRows, place, specs);
  const ExpertsSpec* experts = place.layer->experts();
  if (experts == nullptr) {
    resolve(kDenseRows, place, specs);
    return specs;
  }
  resolve(kRouterRows, place, specs);
  if (experts->shared_intermediate_size > 0) resolve(kSharedRows, place, specs);
  for (place.expert = 0; place.expert < experts->num_experts; ++place.expert) {
    resolve(kExpertRows, place, specs);
  }
  return specs;
}

std::vector<std::string> further_weights(const ModelConfig& config, const WeightSource& weights) {
  std::vector<std::string> found;
  std::vector<std::string> prefixes;
  if (const std::string_view part = config.stored_names.further_part; !part.empty()) {
    prefixes.emplace_back(part);
  }
  for (int i = 0; i < config.further_layers; ++i) {
    prefixes.push_back(fmt::format("model.layers.{}.", config.num_layers + i));
  }
  if (prefixes.empty()) return found;
  for (std::string& name : weights.names()) {
    const auto starts = [&](const std::string& prefix) { return name.starts_with(prefix); };
    if (std::ranges::any_of(prefixes, starts)) found.push_back(std::move(name));
  }
  return found;
}

void check_weights(const ModelConfig& config, const WeightSource& weights) {
  std::set<std::string> expected;
  const auto check = [&](const std::vector<WeightSpec>& specs) {
    for (const WeightSpec& spec : specs) {
      weights.get(spec.name, spec.shape);
      expected.insert(spec.name);
    }
  };
  check(model_weights(config));
  for (int layer = 0; layer < config.num_layers; ++layer) check(layer_weights(config, layer));
  for (std::string& name : further_weights(config, weights)) expected.insert(std::move(name));
  for (const std::string& name : weights.names()) {
    if (!expected.contains(name) && !redundant(name, config)) {
      throw Error(
          {.what = "the checkpoint holds a tensor that its configuration does not account for",
           .where = weights.place(name),
           .expected = "the tensors of " + config.architecture,
           .hint = "leaving it out would change what the model computes"});
    }
  }
}

}  // namespace oscar
