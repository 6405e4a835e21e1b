// Names to cache settings: baselines without data, fits from the bundle's statistics, the bundle.
#include "oscar/eval/methods.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <numbers>
#include <random>

#include "oscar/attention/paged_attention.h"
#include "oscar/attention/wide_codes.h"
#include "oscar/base/error.h"
#include "oscar/base/strings.h"
#include "oscar/eval/rival_codecs.h"
#include "oscar/fit/fit.h"

namespace oscar {
namespace {

enum class Origin { kReference, kDataFree, kStatistics, kBundle, kPortable, kExact };

struct Base {
  const char* name;
  const char* summary;
  Origin origin;
  TransformKind kind = TransformKind::kIdentity;
  bool clip = false;
  bool random = false;
  const char* preset = "";
  bool per_head = false;
};

const std::vector<Base>& bases() {
  static const std::vector<Base> table = {
      {"bf16", "the model as it is", Origin::kReference},
      {"exact", "the INT2 path with the codec off", Origin::kExact},
      {"identity", "INT2 without rotation", Origin::kDataFree, TransformKind::kIdentity},
      {"identity-clip", "INT2 without rotation, clipped", Origin::kDataFree,
       TransformKind::kIdentity, true},
      {"hadamard", "Hadamard rotation", Origin::kDataFree, TransformKind::kHadamard},
      {"hadamard-clip", "Hadamard rotation, clipped", Origin::kDataFree, TransformKind::kHadamard,
       true},
      {"random-clip", "random rotation, clipped", Origin::kDataFree, TransformKind::kHadamard, true,
       true},
      {"oscar", "OSCAR as in the paper", Origin::kStatistics, TransformKind::kOscar, true, false,
       "paper"},
      {"oscar-perhead", "OSCAR, one rotation per KV head", Origin::kStatistics,
       TransformKind::kOscar, true, false, "paper", true},
      {"oscar-released", "OSCAR with the published value objective", Origin::kStatistics,
       TransformKind::kOscar, true, false, "released"},
      {"bundle", "the bundle as it is", Origin::kBundle},
      {"portable", "the bundle's variant for any server", Origin::kPortable},
      {"portable-perhead", "the same, one rotation per KV head", Origin::kPortable,
       TransformKind::kOscar, true, false, "", true},
  };
  return table;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::vector<std::string> known_names(std::span<const NamedBundle> named) {
  std::vector<std::string> known;
  for (const Base& base : bases()) known.emplace_back(base.name);
  for (const NamedBundle& other : named) known.push_back(other.name);
  for (const RivalFormat& rival : rival_formats()) known.emplace_back(rival.name);
  return known;
}

// What a name of another program, or a slip, stands for here; "": nothing is near.
std::string hint_for_unknown(const std::string& name, const std::vector<std::string>& known) {
  constexpr std::string_view kWide[] = {"f16", "fp16", "float16", "f32", "fp32", "none", "full"};
  constexpr std::string_view kOfLlamaCpp[] = {"q2_0", "q4_1", "q5_0", "q5_1", "iq4_nl"};
  if (std::ranges::find(kWide, name) != std::end(kWide)) {
    return "bf16 is the cache that all are compared with, and in every table";
  }
  if (std::ranges::find(kOfLlamaCpp, name) != std::end(kOfLlamaCpp)) {
    return "of llama.cpp's types q8_0 and q4_0 are measured here";
  }
  const std::string nearest = nearest_word(name, known);
  return nearest.empty() ? "" : fmt::format("did you mean {}?", nearest);
}

const Base& find_base(const std::string& name, std::span<const NamedBundle> named = {}) {
  const auto found = std::ranges::find_if(bases(), [&](const Base& b) { return name == b.name; });
  if (found != bases().end()) return *found;
  const std::vector<std::string> known = known_names(named);
  throw UsageError({.what = "unknown method",
                    .where = "--compare",
                    .expected = fmt::format("{}", fmt::join(known, ", ")),
                    .found = name,
                    .hint = hint_for_unknown(name, known)});
}

// Statistics of white noise: what a fit sees when it has no data.
LayerStatistics white_statistics(const LayerGeometry& geometry) {
  LayerStatistics s = make_statistics(geometry);
  s.count_kv = int64_t{1} << 20;
  s.count_q = s.count_kv * (geometry.num_qo_heads / geometry.num_kv_heads);
  for (auto* m : {&s.q_moment, &s.k_moment, &s.v_moment, &s.attn_out_moment, &s.o_proj_metric}) {
    for (int h = 0; h < m->count; ++h) {
      (*m)[h].setIdentity();
      (*m)[h] *= static_cast<double>(s.count_q);
    }
  }
  return s;
}

// Haar-distributed orthogonal matrix [d, d] from a seed alone.
MatrixD random_rotation(int d, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto uniform = [&] { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; };
  MatrixD gaussian(d, d);
  for (int i = 0; i < d * d; ++i) {
    gaussian.data()[i] =
        std::sqrt(-2 * std::log(uniform())) * std::cos(2 * std::numbers::pi * uniform());
  }
  const Eigen::HouseholderQR<MatrixD> qr(gaussian);
  MatrixD q = qr.householderQ();
  for (int c = 0; c < d; ++c) {
    if (qr.matrixQR()(c, c) < 0) q.col(c) *= -1;
  }
  return q;
}

void randomize(LayerTransforms& layer, uint64_t seed) {
  int side_index = 0;
  for (SideTransform* side : {&layer.key, &layer.value}) {
    for (int h = 0; h < side->forward.count; ++h) {
      const uint64_t place = static_cast<uint64_t>(layer.geometry.layer_id) * 4096 + 2 * h;
      side->forward[h] =
          random_rotation(side->forward.rows, seed * 1000003 + place + side_index).cast<float>();
    }
    ++side_index;
  }
}

[[noreturn]] void no_statistics(const Base& base, const std::string& hint) {
  throw Error(
      {.what = fmt::format("method '{}' is fitted from statistics, and there are none", base.name),
       .where = "--compare",
       .hint = hint});
}

LayerTransforms fitted_layer(const Base& base, const MethodSource& source, int layer) {
  const Bundle* const bundle = source.bundle;
  if (!bundle) no_statistics(base, "give a bundle with statistics (--bundle)");
  if (bundle->statistics.empty()) {
    no_statistics(base, "this bundle was stripped: calibrate again without --no-statistics");
  }
  const LayerStatistics& statistics = bundle->statistics.at(layer);
  FitOptions fit = find_preset(base.preset).fit;
  if (base.per_head) fit.granularity = Granularity::kPerHead;
  if (fit.objective_v == ValueObjective::kEnergy && statistics.v_energy_moment.empty()) {
    throw Error({.what = fmt::format("method '{}' is fitted from the energy moment, which the "
                                     "bundle's statistics lack",
                                     base.name),
                 .where = "--compare",
                 .hint = "calibrate with --objective-v energy, which collects it"});
  }
  return fit_layer(statistics, fit, source.config->rope);
}

LayerTransforms data_free_layer(const Base& base, const MethodSource& source, int layer) {
  const FitOptions fit{.kind = base.kind,
                       .granularity = Granularity::kPerHead,
                       .clip_k = base.clip ? kPublishedClipK : 0.0,
                       .clip_v = base.clip ? kPublishedClipV : 0.0};
  const auto geometry = source.config->geometry(layer, source.quantizer.recent_tokens);
  LayerTransforms out = fit_layer(white_statistics(geometry), fit, source.config->rope);
  if (base.random) randomize(out, source.seed);
  return out;
}

LayerTransforms portable_layer(const Base& base, const MethodSource& source, int layer) {
  if (!source.bundle || source.bundle->portable.empty()) {
    throw Error(
        {.what = fmt::format("method '{}' needs a bundle with a portable variant", base.name),
         .where = "--compare",
         .hint = source.bundle ? "calibrate again: every rotation bundle is written with one"
                               : "give one with --bundle"});
  }
  const PortableLayer& both = source.bundle->portable.at(layer);
  return base.per_head ? both.per_head : both.shared;
}

LayerTransforms layer_of(const Base& base, const MethodSource& source, int layer) {
  switch (base.origin) {
    case Origin::kStatistics:
      return fitted_layer(base, source, layer);
    case Origin::kDataFree:
      return data_free_layer(base, source, layer);
    case Origin::kPortable:
      return portable_layer(base, source, layer);
    case Origin::kExact:
      if (!source.bundle || source.bundle->layers.empty()) {
        return data_free_layer(find_base("hadamard"), source, layer);
      }
      [[fallthrough]];
    case Origin::kBundle:
    case Origin::kReference:
      break;
  }
  if (!source.bundle || source.bundle->layers.empty()) {
    throw Error({.what = fmt::format("method '{}' needs a bundle with transforms", base.name),
                 .where = "--compare",
                 .hint = "give one with --bundle"});
  }
  return source.bundle->layers.at(layer);
}

// The bundle of this name, or null.
const NamedBundle* find_named(const std::string& name, std::span<const NamedBundle> named) {
  const auto found = std::ranges::find(named, name, &NamedBundle::name);
  return found == named.end() ? nullptr : &*found;
}

// What the variants after the base ask for.
struct Variants {
  bool keys = true, values = true;
  bool common = false;
  std::optional<int64_t> only_layer;
  std::optional<std::pair<double, double>> clip;
  std::optional<std::pair<int64_t, int64_t>> window, bits;
};

[[noreturn]] void refuse_variant(const std::string& name, const std::string& variant) {
  throw UsageError({.what = "malformed variant of a method",
                    .where = "--compare " + name,
                    .expected = "k, v, layer:N, window:SINK/RECENT; of a codec of others also "
                                "common, else clip:K/V or bits:K/V",
                    .found = variant});
}

template <typename Number>
bool parse_number(const std::string& text, Number& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, status] = std::from_chars(text.data(), end, value);
  return status == std::errc() && stop == end && value >= 0;
}

template <typename Number>
bool parse_pair(const std::string& text, std::optional<std::pair<Number, Number>>& out) {
  const auto parts = split(text, '/');
  std::pair<Number, Number> value;
  if (parts.size() != 2 || !parse_number(parts[0], value.first) ||
      !parse_number(parts[1], value.second)) {
    return false;
  }
  out = value;
  return true;
}

[[noreturn]] void refuse_second(const std::string& name, const std::string& one,
                                const std::string& other) {
  throw UsageError({.what = "two variants of a method that set the same",
                    .where = "--compare " + name,
                    .expected = "at most one of k and v, one layer, one clip, one bits, and one of "
                                "window and common",
                    .found = fmt::format("{} and {}", one, other)});
}

Variants parse_variants(const std::string& name, const ModelConfig& config, bool is_rival) {
  Variants out;
  const auto parts = split(name, '@');
  std::map<std::string, std::string> given;  // what a variant sets, to the variant
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t colon = parts[i].find(':');
    const std::string key = parts[i].substr(0, colon);
    const std::string value = colon == std::string::npos ? "" : parts[i].substr(colon + 1);
    bool good = false;
    if (key == "k" || key == "v") {
      out.keys = key == "k";
      out.values = key == "v";
      good = colon == std::string::npos;
    } else if (key == "layer") {
      int64_t layer = 0;
      good = parse_number(value, layer) && layer < config.num_layers &&
             config.geometry(static_cast<int>(layer), 0).fitted();
      out.only_layer = layer;
    } else if (key == "clip") {
      good =
          !is_rival && parse_pair(value, out.clip) && out.clip->first <= 1 && out.clip->second <= 1;
    } else if (key == "bits") {
      const auto width = [](int64_t bits) { return bits >= 1 && bits <= kMostCodeBits; };
      good = !is_rival && parse_pair(value, out.bits) && width(out.bits->first) &&
             width(out.bits->second);
    } else if (key == "common") {
      out.common = true;
      good = is_rival && colon == std::string::npos;
    } else if (key == "window") {
      good = parse_pair(value, out.window) && out.window->first <= kLargestWindow &&
             out.window->second >= 1 && out.window->second <= kLargestWindow;
    }
    if (!good) refuse_variant(name, parts[i]);
    const std::string sets = key == "v" ? "k" : key == "common" ? "window" : key;
    const auto [first, is_new] = given.emplace(sets, parts[i]);
    if (!is_new) refuse_second(name, first->second, parts[i]);
  }
  return out;
}

// What all methods begin with.
Method start_method(const std::string& name, const std::string& summary, const MethodSource& source,
                    const CacheFormat& quantizer, const Variants& variants) {
  Method method;
  method.name = name;
  method.summary = summary;
  method.quantizer = quantizer;
  if (variants.window) {
    method.quantizer.sink_tokens = static_cast<int>(variants.window->first);
    method.quantizer.recent_tokens = static_cast<int>(variants.window->second);
  }
  method.view = source.view;
  method.view.sink = method.quantizer.sink_tokens;
  method.view.recent = method.quantizer.recent_tokens;
  method.view.demote_block = method.quantizer.demote_block;
  method.layers.resize(source.config->num_layers);
  method.num_local = source.config->num_layers - source.config->num_fitted_layers();
  return method;
}

// `layer` as the method writes it: null where it stays exact, else what `code` makes.
template <typename Code>
void add_codecs(const MethodSource& source, const Variants& variants, const Code& code,
                Method& method) {
  for (int layer = 0; layer < source.config->num_layers; ++layer) {
    if (variants.only_layer && *variants.only_layer != layer) continue;
    const LayerGeometry geometry = source.config->geometry(layer, method.quantizer.recent_tokens);
    if (!geometry.fitted() || !(geometry.quantized || method.codec_off)) continue;
    std::shared_ptr<LayerCodec> codec = code(geometry);
    if (!codec) continue;
    codec->int2_keys = variants.keys && !method.codec_off;
    codec->int2_values = variants.values && !method.codec_off;
    method.layers[layer] = std::move(codec);
  }
}

SideCodec rival_side(const RivalFormat& rival, Side side, const LayerGeometry& geometry,
                     const Method& method, torch::Device device) {
  const int d = side == Side::kKey ? geometry.head_dim_k : geometry.head_dim_v;
  SideCodec codec;
  codec.forward = codec.partner = torch::eye(d).repeat({geometry.num_kv_heads, 1, 1}).to(device);
  codec.recipe = SideRecipe(static_cast<size_t>(geometry.num_kv_heads), {});
  codec.other = rival_codec(rival, side, d, method.view.sink, device);
  return codec;
}

Method rival_method(const std::string& name, const RivalFormat& rival, const MethodSource& source) {
  const Variants variants = parse_variants(name, *source.config, true);
  CacheFormat quantizer = source.quantizer;
  if (!variants.common) {
    quantizer.sink_tokens = rival.sink_tokens;
    quantizer.recent_tokens = rival.recent_tokens;
    quantizer.demote_block = 1;
  }
  // Whole tiles leave the recent window.
  const int tiles = (quantizer.demote_block + rival.tile_tokens - 1) / rival.tile_tokens;
  quantizer.demote_block = tiles * rival.tile_tokens;
  Method method = start_method(name, rival.summary, source, quantizer, variants);
  method.rival = &rival;
  method.key_bits = rival.key.at(source.config->head_dim);
  method.value_bits = rival.value.at(source.config->head_dim);
  const auto code = [&](const LayerGeometry& geometry) {
    const bool exact =
        !variants.common && is_exact_layer(rival, geometry.layer_id, source.config->num_layers);
    if (exact) return std::shared_ptr<LayerCodec>();
    auto codec = std::make_shared<LayerCodec>();
    codec->key = rival_side(rival, Side::kKey, geometry, method, source.device);
    codec->value = rival_side(rival, Side::kValue, geometry, method, source.device);
    return codec;
  };
  add_codecs(source, variants, code, method);
  return method;
}

// Sides of more than 2 bits are not clipped: the ratio was chosen for four levels.
void set_clipping(const Variants& variants, LayerTransforms& transforms) {
  const auto set = [](SideTransform& side, std::optional<double> ratio) {
    if (ratio) std::ranges::fill(side.recipe.clip_ratio, static_cast<float>(*ratio));
  };
  const auto wide = [](int64_t bits) { return bits > 2 ? std::optional(0.0) : std::nullopt; };
  if (variants.bits) {
    set(transforms.key, wide(variants.bits->first));
    set(transforms.value, wide(variants.bits->second));
  }
  if (variants.clip) {
    set(transforms.key, variants.clip->first);
    set(transforms.value, variants.clip->second);
  }
}

}  // namespace

