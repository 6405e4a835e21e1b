// The plain writer of the cache, by the rules of a plan.
#include "oscar/exchange/coded_row.h"

#include <fmt/format.h>

#include "oscar/base/error.h"
#include "oscar/cache/quantize_rows.h"

namespace oscar {

CodedRow code_row(const StackRun& run, double clip_ratio, std::span<const float> row) {
  if (!run.format) throw Error({.what = "the stack codes rows by levels of its own"});
  const RowQuantizer quantizer{.head_dim = static_cast<int>(row.size()),
                               .format = *run.format,
                               .recipe = {.clip_ratio = static_cast<float>(clip_ratio)},
                               .order = run.packing};
  if (!valid_quantizer(quantizer)) {
    throw Error({.what = "rows of this size cannot be coded",
                 .found = fmt::format("{} values in quantization groups of {}", row.size(),
                                      run.format->quant_group_size)});
  }
  const size_t pairs = row.size() / static_cast<size_t>(run.format->quant_group_size);
  CodedRow out;
  out.codes.resize(row.size() / 4);
  out.metadata.resize(pairs * 2 * static_cast<size_t>(metadata_bytes(run.format->metadata)));
  const RowsStatus status = quantize_rows_ref(
      quantizer, row.data(), 1, {.packed = out.codes.data(), .metadata = out.metadata.data()});
  if (status.status != RowStatus::kOk) throw Error({.what = "a row cannot be coded"});
  return out;
}

std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace oscar
