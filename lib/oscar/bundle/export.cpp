// A bundle as the files of another tool, with the lines that serve them.
#include "oscar/bundle/export.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/base/process.h"
#include "oscar/base/sha256.h"
#include "oscar/base/strings.h"
#include "oscar/base/version.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/bundle/schema.h"
#include "oscar/bundle/verify_export.h"
#include "oscar/bundle/weight_samples.h"
#include "oscar/cache/numeric.h"
#include "oscar/cache/quantize_rows.h"
#include "oscar/io/gguf.h"
#include "oscar/io/npy.h"
#include "oscar/io/safetensors.h"
#include "oscar/model/checkpoint/checkpoint.h"

namespace oscar {

// What a server must be told so that it runs an export: its README.

inline constexpr const char* kLaunchName = "README.md";

// Markdown. `plan` is absent for plain arrays. `in_model`: the files are a whole model's.
std::string launch_text(const Bundle& bundle, const ExchangeFormat& format,
                        const std::optional<BackendPlan>& plan, bool in_model);

// Figures are taken from the bundle's own matrices, never from what was written.

namespace {

const char* word_of(BundleVariant variant) {
  switch (variant) {
    case BundleVariant::kOwn:
      return "own";
    case BundleVariant::kPortableShared:
      return "portable";
    case BundleVariant::kPortablePerHead:
      break;
  }
  return "portable-perhead";
}

Json probes(const TransformSet& set, Side which) {
  Json layers = Json::array();
  for (const auto& entry : set) {
    const SideTransform& side = side_of(entry.second, which);
    const std::vector<float> row = probe_row(side.forward.rows, 0);
    Json heads = Json::array();
    for (int head = 0; head < side.forward.count; ++head) {
      std::vector<double> image = probe_image(side, head, row);
      image.resize(std::min<size_t>(image.size(), kProbedNumbers));
      heads.push_back(std::move(image));
    }
    layers.push_back(std::move(heads));
  }
  return layers;
}

Json row_codes(const BackendRun& run, const LayerTransforms& layer) {
  const auto codes = [&](Side which) {
    const ProbeCode code = probe_code(run, side_of(layer, which), which);
    return Json{{"codes", code.codes}, {"metadata", code.metadata}};
  };
  return {{"keys", codes(Side::kKey)}, {"values", codes(Side::kValue)}};
}

}  // namespace

std::vector<float> probe_row(int head_dim, int which) {
  std::vector<float> row(static_cast<size_t>(head_dim));
  for (int i = 0; i < head_dim; ++i) {
    row[static_cast<size_t>(i)] =
        static_cast<float>((i * i * 7 + i * (11 + which) + 5 * which) % 61 - 30) / 16;
  }
  return row;
}

std::vector<double> probe_image(const SideTransform& side, int head,
                                const std::vector<float>& row) {
  const auto matrix = side.forward[head];
  std::vector<double> image(row.size(), 0);
  for (int i = 0; i < matrix.rows(); ++i) {
    const double x =
        double{row[static_cast<size_t>(i)]} - (side.mean.empty() ? 0 : double{side.mean[head][i]});
    for (int j = 0; j < matrix.cols(); ++j) image[static_cast<size_t>(j)] += x * matrix(i, j);
  }
  return image;
}

ProbeCode probe_code(const BackendRun& run, const SideTransform& side, Side which) {
  const ClipPair clip = run.clips.pair.value_or(ClipPair{});
  std::vector<float> row;
  for (const double x : probe_image(side, 0, probe_row(side.forward.rows, 0))) {
    row.push_back(bf16_to_float(float_to_bf16(static_cast<float>(x))));
  }
  const CodedRow coded = code_row(run, which == Side::kKey ? clip.key : clip.value, row);
  return {hex(coded.codes), hex(coded.metadata)};
}

Json begin_manifest(const Bundle& bundle, const char* format) {
  return {{"format", format},
          {"made_with", std::string("OSCAR Toolkit ") + kToolVersion},
          {"created_from",
           {{"content_sha256", bundle.content_sha256},
            {"model",
             bundle.model.fitted_model.empty() ? bundle.model.name : bundle.model.fitted_model},
            {"architecture", bundle.model.architecture},
            {"rope", bundle.model.rope},
            {"weights_fingerprint", bundle.model.fitted_to()}}}};
}

Json make_manifest(const Bundle& bundle, const ExchangeFormat& format,
                   const std::optional<BackendPlan>& plan, const TransformSet& set,
                   const Json& files) {
  const LayerTransforms& first = set.begin()->second;
  Json ids = Json::array();
  for (const auto& entry : set) ids.push_back(entry.first);
  Json manifest = begin_manifest(bundle, format.name);
  manifest.update({{"layers", std::move(ids)},
                   {"heads_k", first.key.forward.count},
                   {"heads_v", first.value.forward.count},
                   {"head_dim_k", first.key.forward.rows},
                   {"head_dim_v", first.value.forward.rows},
                   {"variant", plan ? word_of(plan->run->variant) : "own"},
                   {"sink_tokens", bundle.quantizer.sink_tokens},
                   {"recent_tokens", bundle.quantizer.recent_tokens},
                   {"demote_block", bundle.quantizer.demote_block},
                   {"quant_group_size", bundle.quantizer.quant_group_size},
                   {"row", nullptr}});
  if (!plan) manifest["metadata_dtype"] = codec_word(bundle.quantizer.metadata_dtype);
  if (plan) {
    const BackendRun& run = *plan->run;
    if (run.clips.pair) manifest["clip"] = {run.clips.pair->key, run.clips.pair->value};
    if (run.relative_error) manifest["relative_error"] = *run.relative_error;
    if (run.kl_factor) manifest["kl_factor"] = *run.kl_factor;
    if (run.format) {
      manifest["metadata_dtype"] = codec_word(run.format->metadata);
      manifest["row"] = row_codes(run, first);
    }
  }
  manifest["probe"] = {{"keys", probes(set, Side::kKey)}, {"values", probes(set, Side::kValue)}};
  manifest["files"] = files;
  return manifest;
}

void require_files_of(const Json& manifest, const std::vector<std::filesystem::path>& files,
                      const std::string& hint) {
  const Json& hashes = manifest.at("files");
  for (const std::filesystem::path& file : files) {
    const std::string name = file.filename().string();
    if (!hashes.contains(name)) {
      throw Error(
          {.what = "a file that the manifest does not name", .where = file.string(), .hint = hint});
    }
    const auto expected = hashes.at(name).get<std::string>();
    const std::string found = sha256_of_file(file);
    if (found == expected) continue;
    throw Error({.what = "a file has changed since it was exported",
                 .where = file.string(),
                 .expected = expected,
                 .found = found,
                 .hint = hint});
  }
}

// The plain writer of the cache, by the rules of a plan.

CodedRow code_row(const BackendRun& run, double clip_ratio, std::span<const float> row) {
  if (!run.format) throw Error({.what = "the backend codes rows by levels of its own"});
  const RowQuantizer quantizer{.head_dim = static_cast<int>(row.size()),
                               .format = *run.format,
                               .recipe = {.clip_ratio = static_cast<float>(clip_ratio)},
                               .order = run.packing};
  if (!valid_quantizer(quantizer)) {
    throw Error({.what = "rows of this size cannot be coded",
                 .found = fmt::format("{} values in quantization groups of {}", row.size(),
                                      run.format->quant_group_size)});
  }
  const size_t pairs = row.size() / static_cast<size_t>(run.format->quant_group_size);
  CodedRow out;
  out.codes.resize(row.size() / 4);
  out.metadata.resize(pairs * 2 * static_cast<size_t>(metadata_bytes(run.format->metadata)));
  const RowsStatus status = quantize_rows_ref(
      quantizer, row.data(), 1, {.packed = out.codes.data(), .metadata = out.metadata.data()});
  if (status.status != RowStatus::kOk) throw Error({.what = "a row cannot be coded"});
  return out;
}

std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

// One text for each layout, filled with the figures of a plan.

namespace {

struct Words {
  const Bundle& bundle;
  const ExchangeFormat& format;
  const BackendRun* run;
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
                        const std::optional<BackendPlan>& plan, bool in_model) {
  const Words words{bundle, format, plan ? &*plan->run : nullptr, in_model};
  std::string text = fmt::format("# {} for {}\n\n", bundle.model.name, format.name);
  const std::string said = plan ? plans_json({*plan})[0]["line"].get<std::string>() : "";
  // python/oscar_int2/commands/published.py puts this paragraph onto the card.
  if (plan && is_not_to_serve(*plan->run)) {
    text += fmt::format("DO NOT SERVE: measured KL to BF16 is {} that of the bundle's own.\n\n",
                        times(plan->run->kl_factor));
  }
  if (plan && plan->backend->standing) text += fmt::format("{}\n\n", plan->backend->standing);
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
    text += fmt::format("\nOf the bundle {}: {}.\n", bundle.content_sha256.substr(0, 12), said);
  }
  if (!bundle.model.fitted_weights_fingerprint.empty()) {
    text += fmt::format(
        "\nThe transforms were fitted to other weights, of {} (weights_fingerprint {}): no figure "
        "above was measured on this model.\n",
        bundle.model.fitted_model, bundle.model.fitted_weights_fingerprint);
  }
  text += fmt::format(
      "\n`{}` says what the files should hold; `oscar-bundle verify --for {} FOLDER` looks.\n",
      kManifestName, format.name);
  return text;
}

// Decide what the backend runs, write it, look at what was written.

namespace {

std::string all_of(const std::vector<Obstacle>& obstacles) {
  std::string text;
  for (const Obstacle& obstacle : obstacles) text += (text.empty() ? "" : "; ") + obstacle.text;
  return text;
}

BackendPlan plan_of(const Bundle& bundle, const std::string& from, const ExchangeFormat& format,
                    bool reduce) {
  const Backend& backend = find_backend(format.backend);
  BackendPlan plan = plan_for(backend, bundle);
  if (plan.verdict() == BackendVerdict::kAsIs) return plan;
  const bool fits = is_served(backend);
  const std::string fitting =
      fits ? fmt::format("oscar-calibrate --for {} fits what runs as is", backend.name) : "";
  if (plan.verdict() == BackendVerdict::kCannot) {
    throw Error({.what = fmt::format("{} can run nothing of this bundle", format.name),
                 .where = from,
                 .found = all_of(plan.obstacles),
                 .hint = fitting});
  }
  if (!reduce) {
    const auto line = plans_json({plan})[0]["line"].get<std::string>();
    throw Error({.what = fmt::format("{} cannot run this bundle's own transforms", format.name),
                 .where = from,
                 .found = all_of(plan.obstacles),
                 .hint = fmt::format("--reduce writes what it can ({})", line) +
                         (fitting.empty() ? "" : ";\n            " + fitting)});
  }
  return plan;
}

std::vector<const LayerTransforms*> layers_of(const Bundle& bundle, BundleVariant variant) {
  std::vector<const LayerTransforms*> layers;
  for (size_t i = 0; i < bundle.layers.size(); ++i) {
    layers.push_back(variant == BundleVariant::kOwn              ? &bundle.layers[i]
                     : variant == BundleVariant::kPortableShared ? &bundle.portable[i].shared
                                                                 : &bundle.portable[i].per_head);
  }
  return layers;
}

void write_files(const ExchangeFormat& format, const TransformSet& set,
                 const std::filesystem::path& folder, const std::filesystem::path& base) {
  const std::filesystem::path keys = folder / format.key_file;
  switch (format.layout) {
    case FileLayout::kTorchShared:
    case FileLayout::kTorchPerHead:
    case FileLayout::kTorchLocked: {
      const TorchLayout layout = torch_layout(format.layout);
      write_torch_rotations(keys, set, Side::kKey, layout);
      write_torch_rotations(folder / format.value_file, set, Side::kValue, layout);
      break;
    }
    case FileLayout::kMlx:
      write_mlx_rotations(keys, set, Side::kKey);
      write_mlx_rotations(folder / format.value_file, set, Side::kValue);
      write_mlx_manifest(folder, set);
      break;
    case FileLayout::kGguf:
      write_gguf_rotations(keys, set, base);
      break;
    case FileLayout::kNpz:
      write_npz(keys, to_arrays(set));
      break;
    case FileLayout::kSafetensors:
      write_safetensors(keys, to_arrays(set));
      break;
  }
}

void require_every_layer(const Bundle& bundle, const std::string& from) {
  for (const LayerTransforms& layer : bundle.layers) {
    if (layer.geometry.fitted()) continue;
    throw Error(
        {.what = fmt::format(
             "these files hold a transform for every layer, and {} layers "
             "have none",
             layer.geometry.attention == AttentionKind::kNone ? "linear or shared" : "local"),
         .where = fmt::format("{}: layer {}", from, layer.geometry.layer_id),
         .expected = "a bundle of a model whose layers all attend to all tokens",
         .hint = "--for statistics writes the sums of the other layers"});
  }
}

// One matrix for all heads: by the layout, or, where it has places for either, by the variant.
bool writes_shared(const ExchangeFormat& format, const std::optional<BackendPlan>& plan) {
  if (format.layout == FileLayout::kTorchShared || format.layout == FileLayout::kGguf) return true;
  return format.layout == FileLayout::kMlx && plan &&
         plan->run->variant == BundleVariant::kPortableShared;
}

// How samples of attention matrices lie to each other.
struct SampleRelation {
  double ours = 0, theirs = 0, product = 0, distance = 0;  // sums of squares, and of products

