// config.json: sizes that are accepted are within bounds.
#include "fuzz_case.h"
#include "oscar/model/checkpoint/config.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar::fuzz {

// A file of a few bytes may speak of 4096 layers.
const MemoryBound kMemoryBound{.fixed = size_t{16} << 20, .per_byte = 128};

void read_untrusted(std::string_view bytes) {
  const Json json = parse_json(bytes, "config.json");
  const ModelConfig config = parse_model_config(json, "config.json");
  require(config.num_layers >= 1 && config.num_layers <= kMaxLayers, "num_layers");
  require(config.layers.size() == static_cast<size_t>(config.num_layers), "layers");
  require(config.num_qo_heads >= 1 && config.num_qo_heads <= kMaxHeads, "num_qo_heads");
  require(config.num_kv_heads >= 1 && config.num_qo_heads % config.num_kv_heads == 0,
          "num_kv_heads");
  require(config.head_dim >= 1 && config.head_dim <= kMaxConfigHeadDim, "head_dim");
  require(config.rope.inv_freq.size() == static_cast<size_t>(config.rope.rotary_dim) / 2,
          "frequencies");
  require(config.rope.rotary_dim <= config.head_dim, "rotary_dim");
  const auto check = [](const std::vector<WeightSpec>& weights) {
    for (const WeightSpec& weight : weights) {
      for (const int64_t size : weight.shape) require(size >= 1, "a tensor without numbers");
    }
  };
  check(model_weights(config));
  check(layer_weights(config, config.num_layers - 1));
  for (int layer = 0; layer < config.num_layers; ++layer) config.geometry(layer, 256);
}

}  // namespace oscar::fuzz
