// What held-out loss may decide instead of the preset.
#pragma once

namespace oscar {

// A part that is not searched keeps its value of FitOptions, which is also what ties go to.
struct SearchOptions {
  bool kind = false;        // the orthogonal transforms (layer_fits.h) and the balanced one
  bool orthogonal = false;  // of kinds only orthogonal ones, for stacks with one matrix a side
  bool center = false;
  bool granularity = false;  // per KV head or per layer
  bool clip = false;
  bool rounding = false, scale_correction = false;
  bool full = false;  // more chunks, queries and clip ratios

  bool any() const { return kind || center || granularity || clip || rounding || scale_correction; }
  bool operator==(const SearchOptions&) const = default;
};

}  // namespace oscar