Method make_method(const std::string& name, const MethodSource& given) {
  const ModelConfig& config = *given.config;
  const std::string first = split(name, '@')[0];
  if (const RivalFormat* const rival = find_rival(first)) return rival_method(name, *rival, given);
  const NamedBundle* const named = find_named(first, given.named);
  const Base& base = named ? find_base("bundle") : find_base(first, given.named);
  MethodSource source = given;
  if (named) source.bundle = &named->bundle;
  const Variants variants = parse_variants(name, config, false);
  Method method = start_method(name, named ? fmt::format("bundle {}", first) : base.summary, source,
                               source.quantizer, variants);
  method.reference = base.origin == Origin::kReference;
  method.codec_off = base.origin == Origin::kExact;
  if (method.reference) {
    if (name != base.name) refuse_variant(name, name);
    return method;
  }
  const auto widths = variants.bits.value_or(std::pair<int64_t, int64_t>(2, 2));
  const int key_width = static_cast<int>(widths.first);
  const int value_width = static_cast<int>(widths.second);
  if (!method.codec_off) {
    RowFormat format = method.quantizer.row_format();
    if (format.quant_group_size <= 0) format.quant_group_size = config.head_dim;
    method.key_bits = row_bits(format, key_width);
    method.value_bits = row_bits(format, value_width);
  }
  const auto code = [&](const LayerGeometry& geometry) {
    const int layer = geometry.layer_id;
    LayerTransforms transforms = layer_of(base, source, layer);
    set_clipping(variants, transforms);
    auto codec = std::make_shared<LayerCodec>();
    codec->key = make_side_codec(transforms.key, Side::kKey, method.quantizer, layer, config.rope,
                                 source.device);
    codec->value = make_side_codec(transforms.value, Side::kValue, method.quantizer, layer,
                                   config.rope, source.device);
    codec->key.code_bits = key_width;
    codec->value.code_bits = value_width;
    return codec;
  };
  add_codecs(source, variants, code, method);
  return method;
}

