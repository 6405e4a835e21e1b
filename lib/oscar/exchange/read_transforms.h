// Files of other tools, by what they are, to one set of transforms.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "oscar/exchange/formats.h"
#include "oscar/exchange/transform_set.h"

namespace oscar {

struct ReadTransforms {
  TransformSet set;
  std::string kind;                          // in words: "SGLang rotation files"
  std::vector<std::filesystem::path> files;  // that were read
  std::set<std::string> fields;              // of the entries of .pt files
};

// `paths` are a folder that holds files under the names of formats.h (or, of SGLang, one .pt that
// begins with k and one with v); the two files themselves; or one .npz, .safetensors or .gguf for
// both sides. Throws Error, naming the file, for everything else. `num_layers`: of mlx_rotations.h.
ReadTransforms read_transforms(const std::vector<std::filesystem::path>& paths, int num_layers);

// The files of one format in `folder`, under their names.
ReadTransforms read_export(const ExchangeFormat& format, const std::filesystem::path& folder,
                           int num_layers);

}  // namespace oscar
