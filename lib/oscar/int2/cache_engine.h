// What evaluation asks of an attention that keeps its keys and values in an INT2 cache.
#pragma once

#include <string>

#include "oscar/int2/side_codec.h"
#include "oscar/model/transformer.h"

namespace oscar {

// What Interrupted says when an evaluation is stopped.
inline constexpr const char* kStoppedEvaluation = "stopped; no report was written";

// What one method does to one layer's cache. Copies share tensors.
struct LayerCodec {
  SideCodec key, value;
  bool int2_keys = true, int2_values = true;  // false: that side stays exact
};

// q [batch, Hq, tokens, d] into the basis of the cached keys, float32.
torch::Tensor to_query_basis(const LayerCodec& codec, const torch::Tensor& q);

// Attention output o [batch, Hq, tokens, d] (float32) from the basis of the cached values back to
// the model's; adds the mean that centering took out, because attention weights sum to 1.
torch::Tensor from_value_basis(const LayerCodec& codec, const torch::Tensor& o);

class CacheEngine : public AttentionEngine {
 public:
  // False: the layer runs exactly in the original basis.
  virtual bool quantizes(int layer) const = 0;

  // Queries below this position belong to the prompt (modes prefill and chunked).
  virtual void set_prompt(int64_t tokens) = 0;

  // Position of the first token of every sequence; 0 until it is set.
  virtual void set_first_position(int64_t position) = 0;

  // Before this, attend() takes whole sequences (every key of every query). From here on, k and v
  // of each call are appended to what earlier calls left, up to `longest` tokens a sequence. Each
  // call of keep_cache() begins with an empty cache.
  virtual void keep_cache(int64_t longest) = 0;
};

// What runs a method's attention: the block-wise forward over dequantized rows, or a paged cache
// with the plain CPU twins or the CUDA kernels.
enum class EngineKind : uint8_t { kSimulate, kReference, kKernel };

// "simulate", "reference", "kernel". Throws Error for anything else.
EngineKind parse_engine_kind(const std::string& name);
const char* engine_name(EngineKind kind);

}  // namespace oscar
