// Attention of sampled queries, recomputed from q and k: by a CUDA kernel, or score by score.
#include "oscar/attention/received_attention.h"

#include <algorithm>
#include <limits>

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "oscar/base/error.h"
#include "oscar_kernels/received.h"
#endif

namespace oscar {
namespace {

// One position of each stride of `tokens`, of those that read INT2 rows.
std::vector<int64_t> sampled_queries(const CacheView& view, int64_t tokens) {
  constexpr int64_t kStep = 7;  // shares no factor with the stride: every place has its turn
  std::vector<int64_t> positions;
  for (int64_t m = 0; m * kQueryStride < tokens; ++m) {
    const int64_t i = m * kQueryStride + kStep * m % kQueryStride;
    if (i < tokens && int2_end(view, i) > std::max(view.sink, first_visible(view, i))) {
      positions.push_back(i);
    }
  }
  return positions;
}

torch::Tensor column(const std::vector<int64_t>& values, torch::Device device) {
  return torch::tensor(values, torch::kInt64).to(device).unsqueeze(1);
}

// Which keys [begin, end) of positions each query sees at all, and which of them as INT2.
struct Reach {
  torch::Tensor visible, int2;  // [queries, tokens] bool
};

Reach reach_of(const CacheView& view, const std::vector<int64_t>& queries, int64_t tokens,
               torch::Device device) {
  std::vector<int64_t> first, end;
  for (const int64_t i : queries) {
    first.push_back(first_visible(view, i));
    end.push_back(int2_end(view, i));
  }
  const auto key = torch::arange(tokens, torch::dtype(torch::kInt64).device(device)).unsqueeze(0);
  const auto seen = key.le(column(queries, device)).logical_and(key.ge(column(first, device)));
  return {seen, seen.logical_and(key.ge(view.sink)).logical_and(key.lt(column(end, device)))};
}

#if defined(OSCAR_HAS_KERNELS)

ReceivedRows describe(const torch::Tensor& x) {
  return {.rows = x.data_ptr(), .head_stride = x.stride(0), .token_stride = x.stride(1)};
}

// Fills all but `sink`. False, and nothing done, when the kernel does not take these rows.
bool weigh_with_kernel(const torch::Tensor& q, const torch::Tensor& k, const CacheView& view,
                       double sm_scale, ReceivedAttention& received) {
  for (const torch::Tensor& x : {q, k}) {
    if (!x.is_cuda() || x.scalar_type() != torch::kBFloat16 || x.stride(2) != 1) return false;
  }
  std::vector<int32_t> seen, begin, end, reach(received.queries.begin(), received.queries.end());
  for (const int64_t i : received.queries) {
    const int64_t first = first_visible(view, i);
    seen.push_back(static_cast<int32_t>(first));
    begin.push_back(static_cast<int32_t>(std::max(view.sink, first)));
    end.push_back(static_cast<int32_t>(int2_end(view, i)));
  }
  for (const auto& more : {seen, begin, end}) reach.insert(reach.end(), more.begin(), more.end());
  // The bytes are copied before this returns, though not to the device.
  const torch::Tensor on_device =
      torch::tensor(reach, torch::kInt32).to(q.device(), /*non_blocking=*/true);
  const auto count = static_cast<int64_t>(received.queries.size());
  received.query = torch::empty({q.size(0), count}, received.key.options());
  const ReceivedParams params{.head_dim = static_cast<int>(q.size(2)),
                              .num_qo_heads = static_cast<int>(q.size(0)),
                              .num_kv_heads = static_cast<int>(k.size(0)),
                              .tokens = static_cast<int>(k.size(1)),
                              .queries = static_cast<int>(count),
                              .sm_scale = static_cast<float>(sm_scale),
                              .even_share = static_cast<float>(kEvenShare),
                              .q = describe(q),
                              .k = describe(k),
                              .reach = on_device.data_ptr<int32_t>(),
                              .key = received.key.data_ptr<float>(),
                              .value = received.value.data_ptr<float>(),
                              .attention = received.attention.data_ptr<float>(),
                              .query = received.query.data_ptr<float>()};
  const torch::Tensor workspace = torch::empty({static_cast<int64_t>(received_workspace(params))},
                                               torch::dtype(torch::kUInt8).device(q.device()));
  const c10::DeviceGuard guard(q.device());
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(q.device());
  const cudaError_t error = received_weights(params, workspace.data_ptr(),
                                             static_cast<cudaStream_t>(stream.native_handle()));
  if (error == cudaErrorNotSupported) return false;
  if (error == cudaSuccess) return true;
  throw Error({.what = "weighing rows on the GPU failed",
               .found = cudaGetErrorString(error),
               .hint = "was the program built for this GPU (OSCAR_CUDA_ARCHITECTURES)?"});
}

#else

bool weigh_with_kernel(const torch::Tensor&, const torch::Tensor&, const CacheView&, double,
                       ReceivedAttention&) {
  return false;
}

#endif

// The same score by score, in blocks of queries whose scores fit into memory.
void weigh_scores(const torch::Tensor& q, const torch::Tensor& k, const CacheView& view,
                  double sm_scale, ReceivedAttention& received) {
  const torch::Device device = q.device();
  const int64_t query_heads = q.size(0), heads = k.size(0), tokens = k.size(1);
  const int64_t group = query_heads / heads;
  const auto count = static_cast<int64_t>(received.queries.size());
  const auto keys = k.to(torch::kFloat32).transpose(1, 2);  // [Hkv, d, tokens]
  std::vector<torch::Tensor> query_weights;
  for (int64_t begin = 0; begin < count;) {
    const int64_t last = std::min(
        count, begin + std::max<int64_t>(1, attended_scores(device) / (query_heads * tokens)));
    const std::vector<int64_t> own(received.queries.begin() + begin,
                                   received.queries.begin() + last);
    const int64_t n = last - begin, reach = own.back() + 1;
    const Reach rows = reach_of(view, own, reach, device);
    const auto queries = q.index_select(1, torch::tensor(own, torch::kInt64).to(device))
                             .to(torch::kFloat32)
                             .reshape({heads, group * n, q.size(2)});
    auto p = torch::bmm(queries, keys.slice(2, 0, reach)).mul_(sm_scale);
    p.view({heads, group, n, reach})
        .masked_fill_(rows.visible.logical_not(), -std::numeric_limits<float>::infinity());
    p = p.softmax(-1).view({heads, group, n, reach}).mul_(rows.int2);
    const auto squares = p.square();
    const auto rest = p.sub_(squares);  // p (1 - p)
    const auto int2_rows = rows.int2.to(torch::kFloat32);
    const auto even = int2_rows / int2_rows.sum(1, /*keepdim=*/true);  // [n, reach]
    const auto add = [&](torch::Tensor& weights, const torch::Tensor& attention) {
      const auto total = attention.sum({1, 3});   // [Hkv, n]
      const auto by_row = attention.sum({1, 2});  // [Hkv, reach]
      // No product of matrices: of so few rows MKL splits it by the number of threads.
      weights.slice(1, 0, reach)
          .add_(by_row, 1 - kEvenShare)
          .add_((total.unsqueeze(2) * even).sum(1), kEvenShare);
      received.attention.slice(1, 0, reach).add_(by_row);  // p (1 - p) and p^2 are p
    };
    add(received.key, rest);
    add(received.value, squares);
    query_weights.push_back(rest.sum(3).reshape({query_heads, n}));
    begin = last;
  }
  received.query = torch::cat(query_weights, 1);
}

}  // namespace

int64_t attended_scores(torch::Device device) { return int64_t{1} << (device.is_cuda() ? 25 : 21); }

ReceivedAttention received_attention(const torch::Tensor& q, const torch::Tensor& k,
                                     const CacheView& view, double sm_scale) {
  const int64_t query_heads = q.size(0), heads = k.size(0), tokens = k.size(1);
  const auto options = torch::dtype(torch::kFloat32).device(q.device());
  ReceivedAttention received{.queries = sampled_queries(view, tokens),
                             .key = torch::zeros({heads, tokens}, options),
                             .value = torch::zeros({heads, tokens}, options),
                             .query = torch::zeros({query_heads, 0}, options),
                             .sink = torch::zeros({heads, tokens}, options),
                             .attention = torch::zeros({heads, tokens}, options)};
  if (received.queries.empty()) return received;
  if (!weigh_with_kernel(q, k, view, sm_scale, received)) {
    weigh_scores(q, k, view, sm_scale, received);
  }
  const int64_t end = std::max(view.sink, int2_end(view, tokens - 1));
  const auto int2_keys = received.key.slice(1, view.sink, end);
  received.sink.slice(1, view.sink, end)
      .copy_(int2_keys.gt(kSinkFactor * int2_keys.mean(1, /*keepdim=*/true)));
  return received;
}

}  // namespace oscar
