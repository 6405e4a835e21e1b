// A layer's sums as bytes: in a checkpoint, and on their way between processes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "oscar/bundle/run_checkpoint.h"
#include "oscar/calibrate/statistics_pass.h"

namespace oscar {

// The sums of visit_sums (fit/statistics.h), count_q and count_kv, in float64; not the output
// projection's metric.
std::vector<uint8_t> sums_to_bytes(const LayerStatistics& sums);

// Sums of a layer with the geometry of `shape`, attended ones where it has any, and of so many
// tokens. Calls `refuse`, which throws, where `bytes` are none.
using RefuseSums = std::function<void(const std::string& expected, const std::string& found)>;
std::shared_ptr<const LayerStatistics> sums_from_bytes(std::span<const uint8_t> bytes,
                                                       const LayerStatistics& shape, int64_t tokens,
                                                       const RefuseSums& refuse);

inline constexpr const char* kSnapshot = "snapshot";
inline constexpr const char* kBlocksBefore = "before";

// Adds one tensor of f64 a copy, named by `kind`, the copy's number and its layer.
void save_copies(const char* kind, const SumSnapshots& copies, std::vector<ResumeTensor>& tensors);

// The copies of a kind among `tensors`: `wanted` says of how many tokens a layer of `statistics`
// must have them. Throws Error naming `file` where one is missing or of other tokens.
using WantedCopies = std::function<std::vector<int64_t>(const LayerGeometry&)>;
SumSnapshots load_copies(const char* kind, const std::vector<ResumeTensor>& tensors,
                         const std::vector<LayerStatistics>& statistics, const WantedCopies& wanted,
                         const std::string& file);

}  // namespace oscar
