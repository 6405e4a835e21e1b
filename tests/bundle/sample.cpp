// A small bundle with every dataset filled.
#include "bundle/sample.h"

#include <cmath>
#include <type_traits>

namespace oscar::sample {

LayerGeometry geometry(int layer, const Size& size) {
  return {.layer_id = layer,
          .attention = size.is_last(layer) ? AttentionKind::kSliding : AttentionKind::kFull,
          .sliding_window = size.is_last(layer) ? 512 : 0,
          .num_qo_heads = size.query_heads,
          .num_kv_heads = size.heads,
          .head_dim_k = size.dim,
          .head_dim_v = size.dim,
          .quantized = true};
}

namespace {

template <typename Values>
void fill(Values& values, double start) {
  for (auto& value : values) {
    value = static_cast<std::remove_reference_t<decltype(value)>>(start);
    start += 1.0 / 3;
  }
}

LayerStatistics statistics(int layer, const Size& size) {
  LayerStatistics s = make_statistics(geometry(layer, size));
  double start = 1 + layer;
  for (auto* moment :
       {&s.q_moment, &s.k_moment, &s.v_moment, &s.attn_out_moment, &s.o_proj_metric}) {
    fill(moment->data, start += 1000);
  }
  for (auto* sum : {&s.q_sum, &s.k_sum, &s.v_sum, &s.attn_out_sum}) fill(sum->data, start += 10);
  // Of one layer, as in a model with one that is never quantized.
  if (size.is_last(layer)) {
    s.attended = make_attended_sums(s.geometry);
    for (auto* moment : {&s.attended.q_moment, &s.attended.k_moment, &s.attended.v_moment}) {
      fill(moment->data, start += 1000);
    }
    for (auto* sum : {&s.attended.k_sum, &s.attended.v_sum, &s.attended.k_sink_sum}) {
      fill(sum->data, start += 10);
    }
    for (auto* weight : {&s.attended.q_weight, &s.attended.k_weight, &s.attended.v_weight,
                         &s.attended.k_sink_weight}) {
      fill(*weight, start += 10);
    }
  }
  s.count_q = 200;
  s.count_kv = 100;
  return s;
}

// A plane rotation of columns i and i + 1: orthogonal, and its transpose is another matrix.
void set_rotation(Eigen::Map<MatrixStack<float>::Matrix> matrix, int i, double angle) {
  matrix.setIdentity();
  matrix(i, i) = matrix(i + 1, i + 1) = static_cast<float>(std::cos(angle));
  matrix(i, i + 1) = static_cast<float>(std::sin(angle));
  matrix(i + 1, i) = static_cast<float>(-std::sin(angle));
}

SideTransform side(int layer, TransformKind kind, const Size& size) {
  const int heads = size.heads, dim = size.dim;
  SideTransform s;
  s.kind.assign(heads, kind);
  s.fallback.assign(heads, "");
  s.forward = MatrixStack<float>(heads, dim, dim);
  for (int h = 0; h < heads; ++h) set_rotation(s.forward[h], h, 0.3 + layer + h);
  if (kind == TransformKind::kBalanced) {
    s.partner = s.forward;
    s.forward.data[0] *= 2;  // of head 0: no longer orthogonal
    for (int h = 0; h < heads; ++h) {
      s.partner[h] = s.forward[h].cast<double>().inverse().transpose().cast<float>().eval();
    }
    s.metric = s.feedback = MatrixStack<float>(heads, dim, dim);
    for (int h = 0; h < heads; ++h) {
      s.metric[h].setIdentity();
      s.feedback[h].setIdentity();
      s.feedback[h](0, dim - 1) = 0.25F;
    }
  }
  s.mean = VectorStack<float>(heads, dim);
  if (kind == TransformKind::kBalanced &&
      size.is_last(layer)) {  // the only kind of side that keys take here
    s.centers = MatrixStack<float>(heads, 2, dim);
    for (size_t i = 0; i < s.centers.data.size(); ++i) {
      s.centers.data[i] = 0.5F + static_cast<float>(i);
    }
  }
  s.eigenvalues = VectorStack<double>(heads, dim);
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < dim; ++i) s.eigenvalues[h](i) = 1.0 / 3 + i + 10 * h;
  }
  const bool balanced = kind == TransformKind::kBalanced;
  s.recipe = SideRecipe(
      heads, {.clip_ratio = 0.96F,
              .scale_correction = balanced ? ScaleCorrection::kMetric : ScaleCorrection::kNone,
              .rounding = balanced ? Rounding::kShaped : Rounding::kPlain});
  s.recipe.clip_ratio.back() = 0.0F;
  s.condition_number.assign(heads, kind == TransformKind::kBalanced ? 2.0 : 1.0);
  return s;
}

