// A safetensors file: entries lie in the file and cover it, and what is read survives writing.
#include "fuzz_case.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/io/safetensors.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 256};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto path = scratch_file("model.safetensors", bytes);
  {
    const MappedFile file(path);
    uint64_t data = 0;
    for (const TensorEntry& entry : parse_safetensors_header(file)) {
      require(entry.bytes <= file.size() && entry.offset <= file.size() - entry.bytes,
              "a tensor lies outside the file");
      data += entry.bytes;
    }
    require(data <= file.size(), "tensors are more than the file");
  }
  const SafetensorsWeights weights(scratch_folder());
  for (const std::string& name : weights.names()) {
    const auto stored = weights.stored(name);
    uint64_t sum = 0;
    for (size_t i = 0; i < stored.bytes; ++i) sum += std::to_integer<uint8_t>(stored.data[i]);
    accepted([&] { weights.get(name, stored.shape); });
    require(sum <= 255 * stored.bytes, "bytes are no bytes");
  }
  weights.fingerprint(false);
  const auto copy = scratch_folder() / "copy.safetensors";
  must("copying",
       [&] { copy_safetensors(path, copy, [](const TensorEntry&) { return std::nullopt; }); });
  must("the header of a copy", [&] { return parse_safetensors_header(MappedFile(copy)).size(); });
  const FloatTensors tensors = read_safetensors(path);
  const auto written = scratch_folder() / "written.safetensors";
  must("writing", [&] { write_safetensors(written, tensors); });
  require(same_bits(must("reading again", [&] { return read_safetensors(written); }), tensors),
          "tensors differ after writing");
  const TransformSet set = from_arrays(tensors, "input");
  must("arrays of transforms", [&] { return from_arrays(to_arrays(set), "written"); });
}

}  // namespace oscar::fuzz
