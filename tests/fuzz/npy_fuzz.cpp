// .npy files of integers: as many as the file has bytes for, and the same after writing.
#include "fuzz_case.h"
#include "oscar/io/npy.h"

namespace oscar::fuzz {

const MemoryBound kMemoryBound{.per_byte = 64};

void read_untrusted(std::string_view bytes) {
  const NpyIntegers array = parse_npy_integers(bytes, "input");
  uint64_t count = 1;
  for (const uint64_t size : array.shape) {
    require(!__builtin_mul_overflow(count, size, &count), "a shape of too many values");
  }
  require(array.values.size() == count, "another number of values than the shape's");
  require(count <= bytes.size(), "more values than bytes");
  std::vector<int32_t> values;
  for (const int64_t value : array.values) {
    if (value < INT32_MIN || value > INT32_MAX) return;
    values.push_back(static_cast<int32_t>(value));
  }
  const auto path = scratch_folder() / "written.npy";
  must("writing", [&] { write_npy_int32(path, array.shape, values); });
  const NpyIntegers again = must("reading again", [&] { return read_npy_integers(path); });
  require(again.shape == array.shape && again.values == array.values,
          "integers differ after writing");
}

}  // namespace oscar::fuzz
