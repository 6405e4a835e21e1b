// What we read of a GGUF file, for comparison with the gguf and tokenizers packages.
//   oscar-test-gguf tensors FILE.gguf OUT_FOLDER   NAME.f32 of each tensor, as it lies in the file
//   oscar-test-gguf tokenizer FILE.gguf            the tokenizer in the manner of tokenizer.json
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/model/checkpoint/gguf_tokenizer.h"

namespace {

using namespace oscar;

void write_tensors(const GgufFile& file, const std::filesystem::path& out) {
  for (const auto& [name, tensor] : file.tensors()) {
    std::vector<float> values(tensor.bytes / tensor.type->block_bytes *
                              static_cast<size_t>(tensor.type->block_values));
    decode_ggml(*tensor.type, tensor.data, static_cast<int64_t>(values.size()), values.data());
    std::ofstream stream(out / (name + ".f32"), std::ios::binary);
    stream.write(reinterpret_cast<const char*>(values.data()),
                 static_cast<std::streamsize>(values.size() * sizeof(float)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 3 && args[0] == "tensors") {
      write_tensors(GgufFile(args[1]), args[2]);
    } else if (args.size() == 2 && args[0] == "tokenizer") {
      std::puts(gguf_tokenizer_json(GgufFile(args[1])).value_or("null").c_str());
    } else {
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
