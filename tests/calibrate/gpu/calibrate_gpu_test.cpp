// On a GPU: collected moments equal float64, do not depend on the batch, and match the CPU's model.
#include <gtest/gtest.h>

#include <random>

#include "oscar/calibrate/collector.h"
#include "oscar/model/layer_major.h"
#include "support/cuda_device.h"
#include "support/relative_error.h"

namespace {

using namespace oscar;
using oscar_test::relative_error;

TokenSequences random_sequences(int count, int length, int vocab_size) {
  std::mt19937 random(7);
  TokenSequences corpus;
  for (int i = 0; i < count; ++i) {
    auto& sequence = corpus.sequences.emplace_back(static_cast<size_t>(length));
    for (int32_t& id : sequence)
      id = static_cast<int32_t>(random() % static_cast<unsigned>(vocab_size));
  }
  corpus.record.tokens = int64_t{count} * length;
  return corpus;
}

// Forwards to a collector and keeps its own copy of the tensors.
class Recorder final : public AttentionObserver {
 public:
  explicit Recorder(AttentionObserver& next) : next_(next) {}
  void observe(const AttentionRecord& record) override {
    next_.observe(record);
    records.push_back(record);
  }
  std::vector<AttentionRecord> records;

 private:
  AttentionObserver& next_;
};

class CalibrateGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  }

  std::vector<LayerStatistics> collect(int64_t batch_tokens, bool weights_resident = true,
                                       bool hidden_on_device = true) {
    Transformer model(checkpoint_, {torch::kCUDA, torch::kBFloat16});
    const TokenSequences corpus = random_sequences(6, 512, checkpoint_.config.vocab_size);
    RunPlan plan;
    plan.batches = plan_batches(corpus.sequences, batch_tokens);
    plan.waves = {{0, plan.batches.size(), corpus.record.tokens}};
    plan.memory.weights_resident = weights_resident;
    plan.memory.hidden_on_device = hidden_on_device;
    std::vector<LayerGeometry> layers;
    for (int i = 0; i < checkpoint_.config.num_layers; ++i) {
      layers.push_back(checkpoint_.config.geometry(i, 256));
    }
    MomentPass pass(model, layers, [](const MomentPass&, const RunPosition&) {});
    SilentProgress progress;
    run_layer_major(model, corpus, plan, {}, pass, progress);
    return pass.result();
  }

  Checkpoint checkpoint_ = open_checkpoint("tiny-gqa");
};

TEST_F(CalibrateGpu, MomentsEqualAFloat64RecomputationFromTheObserversTensors) {
  const torch::InferenceMode inference;
  Transformer model(checkpoint_, {torch::kCUDA, torch::kBFloat16});
  const TokenSequences corpus = random_sequences(2, 1024, checkpoint_.config.vocab_size);
  torch::Tensor hidden = model.embed(batch_ids(corpus, {0, 2, 1024}).to(torch::kCUDA));
  for (int layer = 0; layer < checkpoint_.config.num_layers; ++layer) {
    const LayerGeometry geometry = checkpoint_.config.geometry(layer, 256);
    MomentCollector collector(geometry, torch::kCUDA);
    Recorder recorder(collector);
    hidden = model.forward_layer(layer, *model.load_layer(layer), hidden, &recorder);
    const AttentionRecord& seen = recorder.records.at(0);
    MomentCollector reference(geometry, torch::kCPU);
    reference.observe({.layer = layer,
                       .q = seen.q.cpu(),
                       .k = seen.k.cpu(),
                       .v = seen.v.cpu(),
                       .o = seen.o.cpu()});
    const LayerStatistics gpu = collector.result(), cpu = reference.result();
    EXPECT_LT(relative_error(gpu.q_moment.data, cpu.q_moment.data), 1e-6);
    EXPECT_LT(relative_error(gpu.k_moment.data, cpu.k_moment.data), 1e-6);
    EXPECT_LT(relative_error(gpu.v_moment.data, cpu.v_moment.data), 1e-6);
    EXPECT_LT(relative_error(gpu.attn_out_moment.data, cpu.attn_out_moment.data), 1e-6);
    EXPECT_LT(relative_error(gpu.k_sum.data, cpu.k_sum.data), 1e-6);
    EXPECT_EQ(gpu.count_q, cpu.count_q);
  }
}

