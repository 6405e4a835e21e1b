// A calibration shared among processes.
#include "oscar/calibrate/several_processes.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <string>
#include <utility>

#include "oscar/base/process.h"
#include "oscar/calibrate/resume.h"
#include "oscar/calibrate/search/search.h"
#include "oscar/model/device.h"

namespace oscar {

// Who passes which block, and the sums on their way.

namespace {

struct BatchRange {
  size_t begin = 0, end = 0;
};

// Blocks from `start` on. The first goes on until the batches that have begun are over.
std::vector<BatchRange> blocks_from(const CollectionPlan& plan, BlockStart start) {
  std::vector<BatchRange> blocks;
  int64_t tokens = 0;
  size_t begin = start.batch;
  for (size_t end = 1; end <= plan.batches.size(); ++end) {
    tokens += plan.batches[end - 1].tokens();
    const bool block_end = std::find(plan.block_tokens.begin(), plan.block_tokens.end(), tokens) !=
                           plan.block_tokens.end();
    if (!block_end || end <= start.batch || end < start.batch + start.begun) continue;
    blocks.push_back({begin, end});
    begin = end;
  }
  return blocks;
}

// The plan up to a batch.
RunPlan part_of(const RunPlan& plan, size_t end) {
  RunPlan part = plan;
  part.batches.resize(end);
  part.waves.clear();
  for (Wave wave : plan.waves) {
    if (wave.first_batch >= end) break;
    wave.num_batches = std::min(wave.num_batches, end - wave.first_batch);
    wave.tokens = tokens_of(plan, wave.first_batch, wave.num_batches);
    part.waves.push_back(wave);
  }
  return part;
}

// Passes one block from its beginning.
std::unique_ptr<MomentPass> pass_block(const Collecting& job, const BatchRange& block,
                                       Progress& progress) {
  auto moments = std::make_unique<MomentPass>(job.model, job.layers, MomentPass::SavePoint(),
                                              SumMarks(), job.attended);
  run_layer_major(job.model, job.corpus, part_of(job.plan, block.end), {block.begin, 0, {}},
                  *moments, progress);
  return moments;
}

// `work` in another thread, and on a GPU on a stream of its own, after all that was begun here.
template <typename Work>
std::future<void> beside(torch::Device device, Work work) {
  if (device.is_cuda()) wait_for_stream(device);
  return std::async(std::launch::async, [device, work = std::move(work)]() mutable {
    std::optional<c10::Stream> stream;
    if (device.is_cuda()) stream = side_stream(device, kSumsStream);
    const InferenceOn scope(stream);
    work();
  });
}

// The sums of the blocks so far, on the host, to which a thread adds those of the next ones.
class SumsInOrder {
 public:
  SumsInOrder(Ranks& ranks, const Collecting& job, const std::vector<BatchRange>& blocks,
              const SaveSums& save)
      : ranks_(ranks), job_(job), blocks_(blocks), save_(save) {}

  // Of a pass that has nothing left to do.
  void begin_with(const MomentPass& moments) { sums_ = {moments.block(), moments.snapshots()}; }

  // The thread, which must have ended before, adds the blocks before `end` and saves what it has:
  // `own` passed the last of them, or none.
  void begin(size_t end, std::unique_ptr<MomentPass> own) {
    adding_ = beside(job_.model.compute().device, [this, end, own = std::move(own)]() mutable {
      if (added_ == 0) {
        begin_with(*own);
        added_ = 1;
      }
      for (; added_ < end; ++added_) {
        const int owner = ranks_.owner(added_);
        add(blocks_[added_], owner, owner == 0 ? own.get() : nullptr);
      }
      own.reset();  // the next block's sums lie beside these
      if (end < blocks_.size() && !interrupt_requested()) save(false);
    });
  }

  // Until the thread has ended, whose error is thrown here. Blocks of others count as done then.
  void wait(Progress& progress) {
    adding_.get();
    for (; told_ < added_; ++told_) {
      if (ranks_.owner(told_) == 0) continue;
      progress.advance(tokens_of(blocks_[told_]) * job_.model.config().num_layers);
    }
  }

  // After a stop: saves what has been added.
  void stop() {
    try {
      if (adding_.valid()) adding_.get();
    } catch (const Interrupted&) {  // it waited for another process
    }
    if (added_ > 0) save(true);
  }

