// Checks of a codec against what pages hold, and its arrays.
#include "oscar/int2/page_writer.h"

#include <algorithm>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr const char* kWayOut = "use --engine simulate for this method";

const float* data_or_null(const torch::Tensor& t) {
  return t.defined() ? t.data_ptr<float>() : nullptr;
}

torch::Tensor on(const torch::Tensor& t, torch::Device device) {
  return t.defined() ? t.to(device, torch::kFloat32).contiguous() : t;
}

// An append corrects every head's scales by a matrix, so each head gets the one that makes its own
// correction of it; undefined when no head corrects. On the CPU the factors are equal to the bit,
// as adding zeros changes no sum and both definitions add over i in ascending order
// (cache/scale_correction.h): M = I gives (x M)_i = x_i, hence <x, x> / <x, x^>; M = 0 gives a
// numerator of 0, hence factor 1, which leaves a scale that is rounded already as it is. (The
// kernels add in another order: oscar_kernels/append.h.)
torch::Tensor metric_of(const SideCodec& side, torch::Device device) {
  const auto& kinds = side.scale_correction;
  const auto all = [&](ScaleCorrection kind) {
    return std::all_of(kinds.begin(), kinds.end(), [&](ScaleCorrection c) { return c == kind; });
  };
  if (all(ScaleCorrection::kNone)) return {};
  if (all(ScaleCorrection::kMetric)) return on(side.metric, device);
  const auto heads = static_cast<int64_t>(kinds.size()), d = side.forward.size(-1);
  auto metric = torch::zeros({heads, d, d}, torch::kFloat32);
  for (int64_t head = 0; head < heads; ++head) {
    const ScaleCorrection kind = kinds[static_cast<size_t>(head)];
    if (kind == ScaleCorrection::kUnbiased) metric[head].fill_diagonal_(1.0f);
    if (kind == ScaleCorrection::kMetric) metric[head].copy_(side.metric[head]);
  }
  return on(metric, device);
}

}  // namespace

AppendParams PageWriter::parameters() const {
  AppendParams params;
  params.format = format;
  params.clip_k_heads = data_or_null(clip_k);
  params.clip_v_heads = data_or_null(clip_v);
  params.feedback_k = data_or_null(feedback_k);
  params.feedback_v = data_or_null(feedback_v);
  params.metric_k = data_or_null(metric_k);
  params.metric_v = data_or_null(metric_v);
  params.num_kv_heads = static_cast<int>(clip_k.size(0));
  return params;
}

PageWriter make_page_writer(const LayerCodec& codec, const std::string& where,
                            torch::Device device) {
  const SideCodec &key = codec.key, &value = codec.value;
  if (!codec.int2_keys || !codec.int2_values) {
    throw Error({.what = "a page holds both keys and values as INT2",
                 .where = where,
                 .found = codec.int2_keys ? "exact values" : "exact keys",
                 .hint = kWayOut});
  }
  if (key.forward.size(-1) != value.forward.size(-1)) {
    throw Error({.what = "a page holds keys and values of one head dimension",
                 .where = where,
                 .found = std::to_string(key.forward.size(-1)) + " and " +
                          std::to_string(value.forward.size(-1)),
                 .hint = kWayOut});
  }
  PageWriter writer;
  writer.format = {.head_dim = static_cast<int>(key.forward.size(-1)),
                   .quant_group_size = key.quant_group_size,
                   .metadata = key.metadata,
                   .order = PackOrder::kConsecutive};
  writer.clip_k = torch::tensor(key.clip_ratio, torch::kFloat32).to(device);
  writer.clip_v = torch::tensor(value.clip_ratio, torch::kFloat32).to(device);
  writer.feedback_k = on(key.feedback, device);
  writer.feedback_v = on(value.feedback, device);
  writer.metric_k = metric_of(key, device);
  writer.metric_v = metric_of(value, device);
  return writer;
}

}  // namespace oscar
