// A request's pages read back as rows, timed as graph replays.
#include "bench/history.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "bench_kernels.h"
#include "oscar_kernels/history.h"

namespace oscar {
namespace {

struct HistoryCase {
  std::unique_ptr<DeviceBytes> pool, k, v;
  HistoryRowsParams params;
};

}  // namespace

Json bench_history(const HistoryBenchOptions& o) {
  const int d = o.head_dim, pages = (o.tokens + kPageTokens - 1) / kPageTokens;
  const PageFormat format{.head_dim = d, .quant_group_size = d};
  std::vector<int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  const auto table = upload(order);
  const auto length = upload(std::vector<int32_t>{o.tokens});
  const int segments = (o.tokens + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t centre_values = int64_t{segments} * o.num_kv_heads * kCentres * d;
  const DeviceBytes centres(centre_values * 2);
  check_cuda(fill_bf16(centres.as<uint16_t>(), centre_values, 5, nullptr), "fill_bf16");
  const int64_t values = int64_t{o.tokens} * o.num_kv_heads * d;
  const int64_t chunks = int64_t{pages} * o.num_kv_heads;
  const double bytes =
      4.0 * static_cast<double>(values) + 2.0 * o.tokens * o.num_kv_heads * (d / 4 + 4);
  std::vector<HistoryCase> cases(std::max(2, cold_copies(static_cast<size_t>(bytes))));
  for (size_t i = 0; i < cases.size(); ++i) {
    HistoryCase& c = cases[i];
    c.pool = std::make_unique<DeviceBytes>(chunks * chunk_bytes(format));
    c.k = std::make_unique<DeviceBytes>(values * 2);
    c.v = std::make_unique<DeviceBytes>(values * 2);
    check_cuda(
        fill_chunks(format, c.pool->as<uint8_t>(), chunks, 7 + static_cast<uint32_t>(i), nullptr),
        "fill_chunks");
    const int64_t token_stride = int64_t{o.num_kv_heads} * d;
    c.params.format = format;
    c.params.history = {c.pool->as<uint8_t>(), table->as<int32_t>(), pages, length->as<int32_t>()};
    c.params.k = {c.k->as<void>(), 0, token_stride, d};
    c.params.v = {c.v->as<void>(), 0, token_stride, d};
    c.params.tokens = o.tokens;
    c.params.batch = 1, c.params.num_kv_heads = o.num_kv_heads;
  }
  check_cuda(cudaDeviceSynchronize(), "fill");
  const auto half = static_cast<size_t>(bytes / 2);
  const DeviceBytes from(half * 2), to(half * 2);
  const Timing copy = time_graph(2, 8, o.replays, [&](int i, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to.as<char>() + i * half, from.as<char>() + i * half, half,
                               cudaMemcpyDeviceToDevice, stream),
               "copy");
  });
  Json records = Json::array();
  for (const bool centred : {false, true}) {
    for (HistoryCase& c : cases) {
      c.params.centres = {};
      if (centred) c.params.centres = {centres.as<uint16_t>(), segments, nullptr};
    }
    const Timing t =
        time_graph(static_cast<int>(cases.size()), 8, o.replays, [&](int i, cudaStream_t stream) {
          check_cuda(dequantize_history(cases[i].params, stream), "dequantize_history");
        });
    records.push_back(Json{{"key_centres", centred},
                           {"tokens", o.tokens},
                           {"num_kv_heads", o.num_kv_heads},
                           {"head_dim", d},
                           {"history_us", t.median},
                           {"history_p10_us", t.p10},
                           {"history_p90_us", t.p90},
                           {"copy_us", copy.median},
                           {"times_copy", t.median / copy.median},
                           {"gbps", bytes / t.median * 1e-3}});
  }
  return records;
}

}  // namespace oscar
