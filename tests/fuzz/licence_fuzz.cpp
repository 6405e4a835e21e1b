// The licence that the README.md of a model states.
#include "fuzz_case.h"
#include "oscar/eval/report/card.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 64};

void read_untrusted(std::string_view bytes) {
  scratch_file("README.md", bytes);
  const auto licence = read_licence(scratch_folder());
  if (!licence) return;
  require(!licence->id.empty(), "a licence without a word");
  for (const std::string* text : {&licence->id, &licence->name, &licence->link}) {
    require(text->find('\n') == std::string::npos, "a licence of several lines");
  }
}

}  // namespace oscar::fuzz
