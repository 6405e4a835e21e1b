// RoPE: frequencies of every published kind of scaling.
#include "oscar/model/checkpoint/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string_view>

#include "oscar/base/error.h"

namespace oscar {

// Inverse frequencies of the RoPE types that the supported families use.

namespace {

constexpr int64_t kMaxPositions = int64_t{1} << 30;

// Keys that some type below reads, or that change nothing.
constexpr std::array<std::string_view, 17> kKnownKeys = {"rope_theta",
                                                         "rope_type",
                                                         "type",
                                                         "factor",
                                                         "low_freq_factor",
                                                         "high_freq_factor",
                                                         "beta_fast",
                                                         "beta_slow",
                                                         "attention_factor",
                                                         "attn_factor",
                                                         "mscale",
                                                         "mscale_all_dim",
                                                         "truncate",
                                                         "finetuned",
                                                         "freq_factors",
                                                         "original_max_position_embeddings",
                                                         "partial_rotary_factor"};

// Reads numbers of one dictionary; every error names file and key.
struct Parameters {
  const Json& json;
  const std::string& where;

  [[noreturn]] void refuse(const std::string& key, const std::string& what,
                           const std::string& expected) const {
    throw Error({.what = what,
                 .where = where + ": rope " + key,
                 .expected = expected,
                 .found = json.contains(key) ? json[key].dump() : "nothing"});
  }

  bool has(const std::string& key) const { return json.contains(key) && !json[key].is_null(); }

  double number(const std::string& key, double low, double high) const {
    if (!has(key) || !json[key].is_number()) refuse(key, "not a number", "a number");
    const double value = json[key].get<double>();
    if (!(value >= low && value <= high)) {
      refuse(key, "out of range", std::to_string(low) + " to " + std::to_string(high));
    }
    return value;
  }

  double number_or(const std::string& key, double fallback, double low, double high) const {
    return has(key) ? number(key, low, high) : fallback;
  }

  // transformers takes 0 for "not given" here.
  double nonzero_or(const std::string& key, double fallback, double low, double high) const {
    const double value = number_or(key, 0.0, 0.0, high);
    return value == 0.0 ? fallback : number(key, low, high);
  }

  int length_or(const std::string& key, int fallback) const {
    const double value = number_or(key, fallback, 1, double(kMaxPositions));
    if (value != std::floor(value)) refuse(key, "not an integer", "a number of positions");
    return static_cast<int>(value);
  }

