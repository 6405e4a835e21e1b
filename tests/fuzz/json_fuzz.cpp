// JSON text: what is accepted is JSON to the library's own parser too, and survives writing.
#include "fuzz_case.h"
#include "oscar/base/json.h"
#include "oscar/text/pre_tokenizer.h"

namespace oscar::fuzz {

// Two values and a text of it.
const MemoryBound kMemoryBound{.per_byte = 3 * 49};

void read_untrusted(std::string_view bytes) {
  const Json value = parse_json(bytes, "input");
  require(Json::accept(bytes), "text is accepted that is no JSON");
  const std::string text = json_text(value);
  require(must("JSON that was written", [&] { return parse_json(text, "written"); }) == value,
          "JSON differs after writing");
  must("the same as a tokenizer",
       [&] { return parse_tokenizer_json(std::string(bytes), "input"); });
}

}  // namespace oscar::fuzz
