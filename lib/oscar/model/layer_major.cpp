// All sequences through one layer, then the next.
#include "oscar/model/layer_major.h"

#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>
#include <algorithm>
#include <map>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/model/device.h"

namespace oscar {

// GPUs by local rank, memory and cores by equal parts.

ComputeOptions own_compute(const Ranks& ranks, const std::string& device, const std::string& dtype,
                           Progress& progress) {
  const ComputeOptions compute = choose_compute(device, dtype);
  if (ranks.several() && device == "auto" && !compute.device.is_cuda()) {
    progress.note(fmt::format("no GPU was found: {} processes share the CPU", ranks.size()));
  }
  const bool any_gpu = compute.device.is_cuda() && device.find(':') == std::string::npos;
  if (!ranks.several() || !any_gpu) return compute;
  return choose_compute(fmt::format("cuda:{}", ranks.local_rank()), dtype);
}

MemoryLimits own_memory(const Ranks& ranks, const torch::Device& device, int64_t host_memory,
                        int64_t gpu_memory) {
  MemoryLimits limits = memory_limits(device, host_memory, gpu_memory);
  if (host_memory == 0) limits.host_bytes /= ranks.local_size();
  return limits;
}

double longest_part(const Ranks& ranks, const torch::Device& device, size_t pieces) {
  if (pieces == 0) return 0;
  const auto processes = static_cast<size_t>(ranks.size());
  const double largest = static_cast<double>((pieces + processes - 1) / processes);
  int64_t on_machine = ranks.local_size();
  if (!device.is_cuda()) {
    on_machine = std::clamp<int64_t>(parallel_cores() / at::get_num_threads(), 1, on_machine);
  }
  const double turns = static_cast<double>(ranks.local_size()) / static_cast<double>(on_machine);
  return std::min(1.0, largest * turns / static_cast<double>(pieces));
}

// Results wait for those before them.

void work_in_turn(
    Ranks& ranks, size_t begin, size_t end,
    const std::function<void(const std::vector<size_t>& pieces, const PieceDone& done)>& work,
    const std::function<void(size_t piece, const std::vector<uint8_t>& result, bool own)>& take) {
  std::vector<size_t> own;
  for (size_t piece = begin; piece < end; ++piece) {
    if (ranks.owns(piece - begin)) own.push_back(piece);
  }
  if (!ranks.first()) {
    return work(own, [&](size_t, const std::vector<uint8_t>& result) { ranks.send(0, result); });
  }
  std::map<size_t, std::vector<uint8_t>> results;  // own ones that others come before
  size_t next = begin;
  const auto take_next = [&](bool wait) {
    for (; next < end; ++next) {
      const int owner = ranks.owner(next - begin);
      if (owner != 0) {
        if (!wait && !ranks.arrived(owner)) return;
        take(next, ranks.receive(owner), false);
      } else {
        const auto result = results.extract(next);
        if (!result) return;
        take(next, result.mapped(), true);
      }
    }
  };
  work(own, [&](size_t piece, std::vector<uint8_t> result) {
    results.emplace(piece, std::move(result));
    take_next(false);
  });
  take_next(true);
}

// A thread that reads and copies on a stream of its own.

LayerLoader::LayerLoader(Transformer& model, bool resident)
    : model_(model),
      resident_(resident),
      own_(static_cast<size_t>(model.config().num_layers)),
      layers_(resident && model.compute().device.is_cuda() ? model.kept_layers() : own_) {
  if (resident) return;
  for (auto& kept : model.kept_layers()) {
    if (kept) kept = nullptr;  // nothing is written where there is none: others may be looking
  }
}

LayerLoader::~LayerLoader() {
  if (reading_.valid()) reading_.wait();
  try {
    wait_for_device();               // before memory that it may read from is another's
  } catch (const std::exception&) {  // whoever asks the device next is told
  }
}

void LayerLoader::wait_for_device() const {
  const torch::Device device = model_.compute().device;
  if (device.is_cuda()) wait_for_stream(device);
}

void LayerLoader::load_ahead(int layer) {
  const torch::Device device = model_.compute().device;
  if (!device.is_cuda() || layer >= model_.config().num_layers) return;
  if (layers_[static_cast<size_t>(layer)] || reading_.valid()) return;
  coming_ = layer;
  reading_ = std::async(std::launch::async, [this, layer, device] {
    const c10::Stream stream = side_stream(device, kLoadingStream);
    const c10::StreamGuard guard(stream);
    Weights weights = model_.load_layer(layer);
    // Until the next one is asked for, the disk would rest.
    if (layer + 1 < model_.config().num_layers) model_.read_ahead(layer + 1);
    stream.synchronize();
    return weights;
  });
}

const LayerWeights& LayerLoader::get(int layer) {
  if (!resident_ && present_ >= 0 && present_ != layer) {
    wait_for_device();
    layers_[static_cast<size_t>(present_)].reset();
  }
  present_ = layer;
  Weights& kept = layers_[static_cast<size_t>(layer)];
  if (reading_.valid() && coming_ != layer + 1) {
    Weights weights = reading_.get();
    if (coming_ == layer || resident_) layers_[static_cast<size_t>(coming_)] = std::move(weights);
  }
  if (!kept) kept = model_.load_layer(layer);
  load_ahead(layer + 1);
  return *kept;
}

// The loop over waves, layers and batches.

namespace {

std::vector<torch::Tensor> embed_wave(Transformer& model, const TokenSequences& corpus,
                                      const RunPlan& plan, const Wave& wave) {
  std::vector<torch::Tensor> hidden;
  for (size_t i = 0; i < wave.num_batches; ++i) {
    const torch::Tensor ids = batch_ids(corpus, plan.batches[wave.first_batch + i]);
    torch::Tensor states = model.embed(ids.to(model.compute().device));
    hidden.push_back(plan.memory.hidden_on_device ? states : states.to(torch::kCPU));
  }
  return hidden;
}

}  // namespace

torch::Tensor batch_ids(const TokenSequences& corpus, const Batch& batch) {
  torch::Tensor ids = torch::empty({batch.num_sequences, batch.length}, torch::kInt64);
  auto* out = ids.data_ptr<int64_t>();
  for (int64_t i = 0; i < batch.num_sequences; ++i) {
    const auto& sequence = corpus.sequences[static_cast<size_t>(batch.first_sequence + i)];
    out = std::copy(sequence.begin(), sequence.end(), out);
  }
  return ids;
}

void run_layer_major(Transformer& model, const TokenSequences& corpus, const RunPlan& plan,
                     RunPosition start, LayerVisitor& visitor, Progress& progress) {
  const torch::InferenceMode inference;
  const TakesItsTime until_layers_end;
  const int num_layers = model.config().num_layers;
  const torch::Device device = model.compute().device;
  LayerLoader weights(model, plan.memory.weights_resident);
  for (const Wave& wave : waves_from(plan, start.batch, start.hidden.size())) {
    const int first_layer = start.hidden.empty() ? 0 : start.layer;
    std::vector<torch::Tensor> hidden = start.hidden.empty() ? embed_wave(model, corpus, plan, wave)
                                                             : std::exchange(start.hidden, {});
    if (!plan.memory.hidden_on_device) {
      for (torch::Tensor& states : hidden) states = pinned(std::move(states), device);
    }
    for (int layer = first_layer; layer < num_layers; ++layer) {
      const LayerWeights& layer_weights = weights.get(layer);
      AttentionObserver* observer = visitor.observer(layer);
      for (size_t i = 0; i < wave.num_batches; ++i) {
        const torch::Tensor input = hidden[i].to(device, /*non_blocking=*/true);
        const torch::Tensor output = model.forward_layer(layer, layer_weights, input, observer);
        if (plan.memory.hidden_on_device) {
          hidden[i] = output;
        } else {
          hidden[i].copy_(output, /*non_blocking=*/true);
        }
        progress.advance(plan.batches[wave.first_batch + i].tokens());
      }
      if (!plan.memory.hidden_on_device)
        wait_for_stream(device);  // the copies are there, to be saved
      RunPosition next{wave.first_batch, layer + 1, hidden};
      if (next.layer == num_layers) next = {wave.first_batch + wave.num_batches, 0, {}};
      // Asked before the visitor asks: it has then saved where this stops.
      const bool stop = interrupt_requested();
      visitor.layer_done(next);
      // Of activations: what a layer leaves for good lies between them, and with the holes a run
      // would take up to a quarter more than it has in use.
      if (!device.is_cuda()) give_back_freed_memory();
      if (stop) throw Interrupted(kStopped);
    }
  }
}

}  // namespace oscar
