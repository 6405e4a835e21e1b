// The reference's other half: encodes strings from standard input and writes ids to standard
// output.
//
//   oscar-test-tokenize TOKENIZER.json ids|decode|bench
//
// Input: for each string its length in bytes (uint32, little endian), then the bytes. Output of
// `ids`: for each string the number of ids (uint32), then the ids (int32); of `decode`: the string
// that the ids stand for, with its length before it; of `bench`: one line with the speed.
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <string>
#include <vector>

#include "oscar/text/tokenizer.h"

namespace {

bool read_string(std::string& text) {
  uint32_t length = 0;
  if (std::fread(&length, sizeof(length), 1, stdin) != 1) return false;
  text.resize(length);
  return std::fread(text.data(), 1, length, stdin) == length;
}

void write_block(const void* data, size_t count, size_t item_size) {
  const auto length = static_cast<uint32_t>(count);
  std::fwrite(&length, sizeof(length), 1, stdout);
  std::fwrite(data, item_size, count, stdout);
}

void bench(const oscar::Tokenizer& tokenizer) {
  std::vector<std::string> texts;
  size_t bytes = 0, ids = 0;
  for (std::string text; read_string(text); bytes += text.size()) texts.push_back(text);
  const std::clock_t start = std::clock();  // time of the processor: one thread, others may run
  for (const std::string& text : texts) ids += tokenizer.encode(text, false).size();
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  std::printf("%zu bytes, %zu ids, %.3f s, %.2f MB/s of one core\n", bytes, ids, seconds,
              static_cast<double>(bytes) / 1e6 / seconds);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const auto tokenizer = oscar::Tokenizer::from_file(argv[1]);
    if (std::strcmp(argv[2], "bench") == 0) {
      bench(tokenizer);
      return 0;
    }
    const bool decode = std::strcmp(argv[2], "decode") == 0;
    for (std::string text; read_string(text);) {
      const std::vector<int32_t> ids = tokenizer.encode(text, true);
      if (decode) {
        const std::string back = tokenizer.decode(ids, true);
        write_block(back.data(), back.size(), 1);
      } else {
        write_block(ids.data(), ids.size(), sizeof(int32_t));
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