void check_bundle_name(const std::string& name, std::span<const NamedBundle> others) {
  const auto is_method = [&](const Base& base) { return name == base.name; };
  const bool is_known = std::ranges::any_of(bases(), is_method) || find_rival(name);
  if (!is_known && !find_named(name, others)) return;
  throw Error({.what = "a bundle can't have this name",
               .where = "--bundle " + name + "=FILE",
               .expected = "one that no method and no other bundle has",
               .found = name});
}

std::vector<std::string> default_methods(const Bundle* bundle, std::span<const NamedBundle> named) {
  std::vector<std::string> names = {"bf16", "exact", "identity", "hadamard", "hadamard-clip"};
  if (bundle && !bundle->statistics.empty()) {
    names.insert(names.end(), {"oscar", "oscar-perhead"});
  }
  if (bundle && !bundle->portable.empty()) {
    names.insert(names.end(), {"portable", "portable-perhead"});
  }
  names.emplace_back("fp8");
  if (bundle && !bundle->layers.empty()) names.emplace_back("bundle");
  for (const NamedBundle& other : named) names.push_back(other.name);
  return names;
}

void check_engine(const EngineChoice& choice, const CacheView& view, const CacheFormat& quantizer) {
  if (choice.kind == EngineKind::kSimulate) return;
  if (quantizer.rules != CodecRules{}) {
    throw Error(
        {.what = "the paged cache is of this toolkit's codec, the bundle of another backend's",
         .where = "--engine",
         .hint = "leave out --engine: simulate runs every codec"});
  }
  check_paged_mode(view);
  if (choice.kind == EngineKind::kKernel) make_kernel_ops(choice.device);
}

bool runs_in(const Method& method, EngineKind kind) {
  if (kind == EngineKind::kSimulate) return true;
  const auto other = [](const auto& layer) {
    return layer && (layer->key.code_bits != 2 || layer->value.code_bits != 2);
  };
  return !method.codec_off && !method.rival && std::ranges::none_of(method.layers, other);
}

std::unique_ptr<CacheEngine> make_engine(const Method& method, const ModelConfig& config,
                                         const EngineChoice& choice) {
  if (method.reference) return nullptr;
  std::vector<int> windows;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    windows.push_back(config.geometry(layer, method.quantizer.recent_tokens).sliding_window);
  }
  if (choice.kind == EngineKind::kSimulate || !runs_in(method, choice.kind)) {
    return std::make_unique<Int2Attention>(method.layers, method.view, std::move(windows));
  }
  return std::make_unique<PagedAttention>(
      PagedMethod{method.name, method.layers, method.view, std::move(windows), config.num_qo_heads},
      choice.kind == EngineKind::kKernel ? make_kernel_ops(choice.device) : make_reference_ops());
}

}  // namespace oscar
