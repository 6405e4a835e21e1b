// HDF5 files as bundles and as token ids. libhdf5 itself runs in a child process, where a crash is
// an answer: what this program looks for is what gets past that.
#include "fuzz_case.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/verify.h"
#include "oscar/io/hdf5.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.fixed = size_t{16} << 20, .per_byte = 4096};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto path = scratch_file("input.h5", bytes);
  const auto findings = must("verify", [&] { return verify_bundle(path); });
  bool good = true;
  for (const Finding& finding : findings) good = good && finding.ok;
  const bool read = accepted([&] { read_bundle(path); });
  require(good || !read, "a bundle is read that is not verified");
  const InputFile input(path);
  for (const hdf5::ObjectInfo& object : hdf5::list_datasets(input)) {
    accepted([&] {
      const auto ids = hdf5::read_integers(input, object.path, 100);
      require(ids.values.size() == hdf5::element_count(ids.shape), "another number of ids");
    });
  }
}

}  // namespace oscar::fuzz
