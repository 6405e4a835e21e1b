// A report as the page and the card read it, and what to beware of in it.
#include "oscar/eval/report/report_data.h"

#include <fmt/format.h>
#include <algorithm>
#include <charconv>
#include <cmath>

#include "oscar/base/error.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/fit/convergence.h"
#include "oscar/text/repeats.h"

namespace oscar {

// One function for each kind.

namespace {

const Json& entry_of(const Json& json, const char* key) {
  static const Json none;
  if (!json.is_object()) return none;
  const auto found = json.find(key);
  return found == json.end() ? none : *found;
}

// NaN where it is no number.
double number_at(const Json& json, const char* key) {
  const Json& value = entry_of(json, key);
  return value.is_number() ? value.get<double>() : NAN;
}

std::string name_of_file(const Json& bundle) {
  const Json& file = entry_of(bundle, "file");
  return file.is_string() ? file.get<std::string>() : "the bundle";
}

// Notable, and not by chance: the interval's lower end counts.
std::optional<Caution> shared_text(const Json& bundle, const std::string& method) {
  const Json& overlap = entry_of(bundle, "overlap");
  const double share = number_at(overlap, "share"), ngram = number_at(overlap, "ngram");
  const bool by_files = entry_of(overlap, "by_files") == true;
  if (!(number_at(overlap, "low") > kNotableOverlap) || std::isnan(share) ||
      (!by_files && std::isnan(ngram))) {
    return std::nullopt;
  }
  const std::string found =
      by_files ? fmt::format("{:.0f}% of the evaluation's tokens, by their files,", 100 * share)
               : fmt::format("{:.0f}% of the evaluation's {:.0f}-grams", 100 * share, ngram);
  return Caution{
      .kind = "shared-text",
      .method = method,
      .measured = found + " are in the calibration text",
      .sentence = fmt::format("{} are in the calibration text of {}: the figures flatter "
                              "the bundle; evaluate on other text",
                              found, name_of_file(bundle))};
}

// The figures are of another cache than servers of the bundle run.
std::optional<Caution> other_cache_than_served(const Json& bundle, const std::string& method) {
  const Json& gap = entry_of(bundle, "other_cache");
  if (!gap.is_string()) return std::nullopt;
  return Caution{.kind = "other-cache",
                 .method = method,
                 .measured = gap.get<std::string>(),
                 .sentence = fmt::format("the figures are not those of {} as it is served: {}",
                                         name_of_file(bundle), gap.get<std::string>())};
}

void add_of_bundle(const Json& bundle, const std::string& method, std::vector<Caution>& list) {
  if (auto caution = other_cache_than_served(bundle, method)) list.push_back(std::move(*caution));
  if (auto caution = shared_text(bundle, method)) list.push_back(std::move(*caution));
  if (!bundle.is_object() || !bundle.contains("convergence")) return;  // earlier reports
  if (auto caution = little_text(bundle.at("convergence"), method, name_of_file(bundle))) {
    list.push_back(std::move(*caution));
  }
}

void add_portable(const Json& report, std::vector<Caution>& list) {
  const MeasuredKl kl = measured_kl(report);
  if (!kl.own || !(*kl.own > 0)) return;
  for (const auto& [name, value] :
       {std::pair{"portable", kl.shared}, std::pair{"portable-perhead", kl.per_head}}) {
    if (!value || *value / *kl.own < kTooManyTimes) continue;
    const std::string times =
        fmt::format("{:.{}f} times", *value / *kl.own, *value / *kl.own < 9.95 ? 1 : 0);
    list.push_back(
        {.kind = "portable",
         .method = "bundle",
         .measured = times + " its KL",
         .sentence = fmt::format("KL of the variant {}, which other backends run, is about "
                                 "{} the bundle's: do not serve it",
                                 name, times)});
  }
}

// Of the text, and 0 where it is not known.
double copied_share(const Json& report) {
  const double share = number_at(report, "repeated_share");
  return share > 0 && share <= 1 ? share : 0;
}

// Where that is worth a word.
std::string copied_words(const Json& report) {
  const double share = copied_share(report);
  return share > kNotableRepeats
             ? fmt::format("{:.0f}% of the evaluation's text repeats itself", 100 * share)
             : "";
}

std::optional<Caution> repeated_text(const Json& report) {
  const std::string measured = copied_words(report);
  if (measured.empty()) return std::nullopt;
  return Caution{
      .kind = "repeated-text",
      .method = "",
      .measured = measured,
      .sentence =
          measured + ": copies say nothing new, and intervals are too narrow; leave them out"};
}

std::optional<Caution> few_tokens(const Json& report) {
  if (!has_few_units(report)) return std::nullopt;
  std::string measured = count(number_at(report, "tokens")) + " tokens";
  if (!copied_words(report).empty()) measured += " with copies";
  return Caution{.kind = "few-tokens",
                 .method = "",
                 .measured = measured,
                 .sentence = fmt::format("the evaluation counts {} in {}, too few for 95% "
                                         "intervals; use {} sequences or {} tokens and more",
                                         measured, resampling_words(report), kFewestUnits,
                                         count(static_cast<double>(kFewestUnits * kUnitTokens)))};
}

// A model that guesses, or gives every token the same probability: no cache makes it worse.
std::optional<Caution> predicts_nothing(const Json& report) {
  constexpr double kGuessing = 1e-3;  // relative, of log and exp in float32
  const Json& perplexity = entry_of(entry_of(entry_of(report, "methods"), "bf16"), "ppl");
  const double mean = number_at(perplexity, "mean"), error = number_at(perplexity, "se"),
               vocabulary = number_at(entry_of(report, "model"), "vocab_size");
  const bool guesses = mean >= vocabulary * (1 - kGuessing);
  const bool alike = error == 0 && copied_words(report).empty();  // copies are alike in any model
  if (!guesses && !alike) return std::nullopt;
  std::string measured = "BF16 perplexity " + figure(mean);
  if (alike) measured += " on every piece of text";
  if (std::isfinite(vocabulary)) measured += ", vocabulary " + count(vocabulary);
  return Caution{.kind = "predicts-nothing",
                 .method = "",
                 .measured = measured,
                 .sentence = "the model itself predicts nothing: " + measured};
}

}  // namespace

bool has_few_units(const Json& report) {
  const double distinct = number_at(report, "resampling_units") * (1 - copied_share(report));
  // A copy less or more by rounding is none.
  return std::round(distinct) < static_cast<double>(kFewestUnits);
}

std::string resampling_words(const Json& report) {
  const double units = number_at(report, "resampling_units"),
               sequences = number_at(report, "sequences");
  if (!std::isfinite(units) || !std::isfinite(sequences)) return "";
  const auto counted = [](double number, const char* what) {
    return fmt::format("{} {}{}", count(number), what, number == 1 ? "" : "s");
  };
  const bool whole = units == sequences && sequences >= static_cast<double>(kFewestUnits);
  if (whole) return counted(sequences, "sequence");
  return fmt::format("{} of at most {} tokens ({})", counted(units, "piece"), kUnitTokens,
                     counted(sequences, "sequence"));
}

std::vector<Caution> cautions_of(const Json& report) {
  std::vector<Caution> list;
  if (auto caution = few_tokens(report)) list.push_back(std::move(*caution));
  if (auto caution = repeated_text(report)) list.push_back(std::move(*caution));
  if (auto caution = predicts_nothing(report)) list.push_back(std::move(*caution));
  add_of_bundle(entry_of(report, "bundle"), "bundle", list);
  if (const Json& bundles = entry_of(report, "bundles"); bundles.is_object()) {
    for (const auto& [name, bundle] : bundles.items()) add_of_bundle(bundle, name, list);
  }
  add_portable(report, list);
  return list;
}

std::optional<Caution> little_text(const Json& record, const std::string& method,
                                   const std::string& file) {
  const Json &problem = entry_of(record, "problem"), &enough = entry_of(record, "enough");
  if (problem.is_string() || !enough.is_boolean()) {
    const std::string measured =
        "could not be judged: " + (problem.is_string() ? problem.get<std::string>() : kNoVerdict);
    return Caution{.kind = "little-text",
                   .method = method,
                   .measured = measured,
                   .sentence = fmt::format("the calibration text of {} {}", file, measured)};
  }
  if (enough == true) return std::nullopt;
  const double fall = number_at(record, "fall_per_doubling"),
               needed = number_at(record, "tokens_needed");
  std::string measured = "not enough";
  if (std::isfinite(fall)) {
    measured += fmt::format(": predicted loss still falls by {:.1f}% per doubling", 100 * fall);
  }
  std::string sentence = fmt::format("the calibration text of {} is {}", file, measured);
  if (std::isfinite(needed)) sentence += fmt::format("; use about {:.0f} tokens", needed);
  return Caution{.kind = "little-text",
                 .method = method,
                 .measured = std::move(measured),
                 .sentence = std::move(sentence)};
}

// Reading a document of any shape: a wrong type counts as absent.

namespace {

constexpr double kNormal95 = 1.959963984540054;
constexpr size_t kLongestList = 4096;  // entries of a list that a picture reads

const Json& at(const Json& json, const char* key) {
  static const Json none;
  if (!json.is_object()) return none;
  const auto found = json.find(key);
  return found == json.end() ? none : *found;
}

bool has(const Json& json, const char* key) { return json.is_object() && json.contains(key); }

// null is how the JSON writes a number that is not finite.
double number_or_nan(const Json& json) { return json.is_number() ? json.get<double>() : NAN; }

Figure get_figure(const Json& json, const char* key) {
  const Json& value = at(json, key);
  if (value.is_number()) return value.get<double>();
  return has(json, key) && value.is_null() ? Figure(NAN) : Figure();
}

std::string get_text(const Json& json, const char* key) {
  const Json& value = at(json, key);
  return value.is_string() ? value.get<std::string>() : std::string();
}

std::vector<double> numbers_of(const Json& value) {
  std::vector<double> list;
  if (!value.is_array()) return list;
  for (const Json& entry : value) {
    if (list.size() < kLongestList) list.push_back(number_or_nan(entry));
  }
  return list;
}

std::vector<double> get_list(const Json& json, const char* key) {
  return numbers_of(at(json, key));
}

// Objects keyed by numbers, in ascending order.
std::vector<std::pair<double, double>> get_table(const Json& json, const char* key) {
  std::vector<std::pair<double, double>> table;
  const Json& value = at(json, key);
  if (!value.is_object()) return table;
  for (const auto& [name, entry] : value.items()) {
    double place = 0;
    const char* const end = name.data() + name.size();
    const auto [stop, status] = std::from_chars(name.data(), end, place);
    if (status == std::errc() && stop == end && std::isfinite(place)) {
      table.emplace_back(place, number_or_nan(entry));
    }
  }
  std::sort(table.begin(), table.end());
  return table;
}

// From mean and standard error, kept at `floor` or above.
Span95 span_of_estimate(const Json& json, double floor) {
  Span95 span{get_figure(json, "mean"), {}, {}};
  const Figure se = get_figure(json, "se");
  if (is_finite(span.mean) && is_finite(se) && *se > 0) {
    // A mean below the floor, as roundings of both signs may leave, is no reason to start above it.
    span.low = std::max(std::min(floor, *span.mean), *span.mean - kNormal95 * *se);
    span.high = *span.mean + kNormal95 * *se;
  }
  return span;
}

Span95 span_of_interval(const Json& json) {
  return {get_figure(json, "mean"), get_figure(json, "low"), get_figure(json, "high")};
}

NeedleRate read_rate(const Json& json) {
  return {get_figure(json, "passed").value_or(0), get_figure(json, "prompts").value_or(0),
          get_figure(json, "rate"), get_figure(json, "low"), get_figure(json, "high")};
}

NeedleFigures read_needles(const Json& json) {
  NeedleFigures needles;
  needles.all = read_rate(json);
  needles.margin = get_figure(at(json, "margin"), "mean");
  if (const Json& kinds = at(json, "kinds"); kinds.is_object()) {
    for (const auto& [name, rate] : kinds.items())
      needles.kinds.emplace_back(name, read_rate(rate));
  }
  if (const Json& cells = at(json, "cells"); cells.is_array()) {
    for (const Json& cell : cells) {
      if (needles.cells.size() >= kLongestList) break;
      const NeedleCell read{number_or_nan(at(cell, "length")), number_or_nan(at(cell, "depth")),
                            number_or_nan(at(cell, "passed")), number_or_nan(at(cell, "prompts"))};
      if (read.prompts > 0 && std::isfinite(read.prompts) && read.passed >= 0 &&
          read.passed <= read.prompts && std::isfinite(read.length) && std::isfinite(read.depth)) {
        needles.cells.push_back(read);
      }
    }
  }
  const Json& mcnemar = at(json, "mcnemar");
  needles.only_bf16 = get_figure(mcnemar, "only_bf16");
  needles.only_method = get_figure(mcnemar, "only_method");
  needles.mcnemar_p = get_figure(mcnemar, "p");
  if (has(json, "generated")) needles.generated = read_rate(at(json, "generated"));
  return needles;
}

void leave_out_intervals(MethodFigures& m) {
  for (Span95* span : {&m.nll_increase, &m.perplexity, &m.kl, &m.top1, &m.kl_difference}) {
    span->low = span->high = {};
  }
}

MethodFigures read_method(const std::string& name, const Json& json) {
  MethodFigures m;
  m.name = name;
  m.summary = get_text(json, "summary");
  m.variant = name.find('@') != std::string::npos;
  m.reference = name == "bf16";
  m.exact = name == "exact";
  m.rival = has(json, "source");
  m.bits = get_table(json, "bpe");
  m.has_text = has(json, "kl");
  m.nll_increase = span_of_interval(at(json, "nll_increase"));
  m.perplexity = span_of_estimate(at(json, "ppl"), 1);
  m.kl = span_of_estimate(at(json, "kl"), 0);
  m.top1 = span_of_estimate(at(json, "top1"), 0);
  if (m.top1.high) m.top1.high = std::min(1.0, *m.top1.high);
  const Json& above = at(at(json, "kl"), "above_floor");
  if (above.is_boolean()) m.above_floor = above.get<bool>();
  m.kl_percentiles = get_table(at(json, "kl"), "percentiles");
  m.kl_by_position = get_list(at(json, "kl"), "by_position");
  m.output_nmse = get_list(json, "output_nmse");
  if (const Json& layers = at(json, "output_nmse_heads"); layers.is_array()) {
    for (const Json& heads : layers) {
      if (m.output_nmse_heads.size() < kLongestList) {
        m.output_nmse_heads.push_back(numbers_of(heads));
      }
    }
  }
  m.key_row = get_list(at(json, "key_row"), "transformed");
  m.key_row_read = get_list(at(json, "key_row"), "read_back");
  m.kl_difference = span_of_interval(at(json, "kl_difference"));
  m.against = get_text(at(json, "kl_difference"), "against");
  if (has(json, "niah")) m.needles = read_needles(at(json, "niah"));
  return m;
}

void read_pictures(const Json& report, ReportData& data) {
  if (const Json& row = at(report, "key_row"); row.is_object()) {
    data.key_row = {number_or_nan(at(row, "layer")), number_or_nan(at(row, "head")),
                    number_or_nan(at(row, "position")), get_figure(row, "peak"),
                    get_list(row, "written")};
  }
  const Json& spectra = at(report, "spectra");
  data.ranks = get_list(spectra, "ranks");
  if (const Json& layers = at(spectra, "layers"); layers.is_array()) {
    for (const Json& layer : layers) {
      data.spectra.push_back(
          {number_or_nan(at(layer, "layer")), get_list(at(layer, "key"), "share"),
           get_list(at(layer, "value"), "share"), get_figure(at(layer, "key"), "effective_rank"),
           get_figure(at(layer, "value"), "effective_rank")});
    }
  }
  const Json& channels = at(report, "channels");
  data.channel_tokens = get_figure(channels, "tokens");
  if (const Json& layers = at(channels, "layers"); layers.is_array()) {
    for (const Json& layer : layers) {
      const Json &key = at(layer, "key"), &value = at(layer, "value");
      data.channels.push_back({number_or_nan(at(layer, "layer")), get_list(key, "peak_before"),
                               get_list(key, "peak_after"), get_list(value, "peak_before"),
                               get_list(value, "peak_after")});
    }
  }
  const Json& profile = at(channels, "profile");
  if (profile.is_object()) {
    data.profile = {number_or_nan(at(profile, "layer")), number_or_nan(at(profile, "head")),
                    get_list(profile, "before"), get_list(profile, "after")};
  }
}

std::string joined_sources(const Json& corpus) {
  std::string text;
  const Json& sources = at(corpus, "sources");
  if (!sources.is_array()) return text;
  for (const Json& source : sources) {
    if (!text.empty()) text += ", ";
    text += fmt::format("{} ({} tokens)", get_text(source, "name"),
                        count(get_figure(source, "tokens")));
  }
  return text;
}

void read_facts(const Json& report, ReportData& data) {
  const auto add = [&](const char* label, const std::string& value) {
    if (!value.empty()) data.facts.emplace_back(label, value);
  };
  const Json &model = at(report, "model"), &bundle = at(report, "bundle"),
             &corpus = at(report, "corpus"), &q = at(report, "quantizer"),
             &tool = at(report, "tool");
  add("Model", data.architecture.empty()
                   ? data.model
                   : fmt::format("{} ({}, {} layers)", data.model, data.architecture,
                                 count(get_figure(model, "num_layers"))));
  add("Quantized weights", get_text(model, "quantization"));
  add("Weights fingerprint", get_text(model, "weights_fingerprint"));
  if (bundle.is_object()) {
    add("Bundle", fmt::format("{}: preset {}, method {}, {}", get_text(bundle, "file"),
                              get_text(bundle, "preset"), get_text(bundle, "method"),
                              get_text(bundle, "granularity")));
    add("Bundle content", get_text(bundle, "content_sha256"));
    add("Its serving content", get_text(bundle, "serving_sha256"));
    if (const Json& overlap = at(bundle, "overlap"); overlap.is_object()) {
      add("Text seen in calibration", entry_of(overlap, "known") == false
                                          ? "not known"
                                          : percent(get_figure(overlap, "share")));
    }
  }
  add("Corpus", joined_sources(corpus));
  add("Corpus tokens", get_text(corpus, "tokens_sha256"));
  if (data.has_text) {
    add("Counted",
        fmt::format("{} predicted tokens in {} sequences of at most {}, from position {} on",
                    count(data.tokens), count(data.sequences), count(data.longest),
                    count(data.first_position)));
    add("Independent pieces", data.pieces);
  }
  add("Mode", data.mode);
  add("Engine", get_text(report, "engine"));
  add("Position offset", count(data.position_offset));
  if (q.is_object()) {
    add("Cache format",
        fmt::format("{} bits, groups of {}, {} scale and zero; first {} and last {} tokens in BF16",
                    count(get_figure(q, "bits")), count(get_figure(q, "quant_group_size")),
                    get_text(q, "metadata_dtype"), count(get_figure(q, "sink")),
                    count(get_figure(q, "recent"))));
  }
  const Figure threads = get_figure(report, "threads");
  add("Device", data.device + (threads ? fmt::format(", {} threads", count(threads)) : ""));
  add("Seed", has(report, "seed") ? at(report, "seed").dump() : "");
  add("Version", fmt::format("{} ({})", get_text(tool, "version"), get_text(tool, "commit")));
}

// "128 of 2,048 tokens (text), 0 of 48 prompts (needles)".
std::string partial_words(const Json& partial) {
  if (!partial.is_object()) return "";
  std::string words;
  for (const auto& [task, part] : partial.items()) {
    if (!part.is_object() || part.empty()) continue;
    const std::string& unit = part.begin().key();
    words += fmt::format("{}{} of {} {} ({})", words.empty() ? "" : ", ",
                         count(get_figure(part, unit.c_str())), count(get_figure(part, "of")), unit,
                         task);
  }
  return words.empty() ? "a part" : words;
}

void require_schema(const Json& report) {
  const std::string schema = get_text(report, "schema");
  if (schema != "oscar-eval-1") {
    throw Error({.what = "this is no report that a page can be made of",
                 .where = "schema",
                 .expected = "a JSON report of oscar-eval, \"oscar-eval-1\"",
                 .found = schema.empty() ? "none" : schema});
  }
  const Json& methods = at(report, "methods");
  if (!methods.is_object() || methods.empty()) {
    throw Error({.what = "the report compares no methods", .where = "methods"});
  }
}

RowClassFigures read_row_classes(const Json& shares) {
  return {get_figure(shares, "separators"), get_figure(shares, "sinks"),
          get_figure(shares, "others")};
}

}  // namespace

Figure MethodFigures::bits_at(double length) const {
  for (const auto& [place, value] : bits) {
    if (place == length) return value;
  }
  std::vector<std::pair<double, double>> below;  // longer than the windows
  std::ranges::copy_if(bits, std::back_inserter(below), [](const auto& point) {
    return point.first > 0 && point.second > 0 && point.second < 16;
  });
  if (below.size() < 2 || below.front().first == below.back().first || !(length > 0)) return {};
  const auto& [short_length, short_bits] = below.front();
  const auto& [long_length, long_bits] = below.back();
  const double windows = (short_bits - long_bits) / (1 / short_length - 1 / long_length);
  return std::min(16.0, long_bits + windows * (1 / length - 1 / long_length));
}

double ReportData::local_bytes(double context) const {
  if (!is_finite(local_window) || !is_finite(local_elements)) return 0;
  return 2 * *local_elements * std::min(context, *local_window);
}

const MethodFigures* ReportData::find(const std::string& name) const {
  for (const MethodFigures& method : methods) {
    if (method.name == name) return &method;
  }
  return nullptr;
}

ReportData read_report(const Json& report) {
  require_schema(report);
  ReportData data;
  const Json& model = at(report, "model");
  data.model = get_text(model, "name");
  data.architecture = get_text(model, "architecture");
  data.elements_per_token = get_figure(model, "cache_elements_per_token");
  data.local_window = get_figure(at(model, "local_windows"), "window");
  data.local_elements = get_figure(at(model, "local_windows"), "elements_per_token");
  data.max_positions = get_figure(model, "max_positions");
  data.num_layers = get_figure(model, "num_layers");
  data.quantized_layers = get_figure(model, "quantized_layers");
  data.has_bundle = at(report, "bundle").is_object();
  data.bundle = get_text(at(report, "bundle"), "file");
  data.serving_sha256 = get_text(at(report, "bundle"), "serving_sha256");
  data.mode = get_text(report, "mode");
  data.device = get_text(report, "device");
  data.command = get_text(report, "command");
  data.partial = partial_words(at(report, "partial"));
  data.cautions = cautions_of(report);
  data.has_text = has(report, "tokens");
  data.tokens = get_figure(report, "tokens");
  data.sequences = get_figure(report, "sequences");
  data.first_position = get_figure(report, "first_position");
  data.longest = get_figure(report, "longest_sequence");
  data.kl_floor = get_figure(report, "kl_floor");
  data.resampling_units = get_figure(report, "resampling_units");
  data.pieces = resampling_words(report);
  data.position_offset = get_figure(report, "position_offset");
  data.has_needles = at(report, "needle").is_object();
  data.needle_prompts = get_figure(at(report, "needle"), "prompts");
  for (const auto& [length, prompts] : get_table(at(report, "needle"), "lengths")) {
    data.needle_lengths.push_back(length);
  }
  for (const auto& [name, method] : at(report, "methods").items()) {
    data.methods.push_back(read_method(name, method));
  }
  if (const Json& bundles = at(report, "bundles"); bundles.is_object()) {
    for (const auto& [name, bundle] : bundles.items()) data.named_bundles.push_back(name);
  }
  const Json& separated = at(report, "separators");
  data.separator_gap = get_figure(separated, "gap");
  if (const Json& methods = at(separated, "methods");
      methods.is_object() && data.separator_gap.value_or(0) >= 1 && *data.separator_gap < 1e9) {
    for (const auto& [name, method] : methods.items()) {
      data.separated.push_back(read_method(name, method));
    }
  }
  if (has_few_units(report)) {
    for (MethodFigures& m : data.methods) leave_out_intervals(m);
    for (MethodFigures& m : data.separated) leave_out_intervals(m);
  }
  const Json& rows = at(separated, "rows");
  data.row_share = read_row_classes(at(rows, "rows"));
  data.attention_share = read_row_classes(at(rows, "attention"));
  if (const Json& methods = at(rows, "methods"); methods.is_object()) {
    for (const auto& [name, errors] : methods.items()) {
      data.row_errors.push_back({name, read_row_classes(at(errors, "key_error")),
                                 read_row_classes(at(errors, "value_error"))});
    }
  }
  data.positions = get_list(report, "positions");
  read_pictures(report, data);
  read_facts(report, data);
  return data;
}

}  // namespace oscar
