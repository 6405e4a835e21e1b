// A bundle beside a checkpoint, field by field, from the coarsest to the finest.
#include "oscar/bundle/match.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/schema.h"
#include "oscar/bundle/weight_samples.h"

namespace oscar {

namespace {

void require_equal(const std::string& field, const std::string& model, const std::string& bundle,
                   const std::string& where, const std::string& hint) {
  if (model == bundle) return;
  throw Error({.what = "the bundle is of another model: " + field + " differs",
               .where = where,
               .expected = model + " (the model's)",
               .found = bundle + " (the bundle's)",
               .hint = hint});
}

// 1e-6 is another number in the float that GGUF stores.
bool is_same_setting(const Json& a, const Json& b) {
  constexpr double kRounding = 1e-4;  // relative
  if (!a.is_number() || !b.is_number()) return a == b;
  const auto x = a.get<double>(), y = b.get<double>();
  return std::abs(x - y) <= kRounding * std::max(std::abs(x), std::abs(y));
}

void check_numerics(const Json& model, const Json& bundle, const std::string& where,
                    const std::string& hint) {
  if (!bundle.is_object()) return;
  for (const auto& [key, value] : bundle.items()) {
    const auto ours = model.find(key);
    if (ours == model.end() || is_same_setting(*ours, value)) continue;
    require_equal("config.json's " + key, ours->dump(), value.dump(), where, hint);
  }
}

void check_attention(const LayerGeometry& theirs, const ModelConfig& config,
                     const std::string& where, const std::string& hint) {
  const LayerGeometry ours = config.geometry(theirs.layer_id, 0);
  const std::string layer = fmt::format("layer {}, ", theirs.layer_id);
  require_equal(layer + "attention", schema::attention_name(ours.attention),
                schema::attention_name(theirs.attention), where, hint);
  require_equal(layer + "sliding_window", std::to_string(ours.sliding_window),
                std::to_string(theirs.sliding_window), where, hint);
}

bool has_same_files(const BundleModel& model, const WeightSource& weights) {
  return weights.fingerprint(false) == model.weights_fingerprint ||
         weights.fingerprint(true) == model.weights_fingerprint;
}

bool have_common_layer(const std::vector<WeightSamples>& a, const std::vector<WeightSamples>& b) {
  for (size_t layer = 0; layer < std::min(a.size(), b.size()); ++layer) {
    if (!a[layer].empty() && !b[layer].empty()) return true;
  }
  return false;
}

// By samples of the weights that ran, which need not have been those of the files, and where one of
// the two has none, by the fingerprint of the files. Returns a warning where the samples agree and
// the files are others, or are not named.
std::string check_weights(const Bundle& bundle, const Checkpoint& checkpoint,
                          const std::string& where, const std::string& calibrate) {
  const BundleModel& model = bundle.model;
  const std::string hint = "a fine-tune needs a calibration of its own: " + calibrate;
  const bool named = !model.weights_fingerprint.empty();
  std::vector<WeightSamples> ours;
  if (!bundle.weight_samples.empty()) {
    ours = sample_weights(checkpoint.config, *checkpoint.weights);
  }
  const bool ran_fp16 = model.engine.ends_with(", float16");
  const std::string difference = weight_difference(ours, bundle.weight_samples, ran_fp16);
  if (!difference.empty()) {
    throw Error({.what = "the bundle is of another model: weight_samples differ",
                 .where = where,
                 .expected = "entries of the weights in " + checkpoint.path.string(),
                 .found = difference,
                 .hint = hint});
  }
  if (named && has_same_files(model, *checkpoint.weights)) return "";
  if (named && !have_common_layer(ours, bundle.weight_samples)) {
    require_equal("weights_fingerprint", checkpoint.weights->fingerprint(true),
                  model.weights_fingerprint, where, hint);
  }
  if (named) {
    return fmt::format(
        "{}: the weights of q, k, v and o agree with the bundle's samples, the files are not those "
        "of the calibration: written anew or dequantized, or embeddings, MLPs or other norms "
        "differ",
        where);
  }
  if (ours.empty()) {
    throw Error({.what = "the bundle does not say which weights it was calibrated on",
                 .where = where,
                 .expected = "weights_fingerprint, or weight_samples",
                 .found = "neither",
                 .hint = calibrate});
  }
  return fmt::format(
      "{}: the bundle names no files of weights. Its samples of attention weights are this "
      "model's; "
      "whether all others were the same is not known",
      where);
}

}  // namespace

BundleModel describe_model(const Checkpoint& checkpoint, bool hash_weights) {
  const ModelConfig& config = checkpoint.config;
  return {.name = checkpoint.name,
          .architecture = config.architecture,
          .num_layers = config.num_layers,
          .num_qo_heads = config.num_qo_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_dim_k = config.head_dim,
          .head_dim_v = config.head_dim,
          .hidden_size = config.hidden_size,
          .rope = config.rope.as_run,
          .numerics = config.numerics,
          .config_sha256 = checkpoint.config_sha256,
          .tokenizer_sha256 = checkpoint.tokenizer_sha256,
          .chat_template_sha256 = checkpoint.chat_template_sha256,
          .weights_fingerprint = checkpoint.weights->fingerprint(hash_weights),
          .quantization = checkpoint.weights->quantization(),
          .file_sha256 = checkpoint.is_gguf() ? sha256_of_file(checkpoint.path) : ""};
}

bool has_quantized_layer(const Bundle& bundle) {
  return std::ranges::any_of(bundle.layers,
                             [](const LayerTransforms& layer) { return layer.geometry.quantized; });
}

std::string check_bundle_matches(const Bundle& bundle, const Checkpoint& checkpoint,
                                 const std::string& bundle_path) {
  const ModelConfig& config = checkpoint.config;
  const BundleModel& model = bundle.model;
  const std::string calibrate = "calibrate this model with oscar-calibrate";
  const auto number = [&](const char* field, int ours, int theirs) {
    require_equal(field, std::to_string(ours), std::to_string(theirs), bundle_path, calibrate);
  };
  require_equal("architecture", config.architecture, model.architecture, bundle_path, calibrate);
  number("num_layers", config.num_layers, model.num_layers);
  number("hidden_size", config.hidden_size, model.hidden_size);
  number("num_qo_heads", config.num_qo_heads, model.num_qo_heads);
  number("num_kv_heads", config.num_kv_heads, model.num_kv_heads);
  number("head_dim_k", config.head_dim, model.head_dim_k);
  number("head_dim_v", config.head_dim, model.head_dim_v);
  for (const LayerTransforms& layer : bundle.layers) {
    check_attention(layer.geometry, config, bundle_path, calibrate);
  }
  for (const LayerStatistics& layer : bundle.statistics) {
    check_attention(layer.geometry, config, bundle_path, calibrate);
  }
  require_equal("rope", config.rope.as_run.dump(), model.rope.dump(), bundle_path,
                "give the bundle's rope scaling with --rope-scaling, or calibrate with the one "
                "that is served");
  check_numerics(config.numerics, model.numerics, bundle_path,
                 "put the config.json of the calibration back, or " + calibrate);
  std::string warning = check_weights(bundle, checkpoint, bundle_path, calibrate);
  // Of a GGUF file hashes are over its metadata, of a folder over tokenizer.json and config.json.
  const bool same_form = model.file_sha256.empty() != checkpoint.is_gguf();
  if (!model.tokenizer_sha256.empty() && same_form) {
    require_equal("tokenizer_sha256", checkpoint.tokenizer_sha256, model.tokenizer_sha256,
                  bundle_path, calibrate);
  }
  if (!same_form || model.config_sha256.empty() ||
      model.config_sha256 == checkpoint.config_sha256) {
    return warning;
  }
  if (!warning.empty()) warning += '\n';
  return warning +
         fmt::format(
             "{}: the model's configuration is not the one of the calibration (config_sha256 {} of "
             "the model, {} of the bundle); check that no key of config.json that changes the "
             "computation differs",
             bundle_path, checkpoint.config_sha256.substr(0, 12),
             model.config_sha256.substr(0, 12));
}

}  // namespace oscar
