// Cold paged caches of random bytes, timed as graph replays.
#include "bench/attention.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "bench_kernels.h"
#include "common/terminal.h"
#include "oscar/base/error.h"
#include "oscar/cache/pages.h"
#include "oscar_kernels/attention.h"

#if OSCAR_BENCH_TORCH
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace oscar {

// SDPA of libtorch over a contiguous bf16 cache, with its flash and its cuDNN backend.

#if OSCAR_BENCH_TORCH
namespace {

double time_backend(const std::vector<std::array<at::Tensor, 3>>& caches, int replays) {
  const auto call = [&](size_t i) {
    return at::scaled_dot_product_attention(caches[i][0], caches[i][1], caches[i][2], {}, 0.0,
                                            false, std::nullopt, /*enable_gqa=*/true);
  };
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  try {
    for (size_t i = 0; i < std::min<size_t>(3, caches.size()); ++i) call(i);
    check_cuda(cudaStreamSynchronize(stream), "SDPA");
  } catch (const std::exception&) {
    return -1.0;  // this backend does not take the shape
  }
  const int rounds = std::max(1, 8 / static_cast<int>(caches.size()));
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  for (int r = 0; r < rounds; ++r) {
    for (size_t i = 0; i < caches.size(); ++i) call(i);
  }
  graph.capture_end();
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> us;
  for (int replay = -2; replay < replays; ++replay) {
    cudaEventRecord(begin, stream);
    graph.replay();
    cudaEventRecord(end, stream);
    check_cuda(cudaEventSynchronize(end), "SDPA replay");
    float ms = 0.0f;
    cudaEventElapsedTime(&ms, begin, end);
    if (replay >= 0) us.push_back(1e3 * ms / (rounds * static_cast<double>(caches.size())));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

}  // namespace

SdpaTiming time_sdpa(const AttentionBenchShape& shape, int batch, int context, int replays) {
  const c10::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA);
  const size_t bytes =
      static_cast<size_t>(batch) * context * shape.num_kv_heads * 4 * shape.head_dim;
  std::vector<std::array<at::Tensor, 3>> caches;
  const int copies = cold_copies(bytes);
  for (int i = 0; i < copies; ++i) {
    caches.push_back({at::randn({batch, shape.num_qo_heads, shape.q_len, shape.head_dim}, options),
                      at::randn({batch, shape.num_kv_heads, context, shape.head_dim}, options),
                      at::randn({batch, shape.num_kv_heads, context, shape.head_dim}, options)});
  }
  at::Context& context_settings = at::globalContext();
  const auto only = [&](bool flash, bool cudnn) {
    context_settings.setSDPUseFlash(flash);
    context_settings.setSDPUseCuDNN(cudnn);
    context_settings.setSDPUseMemEfficient(false);
    context_settings.setSDPUseMath(false);
  };
  SdpaTiming timing;
  only(true, false);
  timing.flash = time_backend(caches, replays);
  only(false, true);
  timing.cudnn = time_backend(caches, replays);
  caches.clear();
  c10::cuda::CUDACachingAllocator::emptyCache();
  return timing;
}
bool sdpa_available() { return at::hasCUDA(); }
#else
SdpaTiming time_sdpa(const AttentionBenchShape&, int, int, int) { return {}; }
bool sdpa_available() { return false; }
#endif

// What must hold on a GPU before the kernels can be trusted there.

namespace {

// c 4^j 2^-24 as an fp16 subnormal times 1, for all codes and positions.
Json subnormal_check() {
  const DeviceBytes out(20 * sizeof(float));
  check_cuda(subnormal_products(out.as<float>(), nullptr), "subnormal_products");
  std::vector<float> got(20);
  check_cuda(cudaMemcpy(got.data(), out.as<void>(), 80, cudaMemcpyDeviceToHost), "cudaMemcpy");
  int wrong = 0;
  for (int i = 0; i < 20; ++i) {
    wrong += got[i] != 16.0f * std::ldexp(static_cast<float>(i % 4), 2 * (i / 4) - 24);
  }
  return Json{{"check", "tensor cores are exact on fp16 subnormals"},
              {"held", wrong == 0},
              {"detail", fmt::format("{} of 20 code and position pairs wrong", wrong)}};
}

// One request of 1000 tokens, 8 query heads on 2 KV heads, against float64.
Json attention_check() {
  const int d = 128, heads = 2, qo_heads = 8, sink = 64, ring = 260, length = 1000;
  const PageFormat format{};
  const int history = length - sink - 256, pages = (history + 63) / 64;
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0.5f, 1.5f);
  std::vector<uint8_t> pool(static_cast<size_t>(pages) * heads * page_bytes(format));
  for (uint8_t& byte : pool) byte = static_cast<uint8_t>(rng());
  for (int c = 0; c < pages * heads; ++c) {
    for (int row = 0; row < 128; ++row) {
      void* at = &pool[static_cast<size_t>(c) * page_bytes(format) +
                       metadata_offset(format, row / 64, row % 64)];
      store_metadata(at, 0, uniform(rng), format.rows.metadata);
      store_metadata(at, 1, uniform(rng), format.rows.metadata);
    }
  }
  std::vector<int32_t> table(pages), histories{history}, lens{length};
  for (int i = 0; i < pages; ++i) table[i] = pages - 1 - i;
  std::vector<uint16_t> wk(heads * (sink + ring) * d), wv(wk.size()), q(qo_heads * d);
  for (auto* rows : {&wk, &wv, &q}) {
    for (uint16_t& x : *rows) x = float_to_bf16(normal(rng));
  }
  AttentionParams p;
  p.format = format;
  p.history = {pool.data(), table.data(), pages, histories.data()};
  p.windows = {wk.data(), wv.data(), nullptr, sink, ring};
  p.seq_lens = lens.data();
  p.q = q.data();
  p.sm_scale = 0.088388f;
  p.batch = 1, p.num_qo_heads = qo_heads, p.num_kv_heads = heads;
  std::vector<double> expected(q.size()), lse(qo_heads);
  decode_attention_ref(p, expected.data(), lse.data());

  const auto dpool = upload(pool), dtable = upload(table), dhistories = upload(histories);
  const auto dlens = upload(lens), dwk = upload(wk), dwv = upload(wv), dq = upload(q);
  const DeviceBytes o(q.size() * 2);
  p.history = {dpool->as<uint8_t>(), dtable->as<int32_t>(), pages, dhistories->as<int32_t>()};
  p.windows.k = dwk->as<uint16_t>(), p.windows.v = dwv->as<uint16_t>();
  p.seq_lens = dlens->as<int32_t>(), p.q = dq->as<uint16_t>(), p.o = o.as<uint16_t>();
  size_t bytes = 0;
  check_cuda(decode_attention_workspace(p, &bytes), "decode_attention_workspace");
  const DeviceBytes workspace(bytes);
  check_cuda(decode_attention_prepare(workspace.as<void>(), bytes, nullptr), "prepare");
  check_cuda(decode_attention(p, workspace.as<void>(), bytes, nullptr), "decode_attention");
  std::vector<uint16_t> got(q.size());
  check_cuda(cudaMemcpy(got.data(), o.as<void>(), got.size() * 2, cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double x = bf16_to_float(got[i]);
    difference += (x - expected[i]) * (x - expected[i]);
    norm += expected[i] * expected[i];
  }
  const double error = std::sqrt(difference / norm);
  return Json{{"check", "attention equals float64"},
              {"held", error <= 2e-3},  // bf16 output rounds by 1.7e-3
              {"detail", fmt::format("relative error {:.2e}, bound 2e-3", error)}};
}

}  // namespace

Json bench_selftest() { return Json::array({subnormal_check(), attention_check()}); }

namespace {

constexpr int kSink = 64, kRecent = 256, kRing = kRecent + 8;
// As behind an append that demotes up to 65 rows a request (oscar_kernels/attention.h).
constexpr int kUnsettledPages = 2;

// One distinct cache: no row, query or output is shared with another, so that L2 cannot help.
// Lengths and block table are, as the layers of a model share them.
struct ColdCache {
  std::shared_ptr<DeviceBytes> table, history, lens;
  std::unique_ptr<DeviceBytes> pool, wk, wv, q, o, centers;
  AttentionParams params;
};

// windows: sink and recent rows are exact; without, all tokens are in pages. bf16: pages of bf16.
// tables: the cache whose lengths and block table are taken, or null.
ColdCache make_cache(const AttentionBenchShape& shape, int batch, int context, bool windows,
                     bool bf16, uint32_t seed, const ColdCache* tables) {
  ColdCache c;
  const int d = shape.head_dim;
  const PageFormat format{.head_dim = d, .rows = {.quant_group_size = d}};
  const int history = windows ? context - kSink - kRecent : context;
  const int pages = (history + kPageTokens - 1) / kPageTokens;
  if (tables) {
    c.table = tables->table, c.history = tables->history, c.lens = tables->lens;
  } else {
    std::vector<int32_t> table(static_cast<size_t>(batch) * pages);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(seed));
    c.table = upload(table);
    c.history = upload(std::vector<int32_t>(batch, history));
    c.lens = upload(std::vector<int32_t>(batch, context));
  }
  const int64_t head_pages = static_cast<int64_t>(batch) * pages * shape.num_kv_heads;
  const int64_t bytes = head_pages * (bf16 ? kPageTokens * 4 * d : page_bytes(format));
  c.pool = std::make_unique<DeviceBytes>(bytes);
  if (bf16) {
    check_cuda(fill_bf16(c.pool->as<uint16_t>(), bytes / 2, seed, nullptr), "fill_bf16");
  } else {
    check_cuda(fill_pages(format, c.pool->as<uint8_t>(), head_pages, seed, nullptr), "fill_pages");
  }
  const int sink = windows ? kSink : 0;
  const int64_t rows = static_cast<int64_t>(batch) * shape.num_kv_heads * (sink + kRing) * d;
  const int64_t queries = static_cast<int64_t>(batch) * shape.q_len * shape.num_qo_heads * d;
  c.wk = std::make_unique<DeviceBytes>(rows * 2);
  c.wv = std::make_unique<DeviceBytes>(rows * 2);
  c.q = std::make_unique<DeviceBytes>(queries * 2);
  c.o = std::make_unique<DeviceBytes>(queries * 2);
  check_cuda(fill_bf16(c.wk->as<uint16_t>(), rows, seed + 1, nullptr), "fill_bf16");
  check_cuda(fill_bf16(c.wv->as<uint16_t>(), rows, seed + 2, nullptr), "fill_bf16");
  check_cuda(fill_bf16(c.q->as<uint16_t>(), queries, seed + 3, nullptr), "fill_bf16");
  c.params.format = format;
  c.params.history = {c.pool->as<uint8_t>(), c.table->as<int32_t>(), pages,
                      c.history->as<int32_t>()};
  c.params.windows = {c.wk->as<uint16_t>(), c.wv->as<uint16_t>(), nullptr, sink, kRing};
  c.params.seq_lens = c.lens->as<int32_t>();
  c.params.q = c.q->as<uint16_t>();
  c.params.o = c.o->as<uint16_t>();
  c.params.sm_scale = 0.0883883f;
  c.params.batch = batch;
  c.params.q_len = shape.q_len;
  c.params.num_qo_heads = shape.num_qo_heads;
  c.params.num_kv_heads = shape.num_kv_heads;
  return c;
}

std::vector<ColdCache> make_caches(const AttentionBenchShape& shape, int batch, int context,
                                   bool windows, bool bf16) {
  const double per_token = bf16 ? 4.0 * shape.head_dim : shape.head_dim / 2 + 8.0;
  const size_t bytes = static_cast<size_t>(per_token * batch * context) * shape.num_kv_heads;
  std::vector<ColdCache> caches;
  const int count = cold_copies(bytes);
  caches.reserve(count);
  for (int i = 0; i < count; ++i) {
    caches.push_back(make_cache(shape, batch, context, windows, bf16, 1000 + 17 * i,
                                i > 0 ? &caches[0] : nullptr));
  }
  check_cuda(cudaDeviceSynchronize(), "fill");
  return caches;
}

// Gives keys random centers.
void add_centers(std::vector<ColdCache>& caches, const AttentionBenchShape& shape, int context) {
  const int segments = (context + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t values =
      static_cast<int64_t>(segments) * shape.num_kv_heads * kCenters * shape.head_dim;
  for (size_t i = 0; i < caches.size(); ++i) {
    caches[i].centers = std::make_unique<DeviceBytes>(values * 2);
    uint16_t* rows = caches[i].centers->as<uint16_t>();
    check_cuda(fill_bf16(rows, values, 500 + static_cast<uint32_t>(i), nullptr), "fill_bf16");
    caches[i].params.centers = {rows, segments, nullptr};
  }
  check_cuda(cudaDeviceSynchronize(), "fill");
}

class Workspace {
 public:
  explicit Workspace(const AttentionParams& params) {
    size_t bytes = 0;
    check_cuda(decode_attention_workspace(params, &bytes), "decode_attention_workspace");
    memory_ = std::make_unique<DeviceBytes>(bytes);
    check_cuda(decode_attention_prepare(memory_->as<void>(), bytes, nullptr), "prepare");
    check_cuda(cudaDeviceSynchronize(), "prepare");
  }
  void* get() const { return memory_->as<void>(); }
  size_t bytes() const { return memory_->bytes(); }

 private:
  std::unique_ptr<DeviceBytes> memory_;
};

// Times call(cache, stream) over all caches; `bytes`: what one call reads.
Timing time_calls(const std::vector<ColdCache>& caches, double bytes, int replays,
                  const std::function<void(const ColdCache&, cudaStream_t)>& call) {
  const int calls = std::clamp(static_cast<int>(5e9 / bytes), 4, 64);  // about a millisecond
  return time_graph(static_cast<int>(caches.size()), calls, replays,
                    [&](int i, cudaStream_t stream) { call(caches[i], stream); });
}

Timing time_int2(const std::vector<ColdCache>& caches, double bytes, int replays,
                 int unsettled_pages) {
  const Workspace ws(caches[0].params);
  return time_calls(caches, bytes, replays, [&](const ColdCache& cache, cudaStream_t stream) {
    check_cuda(decode_attention(cache.params, ws.get(), ws.bytes(), stream, unsettled_pages),
               "decode_attention");
  });
}

Timing time_bf16_baseline(const std::vector<ColdCache>& caches, double bytes, int replays) {
  const Workspace ws(caches[0].params);
  return time_calls(caches, bytes, replays, [&](const ColdCache& cache, cudaStream_t stream) {
    check_cuda(decode_attention_bf16(cache.params, ws.get(), ws.bytes(), stream),
               "decode_attention_bf16");
  });
}

// Without key centers and with those that the caches have, in turn, so that a clock that drifts
// does not favour one.
struct CenterTimings {
  Timing without, with;
};
CenterTimings time_centers(std::vector<ColdCache>& caches, double bytes, int replays) {
  constexpr int kTurns = 3;
  std::vector<KeyCenters> centers;
  for (const ColdCache& cache : caches) centers.push_back(cache.params.centers);
  std::array<std::vector<Timing>, 2> timings;
  for (int turn = 0; turn < kTurns; ++turn) {
    for (const bool with : {false, true}) {
      for (size_t i = 0; i < caches.size(); ++i) {
        caches[i].params.centers = with ? centers[i] : KeyCenters{};
      }
      timings[with].push_back(time_int2(caches, bytes, replays, -1));
    }
  }
  const auto middle = [](std::vector<Timing>& of) {
    std::sort(of.begin(), of.end(),
              [](const Timing& a, const Timing& b) { return a.median < b.median; });
    return of[kTurns / 2];
  };
  return {middle(timings[0]), middle(timings[1])};
}

// Reading the same pages through the same block table.
Timing time_paged_read(const std::vector<ColdCache>& caches, double bytes, int replays) {
  const DeviceBytes sum(16);
  return time_calls(caches, bytes, replays, [&](const ColdCache& cache, cudaStream_t stream) {
    const AttentionParams& p = cache.params;
    check_cuda(paged_read_ceiling(p.history, p.batch, static_cast<int>(p.history.table_stride),
                                  p.num_kv_heads, page_bytes(p.format), sum.as<int>(), stream),
               "paged_read_ceiling");
  });
}

// Reading the whole pool from end to end.
Timing time_read(const std::vector<ColdCache>& caches, double bytes, int replays) {
  const DeviceBytes sum(16);
  return time_calls(caches, bytes, replays, [&](const ColdCache& cache, cudaStream_t stream) {
    check_cuda(read_ceiling(cache.pool->as<void>(), cache.pool->bytes(), sum.as<int>(), stream),
               "read_ceiling");
  });
}

const std::vector<AttentionBenchShape>& known_shapes() {
  static const std::vector<AttentionBenchShape> known = {
      {"qwen3-8b", 32, 8, 128, 1},   {"qwen3-32b", 64, 8, 128, 1}, {"llama3-8b", 32, 8, 128, 1},
      {"llama3-70b", 64, 8, 128, 1}, {"mha-32", 32, 32, 128, 1},
  };
  return known;
}

}  // namespace

std::string attention_bench_shapes() {
  std::string names;
  for (const AttentionBenchShape& shape : known_shapes()) {
    names += (names.empty() ? "" : ", ") + shape.name;
  }
  return names;
}

AttentionBenchShape attention_bench_shape(const std::string& name) {
  for (const AttentionBenchShape& shape : known_shapes()) {
    if (shape.name == name) return shape;
  }
  throw Error({.what = "unknown attention shape",
               .where = "--shape",
               .expected = attention_bench_shapes(),
               .found = name});
}

Json bench_attention(const AttentionBenchOptions& options) {
  Json records = Json::array();
  const AttentionBenchShape& shape = options.shape;
  const int d = shape.head_dim;
  for (const auto& [batch, context] : options.points) {
    const double tokens = static_cast<double>(batch) * context * shape.num_kv_heads;
    const double int2_bytes = tokens * (d / 2 + 8), bf16_bytes = tokens * 4 * d;
    const double window_bytes =
        static_cast<double>(batch) * shape.num_kv_heads * (kSink + kRecent) * (4 * d - d / 2 - 8);
    Json record{{"shape", shape.name},
                {"batch", batch},
                {"context", context},
                {"bytes_int2", int2_bytes},
                {"bytes_with_windows", int2_bytes + window_bytes}};
    const auto keep = [&](const char* name, const Timing& t, double bytes) {
      record[std::string(name) + "_us"] = t.median;
      record[std::string(name) + "_p10_us"] = t.p10;
      record[std::string(name) + "_p90_us"] = t.p90;
      record[std::string(name) + "_gbps"] = bytes / t.median * 1e-3;
    };
    const int replays = options.replays;
    {
      auto caches = make_caches(shape, batch, context, false, false);
      if (!options.centers) keep("int2", time_int2(caches, int2_bytes, replays, -1), int2_bytes);
      keep("int2_settled", time_int2(caches, int2_bytes, replays, kUnsettledPages), int2_bytes);
      if (options.ceilings) {
        keep("paged_read", time_paged_read(caches, int2_bytes, replays), int2_bytes);
        keep("read", time_read(caches, int2_bytes, replays), int2_bytes);
      }
      if (options.centers) {
        add_centers(caches, shape, context);
        const CenterTimings t = time_centers(caches, int2_bytes, replays);
        keep("int2", t.without, int2_bytes);
        keep("int2_centers", t.with, int2_bytes);
      }
    }
    {
      const auto caches = make_caches(shape, batch, context, true, false);
      keep("int2_windows", time_int2(caches, int2_bytes, replays, -1), int2_bytes + window_bytes);
    }
    if (options.bf16) {
      const auto caches = make_caches(shape, batch, context, false, true);
      keep("bf16_baseline", time_bf16_baseline(caches, bf16_bytes, replays), bf16_bytes);
    }
    if (options.peers && sdpa_available()) {
      const SdpaTiming t = time_sdpa(shape, batch, context, replays);
      if (t.flash > 0) record["sdpa_flash_us"] = t.flash;
      if (t.cudnn > 0) record["sdpa_cudnn_us"] = t.cudnn;
    }
    app::say("{}\n", record.dump());
    records.push_back(record);
  }
  return records;
}

}  // namespace oscar
