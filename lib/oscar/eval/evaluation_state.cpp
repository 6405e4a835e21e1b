// Figures as tensors of float64 in a checkpoint, and back.
#include "oscar/eval/evaluation_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "oscar/base/error.h"

namespace oscar {
namespace {

// Names the layout of the tensors below; another one is another version's.
constexpr const char* kOrder = "evaluation";
constexpr const char* kFloat64 = "f64";
constexpr int64_t kScores = 3, kSums = 2;  // fields of TokenScores and OutputError

struct Table {
  std::vector<int64_t> shape = {};
  std::vector<double> values = {};
};

void add(const std::string& name, const Table& table, std::vector<ResumeTensor>& tensors) {
  if (table.values.empty()) return;
  const auto* bytes = reinterpret_cast<const uint8_t*>(table.values.data());
  tensors.push_back({.name = name, .dtype = kFloat64, .shape = table.shape});
  tensors.back().own({bytes, bytes + table.values.size() * sizeof(double)});
}

Table score_table(const TextState& text) {
  Table scores{.shape = {static_cast<int64_t>(text.scores.size()), kScores,
                         static_cast<int64_t>(text.scores[0].nll.size())}};
  for (const TokenScores& s : text.scores) {
    for (const auto* values : {&s.nll, &s.kl, &s.agrees}) {
      scores.values.insert(scores.values.end(), values->begin(), values->end());
    }
  }
  return scores;
}

Table error_table(const TextState& text) {
  const auto& layers = text.errors[0].error;
  Table errors{.shape = {static_cast<int64_t>(text.errors.size()), kSums,
                         static_cast<int64_t>(layers.size()),
                         static_cast<int64_t>(layers[0].size())}};
  for (const OutputError& e : text.errors) {
    for (const auto* of_layers : {&e.error, &e.energy}) {
      for (const auto& values : *of_layers) {
        errors.values.insert(errors.values.end(), values.begin(), values.end());
      }
    }
  }
  return errors;
}

void add_text(const std::string& name, const TextState& text, std::vector<ResumeTensor>& tensors) {
  if (text.scores.empty()) return;
  add(name + "_scores", score_table(text), tensors);
  add(name + "_errors", error_table(text), tensors);
}

// The tensor `name`, whose last extent is free; `leading` are the others. Empty when there is none.
std::vector<double> find(const std::string& file, const std::vector<ResumeTensor>& tensors,
                         const std::string& name, const std::vector<int64_t>& leading) {
  for (const ResumeTensor& tensor : tensors) {
    if (tensor.name != name) continue;
    size_t rows = 1;
    for (const int64_t extent : leading) rows *= static_cast<size_t>(extent);
    const size_t bytes = tensor.bytes.size(), row = bytes / rows;
    std::vector<int64_t> shape = leading;
    shape.push_back(static_cast<int64_t>(row / sizeof(double)));
    if (tensor.dtype != kFloat64 || tensor.shape != shape ||
        bytes != rows * static_cast<size_t>(shape.back()) * sizeof(double)) {
      refuse_damaged_checkpoint(
          fmt::format("{}, {}", file, name), fmt::format("f64 [{}, n]", fmt::join(leading, ", ")),
          fmt::format("{} [{}], {} bytes", tensor.dtype, fmt::join(tensor.shape, ", "), bytes));
    }
    std::vector<double> values(bytes / sizeof(double));
    std::memcpy(values.data(), tensor.bytes.data(), bytes);
    return values;
  }
  return {};
}

// Cuts `values` into rows of equal length, each into its place.
void deal(const std::vector<double>& values, const std::vector<std::vector<double>*>& rows) {
  const size_t length = values.size() / rows.size();
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i * length);
    rows[i]->assign(begin, begin + static_cast<std::ptrdiff_t>(length));
  }
}

// Of score_table and error_table.
TextState text_of(const std::vector<double>& scores, const std::vector<double>& errors,
                  const EvaluationShape& shape) {
  TextState text;
  text.scores.resize(shape.methods);
  text.errors.resize(shape.methods);
  std::vector<std::vector<double>*> places, sums;
  for (TokenScores& s : text.scores) places.insert(places.end(), {&s.nll, &s.kl, &s.agrees});
  for (OutputError& e : text.errors) {
    for (auto* of_layers : {&e.error, &e.energy}) {
      of_layers->resize(shape.layers);
      for (auto& values : *of_layers) sums.push_back(&values);
    }
  }
  deal(scores, places);
  deal(errors, sums);
  return text;
}

