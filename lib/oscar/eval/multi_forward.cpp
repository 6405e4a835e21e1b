// Layer-major forward of several methods.
#include "oscar/eval/multi_forward.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/freed_memory.h"
#include "oscar/base/interrupt.h"
#include "oscar/executor/layer_loader.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps the reference's attention output and measures the others against it.
class OutputComparison final : public AttentionObserver {
 public:
  explicit OutputComparison(int64_t first_query) : first_query_(first_query) {}

  void observe(const AttentionRecord& record) override {
    const auto o = record.o.slice(2, first_query_);
    if (!target_) {
      reference_ = o;
      energy_ = squares(o, record.k.size(1));
      return;
    }
    add(target_->error[record.layer], squares(o.sub(reference_), record.k.size(1)));
    add(target_->energy[record.layer], energy_);
  }

  void measure(OutputError& target) { target_ = &target; }
  void skip(OutputError& target, int layer) const { add(target.energy[layer], energy_); }

 private:
  // [num_kv_heads] of x [batch, num_qo_heads, tokens, d].
  static std::vector<double> squares(const torch::Tensor& x, int64_t num_kv_heads) {
    const auto heads = x.to(torch::kFloat32).square().sum({0, 2, 3}, false, torch::kFloat64);
    const auto sums = heads.view({num_kv_heads, -1}).sum(1).to(torch::kCPU);
    return {sums.data_ptr<double>(), sums.data_ptr<double>() + num_kv_heads};
  }
  static void add(std::vector<double>& sums, const std::vector<double>& more) {
    for (size_t head = 0; head < sums.size(); ++head) sums[head] += more[head];
  }

  int64_t first_query_;
  OutputError* target_ = nullptr;
  torch::Tensor reference_;
  std::vector<double> energy_;
};

int64_t state_bytes(const Transformer& model, const torch::Tensor& ids, size_t methods) {
  const int64_t element = model.compute().dtype == torch::kBFloat16 ? 2 : 4;
  return ids.numel() * model.config().hidden_size * element * static_cast<int64_t>(methods);
}

// states[m] undefined: still the reference's.
using States = std::vector<torch::Tensor>;

void advance(const Transformer& model, const MultiForward& methods, int layer,
             const LayerWeights& weights, States& states, std::vector<OutputError>& errors) {
  const bool on_cpu = !model.compute().device.is_cuda();
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
    if (on_cpu) give_back_much_freed_memory();
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

// How many batches pass together.
class BlockLength {
 public:
  explicit BlockLength(bool short_blocks) : most_(short_blocks ? 1 : kNoLimit) {}

  size_t most() const { return most_; }
  // `loading` of the `seconds` that a block of `batches` took went into waiting for weights.
  void took(double seconds, double loading, size_t batches) {
    constexpr double kReadingShare = 1.0 / 20, kGrowth = 8;
    if (most_ == kNoLimit) return;
    const double work = std::max(seconds - loading, 1e-9) / static_cast<double>(batches);
    const double wanted = std::ceil(loading / (kReadingShare * work));
    most_ = static_cast<size_t>(
        std::clamp(wanted, 1.0, kGrowth * static_cast<double>(std::max<size_t>(batches, 1))));
  }

 private:
  static constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
  size_t most_;
};

}  // namespace

void run_multi_forward(Transformer& model, const MultiForward& methods,
                       const std::vector<torch::Tensor>& batches, const BatchSink& sink,
                       Progress& progress) {
  const c10::InferenceMode guard;
  const int num_layers = model.config().num_layers;
  const size_t count = methods.engines.size();
  const std::vector<std::vector<double>> zeros(
      num_layers, std::vector<double>(model.config().num_kv_heads, 0.0));
  BlockLength length(methods.short_blocks);
  const TakesItsTime until_a_batch_ends;
  LayerLoader loader(model, /*resident=*/false);
  size_t begin = 0;
  while (begin < batches.size()) {
    const Clock::time_point start = Clock::now();
    double loading = 0;
    size_t end = begin;
    for (int64_t bytes = 0; end < batches.size() && end - begin < length.most(); ++end) {
      bytes += state_bytes(model, batches[end], count);
      if (bytes > methods.hidden_state_room && end > begin) break;
    }
    std::vector<States> block;
    std::vector<std::vector<OutputError>> errors(end - begin, {count, {zeros, zeros}});
    for (size_t b = begin; b < end; ++b) {
      block.emplace_back(count);
      block.back()[0] = model.embed(batches[b]);
    }
    for (int layer = 0; layer < num_layers; ++layer) {
      const Clock::time_point loading_start = Clock::now();
      const LayerWeights& weights = loader.get(layer);
      loading += seconds_since(loading_start);
      for (size_t b = begin; b < end; ++b) {
        stop_if_requested(kStoppedEvaluation);
        advance(model, methods, layer, weights, block[b - begin], errors[b - begin]);
        progress.advance(batches[b].numel());
      }
    }
    for (size_t b = begin; b < end; ++b) {
      stop_if_requested(kStoppedEvaluation);
      States& states = block[b - begin];
      for (size_t m = 1; m < count; ++m) {
        if (!states[m].defined()) states[m] = states[0];
      }
      sink(b, states, std::move(errors[b - begin]));
      states.clear();
    }
    length.took(seconds_since(start), loading, end - begin);
    begin = end;
  }
}

}  // namespace oscar
