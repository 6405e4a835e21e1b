// A report of known content for the tests of the page, and a small check that markup is
// well-formed.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/json.h"

namespace oscar::report_sample {

inline Json estimate(double mean, double se) { return {{"mean", mean}, {"se", se}}; }

inline Json rate(int passed, int prompts) {
  const double r = static_cast<double>(passed) / prompts;
  return {{"passed", passed},
          {"prompts", prompts},
          {"rate", r},
          {"low", std::max(0.0, r - 0.04)},
          {"high", std::min(1.0, r + 0.04)}};
}

// One method with KL `kl`; perplexity grows with it.
inline Json method(double kl, int layers, int passed) {
  Json m;
  m["summary"] = "a method";
  m["bpe"] = {{"8192", 2.787}, {"32768", 2.384}, {"131072", 2.284}, {"4096", 3.324}};
  m["nll"] = estimate(2.18 + kl, 0.01);
  m["ppl"] = estimate(std::exp(2.18 + kl), 0.08);
  m["nll_increase"] = {{"mean", kl}, {"low", 0.9 * kl}, {"high", 1.1 * kl}};
  m["kl"] = {{"mean", kl}, {"se", kl / 30}, {"max", 40 * kl}, {"above_floor", true}};
  for (const char* p : {"1", "25", "50", "75", "90", "99", "99.9"}) {
    m["kl"]["percentiles"][p] = kl * (0.1 + std::stod(p) / 30);
  }
  m["top1"] = estimate(std::max(0.0, 1 - 5 * kl), 0.001);
  m["output_nmse"] = Json::array();
  for (int l = 0; l < layers; ++l) m["output_nmse"].push_back(kl * (1 + l));
  m["niah"] = rate(passed, 400);
  m["niah"]["margin"] = estimate(3, 0.1);
  m["niah"]["kinds"] = {{"single", rate(passed, 400)}, {"multikey", rate(passed / 2, 200)}};
  m["niah"]["cells"] = Json::array();
  for (const int length : {1024, 3968}) {
    for (const double depth : {0.0, 0.5, 1.0}) {
      m["niah"]["cells"].push_back(
          {{"length", length}, {"depth", depth}, {"passed", passed / 10}, {"prompts", 40}});
    }
  }
  m["niah"]["mcnemar"] = {{"only_bf16", 9}, {"only_method", 2}, {"p", 0.065}};
  return m;
}

inline Json spectra(int layers) {
  Json json = {{"ranks", {1, 2, 4, 8}}, {"layers", Json::array()}};
  for (int l = 0; l < layers; ++l) {
    const Json side = {{"share", {0.6, 0.2, 0.05, 0.01}}, {"effective_rank", 3.5}};
    json["layers"].push_back({{"layer", l}, {"key", side}, {"value", side}});
  }
  return json;
}

inline Json channels(int layers) {
  Json json = {{"tokens", 1000}, {"layers", Json::array()}};
  for (int l = 0; l < layers; ++l) {
    const Json side = {{"peak_before", {6.0 + l, 4.0}}, {"peak_after", {1.2, 1.1}}};
    json["layers"].push_back({{"layer", l}, {"key", side}, {"value", side}});
  }
  json["profile"] = {
      {"layer", 0}, {"head", 1}, {"before", {1.0, 0.8, 6.0, 1.1}}, {"after", {1.0, 0.9, 1.2, 1.1}}};
  return json;
}

// A whole report: bf16, exact, identity, oscar and bundle, text and needles, a bundle.
inline Json report(int layers = 4) {
  Json r;
  r["schema"] = "oscar-eval-1";
  r["tool"] = {{"version", "0.1.0"}, {"commit", "abc"}};
  r["command"] = "oscar-eval sample --bundle sample.h5";
  r["model"] = {{"name", "sample"},        {"architecture", "Qwen3ForCausalLM"},
                {"num_layers", layers},    {"cache_elements_per_token", 4096},
                {"max_positions", 131072}, {"weights_fingerprint", "f00d"}};
  r["bundle"] = {{"file", "sample.h5"}, {"content_sha256", "aa"}, {"serving_sha256", "c0ffee"},
                 {"preset", "best"},    {"method", "balanced"},   {"granularity", "per-head"}};
  r["corpus"] = {{"sources", Json::array({{{"name", "heldout.jsonl"}, {"tokens", 8192}}})},
                 {"tokens_sha256", "70"}};
  r["device"] = "cpu, fp32";
  r["threads"] = 2;
  r["seed"] = 0;
  r["mode"] = "decode";
  r["position_offset"] = 0;
  r["quantizer"] = {{"bits", 2},
                    {"sink", 64},
                    {"recent", 256},
                    {"quant_group_size", 128},
                    {"metadata_dtype", "fp16"},
                    {"demote_block", 1}};
  r["methods"]["bf16"] = method(0, layers, 392);
  r["methods"]["bf16"]["output_nmse"] = Json::array();
  r["methods"]["bf16"]["niah"].erase("mcnemar");
  r["methods"]["exact"] = method(1e-7, layers, 392);
  r["methods"]["identity"] = method(6.66, layers, 0);
  r["methods"]["oscar"] = method(0.101, layers, 228);
  r["methods"]["bundle"] = method(0.009, layers, 390);
  for (const char* name : {"identity", "oscar"}) {
    r["methods"][name]["kl_difference"] = {
        {"mean", 0.09}, {"low", 0.08}, {"high", 0.1}, {"against", "bundle"}};
  }
  r["tokens"] = 7552;
  r["sequences"] = 2;
  r["first_position"] = 320;
  r["longest_sequence"] = 4096;
  r["resampling_units"] = 16;
  r["kl_floor"] = 1e-7;
  r["needle"] = {{"prompts", 400}, {"lengths", {{"1024", 200}, {"3968", 200}}}};
  r["key_row"] = {{"layer", 1},
                  {"head", 0},
                  {"position", 192},
                  {"peak", 11.5},
                  {"written", {9.0, 0.1, -0.2, 0.4}}};
  r["methods"]["identity"]["key_row"] = {{"transformed", {9.0, 0.1, -0.2, 0.4}},
                                         {"read_back", {9.0, 0.0, 0.0, 0.0}}};
  r["methods"]["bundle"]["key_row"] = {{"transformed", {2.0, 1.0, -1.0, 0.0}},
                                       {"read_back", {2.0, 1.0, -1.0, 0.5}}};
  r["spectra"] = spectra(layers);
  r["channels"] = channels(layers);
  return r;
}

// What is wrong with `text` as XML, or "" when it is well-formed: every element closed in order,
// attributes quoted, no bare '<' or '&', no control characters.
inline std::string malformed(std::string_view text) {
  std::vector<std::string> open;
  const auto near = [&](size_t i) { return fmt::format("at {}: {}", i, text.substr(i, 60)); };
  for (size_t i = 0; i < text.size();) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c < 0x20 && c != '\n' && c != '\t') return "control character " + near(i);
    if (c == '&') {
      const size_t end = text.find(';', i);
      if (end == std::string_view::npos || end - i > 6) return "bare ampersand " + near(i);
    }
    if (c != '<') {
      ++i;
      continue;
    }
    // The end of the tag: the first '>' outside quotes.
    size_t end = i + 1;
    for (char quote = 0; end < text.size() && (quote != 0 || text[end] != '>'); ++end) {
      if (text[end] == '<') return "'<' inside a tag " + near(i);
      if (text[end] == '"') quote = quote == 0 ? '"' : 0;
    }
    if (end >= text.size()) return "tag without end " + near(i);
    const std::string_view tag = text.substr(i + 1, end - i - 1);
    const std::string name(tag.substr(0, tag.find_first_of(" \n/", tag.starts_with('/') ? 1 : 0)));
    if (tag.starts_with('!')) {
      if (i != 0) return "declaration inside " + near(i);
    } else if (tag.starts_with('/')) {
      if (open.empty() || open.back() != name.substr(1))
        return "closes what is not open " + near(i);
      open.pop_back();
    } else {
      for (size_t e = tag.find('='); e != std::string_view::npos; e = tag.find('=', e + 1)) {
        const auto quotes = std::ranges::count(tag.substr(0, e), '"');
        if (quotes % 2 == 0 && (e + 1 >= tag.size() || tag[e + 1] != '"')) {
          return "attribute without quotes " + near(i);
        }
      }
      if (!tag.ends_with('/')) open.push_back(name);
    }
    i = end + 1;
  }
  return open.empty() ? "" : "never closed: " + open.back();
}

inline bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

inline size_t occurrences(std::string_view text, std::string_view part) {
  size_t found = 0;
  for (size_t i = text.find(part); i != std::string_view::npos; i = text.find(part, i + 1)) ++found;
  return found;
}

}  // namespace oscar::report_sample