  size_t added() const { return added_; }
  Collected take() { return std::move(sums_); }

 private:
  int64_t tokens_of(const BatchRange& block) const {
    return oscar::tokens_of(job_.plan, block.begin, block.end - block.begin);
  }

  void save(bool stop) const { save_(sums_, {blocks_[added_ - 1].end, 0, {}}, stop); }

  // Those of the next block, in this process or, without `own`, in another.
  void add(const BatchRange& block, int owner, const MomentPass* own) {
    std::vector<LayerStatistics> more;  // all first: a stop on the way leaves nothing half added
    if (own != nullptr) {
      more = own->block_sums();
    } else {
      for (const LayerStatistics& layer : sums_.statistics) {
        if (layer.geometry.fitted()) {
          more.push_back(receive_sums(ranks_, owner, layer, tokens_of(block)));
        }
      }
    }
    const std::vector<int64_t>& marks = job_.plan.snapshot_tokens;
    for (const LayerStatistics& sums : more) {
      LayerStatistics& total = sums_.statistics[static_cast<size_t>(sums.geometry.layer_id)];
      add_statistics(total, sums);
      const bool marked = std::ranges::find(marks, total.count_kv) != marks.end();
      if (!marked || !total.geometry.quantized) continue;
      auto copy = std::make_shared<LayerStatistics>(total);
      copy->o_proj_metric = {};
      sums_.snapshots.push_back(std::move(copy));
    }
  }

  Ranks& ranks_;
  const Collecting& job_;
  const std::vector<BatchRange>& blocks_;
  const SaveSums& save_;
  Collected sums_;
  size_t added_ = 0, told_ = 0;  // blocks
  std::future<void> adding_;     // ends before what it uses
};

}  // namespace

Collected collect_with_others(Ranks& ranks, const Collecting& job,
                              std::unique_ptr<MomentPass> moments, RunPosition start,
                              const SaveSums& save, Progress& progress) {
  const auto blocks = blocks_from(job.plan, {start.batch, start.hidden.size()});
  SumsInOrder sums(ranks, job, blocks, save);
  if (blocks.empty()) {
    sums.begin_with(*moments);
    return sums.take();
  }
  try {
    run_layer_major(job.model, job.corpus, part_of(job.plan, blocks.front().end), std::move(start),
                    *moments, progress);
    sums.begin(1, std::move(moments));
    for (size_t i = 1; i < blocks.size(); ++i) {
      if (ranks.owner(i) != 0) continue;
      auto own = pass_block(job, blocks[i], progress);
      sums.wait(progress);
      sums.begin(i + 1, std::move(own));
    }
    sums.wait(progress);
    if (sums.added() < blocks.size()) {
      sums.begin(blocks.size(), nullptr);
      sums.wait(progress);
    }
  } catch (const Interrupted&) {
    sums.stop();
    throw;
  } catch (...) {
    request_stop();  // the thread may wait for another process, which works on
    throw;
  }
  return sums.take();
}

void collect_for_first(Ranks& ranks, const Collecting& job, BlockStart start) {
  const auto blocks = blocks_from(job.plan, start);
  SilentProgress silent;
  std::future<void> sending;
  try {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (!ranks.owns(i)) continue;
      auto moments = pass_block(job, blocks[i], silent);
      if (sending.valid()) sending.get();
      sending = beside(job.model.compute().device, [&, moments = std::move(moments)] {
        ranks.wait_until_taken();
        for (const LayerStatistics& sums : moments->block_sums()) send_sums(ranks, 0, sums);
      });
    }
    if (sending.valid()) sending.get();
    ranks.wait_until_taken();
  } catch (...) {
    request_stop();  // sums on their way would wait for the first, which works on
    throw;
  }
}

// Who searches which layer; sums and decisions on their way.

