// A safetensors file written again with some of its tensors replaced.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "oscar/io/safetensors_header.h"

namespace oscar {

// The bytes to write for a tensor, as many as it has, or nothing to keep it as it is.
using TensorReplacement =
    std::function<std::optional<std::vector<std::byte>>(const TensorEntry& tensor)>;

// Writes `to` with the header of `from`, so that names, order, dtypes, shapes and metadata stay,
// and each tensor as it was or as replaced. Throws Error for a malformed `from`, a replacement of
// another size, or when `to` cannot be written.
void copy_safetensors(const std::filesystem::path& from, const std::filesystem::path& to,
                      const TensorReplacement& replacement);

}  // namespace oscar
