// Copies of sums: judged at the end, kept in between.
#include "oscar/calibrate/convergence_stage.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "oscar/base/parallel.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fitted_layers.h"

namespace oscar {
namespace {

std::shared_ptr<const LayerStatistics> from_saved(const ResumeTensor& tensor,
                                                  const LayerStatistics& sums, int64_t tokens,
                                                  const std::string& where) {
  auto copy = std::make_shared<LayerStatistics>(make_statistics(sums.geometry));
  copy->o_proj_metric = {};
  if (!sums.attended.empty()) copy->attended = make_attended_sums(sums.geometry);
  size_t count = 2;
  visit_sums([&](const std::vector<double>& values) { count += values.size(); }, *copy);
  if (tensor.dtype != "f64" || tensor.bytes.size() != count * sizeof(double)) {
    refuse_damaged_checkpoint(where, fmt::format("{} values of f64", count),
                              fmt::format("{} bytes of {}", tensor.bytes.size(), tensor.dtype));
  }
  std::vector<double> all(count);
  std::memcpy(all.data(), tensor.bytes.data(), tensor.bytes.size());
  size_t next = 0;
  const auto take = [&](std::vector<double>& values) {
    std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(next), values.size(), values.begin());
    next += values.size();
  };
  visit_sums(take, *copy);
  const bool finite =
      std::all_of(all.begin(), all.end(), [](double x) { return std::isfinite(x); });
  const auto rows_per_token = static_cast<double>(sums.count_q / sums.count_kv);
  const auto wanted = static_cast<double>(tokens);
  if (!finite || all[next] != wanted * rows_per_token || all[next + 1] != wanted) {
    refuse_damaged_checkpoint(where, fmt::format("finite sums of {} tokens", tokens),
                              fmt::format("{} tokens", all[next + 1]));
  }
  copy->count_q = static_cast<int64_t>(all[next]);
  copy->count_kv = tokens;
  return copy;
}

}  // namespace

std::string copy_name(const char* kind, size_t index, int layer) {
  return fmt::format("{}_{}_{:06d}", kind, index, layer);
}

Json judge_convergence(const SumSnapshots& snapshots,
                       const std::vector<LayerStatistics>& statistics, const RunPlan& plan,
                       const FitOptions& options, const Rope& rope, Progress& progress) {
  const LayerStatistics& any = first_fitted(statistics, "the model");
  std::vector<int64_t> parts = plan.snapshot_tokens;
  parts.push_back(any.count_kv);
  const std::string problem =
      convergence_problem(parts, std::max(any.geometry.head_dim_k, any.geometry.head_dim_v));
  std::vector<LayerConvergence> layers;
  if (!problem.empty()) return convergence_record(layers, any.count_kv, problem);
  std::map<int, std::vector<const LayerStatistics*>> by_layer;
  for (const auto& copy : snapshots) by_layer[copy->geometry.layer_id].push_back(copy.get());
  std::vector<const LayerStatistics*> judged;
  for (const LayerStatistics& total : statistics) {
    if (total.geometry.quantized) judged.push_back(&total);
  }
  layers.resize(judged.size());
  progress.begin("judging the text", static_cast<int64_t>(judged.size()), "layers");
  std::mutex advancing;
  parallel_for(static_cast<int64_t>(judged.size()), [&](int64_t index) {
    const auto layer = static_cast<size_t>(index);
    const auto& copies = by_layer.at(judged[layer]->geometry.layer_id);
    layers[layer] = layer_convergence(copies, *judged[layer], options, rope);
    const std::lock_guard<std::mutex> lock(advancing);
    progress.advance(1);
  });
  progress.end();
  return convergence_record(layers, any.count_kv, "no layer is quantized");
}

void save_copies(const char* kind, const SumSnapshots& copies, std::vector<ResumeTensor>& tensors) {
  std::map<int, size_t> numbers;
  for (const auto& copy : copies) {
    std::vector<double> all;
    const auto append = [&](const std::vector<double>& values) {
      all.insert(all.end(), values.begin(), values.end());
    };
    visit_sums(append, *copy);
    all.push_back(static_cast<double>(copy->count_q));
    all.push_back(static_cast<double>(copy->count_kv));
    const auto* bytes = reinterpret_cast<const uint8_t*>(all.data());
    const int layer = copy->geometry.layer_id;
    tensors.push_back({.name = copy_name(kind, numbers[layer]++, layer),
                       .dtype = "f64",
                       .shape = {static_cast<int64_t>(all.size())},
                       .bytes = {bytes, bytes + all.size() * sizeof(double)}});
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
      const auto tensor = std::find_if(tensors.begin(), tensors.end(),
                                       [&](const ResumeTensor& t) { return t.name == name; });
      if (tensor == tensors.end()) refuse_damaged_checkpoint(file, name, "none");
      copies.push_back(from_saved(*tensor, sums, tokens[i], file + ", " + name));
    }
  }
  return copies;
}

}  // namespace oscar
