// A small random-initialised checkpoint on disk and its forward pass.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "model/checkpoint/model_folder.h"
#include "oscar/model/checkpoint/weights.h"
#include "oscar/model/transformer.h"

namespace oscar_test {

using namespace oscar;

inline const char* const kSmallConfig =
    R"({"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3",
    "hidden_size":24,"intermediate_size":40,"num_hidden_layers":2,"num_attention_heads":4,
    "num_key_value_heads":2,"head_dim":8,"vocab_size":64,"max_position_embeddings":128})";

using Tensors = std::map<std::string, TestTensor>;

// Random weights of the configuration above.
inline Tensors make_tensors(const std::string& config_text = kSmallConfig) {
  torch::manual_seed(3);
  const ModelConfig config = parse_model_config(parse_json(config_text, "test"), "test");
  Tensors tensors;
  const auto add = [&](const std::vector<WeightSpec>& specs) {
    for (const WeightSpec& spec : specs) {
      const auto values = (torch::randn(spec.shape) * 0.3).contiguous();
      const float* data = values.data_ptr<float>();
      tensors[spec.name] = {spec.shape, {data, data + values.numel()}};
    }
  };
  add(model_weights(config));
  for (int layer = 0; layer < config.num_layers; ++layer) add(layer_weights(config, layer));
  return tensors;
}

// A checkpoint on disk for as long as the object lives.
struct Model {
  explicit Model(const Tensors& tensors, const std::string& config_text = kSmallConfig) {
    write_file(folder.path() / "config.json", config_text);
    write_file(folder.path() / "model.safetensors", safetensors_bytes(tensors));
    checkpoint = open_checkpoint(folder.path().string());
    transformer = std::make_unique<Transformer>(checkpoint, ComputeOptions{});
  }
  torch::Tensor hidden(const torch::Tensor& ids, AttentionObserver* observer = nullptr,
                       AttentionEngine* engine = nullptr, int64_t offset = 0) {
    torch::Tensor x = transformer->embed(ids);
    for (int i = 0; i < 2; ++i) {
      x = transformer->forward_layer(i, *transformer->load_layer(i), x, observer, engine, offset);
    }
    return x;
  }
  TemporaryFolder folder;
  Checkpoint checkpoint;
  std::unique_ptr<Transformer> transformer;
};

}  // namespace oscar_test
