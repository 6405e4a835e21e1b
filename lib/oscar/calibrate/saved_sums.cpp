// Sums one after another, then their counts.
#include "oscar/calibrate/saved_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "oscar/fit/statistics.h"

namespace oscar {
namespace {

constexpr const char* kDtype = "f64";
constexpr size_t kCounts = 2;  // of rows of queries, and of tokens

std::string copy_name(const char* kind, size_t index, int layer) {
  return fmt::format("{}_{}_{:06d}", kind, index, layer);
}

// Of all sums, and the counts.
size_t num_values(const LayerStatistics& sums) {
  size_t count = kCounts;
  visit_sums([&](const std::vector<double>& values) { count += values.size(); }, sums);
  return count;
}

}  // namespace

std::vector<uint8_t> sums_to_bytes(const LayerStatistics& sums) {
  std::vector<uint8_t> bytes;
  bytes.reserve(num_values(sums) * sizeof(double));
  const auto append = [&](const std::vector<double>& values) {
    const auto* first = reinterpret_cast<const uint8_t*>(values.data());
    bytes.insert(bytes.end(), first, first + values.size() * sizeof(double));
  };
  visit_sums(append, sums);
  append({static_cast<double>(sums.count_q), static_cast<double>(sums.count_kv)});
  return bytes;
}

std::shared_ptr<const LayerStatistics> sums_from_bytes(std::span<const uint8_t> bytes,
                                                       const LayerStatistics& shape, int64_t tokens,
                                                       const RefuseSums& refuse) {
  auto sums = std::make_shared<LayerStatistics>(make_statistics(shape.geometry));
  sums->o_proj_metric = {};
  if (!shape.attended.empty()) sums->attended = make_attended_sums(shape.geometry);
  const size_t count = num_values(*sums);
  if (bytes.size() != count * sizeof(double)) {
    refuse(fmt::format("{} values", count), fmt::format("{} bytes", bytes.size()));
  }
  const uint8_t* next = bytes.data();
  bool finite = true;
  const auto take = [&](std::vector<double>& values) {
    const size_t size = values.size() * sizeof(double);
    std::memcpy(values.data(), next, size);
    next += size;
    finite = finite && std::ranges::all_of(values, [](double x) { return std::isfinite(x); });
  };
  visit_sums(take, *sums);
  std::vector<double> counts(kCounts);
  take(counts);
  const auto rows_per_token = static_cast<double>(shape.count_q / shape.count_kv);
  const auto wanted = static_cast<double>(tokens);
  if (!finite || counts[0] != wanted * rows_per_token || counts[1] != wanted) {
    refuse(fmt::format("finite sums of {} tokens", tokens), fmt::format("{} tokens", counts[1]));
  }
  sums->count_q = static_cast<int64_t>(counts[0]);
  sums->count_kv = tokens;
  return sums;
}

void save_copies(const char* kind, const SumSnapshots& copies, std::vector<ResumeTensor>& tensors) {
  std::map<int, size_t> numbers;
  for (const auto& copy : copies) {
    const int layer = copy->geometry.layer_id;
    std::vector<uint8_t> bytes = sums_to_bytes(*copy);
    const auto values = static_cast<int64_t>(bytes.size() / sizeof(double));
    tensors.push_back(
        {.name = copy_name(kind, numbers[layer]++, layer), .dtype = kDtype, .shape = {values}});
    tensors.back().own(std::move(bytes));
  }
}

SumSnapshots load_copies(const char* kind, const std::vector<ResumeTensor>& tensors,
                         const std::vector<LayerStatistics>& statistics, const WantedCopies& wanted,
                         const std::string& file) {
  SumSnapshots copies;
  for (const LayerStatistics& sums : statistics) {
    const std::vector<int64_t> tokens = wanted(sums.geometry);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const std::string name = copy_name(kind, i, sums.geometry.layer_id);
      const auto refuse = [&](const std::string& expected, const std::string& found) {
        refuse_damaged_checkpoint(file + ", " + name, expected, found);
      };
      const auto tensor = std::ranges::find(tensors, name, &ResumeTensor::name);
      if (tensor == tensors.end()) refuse("sums", "none");
      if (tensor->dtype != kDtype) refuse(kDtype, tensor->dtype);
      copies.push_back(sums_from_bytes(tensor->bytes, sums, tokens[i], refuse));
    }
  }
  return copies;
}

}  // namespace oscar
