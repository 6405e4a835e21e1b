// A bundle in memory, and its file: read, written, verified.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/files.h"
#include "oscar/base/json.h"
#include "oscar/bundle/weight_samples.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/fit/statistics.h"
#include "oscar/text/corpus.h"
#include "oscar/text/ngram_fingerprint.h"

namespace oscar {

// The rotation bundle in memory: everything one OUT.h5 holds, in plain structs.

struct BundleModel {
  std::string name, architecture;
  int num_layers = 0, num_qo_heads = 0, num_kv_heads = 0;
  int head_dim_k = 0, head_dim_v = 0, hidden_size = 0;
  Json rope;                // as run
  Json numerics = nullptr;  // what its config.json states of kNumericKeys; null: not known
  std::string config_sha256, tokenizer_sha256, chat_template_sha256, weights_fingerprint;
  std::string quantization, file_sha256;  // of quantized weights, of a GGUF file
  // Of the weights that the transforms were fitted to, where these are others (import --weights
  // any); "" where they are not.
  std::string fitted_weights_fingerprint = {}, fitted_model = {};
  std::string engine = {};  // what ran it, with its version; "": this toolkit's own engine

  const std::string& fitted_to() const {
    return fitted_weights_fingerprint.empty() ? weights_fingerprint : fitted_weights_fingerprint;
  }
};

// Of sink or recent tokens: more than any model serves; the sum of two is far from an int's limit.
inline constexpr int kLargestWindow = 1 << 24;

// One layer of the portable variant: orthogonal, plain writer, no centering.
struct PortableLayer {
  LayerTransforms shared, per_head;
};

struct Bundle {
  bool statistics_only = false;  // format "oscar-statistics"
  std::string preset, method;
  std::string objective_k = "qtq", objective_v = "sv";
  std::string composition, granularity;
  std::string row_weights = "even";  // how rows counted: even, attention, mixed
  int64_t position_span = 0;
  uint64_t fit_seed = 0;
  std::string run_key;  // hash of everything that decided the content; empty when unknown
  BundleModel model;
  CorpusRecord corpus;
  NgramFingerprint fingerprint;  // of the sequences that were used; no hashes: not known
  CacheFormat quantizer;
  std::optional<Json> evaluation;
  Json search;  // how choices were made: sequences held back, queries, seed; null when none was
  Json convergence;  // whether more text would change the fit (SCHEMA.md); null: not measured
  std::vector<LayerTransforms> layers;      // in layer order; empty for statistics_only
  std::vector<LayerStatistics> statistics;  // same order; empty when stripped
  std::vector<PortableLayer> portable;      // may be empty
  // With which `statistics` weighted by attention were collected, where `quantizer` has others.
  std::optional<Windows> collected;
  // By layer id, of the weights that the file is about (weight_samples.h); empty: not known.
  std::vector<WeightSamples> weight_samples;
  // Version and commit of the tool that fitted the transforms. The reader takes them from whoever
  // wrote the file where it does not say; empty: the writer is the one that fitted them.
  std::string fitted_by;
  // Filled by the reader.
  std::string tool_version, tool_commit, created_utc, content_sha256;
};

// Writes atomically (whole file or none). Equal inputs and SOURCE_DATE_EPOCH give equal bytes.
// Throws Error when `path` exists and `force` is false, or cannot be written.
void write_bundle(const Bundle& bundle, const std::filesystem::path& path, bool force);

// Reads and validates: structure, dtypes, shapes, finiteness, checksums, content_sha256, and the
// numerical checks on transforms. Hostile files (links, external storage, filters, sizes) are
// refused before their content is touched.
Bundle read_bundle(const std::filesystem::path& path);

// Bundles into outputs that were opened before the work that makes them.

// Writes `bundle` into `file` and commits it. Its created_utc is kept; an empty one becomes now.
// Throws Error as write_bundle of bundle.h does, which writes through this.
void write_bundle(const Bundle& bundle, AtomicFile& file);

// Now, as files name the moment at which they were made: "2026-01-31T12:00:00Z". SOURCE_DATE_EPOCH
// (seconds) takes the place of the clock. Throws Error when it is no number.
std::string utc_now();

}  // namespace oscar