TextState find_text(const std::string& file, const std::vector<ResumeTensor>& tensors,
                    const std::string& name, const EvaluationShape& shape) {
  const auto count = static_cast<int64_t>(shape.methods);
  const auto scores = find(file, tensors, name + "_scores", {count, kScores});
  const auto errors =
      find(file, tensors, name + "_errors", {count, kSums, static_cast<int64_t>(shape.layers)});
  if (scores.empty() && errors.empty()) return {};
  TextState text = text_of(scores, errors, shape);
  if (const size_t heads = text.errors[0].error[0].size(); heads != shape.heads) {
    refuse_damaged_checkpoint(fmt::format("{}, {}_errors", file, name),
                              fmt::format("{} KV heads", shape.heads), fmt::format("{}", heads));
  }
  return text;
}

}  // namespace

std::vector<uint8_t> text_bytes(const TextState& text) {
  std::vector<double> values = error_table(text).values;
  const std::vector<double> scores = score_table(text).values;
  values.insert(values.end(), scores.begin(), scores.end());
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {bytes, bytes + values.size() * sizeof(double)};
}

TextState text_from_bytes(const std::vector<uint8_t>& bytes, const EvaluationShape& shape) {
  const size_t errors = shape.methods * kSums * shape.layers * shape.heads;
  const size_t count = bytes.size() / sizeof(double), of_token = shape.methods * kScores;
  if (count < errors || bytes.size() != count * sizeof(double) ||
      (count - errors) % of_token != 0) {
    throw Error({.what = "figures of another shape than the text's",
                 .expected = fmt::format("{} sums and {} scores a token", errors, of_token),
                 .found = fmt::format("{} bytes", bytes.size())});
  }
  std::vector<double> values(count);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(errors);
  return text_of({middle, values.end()}, {values.begin(), middle}, shape);
}

EvaluationCheckpoint::EvaluationCheckpoint(std::filesystem::path path, Bundle run)
    : path_(std::move(path)), run_(std::move(run)) {
  run_.statistics_only = true;
}

void EvaluationCheckpoint::save(const EvaluationState& state) {
  if (path_.empty()) return;
  const auto start = SavePace::Clock::now();
  ResumeState saved{.run_key = run_.run_key, .order = kOrder};
  add_text("text", state.text, saved.tensors);
  add_text("separated", state.separated, saved.tensors);
  Table margins, generated;
  for (const auto& outcomes : state.forced) {
    for (const NeedleOutcome& outcome : outcomes) margins.values.push_back(outcome.margin);
    margins.shape = {static_cast<int64_t>(state.forced.size()),
                     static_cast<int64_t>(outcomes.size())};
  }
  add("margins", margins, saved.tensors);
  generated.values.assign(state.generated.begin(), state.generated.end());
  generated.shape = {1, static_cast<int64_t>(generated.values.size())};
  add("generated", generated, saved.tensors);
  write_checkpoint(path_, run_, saved);
  pace_.saved(start);
}

void EvaluationCheckpoint::save_if_due(const EvaluationState& state) {
  if (pace_.due()) save(state);
}

std::optional<EvaluationState> EvaluationCheckpoint::load(const EvaluationShape& shape) const {
  if (path_.empty()) return std::nullopt;
  const auto saved = read_own_checkpoint(
      path_, {run_.run_key, kOrder,
              "the same model, bundles, text, options, device, threads and version"});
  if (!saved) return std::nullopt;
  const std::string file = path_.string();
  const std::vector<ResumeTensor>& tensors = saved->state.tensors;
  EvaluationState state;
  state.text = find_text(file, tensors, "text", shape);
  state.separated = find_text(file, tensors, "separated", shape);
  const auto margins = find(file, tensors, "margins", {static_cast<int64_t>(shape.methods)});
  for (size_t m = 0; m < shape.methods && !margins.empty(); ++m) {
    const size_t prompts = margins.size() / shape.methods;
    state.forced.emplace_back();
    for (size_t i = 0; i < prompts; ++i) {
      state.forced[m].push_back(needle_outcome(margins[m * prompts + i]));
    }
  }
  for (const double pass : find(file, tensors, "generated", {1})) {
    state.generated.push_back(pass != 0);
  }
  return state;
}

}  // namespace oscar