  bool flag_or(const std::string& key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!json[key].is_boolean()) refuse(key, "not a boolean", "true or false");
    return json[key].get<bool>();
  }
};

std::vector<double> plain_frequencies(double theta, int dim) {
  std::vector<double> inv_freq(static_cast<size_t>(dim / 2));
  for (int i = 0; i < dim / 2; ++i) inv_freq[i] = std::pow(theta, -2.0 * i / dim);
  return inv_freq;
}

int scaled_length(double length, double factor) {
  return static_cast<int>(std::min(std::floor(length * factor), double(kMaxPositions)));
}

void scale_linear(Rope& rope, const Parameters& parameters, int max_position_embeddings) {
  const double factor = parameters.number("factor", 1.0, 1e6);
  for (double& frequency : rope.inv_freq) frequency /= factor;
  rope.max_positions = scaled_length(max_position_embeddings, factor);
  rope.as_run["factor"] = factor;
}

// Llama 3.1: wavelengths over original / low_freq_factor are stretched by `factor`, those under
// original / high_freq_factor stay, and those between go over linearly in original / wavelength.
void scale_llama3(Rope& rope, const Parameters& parameters, int max_position_embeddings) {
  const double factor = parameters.number("factor", 1.0, 1e6);
  const double low = parameters.number("low_freq_factor", 1e-6, 1e6);
  const double high = parameters.number("high_freq_factor", 1e-6, 1e6);
  const int original =
      parameters.length_or("original_max_position_embeddings", max_position_embeddings);
  if (high <= low) parameters.refuse("high_freq_factor", "out of order", "over low_freq_factor");
  for (double& frequency : rope.inv_freq) {
    const double turns = original * frequency / (2.0 * std::numbers::pi);  // original / wavelength
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    frequency *= kept + (1.0 - kept) / factor;
  }
  rope.max_positions = max_position_embeddings > original ? max_position_embeddings
                                                          : scaled_length(original, factor);
  rope.as_run["factor"] = factor;
  rope.as_run["low_freq_factor"] = low;
  rope.as_run["high_freq_factor"] = high;
  rope.as_run["original_max_position_embeddings"] = original;
}

// YaRN's temperature as a factor on cos and sin: 0.1 mscale ln(factor) + 1.
double yarn_magnitude(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

// YaRN: dimensions that turn more than beta_fast times over the original length stay, those that
// turn less than beta_slow times are stretched, with a linear ramp between.
void scale_yarn(Rope& rope, const Parameters& parameters, int max_position_embeddings) {
  const int original =
      parameters.length_or("original_max_position_embeddings", max_position_embeddings);
  if (!parameters.json.contains("factor")) {
    parameters.refuse("factor", "a RoPE parameter is missing", "a number");
  }
  const double factor =
      parameters.number_or("factor", double(max_position_embeddings) / original, 1.0, 1e6);
  const double beta_fast = parameters.nonzero_or("beta_fast", 32.0, 1e-6, 1e6);
  const double beta_slow = parameters.nonzero_or("beta_slow", 1.0, 1e-6, 1e6);
  const double mscale = parameters.number_or("mscale", 0.0, 0.0, 1e3);
  const double mscale_all_dim = parameters.number_or("mscale_all_dim", 0.0, 0.0, 1e3);
  const bool truncate = parameters.flag_or("truncate", true);
  const double default_magnitude =
      mscale != 0.0 && mscale_all_dim != 0.0
          ? yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
          : yarn_magnitude(factor, 1.0);
  // What vLLM and llama.cpp multiply the magnitude by; transformers knows attention_factor alone.
  const double further = parameters.number_or("attn_factor", 1.0, 0.0, 1e3);
  if (further != 1.0 && parameters.has("attention_factor")) {
    parameters.refuse("attn_factor", "the factor of attention is there under two names",
                      "attention_factor or attn_factor");
  }
  rope.attention_factor =
      parameters.number_or("attention_factor", default_magnitude * further, 0.0, 1e3);

  // The (fractional) pair of dimensions that turns `turns` times over the original length.
  const int dim = rope.rotary_dim;
  const auto pair_of = [&](double turns) {
    return dim * std::log(original / (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(rope.theta));
  };
  double low = pair_of(beta_fast), high = pair_of(beta_slow);
  if (truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) high += 0.001;  // a step instead of a division by zero
  for (int i = 0; i < dim / 2; ++i) {
    const double stretched = std::clamp((i - low) / (high - low), 0.0, 1.0);
    rope.inv_freq[i] *= stretched / factor + (1.0 - stretched);
  }
  rope.max_positions = std::max(max_position_embeddings, scaled_length(original, factor));
  rope.as_run["factor"] = factor;
  rope.as_run["original_max_position_embeddings"] = original;
  rope.as_run["attention_factor"] = rope.attention_factor;
  rope.as_run["beta_fast"] = beta_fast;
  rope.as_run["beta_slow"] = beta_slow;
  rope.as_run["truncate"] = truncate;
}

// A factor on the wavelength of each pair of dimensions, as GGUF files hold them.
void scale_by_factors(Rope& rope, const Parameters& parameters) {
  const std::string key = "freq_factors",
                    expected = "a positive number for each pair of dimensions";
  const Json& factors = parameters.json.contains(key) ? parameters.json[key] : Json();
  if (!factors.is_array() || factors.size() != rope.inv_freq.size()) {
    parameters.refuse(key, "not one factor a pair of dimensions", expected);
  }
  for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
    if (!factors[i].is_number() || !(factors[i] > 0) || !(factors[i] <= 1e6)) {
      parameters.refuse(key, "out of range", expected + " up to 1e6");
    }
    rope.inv_freq[i] /= factors[i].get<double>();
  }
  rope.as_run[key] = factors;
}

void check_keys(const Parameters& parameters) {
  for (const auto& [key, value] : parameters.json.items()) {
    if (value.is_null()) continue;
    if (std::find(kKnownKeys.begin(), kKnownKeys.end(), key) == kKnownKeys.end()) {
      parameters.refuse(key, "this RoPE parameter is not implemented",
                        "parameters of default, linear, llama3, yarn or freq_factors");
    }
  }
}

// The dimensions that turn, rounded down as transformers does.
int rotary_dim_of(const Parameters& parameters, int head_dim) {
  const double factor = parameters.number_or("partial_rotary_factor", 1.0, 0.0, 1.0);
  const int dim = static_cast<int>(head_dim * factor);
  if (dim < 2 || dim % 2 != 0) {
    parameters.refuse("partial_rotary_factor", "RoPE needs pairs of dimensions",
                      "an even share of head_dim " + std::to_string(head_dim));
  }
  return dim;
}

}  // namespace

Rope make_rope(const Json& json, int head_dim, int max_position_embeddings,
               const std::string& where) {
  const Parameters parameters{json, where};
  if (!json.is_object()) {
    throw Error({.what = "the RoPE parameters are not a JSON object", .where = where});
  }
  check_keys(parameters);
  const std::string key = parameters.has("rope_type") ? "rope_type" : "type";
  if (parameters.has(key) && !json[key].is_string()) parameters.refuse(key, "not a name", "a name");

  Rope rope;
  rope.type = parameters.has(key) ? json[key].get<std::string>() : "default";
  rope.theta = parameters.number("rope_theta", 1.0 + 1e-9, 1e15);
  rope.rotary_dim = rotary_dim_of(parameters, head_dim);
  rope.max_positions = max_position_embeddings;
  rope.inv_freq = plain_frequencies(rope.theta, rope.rotary_dim);
  rope.as_run = {{"rope_type", rope.type}, {"rope_theta", rope.theta}};
  if (rope.rotary_dim != head_dim) {
    rope.as_run["partial_rotary_factor"] = json["partial_rotary_factor"];
  }
  if (rope.type == "linear") {
    scale_linear(rope, parameters, max_position_embeddings);
  } else if (rope.type == "llama3") {
    scale_llama3(rope, parameters, max_position_embeddings);
  } else if (rope.type == "yarn") {
    scale_yarn(rope, parameters, max_position_embeddings);
  } else if (rope.type == "freq_factors") {
    scale_by_factors(rope, parameters);
  } else if (rope.type != "default") {
    parameters.refuse(key, "this RoPE type is not implemented",
                      "default, linear, llama3, yarn or freq_factors");
  }
  if (rope.type != "yarn" && parameters.number_or("attn_factor", 1.0, 0.0, 1e3) != 1.0) {
    parameters.refuse("attn_factor", "a factor of attention without YaRN is not implemented", "1");
  }
  rope.as_run["max_positions"] = rope.max_positions;
  return rope;
}

}  // namespace oscar
