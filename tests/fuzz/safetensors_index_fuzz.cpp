// model.safetensors.index.json beside one good shard.
#include "fuzz_case.h"
#include "oscar/io/safetensors.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 128};

void read_untrusted(std::string_view bytes) {
  static const bool shard = [] {
    write_safetensors(scratch_folder() / "a.safetensors",
                      {{"x", {{2}, {1, 2}}}, {"y", {{1, 1}, {3}}}});
    return true;
  }();
  require(shard, "there is no shard");
  scratch_file("model.safetensors.index.json", bytes);
  const SafetensorsWeights weights(scratch_folder());
  for (const std::string& name : weights.names()) {
    require(name == "x" || name == "y", "a tensor that no shard has");
    must("a tensor of the index", [&] { return weights.stored(name).bytes; });
  }
  for (const auto& path : weights.shards()) {
    require(path.parent_path() == scratch_folder(), "a shard outside the folder");
  }
}

}  // namespace oscar::fuzz
