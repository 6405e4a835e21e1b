// UTF-8 and normalisation forms.
#include "fuzz_case.h"
#include "oscar/base/error.h"
#include "oscar/text/bpe.h"
#include "oscar/text/unicode.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 1024};

void read_untrusted(std::string_view bytes) {
  const std::string valid = replace_invalid_utf8(bytes);
  require(first_invalid_utf8(valid) == kAllValid, "repaired text is no UTF-8");
  require((valid == bytes) == (first_invalid_utf8(bytes) == kAllValid),
          "valid text is changed, or invalid text is not");
  require(bytes_of_characters(characters_of_bytes(bytes)) == bytes, "bytes as characters");
  for (const auto form :
       {NormalForm::kNfc, NormalForm::kNfd, NormalForm::kNfkc, NormalForm::kNfkd}) {
    const std::string normal = normalize_unicode(valid, form);
    require(first_invalid_utf8(normal) == kAllValid, "normalised text is no UTF-8");
    require(normalize_unicode(normal, form) == normal, "a normalisation form is not stable");
  }
  require(first_invalid_utf8(lowercase(valid)) == kAllValid, "lower case is no UTF-8");
}

}  // namespace oscar::fuzz
