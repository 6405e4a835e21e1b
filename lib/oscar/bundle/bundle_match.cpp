// Field by field, from the coarsest to the finest.
#include "oscar/bundle/bundle_match.h"

#include <fmt/format.h>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/schema.h"

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

void check_attention(const LayerGeometry& theirs, const ModelConfig& config,
                     const std::string& where, const std::string& hint) {
  const LayerGeometry ours = config.geometry(theirs.layer_id, 0);
  const std::string layer = fmt::format("layer {}, ", theirs.layer_id);
  require_equal(layer + "attention", schema::attention_name(ours.attention),
                schema::attention_name(theirs.attention), where, hint);
  require_equal(layer + "sliding_window", std::to_string(ours.sliding_window),
                std::to_string(theirs.sliding_window), where, hint);
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
          .config_sha256 = checkpoint.config_sha256,
          .tokenizer_sha256 = checkpoint.tokenizer_sha256,
          .chat_template_sha256 = checkpoint.chat_template_sha256,
          .weights_fingerprint = checkpoint.weights->fingerprint(hash_weights),
          .quantization = checkpoint.weights->quantization(),
          .file_sha256 = checkpoint.is_gguf() ? sha256_of_file(checkpoint.path) : ""};
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
  if (checkpoint.weights->fingerprint(false) != model.weights_fingerprint) {
    require_equal("weights_fingerprint", checkpoint.weights->fingerprint(true),
                  model.weights_fingerprint, bundle_path,
                  "a fine-tune needs a calibration of its own: " + calibrate);
  }
  if (!model.tokenizer_sha256.empty()) {
    require_equal("tokenizer_sha256", checkpoint.tokenizer_sha256, model.tokenizer_sha256,
                  bundle_path, calibrate);
  }
  if (model.config_sha256.empty() || model.config_sha256 == checkpoint.config_sha256) return "";
  return fmt::format(
      "{}: the model's configuration is not the one of the calibration (config_sha256 {} of the "
      "model, {} of the "
      "bundle); check that no key of config.json that changes the computation differs, such as "
      "rms_norm_eps",
      bundle_path, checkpoint.config_sha256.substr(0, 12), model.config_sha256.substr(0, 12));
}

}  // namespace oscar
