// The files that transforms come and go in: one table.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace oscar {

enum class FileLayout {
  kTorchShared,   // format_version 1 of SGLang's rotation files: a matrix [d, d] a layer
  kTorchPerHead,  // format_version 2: [Hkv, d, d]
  kTorchLocked,   // the same under a name that no server reads: launch.h has the key
  kMlx,           // mlx-lm's folder of safetensors
  kGguf,          // tensors beside those of a GGUF model
  kNpz,           // plain arrays (arrays.h)
  kSafetensors,   // the same
};

struct ExchangeFormat {
  const char* name;   // of --to and --stack
  const char* stack;  // the row of stacks() that reads it; null: any bundle fits
  FileLayout layout;
  const char* key_file;          // of keys, or of both sides
  const char* value_file;        // null: in key_file
  const char* former = nullptr;  // its name in manifests of earlier versions; null: the same
};

const std::vector<ExchangeFormat>& exchange_formats();

// Throws UsageError: the answer of stacks/stack.h, or for an unknown name the list of names, and
// after them `further`, which the caller takes besides; Error with the reason for a stack that has
// no file of its own, or none that a release reads yet.
const ExchangeFormat& find_exchange_format(std::string_view name, std::string_view further = {});

// Whether the `format` of a manifest means this one, under its name of today or before.
bool is_called(const ExchangeFormat& format, std::string_view recorded);

std::string exchange_format_names();  // "sglang-v1, sglang-v2, ..."

}  // namespace oscar
