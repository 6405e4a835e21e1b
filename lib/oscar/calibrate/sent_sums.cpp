// As a copy of sums lies in a checkpoint.
#include "oscar/calibrate/sent_sums.h"

#include <string>

#include "oscar/base/error.h"
#include "oscar/calibrate/saved_sums.h"

namespace oscar {

void send_sums(Ranks& ranks, int to, const LayerStatistics& sums) {
  ranks.send(to, sums_to_bytes(sums));
}

LayerStatistics receive_sums(Ranks& ranks, int from, const LayerStatistics& shape, int64_t tokens) {
  const auto refuse = [&](const std::string& expected, const std::string& found) {
    throw Error({.what = "sums that another process sent are not those of this layer",
                 .where = "process " + std::to_string(from) + ", layer " +
                          std::to_string(shape.geometry.layer_id),
                 .expected = expected,
                 .found = found});
  };
  return *sums_from_bytes(ranks.receive(from), shape, tokens, refuse);
}

}  // namespace oscar
