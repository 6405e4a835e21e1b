// oscar-test-rival-rows CODEC SINK IN.npz OUT.npz: `keys` and `values` [heads, tokens, d] of one
// sequence as that codec reads them back, tiles from token SINK on. `levels`: Lloyd-Max of 2, 3 and
// 4 bits, one after another.
#include <fmt/format.h>

#include <cstdlib>

#include "oscar/base/error.h"
#include "oscar/eval/rival_codecs.h"
#include "oscar/io/npy.h"

namespace {

using namespace oscar;

FloatTensor read_back(const RivalFormat& rival, Side side, int64_t sink, FloatTensor rows) {
  const auto x = torch::from_blob(rows.values.data(), rows.shape, torch::kFloat32).unsqueeze(0);
  const auto code = rival_codec(rival, side, static_cast<int>(rows.shape.at(2)), sink, torch::kCPU);
  const auto read = code(x).contiguous();
  FloatTensor result{rows.shape, {}};
  result.values.assign(read.data_ptr<float>(), read.data_ptr<float>() + read.numel());
  return result;
}

void code_rows(const char* name, int64_t sink, const char* from, const char* to) {
  const RivalFormat* const rival = find_rival(name);
  if (!rival) throw Error({.what = "no such codec", .found = name});
  const FloatTensors rows = read_npz(from);
  FloatTensor levels{{28}, {}};
  for (const int bits : {2, 3, 4}) {
    for (const double level : lloyd_max_levels(bits)) {
      levels.values.push_back(static_cast<float>(level));
    }
  }
  write_npz(to, {{"keys", read_back(*rival, Side::kKey, sink, rows.at("keys"))},
                 {"values", read_back(*rival, Side::kValue, sink, rows.at("values"))},
                 {"levels", levels}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    const c10::InferenceMode guard;
    code_rows(argv[1], std::atoll(argv[2]), argv[3], argv[4]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
