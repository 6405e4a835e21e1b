// A GGUF file written again with some of its tensors replaced and others added.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "oscar/io/float_tensor.h"
#include "oscar/io/gguf.h"

namespace oscar {

// The bytes to write for a tensor, as many as it has, or nothing to keep it as it is.
using GgufReplacement = std::function<std::optional<std::vector<std::byte>>(
    const std::string& name, const GgufTensor& tensor)>;

// Writes `to` with the keys and values of `from` byte by byte, its tensors in their order, as they
// were or as replaced, and behind them `added` as F32 in the order of names. Throws Error for a
// replacement of another size, an added tensor whose name is taken or too long, or when `to` cannot
// be written.
void copy_gguf(const GgufFile& from, const std::filesystem::path& to,
               const GgufReplacement& replacement, const FloatTensors& added);

}  // namespace oscar
