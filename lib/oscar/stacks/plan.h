// What one serving stack runs of a bundle, and how: its own transforms, its portable variant, or
// nothing, with clipping ratios, row format, predicted error and what stands in the way.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/cache/codec.h"
#include "oscar/stacks/pooled_clips.h"
#include "oscar/stacks/stack.h"

namespace oscar {

enum class StackVerdict { kAsIs, kPortable, kCannot };

// Transforms that a bundle holds (bundle/SCHEMA.md, /portable).
enum class BundleVariant { kOwn, kPortableShared, kPortablePerHead };

enum class ObstacleKind {
  // to everything in the bundle
  kArchitecture,
  kHeadDim,
  kSlidingLayers,
  kQuantGroupSize,
  kWindowMultiple,
  // to the bundle's own transforms
  kPartner,  // q_rotation or o_rotation of a balanced head
  kMean,
  kHeadsDiffer,
  kShapedRounding,
  kScaleCorrection,
  kClipRatios,
  kCodec,
  // to the portable variant: the file has none
  kNoPortable,
};

struct Obstacle {
  ObstacleKind kind = ObstacleKind::kCodec;
  std::string text;  // "rounding is shaped (layer 3)"
};

// As many ratios as the stack has.
struct PlannedClips {
  ClipScope scope = ClipScope::kHead;  // kHead, kLayer: the ratios that the variant stores
  std::optional<ClipPair> pair;        // kModel, and kModelBoth with equal ratios
};

// Why no error is predicted.
enum class ErrorUnknown {
  kOwnLevels,     // the stack codes by levels of its own
  kNoClipLosses,  // the file keeps no losses of clipping ratios, so the one pair is the published
  kNotMeasured,   // the file holds no predicted_output_nmse of this variant or of its own
};

struct StackRun {
  BundleVariant variant = BundleVariant::kOwn;
  PlannedClips clips;
  // The stack's codec: the bundle's group size, and its metadata dtype where the stack has that,
  // else the stack's first. Absent for levels of its own.
  std::optional<RowFormat> format;
  PackOrder packing = PackOrder::kConsecutive;
  // Predicted error of the attention output over that of the bundle's own transforms, each the sum
  // of predicted_output_nmse over layers and heads, in this toolkit's codec: 1 for those. One pair
  // for the model multiplies it by what pooling costs (math 9.6). Either it or `unknown` is there.
  std::optional<double> relative_error;
  std::optional<ErrorUnknown> unknown;
  // Measured: KL to BF16 of the portable variant over that of the bundle's own transforms, both in
  // this toolkit's codec. Absent without a measurement, and for levels of the stack's own.
  std::optional<double> kl_factor;
};

// Mean KL to BF16 of a bundle and of its portable variants, as one evaluation has them.
struct MeasuredKl {
  std::optional<double> own, shared, per_head;
};

// Of a report of oscar-eval (eval/SCHEMA.md); what it has not compared is absent.
MeasuredKl measured_kl(const Json& report);

// From so many times the loss on, a portable variant is not to be served.
inline constexpr double kTooManyTimes = 5;

struct StackPlan {
  const Stack* stack;  // outlives the plan
  // The first one to the bundle's own transforms or to all of it; then, where a portable variant
  // would be the way out and is missing, that. Empty for kAsIs.
  std::vector<Obstacle> obstacles;
  std::optional<StackRun> run;  // absent for kCannot

  StackVerdict verdict() const {
    if (!run) return StackVerdict::kCannot;
    return run->variant == BundleVariant::kOwn ? StackVerdict::kAsIs : StackVerdict::kPortable;
  }
};

// `bundle` has transforms (is no statistics file). Without `measured`, what the bundle's own stored
// evaluation measured.
StackPlan plan_for(const Stack& stack, const Bundle& bundle, const MeasuredKl& measured);
StackPlan plan_for(const Stack& stack, const Bundle& bundle);

// One plan for each of stacks().
std::vector<StackPlan> plan_for_all(const Bundle& bundle, const MeasuredKl& measured);
std::vector<StackPlan> plan_for_all(const Bundle& bundle);

}  // namespace oscar
