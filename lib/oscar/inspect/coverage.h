// How well one text stands for another (math 10.3): transforms fitted to the statistics of each
// file, scored on those of every other, for example with one file for each domain that will be
// served.
#pragma once

#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"

namespace oscar {

// A fit covers another text badly when it loses more than this share of predicted loss on it. KL
// goes with the loss, and an evaluation's interval is several per cent of KL: from a tenth on the
// difference shows beyond it.
inline constexpr double kPoorCoverage = 0.1;

// Of each quantized layer and head the judging fit (fit/predicted_loss.h) to each file and to all
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

}  // namespace oscar
