// From a bundle to plain data, and from that to a page of text.
#include "oscar/bundle/inspect.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/strings.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/match.h"
#include "oscar/bundle/measured.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/moments.h"

namespace oscar {
namespace {

constexpr int64_t kContexts[] = {8192, 32768, 131072};

struct JsonWriter {
  Json& object;
  template <typename T>
  void operator()(const char* name, const T& value) const {
    if constexpr (requires { codec_word(value); }) {
      object[name] = codec_word(value);
    } else if constexpr (std::is_same_v<T, AttentionKind>) {
      object[name] = schema::attention_name(value);
    } else if constexpr (std::is_same_v<T, std::vector<CorpusSource>>) {
      Json list = Json::array();
      for (const auto& s : value) {
        list.push_back({{"name", s.name},
                        {"sha256", s.sha256},
                        {"kind", s.kind},
                        {"weight", s.weight},
                        {"tokens_used", s.tokens_used}});
      }
      object[name] = list;
    } else {
      object[name] = value;
    }
  }
};

Json describe_side(const SideTransform& side) {
  Json kinds = Json::array(), corrections = Json::array(), roundings = Json::array(),
       shares = Json::array();
  for (const auto kind : side.kind) kinds.push_back(method_name(kind));
  for (const auto correction : side.recipe.scale_correction) {
    corrections.push_back(scale_correction_name(correction));
  }
  for (const auto rounding : side.recipe.rounding) roundings.push_back(rounding_name(rounding));
  for (int h = 0; h < side.eigenvalues.count; ++h) {
    const double sum = side.eigenvalues[h].sum();
    shares.push_back(sum > 0 ? side.eigenvalues[h](side.eigenvalues.cols - 1) / sum : 0.0);
  }
  return {{"kind", kinds},
          {"fallback", side.fallback},
          {"clip_ratio", side.recipe.clip_ratio},
          {"scale_correction", corrections},
          {"rounding", roundings},
          {"centered", is_centered(side)},
          {"centers", has_centers(side) ? kCenters : 0},
          {"largest_eigenvalue_share", shares},
          {"condition_number", side.condition_number}};
}

Json describe_layer(const LayerTransforms& layer) {
  Json json;
  schema::visit_geometry(layer.geometry, JsonWriter{json});
  json["key"] = describe_side(layer.key);
  json["value"] = describe_side(layer.value);
  json["predicted_output_nmse"] = layer.predicted_output_nmse;  // NaN becomes null
  json["warnings"] = layer.warnings;
  if (!layer.search.is_null()) json["search"] = layer.search;
  return json;
}

Json describe_statistics(const LayerStatistics& s) {
  const auto mean_square = [](const MatrixStack<double>& moment, int64_t count) {
    double trace = 0;
    for (int h = 0; h < moment.count; ++h) trace += moment[h].trace();
    return trace / (static_cast<double>(count) * moment.count * moment.cols);
  };
  return {{"layer_id", s.geometry.layer_id},
          {"count_q", s.count_q},
          {"count_kv", s.count_kv},
          {"q_mean_square", mean_square(s.q_moment, s.count_q)},
          {"k_mean_square", mean_square(s.k_moment, s.count_kv)},
          {"v_mean_square", mean_square(s.v_moment, s.count_kv)},
          {"attn_out_mean_square", mean_square(s.attn_out_moment, s.count_q)}};
}

std::string plain(const Json& value) {
  return printable(value.is_string() ? value.get<std::string>() : json_text(value));
}

// "method, clip" of a list of words; anything else as it is.
std::string listed(const Json& list) {
  if (!list.is_array()) return plain(list);
  std::string text;
  for (const Json& entry : list) text += (text.empty() ? "" : ", ") + plain(entry);
  return text;
}

// One word for a list: the value when all agree, "mixed" otherwise.
std::string agreed(const Json& list) {
  for (const auto& entry : list) {
    if (entry != list[0]) return "mixed";
  }
  return list.empty() ? "-" : plain(list[0]);
}

std::string range(const Json& list, const char* format) {
  double low = INFINITY, high = -INFINITY;
  for (const auto& entry : list) {
    if (!entry.is_number()) return "-";
    low = std::min(low, entry.get<double>());
    high = std::max(high, entry.get<double>());
  }
  if (low > high) return "-";
  const std::string a = fmt::format(fmt::runtime(format), low);
  const std::string b = fmt::format(fmt::runtime(format), high);
  return a == b ? a : a + "-" + b;
}

std::string largest(const Json& list, const char* format) {
  double most = -INFINITY;
  for (const auto& entry : list) {
    if (!entry.is_number()) return "-";
    most = std::max(most, entry.get<double>());
  }
  return std::isfinite(most) ? fmt::format(fmt::runtime(format), most) : "-";
}

void add_layer_table(std::string& text, const Json& layers) {
  text +=
      fmt::format("\n{:>5}  {:<8} {:<8}  {:>9} {:>9}  {:>5} {:>5}  {:>5} {:>5}  {:>7}\n", "layer",
                  "keys", "values", "clip K", "clip V", "top K", "top V", "cnd K", "cnd V", "nmse");
  for (const auto& layer : layers) {
    const Json &k = layer["key"], &v = layer["value"];
    const char* const exact =
        layer["attention"] == schema::attention_name(AttentionKind::kLocal)  ? "(BF16)"
        : layer["attention"] == schema::attention_name(AttentionKind::kNone) ? "(none)"
                                                                             : nullptr;
    text += fmt::format(
        "{:>5}  {:<8} {:<8}  {:>9} {:>9}  {:>5} {:>5}  {:>5} {:>5}  {:>7}\n",
        layer["layer_id"].get<int>(), exact ? exact : agreed(k["kind"]),
        exact ? exact : agreed(v["kind"]), range(k["clip_ratio"], "{:.2f}"),
        range(v["clip_ratio"], "{:.2f}"), largest(k["largest_eigenvalue_share"], "{:.2f}"),
        largest(v["largest_eigenvalue_share"], "{:.2f}"), largest(k["condition_number"], "{:.3g}"),
        largest(v["condition_number"], "{:.3g}"),
        largest(layer["predicted_output_nmse"], "{:.1e}"));
  }
}

// Warnings and fallbacks of layers, `most` of them at most.
void add_remarks(std::string& text, const Json& layers, size_t most) {
  size_t count = 0;
  const auto add = [&](const std::string& where, const std::string& words) {
    if (++count <= most) add_line(text, where, words);
  };
  for (const auto& layer : layers) {
    const std::string where = "layer " + plain(layer["layer_id"]);
    for (const auto& warning : layer["warnings"]) add(where, plain(warning));
    for (const char* side : {"key", "value"}) {
      const Json& fallback = layer[side]["fallback"];
      for (size_t h = 0; h < fallback.size(); ++h) {
        if (fallback[h] != "")
          add(where, fmt::format("{} head {}: {}", side, h, plain(fallback[h])));
      }
    }
  }
  if (count > most) text += fmt::format("and {} more remarks\n", count - most);
}

double worst_error(const Json& layer) {
  double worst = -INFINITY;
  for (const auto& head : layer["predicted_output_nmse"]) {
    if (head.is_number()) worst = std::max(worst, head.get<double>());
  }
  return worst;
}

// The layers with the largest predicted errors, in their order.
Json worst_layers(const Json& layers, size_t count) {
  std::vector<Json> found(layers.begin(), layers.end());
  std::ranges::stable_sort(found, std::greater{}, worst_error);
  found.resize(std::min(count, found.size()));
  std::ranges::sort(found, {}, [](const Json& layer) { return layer["layer_id"].get<int>(); });
  return found;
}

void add_statistics_table(std::string& text, const Json& statistics) {
  text += fmt::format("\n{:>5}  {:>14} {:>14}  {:>9} {:>9} {:>9} {:>9}\n", "layer", "q rows",
                      "k and v rows", "mean q^2", "mean k^2", "mean v^2", "mean o^2");
  for (const auto& s : statistics) {
    text += fmt::format("{:>5}  {:>14} {:>14}  {:>9.3g} {:>9.3g} {:>9.3g} {:>9.3g}\n",
                        s["layer_id"].get<int>(), s["count_q"].get<int64_t>(),
                        s["count_kv"].get<int64_t>(), s["q_mean_square"].get<double>(),
                        s["k_mean_square"].get<double>(), s["v_mean_square"].get<double>(),
                        s["attn_out_mean_square"].get<double>());
  }
}

// Of a rotation bundle: its layers, or the worst of them, and what backends run.
void add_layers(std::string& text, const Inspection& inspection, InspectionView view) {
  constexpr size_t kWorst = 5, kRemarks = 5;
  constexpr const char* kLegend =
      "clip 0.00 = off; top = share of the largest eigenvalue, cnd = condition number,\n"
      "nmse = predicted error of the attention output: the worst head's each\n";
  const Json &j = inspection.json, &layers = j["layers"];
  if (std::ranges::none_of(layers, [](const Json& layer) { return layer["quantized"] == true; })) {
    add_line(text, "", kNothingQuantized, 0);
  }
  if (view == InspectionView::kScreen) {
    if (layers.size() > kWorst) {
      text += fmt::format("\nthe {} of {} layers with the largest predicted error", kWorst,
                          layers.size());
    }
    add_layer_table(text, worst_layers(layers, kWorst));
    add_remarks(text, layers, kRemarks);
    text += kLegend + ("\n" + plans_summary(inspection.backends));
    if (j.contains("evaluation_left_out")) add_line(text, "", plain(j["evaluation_left_out"]), 0);
    return;
  }
  add_layer_table(text, layers);
  add_remarks(text, layers, SIZE_MAX);
  text += kLegend;
  if (j.contains("portable")) {
    for (const auto& [key, name] :
         {std::pair{"shared", "layer"}, std::pair{"per_head", "KV head"}}) {
      text += fmt::format("\nportable variant, one rotation per {}", name);
      add_layer_table(text, j["portable"][key]);
      add_remarks(text, j["portable"][key], SIZE_MAX);
    }
  }
  text += "\n" + plans_text(inspection.backends);
  if (j.contains("evaluation_left_out")) add_line(text, "", plain(j["evaluation_left_out"]), 0);
}

}  // namespace

Inspection inspect_bundle(const std::filesystem::path& path,
                          const std::optional<Json>& evaluation) {
  RawFile raw = load_raw(path);
  const FileKind kind = check_format(raw);
  check_content_hash(raw);
  const Bundle b = decode_bundle(raw, kind);
  Json json;
  json["file"] = path.string();
  json["kind"] = kind == FileKind::kRotations    ? "rotation bundle"
                 : kind == FileKind::kStatistics ? "statistics"
                                                 : "checkpoint";
  json["format_version"] = schema::kFormatVersion;
  json["tool_version"] = b.tool_version;
  json["tool_commit"] = b.tool_commit;
  if (!b.fitted_by.empty()) json["fitted_by"] = b.fitted_by;
  json["created_utc"] = b.created_utc;
  json["content_sha256"] = b.content_sha256;
  if (!b.layers.empty()) json["serving_sha256"] = serving_sha256(b);
  schema::visit_root(b, JsonWriter{json});
  schema::visit_model(b.model, JsonWriter{json["model"]});
  for (const auto name : schema::kModelExtras) {
    const Json& value = json["model"][std::string(name)];
    if (value == "" || value.is_null()) json["model"].erase(std::string(name));
  }
  schema::visit_corpus(b.corpus, JsonWriter{json["corpus"]});
  if (b.corpus.recall.empty()) json["corpus"].erase(schema::kRecall);
  schema::visit_quantizer(b.quantizer, JsonWriter{json["quantizer"]});
  if (b.collected) schema::visit_windows(*b.collected, JsonWriter{json["collected"]});
  Json& bits = json["bits_per_element"] = Json::object();
  for (const int64_t context : kContexts) {
    if (context < b.quantizer.sink_tokens + int64_t{b.quantizer.recent_tokens}) continue;
    bits[std::to_string(context)] = bits_per_element(
        b.quantizer.row_format(), context, b.quantizer.sink_tokens, b.quantizer.recent_tokens);
  }
  json["has_statistics"] = !b.statistics.empty();
  json["has_portable"] = !b.portable.empty();
  json["has_weight_samples"] = !b.weight_samples.empty();
  Json& layers = json["layers"] = Json::array();
  for (const auto& layer : b.layers) layers.push_back(describe_layer(layer));
  if (!b.search.is_null()) json["search"] = b.search;
  if (!b.convergence.is_null()) json["convergence"] = b.convergence;
  json["fingerprint_hashes"] = b.fingerprint.hashes.size();
  if (!b.portable.empty()) {
    Json shared = Json::array(), per_head = Json::array();
    for (const auto& layer : b.portable) {
      shared.push_back(describe_layer(layer.shared));
      per_head.push_back(describe_layer(layer.per_head));
    }
    json["portable"] = {{"shared", std::move(shared)}, {"per_head", std::move(per_head)}};
  }
  std::vector<BackendPlan> backends;
  if (kind == FileKind::kRotations) {
    backends = plan_for_all(b, evaluation ? measured_kl(*evaluation) : measured_kl(b));
    json["stacks"] = plans_json(backends);
    if (const std::string word = left_out_evaluation(b); !word.empty()) {
      json["evaluation_left_out"] = word;
    }
  }
  Json& statistics = json["statistics"] = Json::array();
  for (const auto& layer : b.statistics) {
    if (layer.geometry.fitted()) statistics.push_back(describe_statistics(layer));
  }
  if (kind == FileKind::kCheckpoint) {
    const ResumeState state = decode_resume(raw);
    json["resume"] = {{"run_key", state.run_key},
                      {"order", state.order},
                      {"shard", state.shard},
                      {"layer", state.layer}};
  }
  if (b.evaluation) json["evaluation"] = *b.evaluation;
  return {.json = std::move(json), .backends = std::move(backends)};
}

std::string inspection_text(const Inspection& inspection, InspectionView view) {
  const Json& j = inspection.json;
  const bool all = view == InspectionView::kAll;
  std::string text;
  const Json &m = j["model"], &c = j["corpus"], &q = j["quantizer"];
  add_line(text, "file", plain(j["file"]));
  std::string what = plain(j["kind"]);
  if (j["kind"] == "rotation bundle") {
    what += fmt::format(", {}, preset {}, composition {}, {}", plain(j["method"]),
                        plain(j["preset"]), plain(j["composition"]), plain(j["granularity"]));
    if (j["row_weights"] == row_weights_name(RowWeights::kAttention)) {
      what += ", rows by attention";
    } else if (j["row_weights"] == kMixedRowWeights) {
      what += ", rows by attention in some layers and alike in others";
    }
    if (std::ranges::any_of(j["layers"], [](const Json& layer) {
          return layer.contains("key") && layer["key"]["centers"] != 0;
        })) {
      what += ", keys about two centers";
    }
    what += j["has_statistics"].get<bool>() ? ", with statistics" : ", without statistics";
    if (j["has_portable"].get<bool>()) what += ", with a portable variant";
  }
  add_line(text, "what", what);
  add_line(text, "made",
           fmt::format("{} by version {} ({})", plain(j["created_utc"]), plain(j["tool_version"]),
                       plain(j["tool_commit"])));
  if (all && j.contains("fitted_by")) add_line(text, "fitted by", plain(j["fitted_by"]));
  add_line(text, "content", plain(j["content_sha256"]));
  if (all && j.contains("serving_sha256")) add_line(text, "served", plain(j["serving_sha256"]));
  add_line(
      text, "model",
      fmt::format("{} ({}): {} layers, {} query and {} KV heads, head_dim {}/{}", plain(m["name"]),
                  plain(m["architecture"]), plain(m["num_layers"]), plain(m["num_qo_heads"]),
                  plain(m["num_kv_heads"]), plain(m["head_dim_k"]), plain(m["head_dim_v"])));
  if (const auto engine = m.find("engine"); engine != m.end() && *engine != "") {
    add_line(text, "run by", plain(*engine));
  }
  add_line(text, "weights", plain(m["weights_fingerprint"]));
  add_line(text, "",
           j["has_weight_samples"].get<bool>()
               ? "with samples, which servers compare with the weights in memory"
               : "without samples: servers compare the fingerprint with the files");
  if (m.contains(schema::kQuantization)) {
    const bool gguf = m.contains(schema::kFileHash);
    add_line(text, gguf ? "GGUF" : "FP8", plain(m[schema::kQuantization]));
    if (all && gguf) add_line(text, "", "file " + plain(m[schema::kFileHash]));
  }
  add_line(
      text, "corpus",
      fmt::format("{} tokens in {} of {} sequences of up to {}", plain(c["tokens"]),
                  plain(c["sequences_used"]), plain(c["sequences_read"]), plain(c["chunk_len"])));
  if (c.contains(schema::kRecall)) add_line(text, "", "recall: " + plain(c[schema::kRecall]));
  if (c["separators"] != "none") add_line(text, "", "separators: " + plain(c["separators"]));
  for (const auto& source : c["sources"]) {
    add_line(text, "",
             fmt::format("{} (weight {}, {} tokens)", plain(source["name"]),
                         plain(source["weight"]), plain(source["tokens_used"])));
  }
  add_line(text, "positions",
           j["position_span"] == 0
               ? "as collected"
               : fmt::format("averaged over 0 to {}", plain(j["position_span"])));
  add_line(
      text, "quantizer",
      fmt::format("{} bits, groups of {}, {} metadata, first {} and last {} tokens exact, "
                  "demoted {} at a time",
                  plain(q["bits"]), plain(q["quant_group_size"]), plain(q["metadata_dtype"]),
                  plain(q["sink_tokens"]), plain(q["recent_tokens"]), plain(q["demote_block"])));
  if (j.contains("collected")) {
    const Json& w = j["collected"];
    add_line(
        text, "",
        fmt::format("sums by attention: of first {} and last {} tokens exact, demoted {} at a "
                    "time",
                    plain(w["sink_tokens"]), plain(w["recent_tokens"]), plain(w["demote_block"])));
  }
  std::string bits;
  for (const auto& [context, value] : j["bits_per_element"].items()) {
    bits += fmt::format("{}{:.3f} at {}K", bits.empty() ? "" : ", ", value.get<double>(),
                        std::stoll(context) / 1024);
  }
  add_line(text, "bits/value", bits + " tokens of context");
  if (j.contains("resume")) {
    const Json& r = j["resume"];
    add_line(text, "resume",
             fmt::format("position {}, layer {}, order {}, run {}", plain(r["shard"]),
                         plain(r["layer"]), plain(r["order"]), plain(r["run_key"])));
  }
  if (j.contains("search") && j["search"].is_object()) {
    // Any program may have written it: nothing is taken for granted.
    const Json& s = j["search"];
    const auto field = [&s](const char* name) { return plain(s.value(name, Json("?"))); };
    if (s.value("searched", Json()) == Json::array()) {  // merged, or fitted again
      add_line(
          text, "held back",
          fmt::format("{} tokens of the corpus are in no sum: {} and {} sequences, on which "
                      "another fit was searched and confirmed",
                      field("held_back_tokens"), field("search_chunks"), field("confirm_chunks")));
    } else {
      add_line(
          text, "search",
          fmt::format("{} ({}): decided on {} sequences, confirmed on {}; {} tokens in all",
                      listed(s.value("searched", Json())), field("effort"), field("search_chunks"),
                      field("confirm_chunks"), field("held_back_tokens")));
    }
  }
  if (!j.contains("resume")) {
    const Json verdict = j.value("convergence", Json());
    std::vector<std::string> lines = verdict_lines(verdict);
    // Where the text is not enough, the second line says how much would be.
    const size_t shown = needs_more_text(verdict) ? 2 : 1;
    if (!all && lines.size() > shown) lines.resize(shown);
    const char* label = "text";
    for (const std::string& line : lines) {
      add_line(text, std::exchange(label, ""), printable(line));
    }
  }
  if (all && j["fingerprint_hashes"] != 0) {
    add_line(text, "fingerprint",
             fmt::format("{} hashes of {}-token pieces of the text, to notice an evaluation on it",
                         plain(j["fingerprint_hashes"]), kNgramTokens));
  }
  if (!j["layers"].empty()) {
    add_layers(text, inspection, view);
  } else if (!j["statistics"].empty() && all) {
    add_statistics_table(text, j["statistics"]);
  }
  if (j.contains("evaluation")) {
    text += "\nevaluation\n";
    for (const auto& [name, value] : j["evaluation"].items()) {
      add_line(text, "", printable(name) + ": " + plain(value));
    }
  }
  if (!all) text += "\n--all shows every layer, hash and backend\n";
  return text;
}

}  // namespace oscar
