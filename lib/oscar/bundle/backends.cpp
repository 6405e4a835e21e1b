// What each backend takes, and what it can run of a bundle.
#include "oscar/bundle/backends.h"

#include <fmt/format.h>
#include <algorithm>

#include "oscar/base/error.h"

namespace oscar {

// The table of backends, and the differences of their codecs.

namespace {

constexpr auto kFp16 = MetadataDtype::kFp16;
constexpr auto kBf16 = MetadataDtype::kBf16;
constexpr auto kFp32 = MetadataDtype::kFp32;
constexpr auto kAfterCoding = MetadataRounding::kAfterCoding;
constexpr int kWholeHead = 0;

// What OSCAR's own server, a fork of SGLang, has in every tree.
Backend sglang(const char* name, const char* summary, const char* source, const char* standing) {
  return {.name = name,
          .summary = summary,
          .source = source,
          .standing = standing,
          .quant_group_sizes = {kWholeHead, 128, 256},
          .metadata = {{kFp32}, {kBf16, kAfterCoding}, {kFp16, kAfterCoding}},
          .packing = PackOrder::kQuartered,
          .clip = ClipScope::kModel,
          .windows = WindowBasis::kTransformed,
          .window_multiple = 8,
          .power_of_two_head = true,
          .architectures = {}};
}

// One matrix a layer: what the tree of June 2026, the newest that could be run, reads.
Backend sglang_v1() {
  return sglang("sglang-v1", "OSCAR's SGLang, one matrix a layer (rotation file format_version 1)",
                "commit 473ff3f9: mem_cache/memory_pool.py, mem_cache/unified_kv_pool.py,\n"
                "QuantKernel/oscar_rotation_clip_int2_kv.py",
                "Runs in OSCAR's SGLang (FutureMLS-Lab/OSCAR) from commit 473ff3f9 on, proven in "
                "that server on a GPU. Not in SGLang's own releases.");
}

// One matrix a KV head: of a newer tree, and refused by the loader of 473ff3f9 for its shape.
Backend sglang_v2() {
  Backend backend =
      sglang("sglang-v2", "a newer OSCAR's SGLang, one matrix a KV head (format_version 2)",
             "V2.md; commit 0c88a3d1: mem_cache/memory_pool.py",
             "UNPROVEN: for OSCAR's SGLang at commit 0c88a3d1, which was read and not run. Commit "
             "473ff3f9 "
             "refuses these files. Not in SGLang's own releases.");
  backend.per_head = true;
  return backend;
}

// The same with inverses and means of keys, which that tree alone reads.
Backend sglang_0c88a() {
  Backend backend = sglang(
      "sglang-0c88a", "a newer OSCAR's SGLang at that commit: inverses and means of keys too",
      "commit 0c88a3d1: mem_cache/memory_pool.py, load_oscar_rotation_field",
      "UNPROVEN: for OSCAR's SGLang at commit 0c88a3d1, which was read and not run. No server "
      "loads "
      "these files before the first command below has found that it reads all of them.");
  backend.per_head = backend.key_partner = backend.value_partner = backend.key_mean = true;
  return backend;
}

std::vector<Backend> make_table() {
  return {
      {.name = "oscar_int2",
       .summary = "this toolkit's package, in transformers and as a plugin of vLLM",
       .source = "kernels/README.md",
       .per_head = true,
       .key_partner = true,
       .value_partner = true,
       .key_mean = true,
       .value_mean = true,
       .key_centers = true,
       .shaped_rounding = true,
       .scale_correction = true,
       .quant_group_sizes = {kWholeHead, 64, 128},
       .metadata = {{kFp16}, {.dtype = kFp32, .whole_head_only = true}},
       .clip = ClipScope::kHead,
       .head_dim_multiple = 64,
       .power_of_two_head = true,
       .other_layers = true,
       .architectures = {}},
      sglang_v1(),
      sglang_v2(),
      sglang_0c88a(),
      {.name = "llama.cpp",
       .summary = "llama.cpp's OSCAR branch, tensors in the GGUF file, cache type q2_0",
       .source = "src/models/qwen3.cpp, ggml/src/ggml-quants.c, ggml-common.h",
       .standing =
           "For llama.cpp's OSCAR branch zhongzhu/llamacpp at commit 4570ea60, which loads these "
           "matrices (proven on a CPU). DO NOT SERVE: on one text of 1,024 tokens its own 2-bit "
           "rows made a perplexity of 39, and 27 without rotations, where f16 rows have 6.4.",
       .transposed_file = true,
       .quant_group_sizes = {32},
       .metadata = {{kFp16, kAfterCoding}},
       .own_levels = true,
       .clip = ClipScope::kModelBoth,
       .head_dim_multiple = 128,
       .architectures = {"Qwen3ForCausalLM"}},
      {.name = "oscar2",
       .summary = "OSCAR2 forks of llama.cpp, matrices baked into the GGUF file",
       .source = "generate_and_bake_rot.py, ggml type 49",
       .transposed_file = true,
       .quant_group_sizes = {128},
       .metadata = {{kFp16, kAfterCoding}},
       .own_levels = true,
       .clip = ClipScope::kModelBoth,
       .windows = WindowBasis::kOriginal,
       .head_dim_multiple = 128,
       .architectures = {}},
      {.name = "vllm-pr46774",
       .summary = "vLLM's pull request 46774, --kv-cache-dtype oscar_int2",
       .source = "quantization/oscar/rotation.py, ops/triton_oscar_store.py",
       .standing =
           "UNPROVEN as a server: for vLLM with pull request 46774, in no release. Neither it "
           "nor its code ran here: our own reading of its loader and row writer takes such files.",
       .quant_group_sizes = {kWholeHead},
       .metadata = {{kFp16}},
       .rules = {.zero = ZeroForm::kMinimum},
       .clip = ClipScope::kModel,
       .windows = WindowBasis::kOriginal,
       .largest_head_dim = 128,
       .architectures = {}},
      {.name = "onnxruntime",
       .summary = "ONNX Runtime's MixedPrecisionGroupQueryAttention, pull request 31726",
       .source = "docs/oscar_onboarding_guide.md, contrib_ops/cpu/bert/gqa_attention_base.h",
       .per_head = true,
       .quant_group_sizes = {kWholeHead, 32, 64},
       .metadata = {{kFp32}, {kFp16, kAfterCoding}},
       .rules = {.zero = ZeroForm::kMinimum, .ties = CodeTies::kEven},
       .clip = ClipScope::kLayer,
       .windows = WindowBasis::kOriginal,
       .architectures = {}},
      {.name = "mlx",
       .summary = "mlx-lm's pull request 1789, a folder of safetensors",
       .source = "mlx_lm/models/oscar.py, mlx_lm/oscar_calibration.py",
       .standing =
           "UNPROVEN as a server: for mlx-lm with pull request 1789, closed and in no release. "
           "Neither it nor its code ran here: our own reading of its loader and cache takes such "
           "files.",
       .per_head = true,
       .transposed_file = true,
       .quant_group_sizes = {128, 64, 32},
       .metadata = {{kFp16, kAfterCoding}},
       .rules = {.clip_span = ClipSpan::kQuantGroup},
       .clip = ClipScope::kModel,
       .windows = WindowBasis::kOriginal,
       .architectures = {}},
  };
}

const BackendMetadata* find_metadata(const Backend& backend, MetadataDtype dtype) {
  for (const BackendMetadata& metadata : backend.metadata) {
    if (dtype == metadata.dtype) return &metadata;
  }
  return nullptr;
}

// The backend's rules with this metadata. Over groups of a whole head both clip spans are one.
CodecRules rules_with(const Backend& backend, const BackendMetadata& metadata,
                      const CacheFormat& quantizer) {
  CodecRules rules = backend.rules;
  rules.metadata_rounding = metadata.rounding;
  if (quantizer.quant_group_size == kWholeHead) rules.clip_span = ClipSpan::kHeadRow;
  return rules;
}

}  // namespace

const std::vector<Backend>& backends() {
  static const std::vector<Backend> table = make_table();
  return table;
}

std::optional<ErrorInfo> answer_to(std::string_view name) {
  const auto ours = [&](const char* runner) {
    return ErrorInfo{
        .what = fmt::format("{} is served by this toolkit's {}, which takes the .h5 file "
                            "of a bundle made without --for (backend oscar_int2)",
                            name, runner),
        .hint = "vLLM's pull request 46774 is vllm-pr46774"};
  };
  if (name == "vllm") return ours("plugin");
  if (name == "transformers" || name == "oscar") return ours("package");
  return std::nullopt;
}

const Backend& find_backend(std::string_view name) {
  if (const auto answer = answer_to(name)) throw UsageError(*answer);
  std::string known;
  for (const Backend& backend : backends()) {
    if (name == backend.name) return backend;
    known += (known.empty() ? "" : ", ") + std::string(backend.name);
  }
  throw UsageError({.what = "unknown backend", .expected = known, .found = std::string(name)});
}

std::string codec_gap(const Backend& backend, const CacheFormat& quantizer) {
  if (backend.own_levels) return "it codes by mean and spread, between fixed thresholds";
  const BackendMetadata* metadata = find_metadata(backend, quantizer.metadata_dtype);
  if (metadata == nullptr)
    return std::string("it has no ") + codec_word(quantizer.metadata_dtype) + " metadata";
  if (metadata->whole_head_only && quantizer.quant_group_size != kWholeHead) {
    return std::string("with ") + codec_word(quantizer.metadata_dtype) +
           " metadata it takes whole heads only";
  }
  const CodecRules its = rules_with(backend, *metadata, quantizer);
  CodecRules other = quantizer.rules;
  if (quantizer.quant_group_size == kWholeHead) other.clip_span = ClipSpan::kHeadRow;
  if (its.zero != other.zero) {
    return its.zero == ZeroForm::kMinimum ? "it stores the row's minimum, not a zero point"
                                          : "it stores a zero point, not the row's minimum";
  }
  if (its.ties != other.ties) {
    return its.ties == CodeTies::kEven ? "it rounds halves to even" : "it rounds halves up";
  }
  if (its.clip_span != other.clip_span) {
    return its.clip_span == ClipSpan::kQuantGroup ? "it clips each quantization group by itself"
                                                  : "it clips whole rows";
  }
  if (its.metadata_rounding != other.metadata_rounding) {
    const bool after = its.metadata_rounding == MetadataRounding::kAfterCoding;
    return std::string("it rounds scale and zero to ") + codec_word(quantizer.metadata_dtype) +
           (after ? " after coding, not before" : " before coding, not after");
  }
  return "";
}

void take_rules_of(const Backend& backend, CacheFormat& quantizer) {
  const BackendMetadata* metadata = find_metadata(backend, quantizer.metadata_dtype);
  if (backend.own_levels || metadata == nullptr) return;
  quantizer.rules = rules_with(backend, *metadata, quantizer);
}

CacheFormat default_codec(const Backend& backend) {
  CacheFormat quantizer;
  quantizer.quant_group_size = backend.quant_group_sizes.front();
  quantizer.metadata_dtype = backend.metadata.front().dtype;
  take_rules_of(backend, quantizer);
  return quantizer;
}

int group_size_for(const std::vector<int>& sizes, int head_dim) {
  const auto divides = [&](int size) { return size == kWholeHead || head_dim % size == 0; };
  const auto found = std::find_if(sizes.begin(), sizes.end(), divides);
  return found == sizes.end() ? sizes.front() : *found;
}

bool is_served(const Backend& backend) { return !backend.own_levels; }

std::string backend_names(bool served) {
  std::string names;
  for (const Backend& backend : backends()) {
    if (is_served(backend) != served) continue;
    names += (names.empty() ? "" : ", ") + std::string(backend.name);
  }
  return names;
}

// Part by part: what the backend serves, what was asked for, what is left.

namespace {

struct Restriction {
  const Backend& backend;
  const NamedOptions& named;

