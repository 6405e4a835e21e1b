// One row in the very bytes of a stack's cache.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "oscar/stacks/plan.h"

namespace oscar {

struct CodedRow {
  std::vector<uint8_t> codes;     // [d / 4], packed as the stack does
  std::vector<uint8_t> metadata;  // scale and zero of each quantization group, little-endian

  bool operator==(const CodedRow&) const = default;
};

// `row` [d], centred and rotated, as `run` codes it with the pair's ratio (0: off). Throws Error
// for a stack with levels of its own, for groups that do not divide d, and for a row that cannot be
// written.
CodedRow code_row(const StackRun& run, double clip_ratio, std::span<const float> row);

// "58ee": two digits a byte.
std::string hex(std::span<const uint8_t> bytes);

}  // namespace oscar
