// Pickles, and behind a zero byte one around which a file of torch.save is made.
#include "fuzz_case.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/io/torch_file.h"
#include "oscar/io/zip.h"

namespace oscar::fuzz {
namespace {

constexpr std::string_view kGlobals[] = {"torch._utils _rebuild_tensor_v2",
                                         "collections OrderedDict", "torch FloatStorage"};

}  // namespace

// A byte may push a node; the archive around it has one storage of 64 bytes.
const MemoryBound kMemoryBound{.per_byte = 512};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  if (bytes[0] != '\0') {
    const PickleDocument document = read_pickle(bytes, kGlobals, "input");
    require(document.root != nullptr, "a pickle without a value");
    require(document.nodes.size() <= bytes.size(), "more values than bytes");
    return;
  }
  const auto path = scratch_folder() / "k.pt";
  write_zip(path,
            {{"k/data.pkl", std::string(bytes.substr(1))},
             {"k/byteorder", "little"},
             {"k/data/0", std::string(64, '\x3c')},
             {"k/version", "3\n"}},
            64);
  TransformSet set;
  read_torch_rotations(path, Side::kKey, set);
  require(!set.empty(), "a file of no rotations is accepted");
}

}  // namespace oscar::fuzz
