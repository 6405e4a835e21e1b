// The element types of GGUF files: how many values a block holds in how many bytes, and its values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace oscar {

// Writes the values of one block, in order.
using BlockDecoder = void (*)(const std::byte* block, float* out);

struct GgmlType {
  uint32_t id;       // in the file
  const char* name;  // as ggml calls it, for example "Q4_K"
  int64_t block_values;
  size_t block_bytes;
  BlockDecoder decode;  // null: known, but not implemented
};

// The type of a number in a file, or null for one that ggml does not define.
const GgmlType* find_ggml_type(uint32_t id);

// The name of the type of a number; of others that it is one of former versions, or a newer one.
std::string describe_ggml_type(uint32_t id);

// The names of the types that can be decoded, joined with commas.
std::string decodable_ggml_types();

// Writes `values` numbers of whole blocks as fp32, to the bits of the `gguf` package's
// `gguf.quants.dequantize`. `values` is a multiple of the block and the type has a decoder.
void decode_ggml(const GgmlType& type, const std::byte* blocks, int64_t values, float* out);

}  // namespace oscar
