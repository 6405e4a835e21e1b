// A prefill's rows into the paged cache, timed as graph replays.
#include "bench/quantize.h"

#include <fmt/format.h>

#include <memory>
#include <numeric>

#include "bench_kernels.h"
#include "oscar_kernels/append.h"

namespace oscar {
namespace {

constexpr int kSinkTokens = 64, kRingTokens = 320;

struct AppendCase {
  std::unique_ptr<DeviceBytes> pool, k, v, wk, wv;
  AppendParams params;
};

}  // namespace

Json bench_quantize(const QuantizeBenchOptions& o) {
  const int d = o.head_dim, history = o.tokens;
  const int pages = (history + kPageTokens - 1) / kPageTokens;
  const PageFormat format{.head_dim = d, .quant_group_size = d};
  std::vector<int32_t> indices(pages);
  std::iota(indices.rbegin(), indices.rend(), 0);
  const auto table = upload(indices);
  const auto zero = upload(std::vector<int32_t>{0});
  const auto rows = upload(std::vector<int32_t>{0, o.tokens + kSinkTokens});
  const auto now = upload(std::vector<int32_t>{history});
  std::vector<float> u(static_cast<size_t>(o.num_kv_heads) * d * d);
  for (size_t i = 0; i < u.size(); ++i)
    u[i] = 0.05f * static_cast<float>(static_cast<int>(i % 13) - 6);
  const auto feedback = upload(u);
  std::vector<float> m(u.size());  // the diagonal holds the largest entries, as in any metric
  for (size_t i = 0; i < m.size(); ++i) {
    const int row = static_cast<int>(i / d % d), column = static_cast<int>(i % d);
    m[i] = row == column ? 1.0f : 0.05f * static_cast<float>((row + column) % 13 - 6);
  }
  const auto metric = upload(m);
  const int segments = (o.tokens + kSinkTokens + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t centre_values = static_cast<int64_t>(segments) * o.num_kv_heads * kCentres * d;
  const DeviceBytes centres(centre_values * 2);
  check_cuda(fill_bf16(centres.as<uint16_t>(), centre_values, 5, nullptr), "fill_bf16");

  const int64_t values = static_cast<int64_t>(o.tokens + kSinkTokens) * o.num_kv_heads * d;
  const double bytes_read = 2.0 * 2.0 * o.tokens * o.num_kv_heads * d;
  const double bytes_written = 2.0 * o.tokens * o.num_kv_heads * (d / 4 + 4);
  const int count = std::max(2, cold_copies(static_cast<size_t>(bytes_read)));
  std::vector<AppendCase> cases(count);
  for (int i = 0; i < count; ++i) {
    AppendCase& c = cases[i];
    c.pool = std::make_unique<DeviceBytes>(static_cast<size_t>(pages) * o.num_kv_heads *
                                           chunk_bytes(format));
    c.k = std::make_unique<DeviceBytes>(values * 2);
    c.v = std::make_unique<DeviceBytes>(values * 2);
    c.wk = std::make_unique<DeviceBytes>(static_cast<size_t>(o.num_kv_heads) *
                                         (kSinkTokens + kRingTokens) * d * 2);
    c.wv = std::make_unique<DeviceBytes>(c.wk->bytes());
    check_cuda(fill_bf16(c.k->as<uint16_t>(), values, 7 + i, nullptr), "fill_bf16");
    check_cuda(fill_bf16(c.v->as<uint16_t>(), values, 70 + i, nullptr), "fill_bf16");
    c.params.format = format;
    c.params.history = {c.pool->as<uint8_t>(), table->as<int32_t>(), pages, nullptr};
    c.params.windows = {c.wk->as<uint16_t>(), c.wv->as<uint16_t>(), nullptr, kSinkTokens,
                        kRingTokens};
    c.params.k = contiguous_rows(c.k->as<uint16_t>(), o.num_kv_heads, d);
    c.params.v = contiguous_rows(c.v->as<uint16_t>(), o.num_kv_heads, d);
    c.params.rows_indptr = rows->as<int32_t>();
    c.params.old_len = c.params.old_history = zero->as<int32_t>();
    c.params.new_history = now->as<int32_t>();
    c.params.key.clip_ratio = 0.96f, c.params.value.clip_ratio = 0.92f;
    c.params.batch = 1, c.params.num_kv_heads = o.num_kv_heads;
  }
  check_cuda(cudaDeviceSynchronize(), "fill");
  // The time of the bytes: a device-to-device copy that reads and writes as many in all.
  const size_t copied = static_cast<size_t>((bytes_read + bytes_written) / 2);
  const DeviceBytes from(copied * 2), to(copied * 2);
  const Timing copy = time_graph(2, 8, o.replays, [&](int i, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to.as<char>() + i * copied, from.as<char>() + i * copied, copied,
                               cudaMemcpyDeviceToDevice, stream),
               "copy");
  });
  Json records = Json::array();
  struct Writer {
    bool shaped, corrected, centred = false;
  };
  std::vector<Writer> writers;
  for (const Writer writer : {Writer{false, false}, Writer{true, false}, Writer{true, true}}) {
    writers.push_back(writer);
    if (o.centres) writers.push_back({writer.shaped, writer.corrected, true});
  }
  for (const Writer& writer : writers) {
    for (AppendCase& c : cases) {
      for (SideWriter* side : {&c.params.key, &c.params.value}) {
        side->feedback = writer.shaped ? feedback->as<float>() : nullptr;
        side->metric = writer.corrected ? metric->as<float>() : nullptr;
      }
      c.params.centres = {};
      if (writer.centred) c.params.centres = {centres.as<uint16_t>(), segments, nullptr};
    }
    const Timing t = time_graph(count, 8, o.replays, [&](int i, cudaStream_t stream) {
      check_cuda(append_rows(cases[i].params, o.tokens + kSinkTokens, history, stream),
                 "append_rows");
    });
    records.push_back(Json{{"rounding", writer.shaped ? "shaped" : "plain"},
                           {"scale_correction", writer.corrected ? "metric" : "none"},
                           {"key_centres", writer.centred},
                           {"tokens", o.tokens},
                           {"num_kv_heads", o.num_kv_heads},
                           {"head_dim", d},
                           {"append_us", t.median},
                           {"append_p10_us", t.p10},
                           {"append_p90_us", t.p90},
                           {"copy_us", copy.median},
                           {"times_copy", t.median / copy.median},
                           {"gbps", (bytes_read + bytes_written) / t.median * 1e-3}});
  }
  return records;
}

}  // namespace oscar
