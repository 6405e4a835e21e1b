// The methods a comparison can name, and how each fills the cache.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "oscar/attention/int2_attention.h"
#include "oscar/bundle/bundle.h"
#include "oscar/cache/rival_formats.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// One row of the comparison, ready to run.
struct Method {
  std::string name;                    // as asked for
  std::string summary;                 // in words
  bool reference = false;              // bf16: the model's own attention
  bool codec_off = false;              // exact: transformed, never quantized
  const RivalFormat* rival = nullptr;  // another project's codec
  // Bits of a value of a coded row, scales included.
  double key_bits = 16, value_bits = 16;
  CacheFormat quantizer;
  CacheView view;
  std::vector<std::shared_ptr<const LayerCodec>> layers;  // null: the layer stays exact
  int num_local = 0;  // layers without 2-bit rows whatever the method is: local and linear ones
};

// A bundle that a comparison may name.
struct NamedBundle {
  std::string name;
  Bundle bundle;
};

// What methods are made from.
struct MethodSource {
  const ModelConfig* config = nullptr;
  const Bundle* bundle = nullptr;  // may be null: then only methods without statistics exist
  std::span<const NamedBundle> named;
  CacheFormat quantizer;  // windows, groups and metadata of every method
  CacheView view;         // mode and prompt; windows come from `quantizer`
  uint64_t seed = 0;      // of random rotations
  torch::Device device = torch::kCPU;
};

// name = BASE[@VARIANT]...
//   BASE     bf16 exact identity identity-clip hadamard hadamard-clip random-clip oscar
//            oscar-perhead oscar-released bundle portable portable-perhead,
//            the name of a bundle, for its transforms, or of a rival (cache/rival_formats.h),
//            with the windows and exact layers that it is shipped with
//   VARIANT  k (keys only), v (values only), layer:N (only layer N is coded),
//            window:SINK/RECENT;
//            clip:K/V (other clipping ratios, 0 = off) and bits:K/V (other widths of codes, without
//            clipping above 2 bits unless clip gives it): not of a rival;
//            common: the windows of `quantizer`, and no exact layer: of a rival
// oscar, oscar-perhead and oscar-released are fitted from the bundle's statistics. Throws
// UsageError for unknown names, and Error saying what is missing when the bundle cannot provide a
// method.
Method make_method(const std::string& name, const MethodSource& source);

// Throws Error when a bundle can't have `name`: a method has it, or one of `others`.
void check_bundle_name(const std::string& name, std::span<const NamedBundle> others);

// The comparison without --compare: bf16, exact, what the source can provide, and FP8 beside it.
std::vector<std::string> default_methods(const Bundle* bundle, std::span<const NamedBundle> named);

// What runs the methods, and where the model runs.
struct EngineChoice {
  EngineKind kind = EngineKind::kSimulate;
  torch::Device device = torch::kCPU;
};

// Throws Error for what no method could run: a mode without a paged form, a codec without one, or
// kernels that this build or device does not have.
void check_engine(const EngineChoice& choice, const CacheView& view, const CacheFormat& quantizer);

// Whether `kind` runs the method: rivals, other widths than 2 bits and methods without a codec are
// left to the block-wise forward.
bool runs_in(const Method& method, EngineKind kind);

// Engine of a method; null for the reference. What `choice` does not run (runs_in) runs in the
// block-wise forward. Layers whose sliding window fits the recent window are never quantized.
// Throws Error when the engine cannot run the method (PagedAttention).
std::unique_ptr<CacheEngine> make_engine(const Method& method, const ModelConfig& config,
                                         const EngineChoice& choice);

}  // namespace oscar
