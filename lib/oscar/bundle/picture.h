// Bounded pictures of what a bundle holds, for reports: eigenvalue spectra and channel sizes.
#pragma once

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// How the energy that a transform was fitted to is spread over directions, from the eigenvalues
// that the bundle stores (for "balanced" those of C_K^(1/2) C_Q C_K^(1/2), MATH: section 4c; for
// "oscar" those of C_Q and C_S). Per layer and side `share`: eigenvalue / trace in descending
// order, the mean over KV heads, at the places `ranks` (from 1, at most 32 of them), and
// `effective_rank`, the mean over heads of exp(entropy). null when the bundle stores none.
Json spectra_picture(const Bundle& bundle);

// Outlier channels before and after the transform, from the statistics: the root mean square of
// each channel of k and of (k - k_mean) k_rotation (values alike), at the positions of calibration.
// Per layer, side and KV head `peak_before` and `peak_after`: the largest channel over the median
// channel. `profile`: all channels of the key head with the largest peak before. null when the
// bundle has no statistics or no transforms.
Json channels_picture(const Bundle& bundle);

}  // namespace oscar
