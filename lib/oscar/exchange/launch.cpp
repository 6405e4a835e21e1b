// One text for each layout, filled with the figures of a plan.
#include "oscar/exchange/launch.h"

#include <fmt/format.h>

#include "oscar/exchange/manifest.h"
#include "oscar/stacks/describe.h"

namespace oscar {
namespace {

struct Words {
  const Bundle& bundle;
  const ExchangeFormat& format;
  const StackRun* run;
  bool in_model;

  double key_clip() const { return run->clips.pair ? run->clips.pair->key : 0; }
  double value_clip() const { return run->clips.pair ? run->clips.pair->value : 0; }
  int sink() const { return bundle.quantizer.sink_tokens; }
  int recent() const { return bundle.quantizer.recent_tokens; }
  int group() const { return bundle.quantizer.quant_group_size; }
};

// That server's decode kernel takes query heads by blocks, and a block that is no divisor of the
// group reads a wrong KV head: of 5 to 7 query heads a KV head from 16 requests on (seen), of 9 to
// 15 below 16 (read in its source).
std::string query_block(const BundleModel& model) {
  const int group = model.num_kv_heads > 0 ? model.num_qo_heads / model.num_kv_heads : 0;
  if (group >= 5 && group <= 7) return "export SGL_INT2_BLOCK_H=8\n";
  if (group >= 9 && group <= 15) return "export SGL_INT2_BLOCK_H=16\n";
  return "";
}

// Gives the matrices the name that servers read, where the server reads what stands beside them.
std::string unlocking(const Words& w) {
  return fmt::format(
      "python - <<'EOF'\n"
      "import torch\n"
      "from sglang.srt.mem_cache.memory_pool import load_oscar_rotation_field\n"
      "for locked, name in ((\"{}\", \"k_rotation.pt\"), (\"{}\", \"v_rotation.pt\")):\n"
      "    state = torch.load(locked)\n"
      "    for layer in state[\"layers\"].values():\n"
      "        layer[\"rotation\"] = layer.pop(\"transform\")\n"
      "    torch.save(state, name)\n"
      "EOF\n",
      w.format.key_file, w.format.value_file);
}

std::string sglang(const Words& w) {
  const char* dtype = "float32";
  if (w.run->format && w.run->format->metadata == MetadataDtype::kBf16) dtype = "bfloat16";
  if (w.run->format && w.run->format->metadata == MetadataDtype::kFp16) dtype = "float16";
  const bool locked = w.format.layout == FileLayout::kTorchLocked;
  const char* key_file = locked ? "k_rotation.pt" : w.format.key_file;
  const char* value_file = locked ? "v_rotation.pt" : w.format.value_file;
  return fmt::format(
      "From the folder that this file is in:\n\n```\n{}"
      "export SGLANG_ENABLE_MIXED_KV_WINDOWS=1\n"
      "export SGLANG_OSCAR_K_ROTATION_PATH=$PWD/{}\n"
      "export SGLANG_OSCAR_V_ROTATION_PATH=$PWD/{}\n"
      "export SGLANG_OSCAR_K_CLIP_RATIO={:g} SGLANG_OSCAR_V_CLIP_RATIO={:g}\n"
      "export SGLANG_OSCAR_ABSORB_V_ROTATION=0 SGLANG_LLOYD_MAX=0\n"
      "export SGLANG_MIXED_KV_PREFIX_TOKENS={} SGLANG_MIXED_KV_RECENT_TOKENS={}\n"
      "export SGLANG_MIXED_KV_HP_DTYPE=bfloat16 SGLANG_MIXED_KV_SCALE_DTYPE={}\n{}"
      "python -m sglang.launch_server --model-path MODEL --kv-cache-dtype int2 \\\n"
      "  --kv-cache-quant-group-size {} \\\n"
      "  --prefill-attention-backend fa3 --decode-attention-backend triton\n```\n\n"
      "`fa3` needs a Hopper GPU; `--prefill-attention-backend triton` runs on others.\n\n"
      "The server's log proves these files with four lines, and each must be there:\n\n"
      "- `Enable unified mixed KV (int2)`\n"
      "- `Loaded Oscar rotation from` with `{}`, and again with `{}`\n"
      "- `Oscar rotation enabled`\n\n"
      "Without them it serves INT2 with Hadamard blocks of 16 and no exact windows, and says "
      "nothing: so it does where a variable is misspelt.\n",
      locked ? unlocking(w) : "", key_file, value_file, w.key_clip(), w.value_clip(), w.sink(),
      w.recent(), dtype, query_block(w.bundle.model), w.group(), key_file, value_file);
}

std::string vllm_pull_request(const Words& w) {
  return fmt::format(
      "For vLLM with pull request 46774, from the folder that this file is in:\n\n```\n"
      "export VLLM_OSCAR_K_ROTATION_PATH=$PWD/{}\n"
      "export VLLM_OSCAR_V_ROTATION_PATH=$PWD/{}\n"
      "export VLLM_OSCAR_K_CLIP_RATIO={:g} VLLM_OSCAR_V_CLIP_RATIO={:g}\n"
      "export VLLM_OSCAR_GROUP_SIZE={}\n"
      "export VLLM_OSCAR_SINK_TOKENS={} VLLM_OSCAR_RECENT_TOKENS={}\n"
      "vllm serve MODEL --kv-cache-dtype oscar_int2\n```\n\n"
      "A server without these paths runs without rotation and does not say so. Versions of that "
      "request without SINK and RECENT keep no exact windows, which costs much more than the "
      "rotations gain.\n",
      w.format.key_file, w.format.value_file, w.key_clip(), w.value_clip(), w.group(), w.sink(),
      w.recent());
}

std::string mlx(const Words& w) {
  return fmt::format(
      "For mlx-lm with pull request 1789: load this folder with "
      "`mlx_lm.models.oscar.load_rotations(folder, num_layers)` and make each layer's "
      "`OscarKVCache` with\n\n```\n"
      "group_size={}, sink_tokens={}, recent_tokens={},\n"
      "k_clip_ratio={}, v_clip_ratio={}, bounded_attention=False\n```\n\n"
      "Its clipping looks at each group by itself. `bounded_attention=True` hands zero points to "
      "a kernel that takes minima, and was not tried.\n",
      w.group(), w.sink(), w.recent(),
      w.key_clip() > 0 && w.key_clip() < 1 ? fmt::format("{:g}", w.key_clip()) : "None",
      w.value_clip() > 0 && w.value_clip() < 1 ? fmt::format("{:g}", w.value_clip()) : "None");
}

std::string llama_cpp(const Words& w) {
  const std::string in_place =
      w.in_model ? fmt::format("`{}` is a copy of it with them.", w.format.key_file)
                 : fmt::format(
                       "those of `{}` stand alone, `oscar-bundle export --base MODEL.gguf` "
                       "writes a copy of the model with them.",
                       w.format.key_file);
  return fmt::format(
      "For llama.cpp's OSCAR branch (`zhongzhu/llamacpp`), which reads these tensors from the "
      "model's own GGUF file: {} Other builds refuse a file that has them. Then\n\n```\n"
      "export LLAMA_KV_NO_HADAMARD=1 LLAMA_KV_CLIP_RATIO={:g}\n"
      "export LLAMA_KV_HP_SINK={} LLAMA_KV_HP_RECENT={}\n"
      "llama-server -m {} -ctk q2_0 -ctv q2_0\n```\n\n"
      "Its rows have levels of their own, so that no error is predicted here.\n",
      in_place, w.key_clip(), w.sink(), w.recent(), w.in_model ? w.format.key_file : "MODEL.gguf");
}

std::string arrays(const Words& w) {
  return fmt::format(
      "`{}` holds the bundle's own transforms as float32 arrays over layers and KV heads: rows are "
      "row vectors, k' = (k - k_mean) k_rotation, q' = q q_rotation, o = o' o_rotation + v_mean. "
      "Where q_rotation or o_rotation is missing, every head is orthogonal: k_rotation itself, and "
      "the transpose of v_rotation. `oscar-bundle import` reads the file back.\n",
      w.format.key_file);
}

}  // namespace

std::string launch_text(const Bundle& bundle, const ExchangeFormat& format,
                        const std::optional<StackPlan>& plan, bool in_model) {
  const Words words{bundle, format, plan ? &*plan->run : nullptr, in_model};
  std::string text = fmt::format("# {} for {}\n\n", bundle.model.name, format.name);
  if (plan && plan->stack->standing) text += fmt::format("{}\n\n", plan->stack->standing);
  switch (format.layout) {
    case FileLayout::kTorchShared:
    case FileLayout::kTorchPerHead:
    case FileLayout::kTorchLocked:
      text += std::string_view(format.name) == "vllm-pr46774" ? vllm_pull_request(words)
                                                              : sglang(words);
      break;
    case FileLayout::kMlx:
      text += mlx(words);
      break;
    case FileLayout::kGguf:
      text += llama_cpp(words);
      break;
    case FileLayout::kNpz:
    case FileLayout::kSafetensors:
      text += arrays(words);
      break;
  }
  if (plan) {
    text += fmt::format("\nOf the bundle {}: {}.\n", bundle.content_sha256.substr(0, 12),
                        plans_json({*plan})[0]["line"].get<std::string>());
  }
  text += fmt::format(
      "\n`{}` says what the files should hold; `oscar-bundle verify --stack {} FOLDER` looks.\n",
      kManifestName, format.name);
  return text;
}

}  // namespace oscar
