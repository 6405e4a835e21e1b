// Rows in and out of the cache's basis, timed as graph replays.
#include "bench/transform.h"

#include <memory>

#include "bench_kernels.h"
#include "oscar_kernels/transform.h"

namespace oscar {
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
