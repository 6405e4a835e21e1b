// Layer-major forward of several methods.
#include "oscar/eval/multi_forward.h"

#include <fmt/format.h>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"

namespace oscar {
namespace {

// Keeps the reference's attention output and measures the others against it.
class OutputComparison final : public AttentionObserver {
 public:
  explicit OutputComparison(int64_t first_query) : first_query_(first_query) {}

  void observe(const AttentionRecord& record) override {
    const auto o = record.o.slice(2, first_query_);
    if (!target_) {
      reference_ = o;
      energy_ = squares(o);
      return;
    }
    target_->error[record.layer] += squares(o.sub(reference_));
    target_->energy[record.layer] += energy_;
  }

  void measure(OutputError& target) { target_ = &target; }
  void skip(OutputError& target, int layer) const { target.energy[layer] += energy_; }

 private:
  static double squares(const torch::Tensor& x) {
    return x.to(torch::kFloat32).square().sum(torch::kFloat64).item<double>();
  }

  int64_t first_query_;
  OutputError* target_ = nullptr;
  torch::Tensor reference_;
  double energy_ = 0;
};

int64_t state_bytes(const Transformer& model, const torch::Tensor& ids, size_t methods) {
  const int64_t element = model.compute().dtype == torch::kBFloat16 ? 2 : 4;
  return ids.numel() * model.config().hidden_size * element * static_cast<int64_t>(methods);
}

// states[m] undefined: still the reference's.
using States = std::vector<torch::Tensor>;

void advance(const Transformer& model, const MultiForward& methods, int layer,
             const LayerWeights& weights, States& states, std::vector<OutputError>& errors) {
  OutputComparison comparison(methods.first_query);
  const auto entering = states[0];
  states[0] =
      model.forward_layer(layer, weights, entering, &comparison, nullptr, methods.position_offset);
  for (size_t m = 1; m < states.size(); ++m) {
    CacheEngine* const engine = methods.engines[m];
    const bool int2 = engine && engine->quantizes(layer);
    if (!int2 && !states[m].defined()) {
      comparison.skip(errors[m], layer);
      continue;
    }
    comparison.measure(errors[m]);
    states[m] = model.forward_layer(layer, weights, states[m].defined() ? states[m] : entering,
                                    &comparison, int2 ? engine : nullptr, methods.position_offset);
    if (!states[m].isfinite().all().item<bool>()) {
      throw Error({.what = "a hidden state is not finite",
                   .where = fmt::format("layer {}, method {} of the comparison", layer, m),
                   .hint = "run with --dtype fp32"});
    }
  }
  if (!states[0].isfinite().all().item<bool>()) {
    throw Error({.what = "a hidden state of the reference is not finite",
                 .where = fmt::format("layer {}", layer),
                 .hint = "run with --dtype fp32, or check the weights"});
  }
}

}  // namespace

std::vector<OutputError> run_multi_forward(Transformer& model, const MultiForward& methods,
                                           const std::vector<torch::Tensor>& batches,
                                           const BatchSink& sink, Progress& progress) {
  const c10::InferenceMode guard;
  const int num_layers = model.config().num_layers;
  const size_t count = methods.engines.size();
  std::vector<OutputError> errors(
      count, {std::vector<double>(num_layers, 0.0), std::vector<double>(num_layers, 0.0)});
  size_t begin = 0;
  while (begin < batches.size()) {
    size_t end = begin;
    for (int64_t bytes = 0; end < batches.size(); ++end) {
      bytes += state_bytes(model, batches[end], count);
      if (bytes > methods.hidden_state_room && end > begin) break;
    }
    std::vector<States> group;
    for (size_t b = begin; b < end; ++b) {
      group.emplace_back(count);
      group.back()[0] = model.embed(batches[b]);
    }
    for (int layer = 0; layer < num_layers; ++layer) {
      const auto weights = model.load_layer(layer);
      for (size_t b = begin; b < end; ++b) {
        stop_if_requested(kStoppedEvaluation);
        advance(model, methods, layer, *weights, group[b - begin], errors);
        progress.advance(batches[b].numel());
      }
    }
    for (size_t b = begin; b < end; ++b) {
      States& states = group[b - begin];
      for (size_t m = 1; m < count; ++m) {
        if (!states[m].defined()) states[m] = states[0];
      }
      sink(b, states);
      states.clear();
    }
    begin = end;
  }
  return errors;
}

}  // namespace oscar