TEST_F(CalibrateGpu, SumsDoNotDependOnHowSequencesAreBatched) {
  const LayerGeometry geometry = checkpoint_.config.geometry(0, 256);
  const auto random = [](int64_t heads, int64_t d) {
    return torch::randn({6, heads, 777, d}, torch::dtype(torch::kBFloat16).device(torch::kCUDA));
  };
  const AttentionRecord all{.layer = 0,
                            .q = random(geometry.num_qo_heads, geometry.head_dim_k),
                            .k = random(geometry.num_kv_heads, geometry.head_dim_k),
                            .v = random(geometry.num_kv_heads, geometry.head_dim_v),
                            .o = random(geometry.num_qo_heads, geometry.head_dim_v)};
  MomentCollector together(geometry, torch::kCUDA), apart(geometry, torch::kCUDA);
  together.observe(all);
  for (int64_t i = 0; i < 6; ++i) {
    apart.observe({.layer = 0,
                   .q = all.q.narrow(0, i, 1),
                   .k = all.k.narrow(0, i, 1),
                   .v = all.v.narrow(0, i, 1),
                   .o = all.o.narrow(0, i, 1)});
  }
  EXPECT_LT(relative_error(apart.result().q_moment.data, together.result().q_moment.data), 1e-7);
  EXPECT_LT(relative_error(apart.result().v_moment.data, together.result().v_moment.data), 1e-7);
}

TEST_F(CalibrateGpu, RowsThatTheKernelDoesNotTakeAreAddedInFloat64) {
  LayerGeometry geometry = checkpoint_.config.geometry(0, 256);
  geometry.head_dim_k = 40;  // no instantiation; values are fp32
  const auto random = [](int64_t heads, int64_t d, torch::Dtype dtype) {
    return torch::randn({2, heads, 99, d}, torch::dtype(dtype).device(torch::kCUDA));
  };
  const AttentionRecord gpu{
      .layer = 0,
      .q = random(geometry.num_qo_heads, geometry.head_dim_k, torch::kBFloat16),
      .k = random(geometry.num_kv_heads, geometry.head_dim_k, torch::kBFloat16),
      .v = random(geometry.num_kv_heads, geometry.head_dim_v, torch::kFloat32),
      .o = random(geometry.num_qo_heads, geometry.head_dim_v, torch::kFloat32)};
  const AttentionRecord cpu{
      .layer = 0, .q = gpu.q.cpu(), .k = gpu.k.cpu(), .v = gpu.v.cpu(), .o = gpu.o.cpu()};
  MomentCollector found(geometry, torch::kCUDA), expected(geometry, torch::kCPU);
  found.observe(gpu);
  expected.observe(cpu);
  EXPECT_LT(relative_error(found.result().q_moment.data, expected.result().q_moment.data), 1e-12);
  EXPECT_LT(relative_error(found.result().v_moment.data, expected.result().v_moment.data), 1e-12);
}

