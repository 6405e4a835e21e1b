// tokenizer.json, then a NUL and text to be encoded.
#include "fuzz_case.h"
#include "oscar/text/tokenizer.h"
#include "oscar/text/unicode.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.fixed = size_t{8} << 20, .per_byte = 1024};

void read_untrusted(std::string_view bytes) {
  const auto [json, text] = cut_at_nul(bytes);
  const Tokenizer tokenizer =
      Tokenizer::from_json(parse_tokenizer_json(std::string(json), "input"), "input");
  const std::string valid = replace_invalid_utf8(text.substr(0, 512));
  for (const bool special : {false, true}) {
    accepted([&] {
      int64_t lost = 0;
      const auto ids = tokenizer.encode(valid, special, &lost);
      require(lost >= 0, "lost bytes");
      for (const int32_t id : ids) {
        require(id >= 0 && id < tokenizer.vocab_size(), "an id outside the vocabulary");
      }
      require(tokenizer.encode(valid, special) == ids, "the same text gives other ids");
      require(first_invalid_utf8(tokenizer.decode(ids, special)) == kAllValid,
              "decoded text is no UTF-8");
    });
  }
}

}  // namespace oscar::fuzz