LayerTransforms transforms(int layer, TransformKind kind, const Size& size) {
  LayerTransforms t;
  t.geometry = geometry(layer, size);
  t.key = side(layer, kind, size);
  // Values keep the orthogonal kind, so that both spellings of a partner are in one file.
  t.value = side(layer, TransformKind::kOscar, size);
  // Of one side of one layer, as nothing says that all were searched.
  if (size.is_last(layer)) {
    ClipLosses& losses = t.key.clip_losses.emplace();
    losses.ratio = {0.96F, 0.88F, 0.0F};
    losses.nmse = VectorStack<double>(3, size.heads);
    fill(losses.nmse.data, 1.0 / 7);
  }
  t.predicted_output_nmse = {0.01 + layer, 0.02};
  return t;
}

}  // namespace

Bundle statistics_bundle(const Size& size) {
  Bundle b;
  b.statistics_only = true;
  b.preset = "paper";
  b.method = "oscar";
  b.composition = "r_h_pbr";
  b.granularity = "per-head";
  b.position_span = 131072;
  b.fit_seed = ~uint64_t{0};
  b.model = {.name = "sample",
             .architecture = "Qwen3ForCausalLM",
             .num_layers = size.layers,
             .num_qo_heads = size.query_heads,
             .num_kv_heads = size.heads,
             .head_dim_k = size.dim,
             .head_dim_v = size.dim,
             .hidden_size = 32,
             .rope = Json{{"rope_theta", 1e6}},
             .config_sha256 = "c0",
             .tokenizer_sha256 = "70",
             .chat_template_sha256 = "",
             .weights_fingerprint = "f0",
             .quantization = "",
             .file_sha256 = ""};
  CorpusSource source;
  source.name = "a.txt";
  source.sha256 = "aa";
  source.kind = "text";
  source.weight = 0.5;
  source.documents_read = 3;
  source.documents_used = 2;
  source.tokens_read = 120;
  source.tokens_used = 100;
  source.dropped = {"too short: 1"};
  b.corpus.sources = {source};
  b.corpus.sequences_read = 3;
  b.corpus.sequences_used = 2;
  b.corpus.tokens = 100;
  b.corpus.sequence_length = 64;
  b.corpus.order_seed = 7;
  b.corpus.tokens_sha256 = "7a";
  b.corpus.bos_eos_policy = "documents end with EOS";
  b.corpus.chat_template = "none";
  b.quantizer.quant_group_size = size.dim;
  for (int layer = 0; layer < size.layers; ++layer) {
    b.statistics.push_back(statistics(layer, size));
    WeightSamples& samples = b.weight_samples.emplace_back();
    samples.matrices = MatrixStack<float>(size.heads, kSampledMatrices, kWeightSamples);
    samples.vectors = MatrixStack<float>(size.heads, kSampledVectors, kWeightSamples);
    fill(samples.matrices.data, 0.5 + layer);
    fill(samples.vectors.data, 0.25 + layer);
  }
  return b;
}

Bundle rotation_bundle(TransformKind kind, const Size& size) {
  Bundle b = statistics_bundle(size);
  b.statistics_only = false;
  if (kind == TransformKind::kBalanced) {
    b.preset = "best";
    b.method = "balanced";
    b.composition = "t_h";
  }
  b.evaluation = Json{{"kl", Json{{"mean", 0.0051}, {"stderr", 0.0002}}}};
  for (int layer = 0; layer < size.layers; ++layer) {
    b.layers.push_back(transforms(layer, kind, size));
    b.portable.push_back({transforms(layer, TransformKind::kOscar, size),
                          transforms(layer, TransformKind::kHadamard, size)});
  }
  b.layers[0].key.fallback.back() = "cond_2(T) = 2000";
  b.layers.back().warnings = {"rank 3 of 8"};
  b.search = Json{{"effort", "quick"}, {"seed", 3}};
  b.layers.back().search = Json{{"key", Json{{"stages", Json::array({"clip"})}, {"heads", 2}}},
                                {"value", Json{{"heads", 1}}}};
  return b;
}

}  // namespace oscar::sample
