// One row at a time, from the file or from the decoder of its type.
#include "oscar/bundle/weight_samples.h"

#include <cmath>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar {
namespace {

// E4M3 without infinities: sign, 4 bits of exponent, 3 of mantissa.
float fp8_to_float(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

float stored_float(Dtype dtype, const std::byte* place) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, place, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, place, sizeof bits);
  return dtype == Dtype::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

// A matrix of a source, row by row.
class Rows {
 public:
  Rows(const WeightSource& source, const WeightSpec& spec)
      : view_(source.get(spec.name, spec.shape)), stored_(source.stored_bytes(spec.name)) {}

  std::vector<float> operator[](int64_t row) const {
    const int64_t columns = view_.shape[1];
    std::vector<float> values(static_cast<size_t>(columns));
    if (view_.data == nullptr) {
      view_.decode(row, 1, values.data());
      return values;
    }
    const size_t entry = view_.fp8 ? 1 : dtype_bytes(view_.dtype);
    std::vector<std::byte> bytes(values.size() * entry);
    // Not through the map, where a page brings megabytes along.
    stored_.read(static_cast<size_t>(row) * bytes.size(), bytes.size(), bytes.data());
    for (int64_t column = 0; column < columns; ++column) {
      const auto i = static_cast<size_t>(column);
      values[i] = view_.fp8 ? fp8_to_float(static_cast<uint8_t>(bytes[i])) * scale(row, column)
                            : stored_float(view_.dtype, bytes.data() + i * entry);
    }
    return values;
  }

 private:
  float scale(int64_t row, int64_t column) const {
    const BlockScales& fp8 = *view_.fp8;
    const int64_t across = (view_.shape[1] + fp8.block_columns - 1) / fp8.block_columns;
    return fp8
        .scales[static_cast<size_t>(row / fp8.block_rows * across + column / fp8.block_columns)];
  }

  TensorView view_;
  StoredBytes stored_;
};

// The matrix's place among the samples; -1: it is not sampled.
int sampled_index(WeightRole role) {
  switch (role) {
    case WeightRole::kQ:
      return 0;
    case WeightRole::kK:
      return 1;
    case WeightRole::kV:
      return 2;
    case WeightRole::kO:
      return 3;
    default:
      return -1;
  }
}

void sample_matrix(const WeightSource& source, const WeightSpec& spec, int index,
                   MatrixStack<float>& samples) {
  const Rows matrix(source, spec);
  const bool by_columns = spec.role == WeightRole::kO;
  const int64_t part = spec.shape[by_columns ? 1 : 0] / samples.count;  // of a KV head
  const int64_t rows = by_columns ? spec.shape[0] : part;
  const int64_t columns = by_columns ? part : spec.shape[1];
  std::vector<float> row;
  int64_t held = -1;
  const auto take = [&](int head, int sample) {
    const SamplePosition at = sample_position(sample, rows, columns);
    const int64_t wanted = at.row + (by_columns ? 0 : head * part);
    if (wanted != held) row = matrix[held = wanted];
    const float value = row[static_cast<size_t>(at.column + (by_columns ? head * part : 0))];
    samples[head](index, sample) = bf16_to_float(float_to_bf16(value));
  };
  if (by_columns) {  // a row of all heads is read once
    for (int sample = 0; sample < kWeightSamples; ++sample) {
      for (int head = 0; head < samples.count; ++head) take(head, sample);
    }
    return;
  }
  for (int head = 0; head < samples.count; ++head) {
    for (int sample = 0; sample < kWeightSamples; ++sample) take(head, sample);
  }
}

}  // namespace

std::vector<MatrixStack<float>> sample_weights(const ModelConfig& config,
                                               const WeightSource& weights) {
  std::vector<MatrixStack<float>> layers(static_cast<size_t>(config.num_layers));
  for (int layer = 0; layer < config.num_layers; ++layer) {
    if (!config.geometry(layer, 0).fitted()) continue;
    auto& samples = layers[static_cast<size_t>(layer)];
    samples = MatrixStack<float>(config.num_kv_heads, kSampledMatrices, kWeightSamples);
    for (const WeightSpec& spec : layer_weights(config, layer)) {
      const int index = sampled_index(spec.role);
      if (index >= 0) sample_matrix(weights, spec, index, samples);
    }
    for (size_t i = 0; i < samples.data.size(); ++i) {
      if (std::isfinite(samples.data[i])) continue;
      throw Error({.what = "attention weights hold a value that is not finite",
                   .where = weights.shards().front().string() + ": layer " + std::to_string(layer),
                   .hint = "the checkpoint is damaged; fetch it again"});
    }
  }
  return layers;
}

}  // namespace oscar
