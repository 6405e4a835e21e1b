// Checks of a codec against what pages hold, and its arrays.
#include "oscar/int2/page_writer.h"

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

}  // namespace

AppendParams PageWriter::parameters() const {
  AppendParams params;
  params.format = format;
  params.key = key.writer(data_or_null(feedback_k), data_or_null(metric_k));
  params.value = value.writer(data_or_null(feedback_v), data_or_null(metric_v));
  if (centres_k.defined()) {
    params.centres.rows = static_cast<const uint16_t*>(centres_k.data_ptr());
    params.centres.segments = static_cast<int>(centres_k.size(0));
  }
  params.num_kv_heads = static_cast<int>(key.heads());
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
                   .quant_group_size = key.format.quant_group_size,
                   .metadata = key.format.metadata,
                   .order = PackOrder::kConsecutive};
  writer.key = DeviceRecipe(key.recipe, device);
  writer.value = DeviceRecipe(value.recipe, device);
  writer.feedback_k = on(key.feedback, device);
  writer.feedback_v = on(value.feedback, device);
  writer.metric_k = on(key.metric, device);
  writer.metric_v = on(value.metric, device);
  if (key.centres.defined())
    writer.centres_k = key.centres.to(device, torch::kBFloat16).contiguous();
  return writer;
}

}  // namespace oscar
