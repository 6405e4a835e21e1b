// `oscar-bench history`, `quantize` and `transform`: kernels beside the time their bytes take.
#include "bench/kernels.h"

#include <fmt/format.h>
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "bench_kernels.h"
#include "oscar_kernels/append.h"
#include "oscar_kernels/history.h"
#include "oscar_kernels/transform.h"

namespace oscar {

// A request's pages read back as rows, timed as graph replays.

namespace {

struct HistoryCase {
  std::unique_ptr<DeviceBytes> pool, k, v;
  HistoryRowsParams params;
};

}  // namespace

Json bench_history(const HistoryBenchOptions& o) {
  const int d = o.head_dim, pages = (o.tokens + kPageTokens - 1) / kPageTokens;
  const PageFormat format{.head_dim = d, .rows = {.quant_group_size = d}};
  std::vector<int32_t> order(pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  const auto table = upload(order);
  const auto length = upload(std::vector<int32_t>{o.tokens});
  const int segments = (o.tokens + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t center_values = int64_t{segments} * o.num_kv_heads * kCenters * d;
  const DeviceBytes centers(center_values * 2);
  check_cuda(fill_bf16(centers.as<uint16_t>(), center_values, 5, nullptr), "fill_bf16");
  const int64_t values = int64_t{o.tokens} * o.num_kv_heads * d;
  const int64_t head_pages = int64_t{pages} * o.num_kv_heads;
  const double bytes =
      4.0 * static_cast<double>(values) + 2.0 * o.tokens * o.num_kv_heads * (d / 4 + 4);
  std::vector<HistoryCase> cases(std::max(2, cold_copies(static_cast<size_t>(bytes))));
  for (size_t i = 0; i < cases.size(); ++i) {
    HistoryCase& c = cases[i];
    c.pool = std::make_unique<DeviceBytes>(head_pages * page_bytes(format));
    c.k = std::make_unique<DeviceBytes>(values * 2);
    c.v = std::make_unique<DeviceBytes>(values * 2);
    check_cuda(fill_pages(format, c.pool->as<uint8_t>(), head_pages, 7 + static_cast<uint32_t>(i),
                          nullptr),
               "fill_pages");
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
  for (const bool centered : {false, true}) {
    for (HistoryCase& c : cases) {
      c.params.centers = {};
      if (centered) c.params.centers = {centers.as<uint16_t>(), segments, nullptr};
    }
    const Timing t =
        time_graph(static_cast<int>(cases.size()), 8, o.replays, [&](int i, cudaStream_t stream) {
          check_cuda(dequantize_history(cases[i].params, stream), "dequantize_history");
        });
    records.push_back(Json{{"key_centers", centered},
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

// A prefill's rows into the paged cache, timed as graph replays.

namespace {

constexpr int kSinkTokens = 64, kRingTokens = 320;

struct AppendCase {
  std::unique_ptr<DeviceBytes> pool, k, v, wk, wv;
  AppendParams params;
};

// What all cases read beside their rows.
struct AppendTables {
  std::unique_ptr<DeviceBytes> pages, zero, rows, now, feedback, metric;
};

AppendTables append_tables(const QuantizeBenchOptions& o, int pages) {
  const int d = o.head_dim;
  std::vector<int32_t> indices(pages);
  std::iota(indices.rbegin(), indices.rend(), 0);
  std::vector<float> u(static_cast<size_t>(o.num_kv_heads) * d * d);
  for (size_t i = 0; i < u.size(); ++i)
    u[i] = 0.05f * static_cast<float>(static_cast<int>(i % 13) - 6);
  std::vector<float> m(u.size());  // the diagonal holds the largest entries, as in any metric
  for (size_t i = 0; i < m.size(); ++i) {
    const int row = static_cast<int>(i / d % d), column = static_cast<int>(i % d);
    m[i] = row == column ? 1.0f : 0.05f * static_cast<float>((row + column) % 13 - 6);
  }
  return {.pages = upload(indices),
          .zero = upload(std::vector<int32_t>{0}),
          .rows = upload(std::vector<int32_t>{0, o.tokens + kSinkTokens}),
          .now = upload(std::vector<int32_t>{o.tokens}),
          .feedback = upload(u),
          .metric = upload(m)};
}

AppendCase append_case(const QuantizeBenchOptions& o, const AppendTables& tables, int pages,
                       uint32_t seed) {
  const int d = o.head_dim;
  const PageFormat format{.head_dim = d, .rows = {.quant_group_size = d}};
  const int64_t values = static_cast<int64_t>(o.tokens + kSinkTokens) * o.num_kv_heads * d;
  AppendCase c;
  c.pool = std::make_unique<DeviceBytes>(static_cast<size_t>(pages) * o.num_kv_heads *
                                         page_bytes(format));
  c.k = std::make_unique<DeviceBytes>(values * 2);
  c.v = std::make_unique<DeviceBytes>(values * 2);
  c.wk = std::make_unique<DeviceBytes>(static_cast<size_t>(o.num_kv_heads) *
                                       (kSinkTokens + kRingTokens) * d * 2);
  c.wv = std::make_unique<DeviceBytes>(c.wk->bytes());
  check_cuda(fill_bf16(c.k->as<uint16_t>(), values, 7 + seed, nullptr), "fill_bf16");
  check_cuda(fill_bf16(c.v->as<uint16_t>(), values, 70 + seed, nullptr), "fill_bf16");
  c.params.format = format;
  c.params.history = {c.pool->as<uint8_t>(), tables.pages->as<int32_t>(), pages, nullptr};
  c.params.windows = {c.wk->as<uint16_t>(), c.wv->as<uint16_t>(), nullptr, kSinkTokens,
                      kRingTokens};
  c.params.k = contiguous_rows(c.k->as<uint16_t>(), o.num_kv_heads, d);
  c.params.v = contiguous_rows(c.v->as<uint16_t>(), o.num_kv_heads, d);
  c.params.query_start_loc = tables.rows->as<int32_t>();
  c.params.old_len = c.params.old_history = tables.zero->as<int32_t>();
  c.params.new_history = tables.now->as<int32_t>();
  c.params.key.clip_ratio = 0.96f, c.params.value.clip_ratio = 0.92f;
  c.params.batch = 1, c.params.num_kv_heads = o.num_kv_heads;
  return c;
}

// A way of writing rows.
struct Writer {
  bool shaped, corrected, centered = false;
};

std::vector<Writer> writers_of(const QuantizeBenchOptions& o) {
  std::vector<Writer> writers;
  for (const Writer writer : {Writer{false, false}, Writer{true, false}, Writer{true, true}}) {
    writers.push_back(writer);
    if (o.centers) writers.push_back({writer.shaped, writer.corrected, true});
  }
  return writers;
}

// A device-to-device copy that reads and writes 2 x `half` bytes, between two places in turn.
Timing time_copy_of_two(size_t half, int replays) {
  const DeviceBytes from(half * 2), to(half * 2);
  return time_graph(2, 8, replays, [&](int i, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to.as<char>() + i * half, from.as<char>() + i * half, half,
                               cudaMemcpyDeviceToDevice, stream),
               "copy");
  });
}

}  // namespace

Json bench_quantize(const QuantizeBenchOptions& o) {
  const int d = o.head_dim, pages = (o.tokens + kPageTokens - 1) / kPageTokens;
  const AppendTables tables = append_tables(o, pages);
  const int segments = (o.tokens + kSinkTokens + kSegmentTokens - 1) / kSegmentTokens;
  const int64_t center_values = static_cast<int64_t>(segments) * o.num_kv_heads * kCenters * d;
  const DeviceBytes centers(center_values * 2);
  check_cuda(fill_bf16(centers.as<uint16_t>(), center_values, 5, nullptr), "fill_bf16");
  const double bytes_read = 2.0 * 2.0 * o.tokens * o.num_kv_heads * d;
  const double bytes_written = 2.0 * o.tokens * o.num_kv_heads * (d / 4 + 4);
  const int count = std::max(2, cold_copies(static_cast<size_t>(bytes_read)));
  std::vector<AppendCase> cases;
  for (int i = 0; i < count; ++i) {
    cases.push_back(append_case(o, tables, pages, static_cast<uint32_t>(i)));
  }
  check_cuda(cudaDeviceSynchronize(), "fill");
  const Timing copy =
      time_copy_of_two(static_cast<size_t>((bytes_read + bytes_written) / 2), o.replays);
  Json records = Json::array();
  for (const Writer& writer : writers_of(o)) {
    for (AppendCase& c : cases) {
      for (SideWriter* side : {&c.params.key, &c.params.value}) {
        side->feedback = writer.shaped ? tables.feedback->as<float>() : nullptr;
        side->metric = writer.corrected ? tables.metric->as<float>() : nullptr;
      }
      c.params.centers = {};
      if (writer.centered) c.params.centers = {centers.as<uint16_t>(), segments, nullptr};
    }
    const Timing t = time_graph(count, 8, o.replays, [&](int i, cudaStream_t stream) {
      check_cuda(append_rows(cases[i].params, o.tokens + kSinkTokens, o.tokens, stream),
                 "append_rows");
    });
    records.push_back(Json{{"rounding", writer.shaped ? "shaped" : "plain"},
                           {"scale_correction", writer.corrected ? "metric" : "none"},
                           {"key_centers", writer.centered},
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

// Rows in and out of the cache's basis, timed as graph replays.

namespace {

// What the calls of one layer read and write; no two share anything, so that L2 cannot help.
struct TransformCase {
  std::unique_ptr<DeviceBytes> x, out, matrices, means;
  TransformParams qkv, output;
};

TransformCase make_case(const TransformBenchOptions& o, int rows, uint32_t seed) {
  const int d = o.head_dim, heads = o.num_qo_heads + 2 * o.num_kv_heads;
  const int64_t values = int64_t{rows} * heads * d, matrix = int64_t{o.num_kv_heads} * d * d;
  const int64_t mean = int64_t{o.num_kv_heads} * d;
  TransformCase c;
  c.x = std::make_unique<DeviceBytes>(values * 2);
  c.out = std::make_unique<DeviceBytes>(values * 2);
  c.matrices = std::make_unique<DeviceBytes>(4 * matrix * sizeof(float));
  c.means = std::make_unique<DeviceBytes>(2 * mean * sizeof(float));
  // Two bf16 side by side are a float of +-[0.5, 2).
  const auto fill = [&](const DeviceBytes& memory, uint32_t with) {
    check_cuda(
        fill_bf16(memory.as<uint16_t>(), static_cast<int64_t>(memory.bytes() / 2), with, nullptr),
        "fill_bf16");
  };
  fill(*c.x, seed), fill(*c.matrices, seed + 1), fill(*c.means, seed + 2);

  // Rows of a fused projection: the query heads, then those of keys and values.
  const auto tensor = [&](int first_head, int num_heads, int which, const float* subtracted,
                          const float* added) {
    return TransformRows{.x = {c.x->as<uint16_t>() + first_head * d, int64_t{heads} * d, d},
                         .out = c.out->as<uint16_t>() + int64_t{rows} * first_head * d,
                         .matrix = c.matrices->as<float>() + which * matrix,
                         .subtracted = subtracted,
                         .added = added,
                         .num_heads = num_heads};
  };
  const float *k_mean = c.means->as<float>(), *v_mean = k_mean + mean;
  c.qkv.rows = c.output.rows = rows;
  c.qkv.num_kv_heads = c.output.num_kv_heads = o.num_kv_heads;
  c.qkv.head_dim = c.output.head_dim = d;
  c.qkv.num_tensors = 3;
  c.qkv.tensors[0] = tensor(0, o.num_qo_heads, 0, nullptr, nullptr);
  c.qkv.tensors[1] = tensor(o.num_qo_heads, o.num_kv_heads, 1, k_mean, nullptr);
  c.qkv.tensors[2] = tensor(o.num_qo_heads + o.num_kv_heads, o.num_kv_heads, 2, v_mean, nullptr);
  c.output.num_tensors = 1;
  c.output.tensors[0] = tensor(0, o.num_qo_heads, 3, nullptr, v_mean);
  c.output.tensors[0].x = contiguous_rows(c.x->as<uint16_t>(), o.num_qo_heads, d);
  return c;
}

// A device-to-device copy that reads and writes `bytes` in all.
Timing time_copy(double bytes, int replays) {
  const auto half = static_cast<size_t>(bytes / 2);
  const int count = cold_copies(2 * half);
  const DeviceBytes from(half * count), to(half * count);
  return time_graph(count, 8, replays, [&](int i, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to.as<char>() + i * half, from.as<char>() + i * half, half,
                               cudaMemcpyDeviceToDevice, stream),
               "copy");
  });
}

}  // namespace

Json bench_transform(const TransformBenchOptions& o) {
  Json records = Json::array();
  const double d = o.head_dim;
  for (const int rows : o.rows) {
    const double matrix_bytes = 4.0 * o.num_kv_heads * d * d;
    const double all_heads = o.num_qo_heads + 2.0 * o.num_kv_heads;
    const int count =
        cold_copies(static_cast<size_t>(2.0 * rows * all_heads * d + 4.0 * matrix_bytes));
    std::vector<TransformCase> cases;
    cases.reserve(count);
    for (int i = 0; i < count; ++i) {
      cases.push_back(make_case(o, rows, 100 + 10 * static_cast<uint32_t>(i)));
    }
    check_cuda(cudaDeviceSynchronize(), "fill");
    for (const bool output : {false, true}) {
      const double heads = output ? o.num_qo_heads : all_heads;
      const double bytes = 2.0 * 2.0 * rows * heads * d + (output ? 1 : 3) * matrix_bytes;
      const Timing t = time_graph(count, 8, o.replays, [&](int i, cudaStream_t stream) {
        check_cuda(transform_rows(output ? cases[i].output : cases[i].qkv, stream),
                   "transform_rows");
      });
      const Timing copy = time_copy(bytes, o.replays);
      records.push_back(Json{{"tensors", output ? "output" : "qkv"},
                             {"rows", rows},
                             {"num_qo_heads", o.num_qo_heads},
                             {"num_kv_heads", o.num_kv_heads},
                             {"head_dim", o.head_dim},
                             {"transform_us", t.median},
                             {"transform_p10_us", t.p10},
                             {"transform_p90_us", t.p90},
                             {"copy_us", copy.median},
                             {"times_copy", t.median / copy.median},
                             {"tflops", 2.0 * rows * heads * d * d / t.median * 1e-6}});
    }
  }
  return records;
}

}  // namespace oscar
