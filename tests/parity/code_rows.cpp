// oscar-test-code-rows BACKEND RATIO IN.npz OUT.npz: `rows` [n, d] as that backend codes them, in
// groups of the whole row: `codes` [n, d / 4] packed, `scale` and `zero` [n] as stored, `read` [n,
// d] what this toolkit reads of them.
#include <fmt/format.h>

#include <cstdlib>

#include "oscar/base/error.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/export.h"
#include "oscar/cache/quantize_rows.h"
#include "oscar/io/npy.h"

namespace {

using namespace oscar;

void code_rows(const char* name, double ratio, const char* from, const char* to) {
  const Backend& backend = find_backend(name);
  const FloatTensor rows = read_npz(from).at("rows");
  const int64_t n = rows.shape.at(0), d = rows.shape.at(1);
  CacheFormat quantizer = default_codec(backend);
  quantizer.quant_group_size = static_cast<int>(d);
  BackendRun run;
  run.format = quantizer.row_format();
  run.packing = backend.packing;
  FloatTensor codes{{n, d / 4}, {}}, scale{{n}, {}}, zero{{n}, {}}, read{{n, d}, {}};
  for (int64_t row = 0; row < n; ++row) {
    const CodedRow coded = code_row(run, ratio, {&rows.values[row * d], static_cast<size_t>(d)});
    const MetadataDtype dtype = run.format->metadata;
    const ScaleZero sz{load_metadata(coded.metadata.data(), 0, dtype),
                       load_metadata(coded.metadata.data(), 1, dtype)};
    codes.values.insert(codes.values.end(), coded.codes.begin(), coded.codes.end());
    scale.values.push_back(sz.scale);
    zero.values.push_back(sz.zero);
    for (int i = 0; i < d; ++i) {
      const int code = unpack_code(coded.codes.data(), i, static_cast<int>(d), run.packing);
      read.values.push_back(dequantize(run.format->rules, code, sz));
    }
  }
  write_npz(to, {{"codes", codes}, {"scale", scale}, {"zero", zero}, {"read", read}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    code_rows(argv[1], std::atof(argv[2]), argv[3], argv[4]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
