// What held-out loss may decide instead of the preset.
#pragma once

#include <cstdint>

namespace oscar {

// How many clipping ratios there are: what a serving stack has places for.
enum class ClipScope : uint8_t {
  kHead,      // a ratio for each layer, KV head and side
  kLayer,     // a ratio for each layer and side
  kModel,     // one ratio for all keys, one for all values
  kModelBoth  // one ratio
};

// A part that is not searched keeps its value of FitOptions, which is also what ties go to.
struct SearchOptions {
  bool kind = false;        // the orthogonal transforms (layer_fits.h) and the balanced one
  bool orthogonal = false;  // of kinds only orthogonal ones, for stacks with one matrix a side
  bool center = false;
  bool granularity = false;  // per KV head or per layer
  bool row_weights = false;  // even or by attention
  bool key_centres = false;  // one mean, or the nearer of two centres a segment
  bool clip = false;
  ClipScope clip_scope = ClipScope::kHead;  // other: losses are pooled when all layers are searched
  bool rounding = false, scale_correction = false;
  // Of a KV head that the default makes worse than Hadamard with the published clipping ratios
  // does, that instead. Rides along: by itself it asks for no search.
  bool fallback = false;
  bool full = false;  // more chunks, queries and clip ratios

  bool any() const {
    return kind || center || granularity || row_weights || key_centres || clip || rounding ||
           scale_correction;
  }
  bool operator==(const SearchOptions&) const = default;
};

}  // namespace oscar