namespace {

// One of next to no tokens, as receive_sums needs it.
LayerStatistics shape_of(const LayerGeometry& geometry, bool attended, bool gated) {
  LayerStatistics shape = make_statistics(geometry);
  if (gated) shape.gate_moment = make_gate_moment(geometry);
  if (attended) shape.attended = make_attended_sums(geometry);
  shape.count_q = geometry.num_qo_heads / geometry.num_kv_heads;
  shape.count_kv = 1;
  return shape;
}

LayerStatistics receive_statistics(Ranks& ranks, const LayerStatistics& shape, int64_t tokens,
                                   bool energy) {
  LayerStatistics statistics = receive_sums(ranks, 0, shape, tokens);
  if (!energy) return statistics;
  const std::vector<uint8_t> bytes = ranks.receive(0);
  MatrixStack<double> moment = shape.v_moment;
  if (bytes.size() != moment.data.size() * sizeof(double)) {
    throw Error({.what = "energies of another size than the layer's",
                 .where = "layer " + std::to_string(shape.geometry.layer_id)});
  }
  std::memcpy(moment.data.data(), bytes.data(), bytes.size());
  statistics.v_energy_moment = std::move(moment);
  return statistics;
}

}  // namespace

std::vector<int> layer_owners(const Ranks& ranks, const std::vector<LayerGeometry>& layers) {
  std::vector<int> owners;
  size_t searched = 0;
  for (const LayerGeometry& layer : layers) {
    owners.push_back(layer.quantized ? ranks.owner(searched++) : 0);
  }
  return owners;
}

std::vector<bool> own_layers(const Ranks& ranks, const std::vector<LayerGeometry>& layers) {
  std::vector<bool> own;
  for (const int owner : layer_owners(ranks, layers)) own.push_back(owner == ranks.rank());
  return own;
}

void send_statistics(Ranks& ranks, const std::vector<LayerStatistics>& statistics) {
  std::vector<LayerGeometry> layers;
  for (const LayerStatistics& layer : statistics) layers.push_back(layer.geometry);
  const std::vector<int> owners = layer_owners(ranks, layers);
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (owners[i] == 0) continue;
    send_sums(ranks, owners[i], statistics[i]);
    const std::vector<double>& energy = statistics[i].v_energy_moment.data;
    if (energy.empty()) continue;
    const auto* bytes = reinterpret_cast<const uint8_t*>(energy.data());
    ranks.send(owners[i], {bytes, bytes + energy.size() * sizeof(double)});
  }
}

void receive_decisions(Ranks& ranks, const std::vector<LayerGeometry>& layers,
                       std::vector<LayerDecision>& decisions) {
  const std::vector<int> owners = layer_owners(ranks, layers);
  for (size_t i = 0; i < decisions.size(); ++i) {
    if (owners[i] != 0) decisions[i] = decision_from_bytes(ranks.receive(owners[i]), layers[i]);
  }
}

void fit_decisions_of_others(const std::vector<bool>& own,
                             const std::vector<LayerStatistics>& statistics,
                             const FitOptions& fixed, const Rope& rope,
                             std::vector<LayerDecision>& decisions) {
  parallel_for(static_cast<int64_t>(decisions.size()), [&](int64_t index) {
    const auto layer = static_cast<size_t>(index);
    if (own[layer]) return;
    auto warnings = decisions[layer].main.warnings;  // of the fits that were compared
    decisions[layer] = fit_again(std::move(decisions[layer]), statistics[layer], fixed, rope);
    decisions[layer].main.warnings = std::move(warnings);
  });
}

void search_for_first(Ranks& ranks, Transformer& model, const SplitCorpus& split,
                      const RunPlan& plan, const CalibrateOptions& options) {
  const std::vector<LayerGeometry> layers = geometries(options, model.config());
  const std::vector<bool> own = own_layers(ranks, layers);
  const bool attended = attended_view(options).has_value();
  std::vector<LayerStatistics> statistics(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    statistics[i].geometry = layers[i];
    if (!own[i]) continue;
    const bool gated = model.config().layer(layers[i].layer_id).attention.gated;
    statistics[i] = receive_statistics(ranks, shape_of(layers[i], attended, gated),
                                       split.fit.record.tokens, wants_energy(options));
    statistics[i].o_proj_metric = model.o_proj_metric(layers[i].layer_id);
  }
  add_gates_to_metrics(model, statistics);
  SearchPass search(model, statistics, search_settings(options), split.num_search,
                    split.num_confirm, plan.memory.side_by_side, own);
  SilentProgress silent;
  run_layer_major(model, split.held_back, plan, {}, search, silent);
  const std::vector<LayerDecision> decisions = search.take_decisions();
  for (size_t i = 0; i < decisions.size(); ++i) {
    if (own[i]) ranks.send(0, decision_bytes(decisions[i]));
  }
  ranks.wait_until_taken();
}

}  // namespace oscar
