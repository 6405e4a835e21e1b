// RoPE parameters, of config.json or of --rope-scaling: two bytes of sizes, then JSON.
#include <cmath>

#include "fuzz_case.h"
#include "oscar/base/json.h"
#include "oscar/model/checkpoint/rope.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 256};

void read_untrusted(std::string_view bytes) {
  if (bytes.size() < 2) return;
  const int head_dim = 2 * (1 + static_cast<uint8_t>(bytes[0]));
  const int positions = 1 << (static_cast<uint8_t>(bytes[1]) % 31);
  const Rope rope = make_rope(parse_json(bytes.substr(2), "input"), head_dim, positions, "input");
  require(rope.rotary_dim > 0 && rope.rotary_dim <= head_dim, "rotary_dim");
  require(rope.inv_freq.size() == static_cast<size_t>(rope.rotary_dim) / 2, "frequencies");
  for (const double x : rope.inv_freq) require(std::isfinite(x), "a frequency is not finite");
  require(std::isfinite(rope.attention_factor), "the attention factor is not finite");
  require(rope.max_positions > 0, "no positions");
  Json parameters = rope.as_run;
  parameters.erase("max_positions");  // a result
  const Rope again = must("parameters with defaults filled in",
                          [&] { return make_rope(parameters, head_dim, positions, "as run"); });
  require(again.inv_freq == rope.inv_freq && again.max_positions == rope.max_positions &&
              again.attention_factor == rope.attention_factor && again.as_run == rope.as_run,
          "parameters as run give another RoPE");
}

}  // namespace oscar::fuzz
