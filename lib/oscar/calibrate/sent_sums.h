// A layer's sums on their way from one process to another.
#pragma once

#include "oscar/executor/ranks.h"
#include "oscar/fit/statistics.h"

namespace oscar {

// Sums of visit_sums (fit/statistics.h) and counts, not the output projection's metric.
void send_sums(Ranks& ranks, int to, const LayerStatistics& sums);

// The next ones from a process, of a layer of the shape of `shape` and of so many tokens. Throws
// Error where they are none.
LayerStatistics receive_sums(Ranks& ranks, int from, const LayerStatistics& shape, int64_t tokens);

}  // namespace oscar
