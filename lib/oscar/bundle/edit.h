// Bundles out of bundles: stripped, fitted again, compared.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/text/ngram_fingerprint.h"

namespace oscar {

// Bundles with less in them: to publish, or for a server.

enum class StripProfile {
  kPublish,  // all but statistics and the fingerprint of the text
  // These, the portable variants and the evaluation left out: what this toolkit's own cache reads.
  kServing,
};

// Throws Error naming the file, `name`, for a statistics file, which would be left empty.
Bundle strip_bundle(Bundle bundle, StripProfile profile, const std::string& name);

// The content_sha256 of a bundle's serving profile: equal for any two files whose rows are served
// alike and described alike, whatever else they hold.
std::string serving_sha256(const Bundle& bundle);

// A rotation bundle from statistics alone: everything that needs no model.

// The model's RoPE from its record, which holds every parameter; `name` is the file in errors.
Rope recorded_rope(const Bundle& input, const std::string& name);

struct RefitOptions {
  std::string preset = "best";  // recorded; `fit` already holds its values
  // position_span -1: as recorded in the input, where that is 0 all that the model serves
  FitOptions fit;
  CacheFormat quantizer;  // quant_group_size 0: head_dim
  bool keep_statistics = true;
};

// Transforms, metrics, fixed clipping ratios and the portable variant of every layer of `input`, a
// statistics file or a bundle with statistics; `name` is its file in errors. Nothing is searched,
// so no error is predicted; `search` keeps what the statistics leave out. A warning says so where
// sums weighted by attention were collected with other windows. Throws Error when
// statistics are missing, when the energy objective was not collected, or when the input does not
// say which positions are served.
Bundle refit_bundle(Bundle input, const RefitOptions& options, const std::string& name);

// The same with layers that are made otherwise, for example searched. `fit_one` gets the statistics
// of each layer that has some, the options with their positions, the model's RoPE and the cache
// format, and gives the layer and its portable variants.
struct RefittedLayer {
  LayerTransforms main;
  PortableLayer portable;
};
using RefitLayer = std::function<RefittedLayer(const LayerStatistics&, const FitOptions&,
                                               const Rope&, const CacheFormat&)>;
Bundle refit_bundle(Bundle input, const RefitOptions& options, const std::string& name,
                    const RefitLayer& fit_one);

// How rows of transforms from elsewhere are written.

struct WriterOptions {
  Rounding rounding = Rounding::kShaped;
  ScaleCorrection scale_correction = ScaleCorrection::kMetric;
  bool center = true;          // sides without means get those of their rows
  int64_t position_span = -1;  // as of RefitOptions
};

// `bundle` with its transforms and clipping ratios as they are, and the feedback factors, metrics
// and means that follow from the sums of `statistics`, a file of the same model. The corpus and its
// fingerprint are added to the bundle's, so that an evaluation knows the text. Warnings of layers
// say where rows count alike, and where sums by attention were collected with other windows, as
// those of refit_bundle do. `name` and `statistics_name` are the files in errors. Throws Error when
// models differ or there are no sums.
Bundle set_writer(Bundle bundle, Bundle statistics, const WriterOptions& options,
                  const std::string& name, const std::string& statistics_name);

// What two OSCAR files say differently, object by object.

// One line for each difference: attributes with both values, datasets with the largest absolute
// difference (or shapes and dtypes), objects that only one file has. created_utc and tool_* are
// not compared; content_sha256 follows from the rest. Throws Error when a file cannot be read.
std::vector<std::string> diff_bundles(const std::filesystem::path& a,
                                      const std::filesystem::path& b);

// The fingerprint of a bundle's text as a dataset: one owner of its names and its checks.

// Adds dataset /corpus/ngram_hashes, i64 [count], with attributes `ngram`, `capacity` and `rule`.
// Nothing for a fingerprint without hashes. `fingerprint` must outlive `file`.
void encode_fingerprint(const NgramFingerprint& fingerprint, EncodedFile& file);

// Without hashes when the file has none, or was sampled by a rule that this build does not know.
// Throws Error for a dataset of this rule that it can't have written: dtype, shape, more hashes
// than the capacity, negative, repeated or unordered ones.
NgramFingerprint decode_fingerprint(const RawFile& raw);

}  // namespace oscar
