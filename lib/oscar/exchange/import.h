// Transforms of other tools as a bundle of this one, to be evaluated and served beside its own.
#pragma once

#include <optional>
#include <string>

#include "oscar/bundle/bundle.h"
#include "oscar/checkpoint/checkpoint.h"
#include "oscar/exchange/read_transforms.h"
#include "oscar/stacks/pooled_clips.h"

namespace oscar {

inline constexpr const char* kImportedPreset = "imported";

struct ImportOptions {
  std::string name = kImportedPreset;  // recorded as the method; letters, digits and -_.
  QuantizerSettings quantizer;         // quant_group_size 0: head_dim
  ClipPair clip;                       // where the files hold no ratios, as those of stacks do not
};

// Any invertible matrices, for each KV head or shared, with or without means; what the files leave
// out follows: inverses from the matrices, orthogonal ones served as such; plain rounding without
// scale correction unless feedback and metrics are given. An orthogonal matrix is recorded as
// OSCAR's kind, another as balanced, whoever made it. The portable variant is there where one
// uncentred orthogonal matrix a layer was given. Throws Error naming layer and head for a layer
// that is missing or too many, another shape, and matrices that no cache can run (fit/checks.h).
Bundle import_bundle(const ReadTransforms& read, const Checkpoint& checkpoint,
                     const ImportOptions& options);

}  // namespace oscar
