// The portable variant of a bundle for a backend, what it is predicted to cost, and how that is
// told.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/measured.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/fit.h"

namespace oscar {

// One pair of clipping ratios for a whole model, from the losses that were measured layer by layer.

struct ClipPair {
  double key = kPublishedClipK, value = kPublishedClipV;  // 0 = off

  bool operator==(const ClipPair&) const = default;
};

struct PooledClips {
  ClipPair pair;
  // Loss with `pair` over the loss with the ratios that each layer has, each side alone INT2,
  // summed over both and over layers. Absent: the layers keep no losses of their ratios, or of no
  // ratio that all were tried with, and `pair` is the published one.
  std::optional<double> loss_factor = 1.0;
};

// The pair that all `layers` have, else that of least loss among the ratios that every layer was
// tried with, by ClipLosses (math 9.6); ties go to what the search began with. `one_ratio`: among
// pairs of equal ratios. Layers that are not quantized have no place in the list.
PooledClips pool_clips(const std::vector<const LayerTransforms*>& layers, bool one_ratio);

// Successive quantized layers that share their ratios.
struct ClipShare {
  int first_layer = 0;
  size_t layers = 0;
  PooledClips clips;
};

// Gives the bundle's own layers as few ratios as `scope` has, each pooled over what shares it, and
// multiplies predicted_output_nmse by what that costs (NaN, not measured, when that is not known).
// Nothing for ClipScope::kHead.
std::vector<ClipShare> pool_own_clips(Bundle& bundle, ClipScope scope);

// What the bundle records of them (bundle/SCHEMA.md, `pooled_clip`).
Json pooled_clip_record(const std::vector<ClipShare>& shares);

// What one backend runs of a bundle, and how: its own transforms, its portable variant, or
// nothing, with clipping ratios, row format, predicted error and what stands in the way.

enum class BackendVerdict { kAsIs, kPortable, kCannot };

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

// As many ratios as the backend has.
struct PlannedClips {
  ClipScope scope = ClipScope::kHead;  // kHead, kLayer: the ratios that the variant stores
  std::optional<ClipPair> pair;        // kModel, and kModelBoth with equal ratios
};

// Why no error is predicted.
enum class ErrorUnknown {
  kOwnLevels,     // the backend codes by levels of its own
  kNoClipLosses,  // the file keeps no losses of clipping ratios, so the one pair is the published
  kNotMeasured,   // the file holds no predicted_output_nmse of this variant or of its own
};

struct BackendRun {
  BundleVariant variant = BundleVariant::kOwn;
  PlannedClips clips;
  // The backend's codec: the bundle's group size, and its metadata dtype where the backend has
  // that, else the backend's first. Absent for levels of its own.
  std::optional<RowFormat> format;
  PackOrder packing = PackOrder::kConsecutive;
  // Predicted error of the attention output over that of the bundle's own transforms, each the sum
  // of predicted_output_nmse over layers and heads, in this toolkit's codec: 1 for those. One pair
  // for the model multiplies it by what pooling costs (math 9.6). Either it or `unknown` is there.
  std::optional<double> relative_error;
  std::optional<ErrorUnknown> unknown;
  // Measured: KL to BF16 of the portable variant over that of the bundle's own transforms, both in
  // this toolkit's codec. Absent without a measurement, and for levels of the backend's own.
  std::optional<double> kl_factor;
  bool on_calibration_text = false;  // kl_factor, on more of it than kNotableOverlap
};

// From so many times the loss on, a portable variant is not to be served.
inline constexpr double kTooManyTimes = 5;

// Whether that was measured.
bool is_not_to_serve(const BackendRun& run);

struct BackendPlan {
  const Backend* backend;  // outlives the plan
  // The first one to the bundle's own transforms or to all of it; then, where a portable variant
  // would be the way out and is missing, that. Empty for kAsIs.
  std::vector<Obstacle> obstacles;
  std::optional<BackendRun> run;  // absent for kCannot

  BackendVerdict verdict() const {
    if (!run) return BackendVerdict::kCannot;
    return run->variant == BundleVariant::kOwn ? BackendVerdict::kAsIs : BackendVerdict::kPortable;
  }
};

// `bundle` has transforms (is no statistics file). Without `measured`, measured_kl(bundle).
BackendPlan plan_for(const Backend& backend, const Bundle& bundle, const MeasuredKl& measured);
BackendPlan plan_for(const Backend& backend, const Bundle& bundle);

// One plan for each of backends().
std::vector<BackendPlan> plan_for_all(const Bundle& bundle, const MeasuredKl& measured);
std::vector<BackendPlan> plan_for_all(const Bundle& bundle);

// Table, choices and plans in words: JSON for programs, text of 80 columns for people.

// The table.
Json backends_json();
std::string backends_text();

// A few words for each part: "transform searched" or "balanced", "plain rounding", ...
std::vector<std::string> describe_choice(const BackendChoice& choice);

// A list with one object for each plan:
//   name            of the backend
//   verdict         "as is", "portable" or "cannot"
//   reason          of "portable": the first thing that keeps it from running the bundle's own
//                   transforms; of "cannot": why; "" for "as is"
//   variant         of "portable": "portable" or "portable-perhead", as in oscar-eval --compare
//   clip            of "portable", where the backend has one ratio for each side: [keys, values].
//                   Null: the ratios as stored
//   relative_error  of "portable": predicted. Null: not known
//   kl_factor       of "portable": measured. Null: not measured
//   do_not_serve    is_not_to_serve
//   line            all that but the clip in words, for a column of 62 characters
Json plans_json(const std::vector<BackendPlan>& plans);

// What a predicted error has been worth: KL measured over KL that was predicted, for the portable
// variants of three models (docs/serving.md).
inline constexpr const char* kPredictionWorth = "0.5 to 2.3 times";

// A line for each plan, and what they mean.
std::string plans_text(const std::vector<BackendPlan>& plans);
// In a line for each verdict.
std::string plans_summary(const std::vector<BackendPlan>& plans);

}  // namespace oscar
