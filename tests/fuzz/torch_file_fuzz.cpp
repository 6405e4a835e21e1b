// Whole files of torch.save: what is read survives writing.
#include "fuzz_case.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/io/torch_file.h"

namespace oscar::fuzz {
namespace {

// Tensors by their place, as far down as files of rotations go.
void collect(const TorchFile& file, const PickleNode& node, const std::string& name, int depth,
             TorchDict& tensors) {
  if (TorchFile::is_tensor(node)) {
    constexpr int64_t kMost = 1 << 16;
    accepted([&] { tensors.push_back({name, {file.tensor(node, name, kMost)}}); });
  } else if (depth > 0 && tensors.size() < 64) {
    for (size_t i = 0; i < node.items.size() && i < 16; ++i) {
      collect(file, *node.items[i], name + "." + std::to_string(i), depth - 1, tensors);
    }
  }
}

}  // namespace

// A view may show one number of its storage 65,536 times.
const MemoryBound kMemoryBound{.fixed = size_t{64} << 20, .per_byte = 512};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto path = scratch_file("k.pt", bytes);
  const TorchFile file = TorchFile::open(path);
  TorchDict tensors;
  collect(file, file.root(), "t", 3, tensors);
  const auto written = scratch_folder() / "written.pt";
  must("writing", [&] { write_torch_file(written, {tensors}); });
  const TorchFile again = must("opening again", [&] { return TorchFile::open(written); });
  for (const TorchItem& item : tensors) {
    const auto& name = std::get<std::string>(item.key);
    const auto& tensor = std::get<FloatTensor>(item.value.is);
    const PickleNode* node = again.root().find(name);
    require(node != nullptr, "a tensor is lost");
    const FloatTensor read =
        must("reading again", [&] { return again.tensor(*node, name, 1 << 16); });
    require(same_bits({{"t", read}}, {{"t", tensor}}), "a tensor differs after writing");
  }
  TransformSet set;
  read_torch_rotations(path, Side::kValue, set);
}

}  // namespace oscar::fuzz
