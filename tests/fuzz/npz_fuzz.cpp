// .npz: a whole archive, or, behind a zero byte, one .npy file that an archive is made around,
// since checksums keep changed bytes away from what is inside.
#include "fuzz_case.h"
#include "oscar/io/npy.h"
#include "oscar/io/zip.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 256};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto path = scratch_folder() / "input.npz";
  if (bytes[0] == '\0') {
    write_zip(path, {{"k_rotation.npy", std::string(bytes.substr(1))}}, 64);
  } else {
    scratch_file("input.npz", bytes);
  }
  const FloatTensors arrays = read_npz(path);
  const auto written = scratch_folder() / "written.npz";
  must("writing", [&] { write_npz(written, arrays); });
  require(same_bits(must("reading again", [&] { return read_npz(written); }), arrays),
          "arrays differ after writing");
}

}  // namespace oscar::fuzz
