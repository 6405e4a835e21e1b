// Matrices of others as a bundle.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/model/checkpoint/checkpoint.h"

namespace oscar {

// Files of other tools, by what they are, to one set of transforms.

// What oscar-export.json says of the bundle that the files beside it were exported from.
struct ExportOrigin {
  std::string weights_fingerprint, model;
  Json rope;              // null: exports of earlier versions do not say
  CacheFormat quantizer;  // windows, group and metadata; what is not said has its default
  std::optional<ClipPair> clip = {};  // of backends with one pair for the whole model
};

struct ReadTransforms {
  TransformSet set;
  std::string kind;                          // in words: "SGLang rotation files"
  std::vector<std::filesystem::path> files;  // that were read
  std::set<std::string> fields;              // of the entries of .pt files
  std::optional<ExportOrigin> origin = {};   // absent: no oscar-export.json beside the files
};

// `paths` are a folder that holds files under the names of rotation_files.h (or, of SGLang, one .pt
// that begins with k and one with v); the two files themselves; or one .npz, .safetensors or .gguf
// for both sides. Throws Error, naming the file, for everything else, and for files that are not
// those of the oscar-export.json beside them. `num_layers`: of rotation_files.h.
ReadTransforms read_transforms(const std::vector<std::filesystem::path>& paths, int num_layers);

// The files of one format in `folder`, under their names.
ReadTransforms read_export(const ExchangeFormat& format, const std::filesystem::path& folder,
                           int num_layers);

// Transforms of other tools as a bundle of this one, to be evaluated and served beside its own.

inline constexpr const char* kImportedPreset = "imported";

enum class AcceptedWeights {
  kSame,  // exports of a bundle of these weights, and files that name none
  kAny,   // all; the bundle says in a warning where the weights are others
};

struct ImportOptions {
  std::string name = kImportedPreset;  // recorded as the method; letters, digits and -_.
  CacheFormat quantizer;               // quant_group_size 0: head_dim
  // Where the files hold no ratios, as those of backends do not; absent: those of the export, or
  // `default_clip` where there is none or it does not say.
  std::optional<ClipPair> clip = {};
  ClipPair default_clip = {};  // the published ones
  AcceptedWeights weights = AcceptedWeights::kSame;
};

// Any invertible matrices, for each KV head or shared, with or without means; what the files leave
// out follows: inverses from the matrices, orthogonal ones served as such; plain rounding without
// scale correction unless feedback and metrics are given. A matrix far from the size of a rotation
// is multiplied by a power of two, and a warning of the first layer says so. An orthogonal matrix
// is recorded as OSCAR's kind, another as balanced, whoever made it. The portable variant is there
// where one uncentered orthogonal matrix a layer was given. Throws Error naming layer and head for
// a layer that is missing or too many, another shape, and matrices that no cache can run
// (fit/fit.h); for an export of a bundle with another RoPE; and for one of other weights, unless
// `options` accept any.
Bundle import_bundle(const ReadTransforms& read, const Checkpoint& checkpoint,
                     const ImportOptions& options);

}  // namespace oscar
