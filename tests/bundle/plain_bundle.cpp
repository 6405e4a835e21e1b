// A small bundle of plain rows.
#include "bundle/plain_bundle.h"

namespace oscar::plain {

namespace {

SideTransform plain_side(float clip) {
  SideTransform side;
  side.kind.assign(kHeads, TransformKind::kHadamard);
  side.fallback.assign(kHeads, "");
  side.forward = MatrixStack<float>(kHeads, kHeadDim, kHeadDim);
  for (int h = 0; h < kHeads; ++h) side.forward[h].setIdentity();
  side.mean = VectorStack<float>(kHeads, kHeadDim);
  side.recipe = SideRecipe(kHeads, {.clip_ratio = clip});
  return side;
}

LayerTransforms plain_layer(int id, float clip_k, float clip_v, double nmse) {
  LayerTransforms layer;
  layer.geometry = {.layer_id = id,
                    .num_qo_heads = 4,
                    .num_kv_heads = kHeads,
                    .head_dim_k = kHeadDim,
                    .head_dim_v = kHeadDim};
  layer.key = plain_side(clip_k);
  layer.value = plain_side(clip_v);
  layer.predicted_output_nmse.assign(kHeads, nmse);
  return layer;
}

}  // namespace

ClipLosses clip_losses(const std::vector<std::pair<float, double>>& tried) {
  ClipLosses losses{.ratio = {}, .nmse = {static_cast<int>(tried.size()), kHeads}};
  for (const auto& [ratio, loss] : tried) {
    losses.nmse[static_cast<int>(losses.ratio.size())].setConstant(loss);
    losses.ratio.push_back(ratio);
  }
  return losses;
}

Bundle plain_bundle() {
  Bundle bundle;
  bundle.model = {.name = "m",
                  .architecture = "Qwen3ForCausalLM",
                  .num_layers = 2,
                  .num_qo_heads = 4,
                  .num_kv_heads = kHeads,
                  .head_dim_k = kHeadDim,
                  .head_dim_v = kHeadDim,
                  .hidden_size = 32,
                  .rope = {},
                  .config_sha256 = "",
                  .tokenizer_sha256 = "",
                  .chat_template_sha256 = "",
                  .weights_fingerprint = "",
                  .quantization = "",
                  .file_sha256 = ""};
  bundle.quantizer.quant_group_size = kHeadDim;
  for (int id = 0; id < 2; ++id) {
    bundle.layers.push_back(plain_layer(id, 0.96F, 0.92F, 0.01));
    LayerTransforms portable = plain_layer(id, id == 0 ? 0.96F : 0.90F, 0.92F, 0.04);
    portable.key.clip_losses = id == 0 ? clip_losses({{0.96F, 3}, {0.93F, 4}, {0.90F, 9}})
                                       : clip_losses({{0.96F, 9}, {0.93F, 4}, {0.90F, 3}});
    portable.value.clip_losses = clip_losses({{0.92F, 2}, {0.0F, 5}});
    bundle.portable.push_back({portable, portable});
  }
  return bundle;
}

}  // namespace oscar::plain
