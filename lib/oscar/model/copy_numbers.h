// Numbers from a file into a tensor, looked through on the way.
#pragma once

#include <cstddef>
#include <functional>

#include "oscar/model/torch.h"

namespace oscar {

// Writes bytes first .. first + bytes - 1 to `out`.
using ByteReader = std::function<void(size_t first, size_t bytes, std::byte* out)>;

// Fills `place`, contiguous, of bf16, fp16, fp32 or FP8 (E4M3) on any device, with as many numbers
// of its type. Returns whether all are finite. On a GPU they pass through pinned memory, which is
// three times as fast as a copy from the file's pages, and need no kernel there: beside a forward
// pass each would wait for the products in progress. All has been read when this returns, and
// `place` is filled once the stream gets there.
bool copy_numbers(const ByteReader& read, const torch::Tensor& place);

}  // namespace oscar
