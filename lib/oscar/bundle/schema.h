// Names, shapes and dtypes of a bundle's file (SCHEMA.md).
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/bundle/weight_samples.h"
#include "oscar/cache/codec.h"
#include "oscar/io/hdf5.h"

namespace oscar::schema {

// Every name in a bundle, once: format, groups, attributes and datasets with dtype and shape rule.

inline constexpr const char* kRotationFormat = "oscar-rotation-bundle";
inline constexpr const char* kStatisticsFormat = "oscar-statistics";
inline constexpr int64_t kFormatVersion = 1;
// Entries of required_features that this build understands. A reader that codes keys about one mean
// would read rows about two centers wrongly.
inline constexpr const char* kKeyCentersFeature = "key_centres";
// A reader that takes what is stored for all there is would miss what it left out (derived.h).
inline constexpr const char* kDerivedFeature = "derived";
inline constexpr std::array<const char*, 2> kKnownFeatures{kKeyCentersFeature, kDerivedFeature};

inline constexpr const char* kModel = "/model";
inline constexpr const char* kCorpus = "/corpus";
inline constexpr const char* kQuantizer = "/quantizer";
inline constexpr const char* kEvaluation = "/evaluation";
inline constexpr const char* kLayers = "/layers";
inline constexpr const char* kPortable = "/portable";
inline constexpr const char* kPortableLayers = "/portable/layers";
inline constexpr const char* kShared = "shared";          // below a portable layer
inline constexpr const char* kPerHead = "per_head";       // below a portable layer
inline constexpr const char* kStatistics = "statistics";  // below a layer
inline constexpr const char* kResume = "/resume";

inline constexpr const char* kRequiredFeatures = "required_features";
inline constexpr const char* kCoding = "coding";  // attribute of a group (derived.h)
inline constexpr const char* kContentHash = "content_sha256";
inline constexpr const char* kCreated = "created_utc";
inline constexpr const char* kToolPrefix = "tool_";
inline constexpr const char* kFittedBy = "tool_fitted_by";
inline std::string tool_and_commit(std::string_view version, std::string_view commit) {
  return std::string(version) + " (" + std::string(commit) + ")";
}

// [], [Hkv], [Hkv, d], [Hkv, 2, d], [Hkv, d, d], [Hkv, 4, 16], [Hkv, 5, 16]; [ratios], [ratios,
// Hkv] with as many ratios as were tried.
enum class Rank {
  kScalar,
  kHeads,
  kVectors,
  kCenters,
  kMatrices,
  kQueryMatrices,
  kMatrixSamples,
  kVectorSamples,
  kRatios,
  kRatioHeads
};

struct DatasetSpec {
  const char* name;
  hdf5::Dtype dtype;
  Rank rank;
  Side side;  // d = head_dim_k or head_dim_v
  bool required;
};

inline hdf5::Shape shape_of(const DatasetSpec& spec, const LayerGeometry& geometry,
                            uint64_t ratios) {
  const auto heads = static_cast<uint64_t>(geometry.num_kv_heads);
  const auto d =
      static_cast<uint64_t>(spec.side == Side::kKey ? geometry.head_dim_k : geometry.head_dim_v);
  switch (spec.rank) {
    case Rank::kScalar:
      return {};
    case Rank::kHeads:
      return {heads};
    case Rank::kVectors:
      return {heads, d};
    case Rank::kCenters:
      return {heads, kCenters, d};
    case Rank::kMatrices:
      return {heads, d, d};
    case Rank::kQueryMatrices:
      return {static_cast<uint64_t>(geometry.num_qo_heads), d, d};
    case Rank::kMatrixSamples:
      return {heads, kSampledMatrices, kWeightSamples};
    case Rank::kVectorSamples:
      return {heads, kSampledVectors, kWeightSamples};
    case Rank::kRatios:
      return {ratios};
    case Rank::kRatioHeads:
      break;
  }
  return {ratios, heads};
}

// Both or neither.
struct ClipLossSpecs {
  DatasetSpec ratio, nmse;
};

// The datasets of one side of a layer.
struct SideSpecs {
  DatasetSpec kind, rotation, partner, mean, eigenvalues, clip_ratio, scale_correction, metric,
      feedback, condition_number;
  ClipLossSpecs clip_losses;
  const DatasetSpec* centers;  // null: this side has none
  const char* fallback;        // attribute: JSON list of a reason for each head, "" = none
};

// Bundles with it name kKeyCentersFeature among their required features.
inline constexpr DatasetSpec kKeyCenters = {"k_centres", hdf5::Dtype::kF32, Rank::kCenters,
                                            Side::kKey, false};

inline constexpr SideSpecs kKeySpecs = {
    .kind = {"k_kind", hdf5::Dtype::kU8, Rank::kHeads, Side::kKey, true},
    .rotation = {"k_rotation", hdf5::Dtype::kF32, Rank::kMatrices, Side::kKey, true},
    .partner = {"q_rotation", hdf5::Dtype::kF32, Rank::kMatrices, Side::kKey, false},
    .mean = {"k_mean", hdf5::Dtype::kF32, Rank::kVectors, Side::kKey, true},
    .eigenvalues = {"k_eigenvalues", hdf5::Dtype::kF64, Rank::kVectors, Side::kKey, true},
    .clip_ratio = {"k_clip_ratio", hdf5::Dtype::kF32, Rank::kHeads, Side::kKey, true},
    .scale_correction = {"k_scale_correction", hdf5::Dtype::kU8, Rank::kHeads, Side::kKey, true},
    .metric = {"k_metric", hdf5::Dtype::kF32, Rank::kMatrices, Side::kKey, false},
    .feedback = {"k_feedback", hdf5::Dtype::kF32, Rank::kMatrices, Side::kKey, false},
    .condition_number = {"k_condition_number", hdf5::Dtype::kF64, Rank::kHeads, Side::kKey, false},
    .clip_losses = {.ratio = {"k_clip_tried", hdf5::Dtype::kF32, Rank::kRatios, Side::kKey, false},
                    .nmse = {"k_clip_nmse", hdf5::Dtype::kF64, Rank::kRatioHeads, Side::kKey,
                             false}},
    .centers = &kKeyCenters,
    .fallback = "k_fallback"};

inline constexpr SideSpecs kValueSpecs = {
    .kind = {"v_kind", hdf5::Dtype::kU8, Rank::kHeads, Side::kValue, true},
    .rotation = {"v_rotation", hdf5::Dtype::kF32, Rank::kMatrices, Side::kValue, true},
    .partner = {"o_rotation", hdf5::Dtype::kF32, Rank::kMatrices, Side::kValue, false},
    .mean = {"v_mean", hdf5::Dtype::kF32, Rank::kVectors, Side::kValue, true},
    .eigenvalues = {"v_eigenvalues", hdf5::Dtype::kF64, Rank::kVectors, Side::kValue, true},
    .clip_ratio = {"v_clip_ratio", hdf5::Dtype::kF32, Rank::kHeads, Side::kValue, true},
    .scale_correction = {"v_scale_correction", hdf5::Dtype::kU8, Rank::kHeads, Side::kValue, true},
    .metric = {"v_metric", hdf5::Dtype::kF32, Rank::kMatrices, Side::kValue, false},
    .feedback = {"v_feedback", hdf5::Dtype::kF32, Rank::kMatrices, Side::kValue, false},
    .condition_number = {"v_condition_number", hdf5::Dtype::kF64, Rank::kHeads, Side::kValue,
                         false},
    .clip_losses = {.ratio = {"v_clip_tried", hdf5::Dtype::kF32, Rank::kRatios, Side::kValue,
                              false},
                    .nmse = {"v_clip_nmse", hdf5::Dtype::kF64, Rank::kRatioHeads, Side::kValue,
                             false}},
    .centers = nullptr,
    .fallback = "v_fallback"};

// The datasets of a group that files of version 0.1 may store otherwise than as they are, and the
// rule (derived.h).
enum class Coding { kUpper, kInverse, kOutputMetric, kFactor };
inline const char* coding_name(Coding coding) {
  constexpr const char* kNames[] = {"upper", "inverse", "output_metric", "factor"};
  return kNames[static_cast<size_t>(coding)];
}
// Of two rules for a dataset the one that stands first is used where it fits.
struct CodingRule {
  const char* dataset;
  Coding coding;
  const SideSpecs* side;  // whose specs the derived ones are made from
};
inline constexpr std::array<CodingRule, 17> kCodings{{
    {"v_metric", Coding::kOutputMetric, &kValueSpecs},
    {"k_metric", Coding::kUpper, nullptr},
    {"v_metric", Coding::kUpper, nullptr},
    {"q_moment", Coding::kUpper, nullptr},
    {"k_moment", Coding::kUpper, nullptr},
    {"v_moment", Coding::kUpper, nullptr},
    {"attn_out_moment", Coding::kUpper, nullptr},
    {"o_proj_metric", Coding::kUpper, nullptr},
    {"gate_moment", Coding::kUpper, nullptr},
    {"v_energy_moment", Coding::kUpper, nullptr},
    {"q_attended_moment", Coding::kUpper, nullptr},
    {"k_attended_moment", Coding::kUpper, nullptr},
    {"v_attended_moment", Coding::kUpper, nullptr},
    {"q_rotation", Coding::kInverse, &kKeySpecs},
    {"o_rotation", Coding::kInverse, &kValueSpecs},
    {"k_feedback", Coding::kFactor, &kKeySpecs},
    {"v_feedback", Coding::kFactor, &kValueSpecs},
}};

// Absent until the search has measured it.
inline constexpr DatasetSpec kPredictedNmse = {"predicted_output_nmse", hdf5::Dtype::kF64,
                                               Rank::kHeads, Side::kValue, false};
// Of every layer with transforms or sums, or of none (weight_samples.h).
inline constexpr DatasetSpec kMatrixSampleSpec = {"weight_samples", hdf5::Dtype::kF32,
                                                  Rank::kMatrixSamples, Side::kKey, false};
inline constexpr DatasetSpec kVectorSampleSpec = {"vector_samples", hdf5::Dtype::kF32,
                                                  Rank::kVectorSamples, Side::kKey, false};
inline constexpr const char* kWarnings = "warnings";  // layer attribute, JSON list

// Optional attributes: of the root JSON in kSearch, of a layer one for each part of its record
// (SCHEMA.md), kSearchPrefix and the part's name.
inline constexpr const char* kSearch = "search";
inline constexpr const char* kSearchPrefix = "search_";

// Optional: attribute of the root (JSON), and dataset i64 [count] below /corpus with its own
// attributes (edit.h).
inline constexpr const char* kConvergence = "convergence";
inline constexpr const char* kFingerprint = "/corpus/ngram_hashes";

inline const char* attention_name(AttentionKind kind) {
  constexpr const char* kNames[] = {"full", "sliding", "local", "none"};
  return kNames[static_cast<size_t>(kind)];
}

// "/layers/007", "/layers/1234"
inline std::string layer_path(const char* parent, int layer_id) {
  std::string digits = std::to_string(layer_id);
  if (digits.size() < 3) digits.insert(0, 3 - digits.size(), '0');
  return std::string(parent) + "/" + digits;
}

// The features that a reader of the bundle has to know.
inline std::vector<const char*> features_of(const Bundle& bundle) {
  std::vector<const char*> features;
  if (std::ranges::any_of(bundle.layers, [](const auto& l) { return !l.key.centers.empty(); })) {
    features.push_back(kKeyCentersFeature);
  }
  return features;
}

// The visitors below bind names to fields, for reading and writing alike: `visit` is called with
// (spec, field) for datasets and with (name, field) for attributes.

template <typename Recipe, typename Visit>
void visit_recipe(Recipe& recipe, const SideSpecs& specs, Visit&& visit) {
  visit(specs.clip_ratio, recipe.clip_ratio);
  visit(specs.scale_correction, recipe.scale_correction);
}

template <typename SideType, typename Visit>
void visit_side(SideType& side, const SideSpecs& specs, Visit&& visit) {
  visit(specs.kind, side.kind);
  visit(specs.rotation, side.forward);
  visit(specs.partner, side.partner);
  visit(specs.mean, side.mean);
  visit(specs.eigenvalues, side.eigenvalues);
  visit_recipe(side.recipe, specs, visit);
  visit(specs.metric, side.metric);
  visit(specs.feedback, side.feedback);
  visit(specs.condition_number, side.condition_number);
  visit(specs.clip_losses, side.clip_losses);
  if (specs.centers) visit(*specs.centers, side.centers);
}

template <typename Statistics, typename Visit>
void visit_statistics(Statistics& s, Visit&& visit) {
  constexpr auto kF64 = hdf5::Dtype::kF64;
  constexpr auto kI64 = hdf5::Dtype::kI64;
  visit(DatasetSpec{"q_moment", kF64, Rank::kMatrices, Side::kKey, true}, s.q_moment);
  visit(DatasetSpec{"k_moment", kF64, Rank::kMatrices, Side::kKey, true}, s.k_moment);
  visit(DatasetSpec{"v_moment", kF64, Rank::kMatrices, Side::kValue, true}, s.v_moment);
  visit(DatasetSpec{"attn_out_moment", kF64, Rank::kMatrices, Side::kValue, true},
        s.attn_out_moment);
  visit(DatasetSpec{"q_sum", kF64, Rank::kVectors, Side::kKey, true}, s.q_sum);
  visit(DatasetSpec{"k_sum", kF64, Rank::kVectors, Side::kKey, true}, s.k_sum);
  visit(DatasetSpec{"v_sum", kF64, Rank::kVectors, Side::kValue, true}, s.v_sum);
  visit(DatasetSpec{"attn_out_sum", kF64, Rank::kVectors, Side::kValue, true}, s.attn_out_sum);
  visit(DatasetSpec{"o_proj_metric", kF64, Rank::kMatrices, Side::kValue, true}, s.o_proj_metric);
  visit(DatasetSpec{"gate_moment", kF64, Rank::kQueryMatrices, Side::kValue, false}, s.gate_moment);
  visit(DatasetSpec{"v_energy_moment", kF64, Rank::kMatrices, Side::kValue, false},
        s.v_energy_moment);
  visit(DatasetSpec{"q_attended_moment", kF64, Rank::kMatrices, Side::kKey, false},
        s.attended.q_moment);
  visit(DatasetSpec{"k_attended_moment", kF64, Rank::kMatrices, Side::kKey, false},
        s.attended.k_moment);
  visit(DatasetSpec{"v_attended_moment", kF64, Rank::kMatrices, Side::kValue, false},
        s.attended.v_moment);
  visit(DatasetSpec{"k_attended_sum", kF64, Rank::kVectors, Side::kKey, false}, s.attended.k_sum);
  visit(DatasetSpec{"v_attended_sum", kF64, Rank::kVectors, Side::kValue, false}, s.attended.v_sum);
  visit(DatasetSpec{"k_sink_sum", kF64, Rank::kVectors, Side::kKey, false}, s.attended.k_sink_sum);
  visit(DatasetSpec{"q_attended_weight", kF64, Rank::kHeads, Side::kKey, false},
        s.attended.q_weight);
  visit(DatasetSpec{"k_attended_weight", kF64, Rank::kHeads, Side::kKey, false},
        s.attended.k_weight);
  visit(DatasetSpec{"v_attended_weight", kF64, Rank::kHeads, Side::kValue, false},
        s.attended.v_weight);
  visit(DatasetSpec{"k_sink_weight", kF64, Rank::kHeads, Side::kKey, false},
        s.attended.k_sink_weight);
  visit(DatasetSpec{"count_q", kI64, Rank::kScalar, Side::kKey, true}, s.count_q);
  visit(DatasetSpec{"count_kv", kI64, Rank::kScalar, Side::kKey, true}, s.count_kv);
}

// Of the program that wrote the file; other writers may leave it out.
inline constexpr const char* kRunKey = "run_key";
// Of the codec; a file without them follows this toolkit's.
inline constexpr const char* kTies = "ties";
inline constexpr const char* kMetadataRounding = "metadata_rounding";
// A file without it has counted all rows alike.
inline constexpr const char* kRowWeights = "row_weights";
// Files without them have text as it came. The first is there where stretches were repeated.
inline constexpr const char* kRecall = "recall";
inline constexpr const char* kSeparators = "separators";
// Of a model whose weights are quantized: their types by number of tensors, and of a GGUF file its
// hash. Files about other models lack them.
inline constexpr const char* kQuantization = "quantization";
inline constexpr const char* kFileHash = "file_sha256";
// Of a bundle whose transforms were fitted to other weights than it is for; others lack them.
inline constexpr const char* kFittedWeights = "fitted_weights_fingerprint";
inline constexpr const char* kFittedModel = "fitted_model";
// What ran the model, where it was not this toolkit's own engine.
inline constexpr const char* kEngine = "engine";
// What config.json says beside shape and RoPE. Files of earlier versions lack it.
inline constexpr const char* kNumerics = "numerics";
inline constexpr std::array<std::string_view, 6> kModelExtras = {
    kQuantization, kFileHash, kFittedWeights, kFittedModel, kEngine, kNumerics};
inline constexpr std::array<std::string_view, 13> kOptionalAttributes = {
    kFittedBy,     kRunKey,   kTies,          kMetadataRounding, kRowWeights, kRecall,  kSeparators,
    kQuantization, kFileHash, kFittedWeights, kFittedModel,      kEngine,     kNumerics};

template <typename BundleType, typename Visit>
void visit_root(BundleType& b, Visit&& visit) {
  visit("preset", b.preset);
  visit("method", b.method);
  visit("objective_k", b.objective_k);
  visit("objective_v", b.objective_v);
  visit("composition", b.composition);
  visit("granularity", b.granularity);
  visit(kRowWeights, b.row_weights);
  visit("position_span", b.position_span);
  visit("fit_seed", b.fit_seed);
  visit(kRunKey, b.run_key);
}

template <typename ModelType, typename Visit>
void visit_model(ModelType& m, Visit&& visit) {
  visit("name", m.name);
  visit("architecture", m.architecture);
  visit("num_layers", m.num_layers);
  visit("num_qo_heads", m.num_qo_heads);
  visit("num_kv_heads", m.num_kv_heads);
  visit("head_dim_k", m.head_dim_k);
  visit("head_dim_v", m.head_dim_v);
  visit("hidden_size", m.hidden_size);
  visit("rope", m.rope);
  visit(kNumerics, m.numerics);
  visit("config_sha256", m.config_sha256);
  visit("tokenizer_sha256", m.tokenizer_sha256);
  visit("chat_template_sha256", m.chat_template_sha256);
  visit("weights_fingerprint", m.weights_fingerprint);
  visit(kQuantization, m.quantization);
  visit(kFileHash, m.file_sha256);
  visit(kFittedWeights, m.fitted_weights_fingerprint);
  visit(kFittedModel, m.fitted_model);
  visit(kEngine, m.engine);
}

template <typename CorpusType, typename Visit>
void visit_corpus(CorpusType& c, Visit&& visit) {
  visit("sources", c.sources);
  visit("sequences_read", c.sequences_read);
  visit("sequences_used", c.sequences_used);
  visit("tokens", c.tokens);
  visit("chunk_len", c.sequence_length);
  visit("order_seed", c.order_seed);
  visit("tokens_sha256", c.tokens_sha256);
  visit("bos_eos_policy", c.bos_eos_policy);
  visit("template", c.chat_template);
  visit(kRecall, c.recall);
  visit(kSeparators, c.separators);
}

// Of the quantizer; of a layer's statistics where these have others.
inline constexpr const char* kSinkTokens = "sink_tokens";

template <typename WindowsType, typename Visit>
void visit_windows(WindowsType& w, Visit&& visit) {
  visit(kSinkTokens, w.sink_tokens);
  visit("recent_tokens", w.recent_tokens);
  visit("demote_block", w.demote_block);
}

template <typename QuantizerType, typename Visit>
void visit_quantizer(QuantizerType& q, Visit&& visit) {
  visit("bits", q.bits);
  visit("quant_group_size", q.quant_group_size);
  visit_windows(q, visit);
  visit("metadata_dtype", q.metadata_dtype);
  visit("clip_span", q.rules.clip_span);
  visit("zero", q.rules.zero);
  visit(kTies, q.rules.ties);
  visit(kMetadataRounding, q.rules.metadata_rounding);
}

// Layer attributes that a file may lack: the model's value, 0, and 1 stand in for them.
inline constexpr const char* kTurned = "turned";  // written where it is 0
inline constexpr std::array<const char*, 3> kOptionalLayerAttributes = {"num_qo_heads",
                                                                        "sliding_window", kTurned};

template <typename GeometryType, typename Visit>
void visit_geometry(GeometryType& g, Visit&& visit) {
  visit("layer_id", g.layer_id);
  visit("attention", g.attention);
  visit("num_kv_heads", g.num_kv_heads);
  visit("head_dim_k", g.head_dim_k);
  visit("head_dim_v", g.head_dim_v);
  visit("quantized", g.quantized);
  visit("num_qo_heads", g.num_qo_heads);
  visit("sliding_window", g.sliding_window);
  visit(kTurned, g.turned);
}

}  // namespace oscar::schema
