// What of a model a plan of memory needs: layers, positions, the quantizer and the weights' bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// What a layer of linear attention keeps of one request, as vLLM 0.26 does: [num_value_heads,
// value_dim, key_dim] numbers, and in BF16 the last taps - 1 inputs of its convolution.
struct LinearState {
  DeltaNetSpec heads;
  int recurrent_bytes = 2;  // of a number of the state proper

  int64_t bytes() const {
    return heads.channels() * (heads.taps - 1) * 2 +
           heads.value_rows() * heads.key_dim * recurrent_bytes;
  }
};

// A model as far as its cache goes.
struct CachedModel {
  std::string name, architecture;
  std::vector<LayerGeometry> layers;
  int64_t max_positions = 0;                // that the model serves; 0: not known
  CacheFormat quantizer;                    // of a bundle, or the defaults
  std::optional<int64_t> weight_bytes;      // none: not known
  std::string weight_source;                // "its safetensors files", ...; or why it is not known
  std::optional<LinearState> linear_state;  // of each layer of kind kNone; none: not known
};

// Of a checkpoint folder, a .gguf file, an embedded model's name or a bundle. Of a folder
// config.json and the sizes and headers of the files that a loader reads are looked at, and no
// weight, so that any quantization will do; a missing shard leaves the weights unknown, and one
// that is cut short or a pointer of Git LFS is an Error. Without such files the weights are counted
// by their shapes, in the bits of config.json: BF16, FP8, AWQ or GPTQ. Of a GGUF file they count in
// BF16, as in the folder that servers load of it. A bundle does not know the weights, nor the state
// of linear attention, which is read of config.json alone. Throws Error for anything else.
CachedModel read_cached_model(const std::string& model);

}  // namespace oscar
