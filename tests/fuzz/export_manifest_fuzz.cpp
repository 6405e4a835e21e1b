// oscar-export.json of an export whose other files are good.
#include "bundle/sample.h"
#include "fuzz_case.h"
#include "oscar/bundle/export.h"
#include "oscar/bundle/verify_export.h"

namespace oscar::fuzz {

// The export's matrices are read again each time.
const MemoryBound kMemoryBound{.fixed = size_t{16} << 20, .per_byte = 128};

void read_untrusted(std::string_view bytes) {
  static const ExchangeFormat& format = find_exchange_format("npz");
  static const std::filesystem::path folder = [] {
    auto path = scratch_folder() / "export";
    constexpr sample::Size kSmall{.layers = 1, .heads = 2, .query_heads = 2, .dim = 4};
    const Bundle bundle = sample::rotation_bundle(TransformKind::kOscar, kSmall);
    export_bundle(bundle, "x.h5", format, false, path);
    return path;
  }();
  scratch_file(std::filesystem::path("export") / kManifestName, bytes);
  must("verify", [&] { return verify_export(format, folder); });
}

}  // namespace oscar::fuzz
