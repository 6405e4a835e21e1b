// How well texts stand for each other, and pictures of a bundle.
#pragma once

#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// How well one text stands for another (math 10.3): transforms fitted to the statistics of each
// file, scored on those of every other, for example with one file for each domain that will be
// served.

// A fit covers another text badly when it loses more than this share of predicted loss on it. KL
// goes with the loss, and an evaluation's interval is several per cent of KL: from a tenth on the
// difference shows beyond it.
inline constexpr double kPoorCoverage = 0.1;

// Of each quantized layer and head the judging fit (fit/head_fit.h) to each file and to all
// files joined (their sums added) is scored on each file. Keys of the result:
//   files      list of `name`, `tokens` (those in the sums)
//   position_span, poor_coverage
//   key, value [fit][scored] loss over that of the scored file's own fit, mean over heads and
//              layers: 1 where both are one file. Fits are the files in order, then the joined one
//   key_worst_layer, value_worst_layer  the same, of the layer where it is largest
//   warnings   texts that are covered badly, with what to do; files whose own text is not enough
// `names` are the files. Positions are the longest span that a file was made for. Throws Error when
// a file has no statistics or the files' models differ (as merge_statistics).
Json coverage(const std::vector<Bundle>& files, const std::vector<std::string>& names);

// The same for people, 80 columns wide, without the warnings.
std::string coverage_text(const Json& coverage);

// Bounded pictures of what a bundle holds, for reports: eigenvalue spectra and channel sizes.

// `x` with the four significant digits that all numbers of pictures have: reports stay small and
// read the same everywhere.
double picture_number(double x);

// How fast the eigenvalues fall that the transforms were fitted with, as the bundle stores them
// (head_fit.h says of which matrices):
//   ranks   places 1 .. head_dim in descending order of eigenvalue, at most 32 of them
//   layers  [fitted layers] layer, key, value; a side is null where no head has eigenvalues, else
//     share           [ranks] eigenvalue / trace, mean over the KV heads that have eigenvalues
//     effective_rank  mean over the same heads of exp(entropy of the shares) (head_fit.h)
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
