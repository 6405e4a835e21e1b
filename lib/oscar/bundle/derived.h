// Reads what files of version 0.1 leave out because the rest of them says so, to the same bits.
//
// A group's attribute `coding` is a JSON object: the names of those of its datasets that are not
// stored as they are, and the rule of each (schema.h, kCodings):
//   upper    a symmetric matrix: rows of the upper triangle one after another, [Hkv, d (d + 1) / 2]
//   inverse  q_rotation, o_rotation: of balanced heads T^-T, T^-1 of the stored T, in float64 by
//            fixed_order_inverse, then rounded to f32; of others T and T^T
//   output_metric  v_metric: error_metric (fit/head_fit.h) of statistics/o_proj_metric and
//            o_rotation (else v_rotation^T), rounded to f32
//   factor   k_feedback, v_feedback: feedback_factor (fit/head_fit.h) of the metric, rounded to f32
// All but the first are left out. An i32 dataset in the place of an inverse or factor is added to
// the bits of the derived numbers, modulo 2^32. Files with the attribute name "derived" among their
// required features. content_sha256 is that of the whole content, as if nothing were left out.
#pragma once

#include <cstdint>

#include "oscar/bundle/raw_file.h"

namespace oscar {

// Gives `raw` the datasets that it has left out, and takes the codings out of its attributes and
// required features. Nothing happens to a file without codings, or with a feature that this build
// does not know. Throws Error naming the object where a coding is unknown, does not fit its
// dataset, or has no source; or where the content would be more than `most_bytes`.
void restore_left_out(RawFile& raw, uint64_t most_bytes);

}  // namespace oscar
