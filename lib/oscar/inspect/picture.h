// Bounded pictures of what a bundle holds, for reports: eigenvalue spectra and channel sizes.
#pragma once

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// `x` with the four significant digits that all numbers of pictures have: reports stay small and
// read the same everywhere.
double picture_number(double x);

// How fast the eigenvalues fall that the transforms were fitted with, as the bundle stores them
// (head_fit.h and balanced_fit.h say of which matrices):
//   ranks   places 1 .. head_dim in descending order of eigenvalue, at most 32 of them
//   layers  [fitted layers] layer, key, value; a side is null where no head has eigenvalues, else
//     share           [ranks] eigenvalue / trace, mean over the KV heads that have eigenvalues
//     effective_rank  mean over the same heads of exp(entropy of the shares) (spectrum.h)
// Four significant digits. null when no side of any layer has eigenvalues.
Json spectra_picture(const Bundle& bundle);

// Outlier channels before and after the transform, at the positions of calibration: the root mean
// square of each channel of k and of (k - k_mean) k_rotation, and of values alike, from the sums
// that the bundle keeps.
//   tokens   that the first layer's statistics saw
//   layers   [fitted layers] layer, key, value; of a side peak_before, peak_after [Hkv]: the
//            largest channel over the median one
//   profile  layer, head, before, after [head_dim]: all channels of the key head with the largest
//            finite peak_before; null without one
// Four significant digits. null when the bundle has no transforms or no statistics of them.
Json channels_picture(const Bundle& bundle);

}  // namespace oscar
