// GGUF files: metadata, tensors and their values, and as a model its configuration and tokenizer.
#include <memory>

#include "fuzz_case.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/io/gguf.h"
#include "oscar/model/checkpoint/gguf_model.h"
#include "oscar/model/checkpoint/gguf_tokenizer.h"
#include "oscar/text/tokenizer.h"

namespace oscar::fuzz {
namespace {

void ask_for_values(const GgufFile& file) {
  for (const std::string& key : file.keys()) {
    accepted([&] { file.text(key); });
    accepted([&] { file.integer(key); });
    accepted([&] { file.number(key); });
    accepted([&] { file.scalar(key); });
    accepted([&] { file.flag(key); });
    accepted([&] { file.texts(key); });
    accepted([&] { file.integers(key); });
    accepted([&] { file.floats(key); });
  }
}

void decode_tensors(const GgufFile& file, size_t file_bytes) {
  for (const auto& [name, tensor] : file.tensors()) {
    require(tensor.bytes <= file_bytes, "a tensor is more than its file");
    if (tensor.type->decode == nullptr) continue;
    int64_t values = 1;
    for (const int64_t size : tensor.shape) values *= size;
    std::vector<float> numbers(static_cast<size_t>(values));
    decode_ggml(*tensor.type, tensor.data, values, numbers.data());
  }
}

void copy(const GgufFile& file) {
  const auto path = scratch_folder() / "copy.gguf";
  must("copying", [&] {
    copy_gguf(file, path,
              [](const std::string&, const GgufTensor&) {
                return std::optional<std::vector<std::byte>>();
              },
              {});
  });
  const auto opened = must("opening a copy", [&] { return std::make_unique<GgufFile>(path); });
  const GgufFile& again = *opened;
  require(again.metadata() == file.metadata(), "a copy has other metadata");
  require(again.tensors().size() == file.tensors().size(), "a copy has other tensors");
  for (const auto& [name, tensor] : file.tensors()) {
    const GgufTensor& other = again.tensors().at(name);
    require(other.type == tensor.type && other.shape == tensor.shape &&
                std::equal(tensor.data, tensor.data + tensor.bytes, other.data),
            "a tensor differs in a copy");
  }
}

}  // namespace

// Values of the densest types take 20 times their bytes as fp32; tables of a tokenizer are made
// into JSON, and a file of a few bytes may speak of 4096 layers.
const MemoryBound kMemoryBound{.fixed = size_t{16} << 20, .per_byte = 2048};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto path = scratch_file("model.gguf", bytes);
  const auto file = std::make_shared<GgufFile>(path);
  ask_for_values(*file);
  decode_tensors(*file, bytes.size());
  copy(*file);
  gguf_tokenizer_sha256(*file);
  accepted([&] {
    const auto json = gguf_tokenizer_json(*file);
    if (json) {
      Tokenizer::from_json(parse_tokenizer_json(*json, "input"), "input").encode("a text", true);
    }
  });
  accepted([&] {
    const ModelConfig config = parse_model_config(gguf_config(*file), "input");
    const GgufWeights weights(file, config);
    for (const std::string& name : weights.names()) weights.place(name);
    weights.fingerprint(false);
  });
  read_gguf_rotations(path);
}

}  // namespace oscar::fuzz
