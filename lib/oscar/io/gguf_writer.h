// GGUF files of float32 tensors, written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "oscar/io/float_tensor.h"

namespace oscar {

using GgufMetadata = std::vector<std::pair<std::string, std::variant<uint32_t, std::string>>>;

// Version 3, atomically; tensors in the order of names, shapes outermost first as everywhere here.
// Equal arguments give equal bytes.
void write_gguf(const std::filesystem::path& path, const GgufMetadata& metadata,
                const FloatTensors& tensors);

}  // namespace oscar
