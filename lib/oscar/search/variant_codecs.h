// Codecs of cache variants, put together on the device from fits that are brought there once.
#pragma once

#include <map>
#include <vector>

#include "oscar/fit/compose.h"
#include "oscar/int2/side_codec.h"

namespace oscar {

// How each KV head's keys (or values) are transformed and written.
using SideVariant = std::vector<HeadChoice>;  // [Hkv]

// Many variants choose among few fits. For one layer; fits must outlive it.
class VariantCodecs {
 public:
  VariantCodecs(const QuantizerSettings& quantizer, int layer, torch::Device device)
      : quantizer_(quantizer), layer_(layer), device_(device) {}

  // make_side_codec(compose_heads(heads, side)): any number of heads, as if of one layer.
  SideCodec codec(const SideVariant& heads, Side side);

 private:
  const SideCodec& of_fit(const SideTransform& fit, Side side);

  QuantizerSettings quantizer_;
  int layer_;
  torch::Device device_;
  std::map<const SideTransform*, SideCodec> fits_;
};

}  // namespace oscar
