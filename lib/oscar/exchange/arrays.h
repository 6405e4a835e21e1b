// Transforms as plain arrays over layers, for .npz and .safetensors: what a researcher writes and
// reads.
#pragma once

#include <string>

#include "oscar/exchange/transform_set.h"
#include "oscar/io/float_tensor.h"

namespace oscar {

// Names and meaning are those of the bundle's datasets (bundle/SCHEMA.md), stacked over all layers
// of the model in order, float32: k_rotation, q_rotation, v_rotation, o_rotation, k_metric,
// v_metric, k_feedback, v_feedback [layers, Hkv, d, d]; k_mean, v_mean [layers, Hkv, d]; k_centres
// [layers, Hkv, 2, d]; k_clip_ratio, v_clip_ratio, k_scale_correction, v_scale_correction
// [layers, Hkv].
// What no layer has is left out; where some have it, the others get what stands for its absence.
FloatTensors to_arrays(const TransformSet& set);

// The reverse. Hkv may be left out of a shape where all heads share; k_rotation and v_rotation must
// be there. Throws Error naming `where` and the array for other names, a shape that does not fit,
// or a number that is not finite.
TransformSet from_arrays(const FloatTensors& arrays, const std::string& where);

}  // namespace oscar
