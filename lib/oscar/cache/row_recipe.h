// How rows become INT2, in types: what a search chooses, a bundle keeps and every writer follows.
#pragma once

#include <vector>

#include "oscar/cache/codec_rules.h"
#include "oscar/cache/scale_correction.h"

namespace oscar {

enum class Rounding : uint8_t { kPlain = 0, kShaped = 1 };

// What all rows of a cache share.
struct RowFormat {
  int quant_group_size = 128;  // divides head_dim
  MetadataDtype metadata = MetadataDtype::kFp16;
  CodecRules rules = {};  // other than the default: plain rounding, no scale correction

  bool operator==(const RowFormat&) const = default;
};

// What the rows of one head of one side (keys or values) share.
struct RowRecipe {
  float clip_ratio = 0.0f;  // <= 0: off
  ScaleCorrection scale_correction = ScaleCorrection::kNone;
  Rounding rounding = Rounding::kPlain;

  bool operator==(const RowRecipe&) const = default;
};

// The recipes of one side's heads; columns of equal length, as files and kernels take them.
struct SideRecipe {
  std::vector<float> clip_ratio;
  std::vector<ScaleCorrection> scale_correction;
  std::vector<Rounding> rounding;

  SideRecipe() = default;
  SideRecipe(size_t heads, const RowRecipe& recipe)
      : clip_ratio(heads, recipe.clip_ratio),
        scale_correction(heads, recipe.scale_correction),
        rounding(heads, recipe.rounding) {}

  size_t size() const { return clip_ratio.size(); }
  RowRecipe operator[](size_t head) const {
    return {clip_ratio[head], scale_correction[head], rounding[head]};
  }
  void push_back(const RowRecipe& recipe) {
    clip_ratio.push_back(recipe.clip_ratio);
    scale_correction.push_back(recipe.scale_correction);
    rounding.push_back(recipe.rounding);
  }
  // Whether some head corrects, or rounds, in this way.
  bool any(ScaleCorrection correction) const;
  bool any(Rounding way) const;

  bool operator==(const SideRecipe&) const = default;
};

// Average bits per cached element (math 4.8) of a context of `length` tokens of which the first
// `sink` and the last `recent` are exact, in 16 bits; 16 while all are.
double bits_per_element(const RowFormat& format, int64_t length, int64_t sink, int64_t recent);

}  // namespace oscar
