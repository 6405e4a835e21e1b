// What must hold on a GPU before the kernels can be trusted there.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <random>

#include "bench/attention.h"
#include "bench_kernels.h"
#include "oscar/cache/paged_reference.h"
#include "oscar_kernels/attention.h"

namespace oscar {
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
  std::vector<uint8_t> pool(static_cast<size_t>(pages) * heads * chunk_bytes(format));
  for (uint8_t& byte : pool) byte = static_cast<uint8_t>(rng());
  for (int c = 0; c < pages * heads; ++c) {
    for (int row = 0; row < 128; ++row) {
      void* at = &pool[static_cast<size_t>(c) * chunk_bytes(format) +
                       metadata_offset(format, row / 64, row % 64)];
      store_metadata(at, 0, uniform(rng), format.metadata);
      store_metadata(at, 1, uniform(rng), format.metadata);
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
  p.seq_len = lens.data();
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
  p.seq_len = dlens->as<int32_t>(), p.q = dq->as<uint16_t>(), p.o = o.as<uint16_t>();
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

}  // namespace oscar
