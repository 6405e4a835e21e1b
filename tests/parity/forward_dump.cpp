// Runs a checkpoint over token ids and writes logits and statistics for comparison with a
// reference.
//   oscar-test-forward run MODEL IDS TOKENS OUT_FOLDER DTYPE [ROPE_SCALING]
//   oscar-test-forward config CONFIG.json [ROPE_SCALING]
// IDS: raw int64, rows of TOKENS ids. OUT_FOLDER gets logits.f32 [rows, tokens, vocab] and
// layer<i>.f64, but of linear layers: q, k, v, o moments and M_O, each [Hkv, d, d], then q, k, v, o
// sums, each [Hkv, d]; and config.json, what was understood of the model's, and `notes` on its
// files. `config` prints that alone. DTYPE fp32 runs on the CPU.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/calibrate/collector.h"
#include "oscar/model/transformer.h"

namespace {

using namespace oscar;

// Names of transformers where there are such names; widths of 0 stand for what is not there.
Json describe_layer(const LayerSpec& layer) {
  const AttentionSpec& attention = layer.attention;
  Json json = {{"qkv_bias", attention.qkv_bias},
               {"o_bias", attention.o_bias},
               {"qk_norm", attention.qk_norm},
               {"joint_norm", attention.joint_norm},
               {"sliding_window", attention.window},
               {"local", attention.local},
               {"linear", layer.delta_net.has_value()},
               {"output_norms", layer.output_norms},
               {"intermediate_size", layer.dense_intermediate_size()}};
  if (const ExpertsSpec* experts = layer.experts()) {
    json["num_experts"] = experts->num_experts;
    json["num_experts_per_tok"] = experts->top_k;
    json["moe_intermediate_size"] = experts->intermediate_size;
  } else {
    const DenseSpec& mlp = std::get<DenseSpec>(layer.mlp);
    json["mlp_bias"] = mlp.bias;
    json["activation"] = mlp.activation == Activation::kSilu ? "silu" : "gelu_pytorch_tanh";
  }
  return json;
}

// What was understood of a config.json, in transformers' names where there are such names.
Json describe_config(const ModelConfig& c) {
  Json layers = Json::array();
  for (const LayerSpec& layer : c.layers) layers.push_back(describe_layer(layer));
  return {{"num_hidden_layers", c.num_layers},
          {"hidden_size", c.hidden_size},
          {"num_attention_heads", c.num_qo_heads},
          {"num_key_value_heads", c.num_kv_heads},
          {"head_dim", c.head_dim},
          {"vocab_size", c.vocab_size},
          {"rms_norm_eps", c.rms_norm_eps},
          {"tie_word_embeddings", c.tie_word_embeddings},
          {"layers", layers},
          {"eos_token_ids", c.eos_token_ids},
          {"bos_token_id", c.bos_token_id ? Json(*c.bos_token_id) : Json()},
          {"inv_freq", c.rope.inv_freq},
          {"local_inv_freq", c.local_rope ? Json(c.local_rope->inv_freq) : Json()},
          {"sm_scale", c.sm_scale},
          {"attention_factor", c.rope.attention_factor},
          {"max_positions", c.rope.max_positions}};
}

torch::Tensor read_ids(const std::string& path, int64_t tokens) {
  const std::string bytes = read_text_file(path);
  const auto count = static_cast<int64_t>(bytes.size() / sizeof(int64_t));
  return torch::from_blob(const_cast<char*>(bytes.data()), {count / tokens, tokens}, torch::kInt64)
      .clone();
}

void append(std::ofstream& stream, const std::vector<double>& values) {
  stream.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(double)));
}

void write_layer(const std::filesystem::path& path, const LayerStatistics& s) {
  std::ofstream stream(path, std::ios::binary);
  for (const auto* stack :
       {&s.q_moment, &s.k_moment, &s.v_moment, &s.attn_out_moment, &s.o_proj_metric}) {
    append(stream, stack->data);
  }
  for (const auto* stack : {&s.q_sum, &s.k_sum, &s.v_sum, &s.attn_out_sum}) {
    append(stream, stack->data);
  }
}

void run(const std::vector<std::string>& args, const std::optional<Json>& rope_scaling) {
  const Checkpoint checkpoint = open_checkpoint(args[0], rope_scaling);
  const ComputeOptions options = choose_compute(args[4] == "fp32" ? "cpu" : "auto", args[4]);
  const std::filesystem::path out = args[3];
  Json understood = describe_config(checkpoint.config);
  understood["notes"] = checkpoint.notes;
  std::ofstream(out / "config.json") << understood;
  Transformer model(checkpoint, options);
  torch::Tensor hidden = model.embed(read_ids(args[1], std::stoll(args[2])));
  for (int layer = 0; layer < model.config().num_layers; ++layer) {
    MomentCollector collector(model.config().geometry(layer, 256), options.device);
    hidden = model.forward_layer(layer, *model.load_layer(layer), hidden, &collector);
    if (model.config().layer(layer).delta_net) continue;
    std::vector<LayerStatistics> statistics = {collector.result()};
    statistics.front().o_proj_metric = model.o_proj_metric(layer);
    add_gates_to_metrics(model, statistics);
    write_layer(out / ("layer" + std::to_string(layer) + ".f64"), statistics.front());
  }
  const torch::Tensor logits = model.logits(hidden).cpu().contiguous();
  std::ofstream stream(out / "logits.f32", std::ios::binary);
  stream.write(reinterpret_cast<const char*>(logits.data_ptr<float>()),
               static_cast<std::streamsize>(logits.numel() * sizeof(float)));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  const bool running = !args.empty() && args[0] == "run";
  const size_t wanted = running ? 6 : 2;
  if (args.size() != wanted && args.size() != wanted + 1) return 2;
  try {
    std::optional<Json> rope_scaling;
    if (args.size() > wanted) rope_scaling = parse_json(args[wanted], "--rope-scaling");
    if (running) {
      run({args.begin() + 1, args.end()}, rope_scaling);
    } else {
      const Json json = read_json_file(args[1]);
      std::puts(describe_config(parse_model_config(json, args[1], rope_scaling)).dump().c_str());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