  void add(const MatrixStack<float>& a, const MatrixStack<float>& b) {
    for (size_t i = 0; i < std::min(a.data.size(), b.data.size()); ++i) {
      const double x = a.data[i], y = b.data[i];
      ours += x * x;
      theirs += y * y;
      product += x * y;
      distance += (x - y) * (x - y);
    }
  }
  double correlation() const { return product / std::sqrt(std::max(ours * theirs, 1e-300)); }
  double relative_distance() const { return std::sqrt(distance / std::max(ours, 1e-300)); }
};

// Fewest bits of a number of the attention matrices, and the name of that type.
std::pair<double, std::string> coarsest_type(const std::filesystem::path& base) {
  std::pair<double, std::string> coarsest = {32, "F32"};
  const GgufFile file(base);
  for (const auto& [key, tensor] : file.tensors()) {
    const std::string& name = key;  // clang 14 captures no structured binding
    const bool sampled = std::ranges::any_of(
        std::array{".attn_q.weight", ".attn_k.weight", ".attn_v.weight", ".attn_output.weight"},
        [&](const char* ending) { return name.ends_with(ending); });
    if (!sampled || tensor.type == nullptr) continue;
    const double bits = 8.0 * static_cast<double>(tensor.type->block_bytes) /
                        static_cast<double>(tensor.type->block_values);
    if (bits < coarsest.first) coarsest = {bits, tensor.type->name};
  }
  return coarsest;
}

// Other weights share no sign with the bundle's. Ternary ones of the same model still have .6 (the
// gguf package's TQ2_0 of numbers with outliers, Student's t of 5).
constexpr double kLeastCorrelation = 0.5;
// Of 2^-bits: a quantization's relative distance. The gguf package's Q8_0 to Q4_0 have 1.9 to 2.9
// on the same numbers and Gaussian ones; wider outliers make a block's step wider.
constexpr double kMostDistance = 5;

// Of a bundle's model: stored as numbers, of which a GGUF file names the types, too.
bool is_plain(const std::string& quantization) {
  std::istringstream types(quantization);
  for (std::string type; std::getline(types >> std::ws, type, ',');) {
    const std::string name = type.substr(0, type.find(' '));
    if (name != "F32" && name != "F16" && name != "BF16") return false;
  }
  return true;
}

// Refuses a base of other weights than the bundle's. Returns a warning where they may be others.
std::string check_base(const Bundle& bundle, const std::string& from,
                       const std::filesystem::path& base) {
  const Checkpoint checkpoint = open_checkpoint(base.string());
  const WeightSource& weights = *checkpoint.weights;
  if (weights.fingerprint(false) == bundle.model.weights_fingerprint) return "";
  const std::vector<WeightSamples> samples = sample_weights(checkpoint.config, weights);
  if (bundle.weight_samples.empty() || samples.empty()) {
    return fmt::format(
        "{}: whether it holds the weights of {} is not known: the bundle has no "
        "samples of them",
        base.string(), from);
  }
  const std::string difference = weight_difference(samples, bundle.weight_samples, true);
  const bool same_heads = checkpoint.config.num_kv_heads == bundle.model.num_kv_heads &&
                          checkpoint.config.num_qo_heads == bundle.model.num_qo_heads;
  if (difference.empty() && same_heads) return "";
  SampleRelation relation;
  for (size_t i = 0; i < std::min(samples.size(), bundle.weight_samples.size()); ++i) {
    relation.add(samples[i].matrices, bundle.weight_samples[i].matrices);
  }
  const bool from_plain = is_plain(bundle.model.quantization);
  const auto [bits, type] = coarsest_type(base);
  constexpr double kPlainBits = 16;
  if ((from_plain && bits >= kPlainBits) || !same_heads ||
      relation.correlation() < kLeastCorrelation) {
    throw Error({.what = "the base holds other weights than the bundle was made for",
                 .where = base.string(),
                 .expected = "the weights of " + from + ", in any quantization",
                 .found = same_heads ? difference : "another number of heads",
                 .hint = "calibrate this file: oscar-calibrate takes it as MODEL"});
  }
  const double explained = kMostDistance * std::exp2(-bits);
  if (!from_plain || relation.relative_distance() <= explained) return "";
  return fmt::format(
      "{}: its attention weights lie {:.2g}% from those of {}, and {} explains {:.2g}% at most. "
      "A fine-tune needs a calibration of its own",
      base.string(), 100 * relation.relative_distance(), from, type, 100 * explained);
}

}  // namespace

ExportResult export_bundle(const Bundle& bundle, const std::string& from,
                           const ExchangeFormat& format, bool reduce,
                           const std::filesystem::path& to, const std::filesystem::path& base) {
  if (bundle.statistics_only) {
    throw Error({.what = "a statistics file has no transforms",
                 .where = from,
                 .hint = "oscar-bundle fit makes a bundle of it"});
  }
  if (!base.empty() && format.layout != FileLayout::kGguf) {
    throw Error({.what = "only gguf-rot goes into a model's file", .where = base.string()});
  }
  ExportResult result;
  if (format.backend != nullptr) result.plan = plan_of(bundle, from, format, reduce);
  require_every_layer(bundle, from);
  const BundleVariant variant = result.plan ? result.plan->run->variant : BundleVariant::kOwn;
  const TransformSet set =
      transform_set(layers_of(bundle, variant), writes_shared(format, result.plan));
  AtomicFolder folder(to);
  write_files(format, set, folder.temporary(), base);  // looks at the base's shape, too
  if (!base.empty()) result.warning = check_base(bundle, from, base);
  Json files = Json::object();
  for (const char* name : {format.key_file, format.value_file}) {
    if (name != nullptr) files[name] = sha256_of_file(folder.temporary() / name);
  }
  const Json manifest = make_manifest(bundle, format, result.plan, set, files);
  write_file_atomically(folder.temporary() / kManifestName, manifest.dump(1) + "\n");
  write_file_atomically(folder.temporary() / kLaunchName,
                        launch_text(bundle, format, result.plan, !base.empty()));
  for (const Finding& finding : verify_export(format, folder.temporary())) {
    if (!finding.ok) {
      throw Error({.what = "what was written does not read back: " + finding.check,
                   .where = to.string(),
                   .found = finding.detail,
                   .hint = "oscar-bundle verify checks the bundle"});
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.temporary())) {
    result.files.push_back(entry.path().filename().string());
  }
  std::sort(result.files.begin(), result.files.end());
  result.layers = set.size();
  stop_if_requested("stopped; nothing was written");
  folder.commit();
  return result;
}

// The bundle's table of statistics, walked over layers.

namespace {

constexpr const char* kStatisticsName = "statistics.npz";

// One layer's part of an array.
struct LayerPart {
  std::vector<uint64_t> shape;
  const void* data = nullptr;
  size_t bytes = 0;  // 0: the layer has none
  const char* type = "<f8";
};

LayerPart part_of(const MatrixStack<double>& s) {
  return {{uint64_t(s.count), uint64_t(s.rows), uint64_t(s.cols)},
          s.data.data(),
          s.data.size() * sizeof(double)};
}
LayerPart part_of(const VectorStack<double>& s) {
  return {{uint64_t(s.count), uint64_t(s.cols)}, s.data.data(), s.data.size() * sizeof(double)};
}
LayerPart part_of(const std::vector<double>& s) {
  return {{s.size()}, s.data(), s.size() * sizeof(double)};
}
LayerPart part_of(const int64_t& count) { return {{}, &count, sizeof count, "<i8"}; }

class Stacking {
 public:
  Stacking(size_t layers, const std::string& from) : layers_(layers), from_(from) {}

