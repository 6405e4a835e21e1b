// mlx-lm's folder of rotations (pull request 1789): two safetensors files and a manifest.
#pragma once

#include <filesystem>

#include "oscar/exchange/transform_set.h"

namespace oscar {

inline constexpr const char* kMlxManifest = "metadata.json";

// Keys layer_<global id>, float32 [d, d] or [Hkv, d, d]; rows are x' = x M^T, so M = rotation^T.
void write_mlx_rotations(const std::filesystem::path& path, const TransformSet& set, Side side);

// Writes metadata.json, of the schema mlx-lm-oscar-rotations-v1.
void write_mlx_manifest(const std::filesystem::path& folder, const TransformSet& set);

// Reads one side into `set`; a single key `rotation` is taken for layers 0 to `num_layers` - 1.
// Throws Error naming file and key for other names, shapes and numbers that are not finite.
void read_mlx_rotations(const std::filesystem::path& path, Side side, int num_layers,
                        TransformSet& set);

// Whether the keys of a safetensors file are those of this folder.
bool has_mlx_keys(const std::filesystem::path& path);

}  // namespace oscar
