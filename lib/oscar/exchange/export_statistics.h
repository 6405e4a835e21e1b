// The sums of a calibration as NumPy arrays, for a researcher's own fit.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"

namespace oscar {

inline constexpr const char* kStatisticsExport = "statistics";  // of export --to

// Writes the folder `to`, whole or not at all: statistics.npz, a README and oscar-export.json.
// Arrays have the names of the bundle's statistics (bundle/SCHEMA.md), float64, over layers:
// moments [layers, Hkv, d, d], sums [layers, Hkv, d], weights [layers, Hkv]; count_q, count_kv and
// layer_id are int64 [layers]. Where only some layers have a sum the others have zeros. Returns the
// names of the files. `from` names the bundle in errors. Throws Error for a bundle without
// statistics, for layers of different shapes, and when `to` exists.
std::vector<std::string> export_statistics(const Bundle& bundle, const std::string& from,
                                           const std::filesystem::path& to);

}  // namespace oscar
