// Random codecs and rows for tests of the cache engines.
#pragma once

#include "oscar/attention/int2_attention.h"

namespace oscar_test {

struct CodecKind {
  bool identity = false;  // no transform: cached rows are the rows given
  bool shaped = false;    // noise-shaped rounding with scales corrected by the metric
  int64_t group = 0;      // quant_group_size, 0 = d
};

// Transforms close to the identity, means, clipping that differs by head.
inline std::shared_ptr<oscar::LayerCodec> random_codec(int64_t heads, int64_t d, CodecKind kind) {
  const auto codec = std::make_shared<oscar::LayerCodec>();
  const auto eye = torch::eye(d).repeat({heads, 1, 1});
  for (auto* side : {&codec->key, &codec->value}) {
    const auto noise = torch::randn({heads, d, d}) / std::sqrt(static_cast<double>(d));
    side->forward = kind.identity ? eye : eye + 0.1 * noise;
    if (!kind.identity) side->mean = torch::randn({heads, d});
    for (int64_t h = 0; h < heads; ++h) {
      side->recipe.push_back(
          {h % 2 ? 0.92f : 0.97f,
           kind.shaped ? oscar::ScaleCorrection::kMetric : oscar::ScaleCorrection::kNone,
           kind.shaped ? oscar::Rounding::kShaped : oscar::Rounding::kPlain});
    }
    side->format.quant_group_size = static_cast<int>(kind.group > 0 ? kind.group : d);
    if (kind.shaped) {
      side->feedback = eye + 0.5 * noise.triu(1);
      side->metric = torch::matmul(noise, noise.transpose(1, 2)) + 0.1 * eye;
    }
  }
  codec->key.partner = torch::linalg_inv(codec->key.forward).transpose(1, 2).contiguous();
  codec->value.partner = torch::linalg_inv(codec->value.forward).contiguous();
  return codec;
}

struct Sequences {
  torch::Tensor q, k, v;  // [batch, heads, tokens, d]
};

// Rows that bf16 holds exactly.
inline Sequences random_sequences(int64_t batch, int64_t hq, int64_t hkv, int64_t tokens,
                                  int64_t d) {
  const auto rows = [&](int64_t heads) {
    return torch::randn({batch, heads, tokens, d}).to(torch::kBFloat16).to(torch::kFloat32);
  };
  return {rows(hq), rows(hkv), rows(hkv)};
}

}  // namespace oscar_test
