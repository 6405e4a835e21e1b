// A bundle as the files of another tool, with the lines that serve them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/rotation_files.h"

namespace oscar {

// oscar-export.json: what an export says of itself, so that it can be checked without the bundle.

inline constexpr const char* kManifestName = "oscar-export.json";

// A row of numbers that no matrix of use maps onto itself or onto another head's: exact in bf16,
// neither symmetric nor constant. `which` gives another one.
std::vector<float> probe_row(int head_dim, int which);

// [d] (probe - mean) forward of one head, in float64.
std::vector<double> probe_image(const SideTransform& side, int head, const std::vector<float>& row);

// That image rounded to bf16, as the backend codes it.
struct ProbeCode {
  std::string codes, metadata;  // hex
  bool operator==(const ProbeCode&) const = default;
};
ProbeCode probe_code(const BackendRun& run, const SideTransform& side, Side which);

// Objects and lists by key:
//   format, made_with
//   created_from {content_sha256, model, architecture, rope, weights_fingerprint}: the bundle's,
//   and
//                the model and weights that its transforms were fitted to
//   layers       global ids; heads_k, heads_v; head_dim_k, head_dim_v
//   variant      "own", "portable", "portable-perhead"; clip [keys, values] where there is one
//   pair;
//                relative_error where it is predicted; sink_tokens, recent_tokens, demote_block,
//                quant_group_size, metadata_dtype
//   probe        {keys, values}: for each layer and head the first numbers of probe_image
//   row          {keys, values}: of the first layer and head, probe_code; null for levels of a
//                backend's own and for plain arrays
//   files        {name: sha256}
//
// begin_manifest has format, made_with and created_from.
Json begin_manifest(const Bundle& bundle, const char* format);
Json make_manifest(const Bundle& bundle, const ExchangeFormat& format,
                   const std::optional<BackendPlan>& plan, const TransformSet& set,
                   const Json& files);

inline constexpr int kProbedNumbers = 4;

// Throws Error, with `hint`, unless each of `files` is the one of its name that the manifest lists.
void require_files_of(const Json& manifest, const std::vector<std::filesystem::path>& files,
                      const std::string& hint = "");

// One row in the very bytes of a backend's cache.

struct CodedRow {
  std::vector<uint8_t> codes;     // [d / 4], packed as the backend does
  std::vector<uint8_t> metadata;  // scale and zero of each quantization group, little-endian

  bool operator==(const CodedRow&) const = default;
};

// `row` [d], centered and rotated, as `run` codes it with the pair's ratio (0: off). Throws Error
// for a backend with levels of its own, for groups that do not divide d, and for a row that cannot
// be written.
CodedRow code_row(const BackendRun& run, double clip_ratio, std::span<const float> row);

// "58ee": two digits a byte.
std::string hex(std::span<const uint8_t> bytes);

// A bundle in the files of a backend.

struct ExportResult {
  std::optional<BackendPlan> plan;  // absent for plain arrays
  std::vector<std::string> files;   // names in the folder
  size_t layers = 0;
  std::string warning;  // of the base, whose weights may be others; may be empty
};

// Writes the folder `to`, whole or not at all, with the files of `format`, the README of its server
// and oscar-export.json, and reads it back under the backend's rules before
// it appears. `from` names the bundle in errors. What the backend cannot run is refused with the
// reason, or, with `reduce` and where the bundle has one, replaced by its portable variant.
// `base`, for gguf-rot alone, is a GGUF model whose copy gets the tensors; empty: they stand alone.
// It holds the weights of the bundle in any quantization: others are refused by the bundle's
// samples, or warned of where they lie farther away than a quantization moves weights. Throws Error
// also for a statistics file and when `to` exists.
ExportResult export_bundle(const Bundle& bundle, const std::string& from,
                           const ExchangeFormat& format, bool reduce,
                           const std::filesystem::path& to, const std::filesystem::path& base = {});

// The sums of a calibration as NumPy arrays, for a researcher's own fit.

inline constexpr const char* kStatisticsExport = "statistics";  // of export --for

// Writes the folder `to`, whole or not at all: statistics.npz, a README and oscar-export.json.
// Arrays have the names of the bundle's statistics (bundle/SCHEMA.md), float64, over layers:
// moments [layers, Hkv, d, d], sums [layers, Hkv, d], weights [layers, Hkv]; count_q, count_kv and
// layer_id are int64 [layers]. Where only some layers have a sum the others have zeros. Returns the
// names of the files. `from` names the bundle in errors. Throws Error for a bundle without
// statistics, for layers of different shapes, and when `to` exists.
std::vector<std::string> export_statistics(const Bundle& bundle, const std::string& from,
                                           const std::filesystem::path& to);

}  // namespace oscar
