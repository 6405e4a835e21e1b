// Values of config.json: each one checked, every error with file and key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "oscar/base/json.h"

namespace oscar {

// Bounds that no real model comes near; they keep products of sizes inside 64 bits.
inline constexpr int64_t kMaxLayers = 4096, kMaxHeads = 8192, kMaxHeadDim = 4096;
inline constexpr int64_t kMaxWidth = int64_t{1} << 22, kMaxVocab = int64_t{1} << 26;
inline constexpr int64_t kMaxLength = int64_t{1} << 30, kMaxExperts = 2048;

// Types of layers in layer_types and, of some families, in rope_parameters.
inline constexpr const char *kFullAttention = "full_attention",
                            *kSlidingAttention = "sliding_attention";

struct ConfigReader {
  const Json& json;
  const std::string& source;  // the file, for messages

  // Throws Error naming file and key.
  [[noreturn]] void refuse(const std::string& key, const std::string& what,
                           const std::string& expected) const;

  // Present and not null.
  bool has(const std::string& key) const { return json.contains(key) && !json[key].is_null(); }

  // An integer from min to max; none where the key is absent or null.
  std::optional<int> size(const std::string& key, int64_t max, int64_t min = 1) const;
  bool flag(const std::string& key, bool fallback) const;
  double number(const std::string& key, double fallback, double low, double high) const;
  std::string text(const std::string& key, const std::string& fallback) const;
};

}  // namespace oscar