TEST_F(CalibrateGpu, SumsWeightedByAttentionEqualThoseOfTheCpu) {
  LayerGeometry geometry = checkpoint_.config.geometry(0, 256);
  const Rope rope{.rotary_dim = 4, .inv_freq = {1.0, 0.1}, .as_run = {}};
  const CacheView view{.sink = 16, .recent = 64};
  for (const int window : {0, 300}) {
    geometry.sliding_window = window;
    const auto random = [](int64_t heads, int64_t d) {
      return torch::randn({3, heads, 777, d}, torch::dtype(torch::kBFloat16).device(torch::kCUDA));
    };
    const AttentionRecord gpu{.layer = 0,
                              .q = 4 * random(geometry.num_qo_heads, geometry.head_dim_k),
                              .k = random(geometry.num_kv_heads, geometry.head_dim_k),
                              .v = random(geometry.num_kv_heads, geometry.head_dim_v),
                              .o = {}};
    const AttentionRecord cpu{.q = gpu.q.cpu(), .k = gpu.k.cpu(), .v = gpu.v.cpu(), .o = {}};
    AttendedCollector on_gpu(geometry, rope, view, torch::kCUDA);
    AttendedCollector on_cpu(geometry, rope, view, torch::kCPU);
    on_gpu.observe(gpu);
    on_cpu.observe(cpu);
    const AttendedSums found = on_gpu.result(), expected = on_cpu.result();
    EXPECT_LT(relative_error(found.q_moment.data, expected.q_moment.data), 1e-5);
    EXPECT_LT(relative_error(found.k_moment.data, expected.k_moment.data), 1e-5);
    EXPECT_LT(relative_error(found.v_moment.data, expected.v_moment.data), 1e-5);
    EXPECT_LT(relative_error(found.k_weight, expected.k_weight), 1e-5);
    EXPECT_LT(relative_error(found.v_weight, expected.v_weight), 1e-5);
  }
}

TEST_F(CalibrateGpu, ResidentLayersAreReadOnceForAllPassesOfAModel) {
  Transformer model(checkpoint_, {torch::kCUDA, torch::kBFloat16});
  const LayerWeights* first = nullptr;
  {
    LayerLoader loader(model, true);
    first = &loader.get(0);
    loader.get(1);
  }
  LayerLoader again(model, true);
  EXPECT_EQ(&again.get(0), first);
  const LayerLoader streaming(model, false);
  for (const auto& layer : model.kept_layers()) EXPECT_EQ(layer, nullptr);
}

TEST_F(CalibrateGpu, WavesAreNoLargerThanTheHostCanSaveOfThem) {
  constexpr int64_t kMany = int64_t{64} << 30;
  Transformer model(checkpoint_, {torch::kCUDA, torch::kBFloat16});
  const auto sequences = random_sequences(64, 512, checkpoint_.config.vocab_size).sequences;
  const auto plan = [&](int64_t host_bytes, bool saved = true) {
    std::vector<Batch> batches = plan_batches(sequences, 2048);
    MemoryNeeds needs = model_needs(model, longest_batch(batches));
    needs.hidden_saved = saved;
    return plan_run(std::move(batches), std::move(needs), {host_bytes, kMany}, torch::kCUDA);
  };
  const RunPlan whole = plan(kMany);
  ASSERT_EQ(whole.waves.size(), 1u);
  ASSERT_TRUE(whole.memory.hidden_on_device);
  const int64_t hidden = whole.waves[0].tokens * whole.hidden_bytes_per_token;
  const RunPlan halves = plan(whole.peak.host_bytes - hidden / 2);
  EXPECT_EQ(halves.waves.size(), 2u);
  EXPECT_EQ(halves.peak.host_bytes, whole.peak.host_bytes - hidden / 2);
  const RunPlan unsaved = plan(whole.peak.host_bytes - hidden / 2, /*saved=*/false);
  EXPECT_EQ(unsaved.waves.size(), 1u);
}

TEST_F(CalibrateGpu, TwoRunsGiveTheSameBits) { EXPECT_EQ(collect(2048), collect(2048)); }

TEST_F(CalibrateGpu, WeightsReadWhileTheLayerBeforeComputesGiveTheSameBits) {
  EXPECT_EQ(collect(512, /*weights_resident=*/false), collect(512));
}

TEST_F(CalibrateGpu, HiddenStatesOnTheHostGiveTheSameBits) {
  EXPECT_EQ(collect(512, /*weights_resident=*/false, /*hidden_on_device=*/false), collect(512));
}

}  // namespace
