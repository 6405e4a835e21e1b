// Numbers from a file's memory into a tensor, looked through on the way.
#pragma once

#include <cstddef>

#include "oscar/model/torch.h"

namespace oscar {

// Fills `place`, contiguous, of bf16, fp16, fp32 or FP8 (E4M3) on any device, with as many numbers
// of its type from `data`, which need not be aligned. Returns whether all are finite. On a GPU they
// pass through pinned memory, which is three times as fast as a copy from the file's pages, and
// need no kernel there: beside a forward pass each would wait for the products in progress. The
// bytes at `data` are read when this returns, and `place` is filled once the stream gets there.
bool copy_numbers(const std::byte* data, const torch::Tensor& place);

}  // namespace oscar
