// Rotations as tensors of a GGUF file, as llama.cpp's OSCAR branch reads them beside a model's own.
#pragma once

#include <filesystem>
#include <string>

#include "oscar/exchange/transform_set.h"

namespace oscar {

// blk.<global id>.attn_k_rot.weight and attn_v_rot.weight, F32 [d, d], which hold rotation^T: the
// branch multiplies a row x by the matrix as ggml does, x M^T. The file has no other tensors, or,
// with `base`, those of that GGUF model before them, with its metadata. Throws Error for a base
// that has such tensors already or another shape than the rotations (architecture, layers,
// head_dim).
void write_gguf_rotations(const std::filesystem::path& path, const TransformSet& set,
                          const std::filesystem::path& base = {});

// Reads them from any GGUF file, those of a whole model too, whatever else is in it. Throws Error
// naming file and tensor for another shape or type, and for numbers that are not finite.
TransformSet read_gguf_rotations(const std::filesystem::path& path);

}  // namespace oscar
