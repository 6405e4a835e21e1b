// Whole safetensors files of numbers, read into memory and written.
#pragma once

#include <map>

#include "oscar/io/float_tensor.h"

namespace oscar {

// Every tensor, as float32. Throws Error naming file and tensor for a malformed file and for dtypes
// other than F64, F32, F16 and BF16.
FloatTensors read_safetensors(const std::filesystem::path& path);

// Atomically, as F32 in the order of names, the data at a multiple of 8 bytes. `metadata` becomes
// __metadata__. Equal tensors give equal bytes.
void write_safetensors(const std::filesystem::path& path, const FloatTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace oscar
