// Byte-level BPE from a Hugging Face tokenizer.json, equal to the `tokenizers` library.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

// One thread at a time may use an object: it remembers words it has cut.
class Tokenizer {
 public:
  // Throws Error naming any component of the file that is not implemented, with the way out
  // (pre-tokenized ids).
  static Tokenizer from_file(const std::filesystem::path& tokenizer_json);
  // The same of the file's text, which is said to come from `source`.
  static Tokenizer from_text(const std::string& tokenizer_json, const std::string& source);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Token ids of UTF-8 `text`. Added and special tokens inside the text are recognised.
  // `add_special_tokens` applies the file's post-processor template (for example a leading BOS).
  // Throws Error with the byte offset when the text is not valid UTF-8.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens) const;

  // Text of `ids`; special tokens are left out on request, ids of no token always. Bytes that form
  // no character become U+FFFD.
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
