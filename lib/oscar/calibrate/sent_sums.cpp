// As a copy of sums lies in a checkpoint.
#include "oscar/calibrate/sent_sums.h"

#include <memory>
#include <string>
#include <vector>

#include "oscar/calibrate/convergence_stage.h"

namespace oscar {
namespace {

constexpr const char* kSums = "sums";

}  // namespace

void send_sums(Ranks& ranks, int to, const LayerStatistics& sums) {
  std::vector<ResumeTensor> tensors;
  save_copies(kSums, {std::make_shared<LayerStatistics>(sums)}, tensors);
  ranks.send(to, tensors.front().bytes);
}

LayerStatistics receive_sums(Ranks& ranks, int from, const LayerStatistics& shape, int64_t tokens) {
  const ResumeTensor sums{.name = copy_name(kSums, 0, shape.geometry.layer_id),
                          .dtype = "f64",
                          .shape = {},
                          .bytes = ranks.receive(from)};
  return *load_copies(
              kSums, {sums}, {shape},
              [&](const LayerGeometry&) { return std::vector<int64_t>{tokens}; },
              "sums of process " + std::to_string(from))
              .front();
}

}  // namespace oscar