  void add(size_t layer, const char* name, const LayerPart& part) {
    if (part.bytes == 0) return;
    NpzArray& array = arrays_[name];
    if (array.type.empty()) {
      array.type = part.type;
      array.shape = part.shape;
      array.shape.insert(array.shape.begin(), layers_);
      array.bytes.assign(layers_ * part.bytes, '\0');
    }
    const std::vector<uint64_t> own(array.shape.begin() + 1, array.shape.end());
    if (own != part.shape) {
      throw Error({.what = "layers of different shapes make no array",
                   .where = fmt::format("{}: {} of layer {}", from_, name, layer)});
    }
    std::memcpy(array.bytes.data() + layer * part.bytes, part.data, part.bytes);
  }
  const std::map<std::string, NpzArray>& arrays() const { return arrays_; }

 private:
  size_t layers_;
  std::string from_;
  std::map<std::string, NpzArray> arrays_;
};

std::string readme(const Bundle& bundle) {
  return fmt::format(
      "# Statistics of {}\n\n`{}` (`numpy.load`) holds what a calibration summed: sums over tokens "
      "and the query heads of each KV head, not means. Divide q_moment, q_sum, attn_out_moment and "
      "attn_out_sum by count_q, k_moment, v_moment, k_sum and v_sum by count_kv, and what is "
      "summed by attention by the weight of its side. Rows are row vectors, heads come after "
      "layers; layer_id has the model's number of each layer. Names, units and what each is: "
      "lib/oscar/bundle/SCHEMA.md of OSCAR Toolkit.\n",
      bundle.model.name, kStatisticsName);
}

}  // namespace

std::vector<std::string> export_statistics(const Bundle& bundle, const std::string& from,
                                           const std::filesystem::path& to) {
  if (bundle.statistics.empty()) {
    throw Error({.what = "there are no statistics to export",
                 .where = from,
                 .expected = "a statistics file, or a bundle that was made without "
                             "--no-statistics and not stripped"});
  }
  std::vector<const LayerStatistics*> layers;
  for (const LayerStatistics& layer : bundle.statistics) {
    if (layer.geometry.fitted()) layers.push_back(&layer);
  }
  Stacking stacking(layers.size(), from);
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerStatistics& layer = *layers[i];
    schema::visit_statistics(layer, [&](const schema::DatasetSpec& spec, const auto& values) {
      stacking.add(i, spec.name, part_of(values));
    });
    stacking.add(i, "layer_id", part_of(int64_t{layer.geometry.layer_id}));
  }
  AtomicFolder folder(to);
  const std::filesystem::path file = folder.temporary() / kStatisticsName;
  write_npz(file, stacking.arrays());
  Json arrays = Json::object();
  for (const auto& [name, array] : stacking.arrays()) arrays[name] = array.shape;
  Json manifest = begin_manifest(bundle, kStatisticsExport);
  manifest.update({{"tokens", bundle.corpus.tokens},
                   {"row_weights", bundle.row_weights},
                   {"arrays", std::move(arrays)},
                   {"files", {{kStatisticsName, sha256_of_file(file)}}}});
  write_file_atomically(folder.temporary() / kManifestName, manifest.dump(1) + "\n");
  write_file_atomically(folder.temporary() / kLaunchName, readme(bundle));
  stop_if_requested("stopped; nothing was written");
  folder.commit();
  return {kLaunchName, kManifestName, kStatisticsName};
}

}  // namespace oscar
