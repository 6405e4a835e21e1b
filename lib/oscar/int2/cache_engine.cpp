// Names of the engines, and the changes of basis around them.
#include "oscar/int2/cache_engine.h"

#include "oscar/base/error.h"

namespace oscar {

torch::Tensor to_query_basis(const LayerCodec& codec, const torch::Tensor& q) {
  const int64_t group = q.size(1) / codec.key.partner.size(0);
  return torch::matmul(q.to(torch::kFloat32),
                       codec.key.partner.repeat_interleave(group, /*dim=*/0));
}

torch::Tensor from_value_basis(const LayerCodec& codec, const torch::Tensor& o) {
  const int64_t group = o.size(1) / codec.value.partner.size(0);
  const auto out = torch::matmul(o, codec.value.partner.repeat_interleave(group, /*dim=*/0));
  if (!codec.value.mean.defined()) return out;
  return out + codec.value.mean.repeat_interleave(group, 0).unsqueeze(1);
}

EngineKind parse_engine_kind(const std::string& name) {
  for (const auto kind : {EngineKind::kSimulate, EngineKind::kReference, EngineKind::kKernel}) {
    if (name == engine_name(kind)) return kind;
  }
  throw Error({.what = "unknown engine",
               .where = "--engine",
               .expected = "simulate, reference or kernel",
               .found = name});
}

const char* engine_name(EngineKind kind) {
  switch (kind) {
    case EngineKind::kReference:
      return "reference";
    case EngineKind::kKernel:
      return "kernel";
    case EngineKind::kSimulate:
      break;
  }
  return "simulate";
}

}  // namespace oscar
