// BPE from a Hugging Face tokenizer.json, equal to the `tokenizers` library.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/text/pre_tokenizer.h"

namespace oscar {

// One thread at a time may use an object: it remembers words it has cut.
class Tokenizer {
 public:
  // Throws Error naming any component of the file that is not implemented, with the way out
  // (pre-tokenized ids). The decoder matters to decode() only.
  static Tokenizer from_file(const std::filesystem::path& tokenizer_json);
  // The same from the document itself; `source` is its name in errors.
  static Tokenizer from_json(const TokenizerJson& document, const std::string& source);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Token ids of UTF-8 `text`. Added and special tokens inside the text are recognised.
  // `add_special_tokens` applies the file's post-processor template (for example a leading BOS).
  // What no token of the vocabulary can write is left out, as the library does; its bytes, after
  // normalisation, are added to `lost_bytes`. Throws Error with the byte offset when the text is
  // not valid UTF-8.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens,
                              int64_t* lost_bytes = nullptr) const;

  // Text of `ids`; special tokens are left out on request, ids of no token always. Bytes that form
  // no character become U+FFFD. Throws Error unless the file's decoder is ByteLevel.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const;

  // Id of a token by its content, added tokens included.
  std::optional<int32_t> token_id(std::string_view token) const;
  int32_t vocab_size() const;  // largest id + 1, added tokens included

 private:
  struct Implementation;
  explicit Tokenizer(std::unique_ptr<Implementation> implementation);
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace oscar