  [[noreturn]] void refuse(const std::string& option, const std::string& why,
                           const std::string& expected = "") const {
    const auto place = named.find(option);
    throw Error({.what = fmt::format("{} {}", backend.name, why),
                 .where = place == named.end() ? option : option + " " + place->second,
                 .expected = expected,
                 .hint = fmt::format("leave out {}, or --for {}", option, backend.name)});
  }

  // Keeps `value` when it is served; else takes `instead`, unless the option was named.
  template <typename T>
  void limit(const char* option, bool served, T& value, T instead, const std::string& why) const {
    if (served) return;
    if (named.contains(option)) refuse(option, why);
    value = instead;
  }
};

void limit_transforms(const Restriction& r, BackendChoice& c) {
  const Backend& backend = r.backend;
  r.limit("--granularity", backend.per_head || c.fit.granularity == Granularity::kShared,
          c.fit.granularity, Granularity::kShared, "takes one transform a layer");
  c.search.granularity = c.search.granularity && backend.per_head;
  const bool any_kind = backend.key_partner && backend.value_partner;
  r.limit("--method", any_kind || c.fit.kind != TransformKind::kBalanced, c.fit.kind,
          TransformKind::kOscar, "takes orthogonal transforms");
  c.search.orthogonal = c.search.orthogonal || !any_kind;
  if (!backend.per_head && c.search.kind && r.named.contains("--method")) {
    r.refuse("--method", "takes one transform a layer, and the search chooses one a KV head");
  }
  c.search.kind = c.search.kind && backend.per_head;
  const bool centering =
      backend.key_mean && backend.value_mean && backend.windows == WindowBasis::kTransformed;
  r.limit("--center", centering || !c.fit.center, c.fit.center, false,
          backend.key_mean ? "has no place for a mean of values,\n  and a fit takes off both means"
                           : "has no place for means");
  c.search.center = c.search.center && centering;
  r.limit("--key-centers", backend.key_centers || !c.fit.key_centers, c.fit.key_centers, false,
          "codes keys about one mean at most");
  c.search.key_centers = c.search.key_centers && backend.key_centers;
}

void limit_writer(const Restriction& r, BackendChoice& c) {
  const Backend& backend = r.backend;
  r.limit("--rounding", backend.shaped_rounding || c.fit.rounding == Rounding::kPlain,
          c.fit.rounding, Rounding::kPlain, "rounds codes to the nearest");
  c.search.rounding = c.search.rounding && backend.shaped_rounding;
  r.limit("--scale-correction",
          backend.scale_correction || c.fit.scale_correction == ScaleCorrection::kNone,
          c.fit.scale_correction, ScaleCorrection::kNone, "does not correct scales");
  c.search.scale_correction = c.search.scale_correction && backend.scale_correction;
}

void limit_clipping(const Restriction& r, BackendChoice& c) {
  if (r.backend.clip == ClipScope::kHead) return;
  const bool one_for_all = r.backend.clip == ClipScope::kModelBoth;
  c.search.clip_scope = r.backend.clip;
  if (r.named.contains("--clip") && !c.search.clip) {
    if (one_for_all && c.fit.clip_k != c.fit.clip_v) {
      r.refuse("--clip", "has one clipping ratio for keys and values");
    }
    return;
  }
  c.fit.clip_k = kPublishedClipK;
  c.fit.clip_v = one_for_all ? kPublishedClipK : kPublishedClipV;
}

void limit_codec(const Restriction& r, BackendChoice& c) {
  const Backend& backend = r.backend;
  CacheFormat& q = c.quantizer;
  const auto& sizes = backend.quant_group_sizes;
  if (std::find(sizes.begin(), sizes.end(), q.quant_group_size) == sizes.end()) {
    r.limit("--quant-group-size", false, q.quant_group_size, sizes.front(),
            "takes no quantization groups of that size");
    c.quant_group_sizes = sizes;
  }
  if (!r.named.contains("--metadata-dtype")) {
    q.metadata_dtype = backend.metadata.front().dtype;
  }
  take_rules_of(backend, q);
  const std::string gap = codec_gap(backend, q);
  if (!gap.empty()) r.refuse("--metadata-dtype", "is not served with it:\n  " + gap);
  for (const auto& [option, tokens] :
       {std::pair{"--sink", q.sink_tokens}, {"--recent", q.recent_tokens}}) {
    if (tokens % backend.window_multiple != 0) {
      r.refuse(option,
               fmt::format("takes windows of multiples of {} tokens", backend.window_multiple));
    }
  }
}

}  // namespace

BackendChoice restrict_to(const Backend& backend, BackendChoice choice, const NamedOptions& named) {
  if (!is_served(backend)) {
    throw Error(
        {.what = "not served yet, because\n  " + codec_gap(backend, default_codec(backend)),
         .where = std::string("--for ") + backend.name,
         .expected = backend_names(true),
         .hint = "its portable variant is in every bundle; oscar-bundle backends lists all"});
  }
  const FitOptions wanted = choice.fit;
  const Restriction restriction{backend, named};
  limit_transforms(restriction, choice);
  limit_writer(restriction, choice);
  limit_clipping(restriction, choice);
  limit_codec(restriction, choice);
  choice.search.fallback = choice.search.fallback && choice.fit == wanted;
  return choice;
}

}  // namespace oscar
