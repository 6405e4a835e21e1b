// Value transforms into a checkpoint's weights.
#include "oscar/bundle/fold.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>

#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/base/process.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/match.h"
#include "oscar/bundle/weight_samples.h"
#include "oscar/cache/numeric.h"
#include "oscar/io/gguf.h"
#include "oscar/io/safetensors.h"
#include "oscar/model/checkpoint/gguf_model.h"
#include "oscar/model/checkpoint/named_weights.h"
#include "oscar/model/checkpoint/weights.h"

namespace oscar {

// Blocks of a tensor to float64 and back.

namespace {

double element(const TensorView& tensor, int64_t index) {
  return stored_float(tensor.dtype,
                      tensor.data + static_cast<size_t>(index) * dtype_bytes(tensor.dtype));
}

// [rows, cols] elements from `begin` on, in the order of the file.
MatrixD block(const TensorView& tensor, int64_t begin, int64_t rows, int64_t cols) {
  MatrixD result(rows, cols);
  for (int64_t i = 0; i < rows * cols; ++i) result.data()[i] = element(tensor, begin + i);
  return result;
}

// A tensor's new bytes, filled front to back.
class Writer {
 public:
  explicit Writer(const TensorView& like) : like_(like) { bytes_.reserve(like.bytes); }

  template <typename Values>
  void add(const Values& values) {
    const MatrixD plain = values;  // row-major
    for (int64_t i = 0; i < plain.size(); ++i) add_one(static_cast<float>(plain.data()[i]));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void add_one(float value) {
    switch (like_.dtype) {
      case Dtype::kBf16:
        return store(value, float_to_bf16(value), bf16_to_float(float_to_bf16(value)));
      case Dtype::kFp16:
        return store(value, float_to_fp16(value), fp16_to_float(float_to_fp16(value)));
      case Dtype::kFp32:
        return store(value, value, value);
    }
  }
  template <typename T>
  void store(float value, T stored, float back) {
    if (!std::isfinite(back)) {
      throw Error({.what = "a folded weight does not fit its dtype",
                   .where = like_.name,
                   .expected = std::string("numbers that ") + dtype_name(like_.dtype) + " holds",
                   .found = std::to_string(value)});
    }
    const size_t end = bytes_.size();
    bytes_.resize(end + sizeof(stored));
    std::memcpy(bytes_.data() + end, &stored, sizeof(stored));
  }

  const TensorView& like_;
  std::vector<std::byte> bytes_;
};

}  // namespace

std::vector<std::byte> fold_value_weight(const TensorView& weight, const ValueFold& fold) {
  Writer out(weight);
  const int64_t d = fold.head_dim(), hidden = weight.shape[1];
  for (int head = 0; head < fold.num_kv_heads(); ++head) {
    out.add(fold.forward[head].transpose() * block(weight, head * d * hidden, d, hidden));
  }
  return out.take();
}

std::vector<std::byte> fold_value_bias(const TensorView& bias, const ValueFold& fold) {
  Writer out(bias);
  const int64_t d = fold.head_dim();
  for (int head = 0; head < fold.num_kv_heads(); ++head) {
    MatrixD row = block(bias, head * d, 1, d);
    if (!fold.mean.empty()) row -= fold.mean[head];
    out.add(row * fold.forward[head]);
  }
  return out.take();
}

std::vector<std::byte> fold_output_weight(const TensorView& weight, const ValueFold& fold) {
  Writer out(weight);
  const int64_t d = fold.head_dim(), joined = fold.num_qo_heads / fold.num_kv_heads();
  for (int64_t row = 0; row < weight.shape[0]; ++row) {
    for (int64_t head = 0; head < fold.num_kv_heads(); ++head) {
      const int64_t begin = (row * fold.num_qo_heads + head * joined) * d;
      out.add(block(weight, begin, joined, d) * fold.inverse[head].transpose());
    }
  }
  return out.take();
}

std::vector<std::byte> fold_output_bias(const TensorView& bias, const TensorView& output_weight,
                                        const ValueFold& fold) {
  Writer out(bias);
  const int64_t d = fold.head_dim(), joined = fold.num_qo_heads / fold.num_kv_heads();
  const int64_t hidden = output_weight.shape[0];
  VectorD folded = block(bias, 0, 1, hidden);
  for (int64_t row = 0; row < hidden; ++row) {
    for (int64_t head = 0; head < static_cast<int64_t>(fold.mean.size()); ++head) {
      const int64_t begin = (row * fold.num_qo_heads + head * joined) * d;
      folded[row] += (block(output_weight, begin, joined, d) * fold.mean[head].transpose()).sum();
    }
  }
  out.add(folded);
  return out.take();
}

MatrixD attended_to_self(const ValueWeights& weights, const MatrixD& inputs, int num_qo_heads,
                         int num_kv_heads) {
  const int64_t hidden = weights.output.shape[0], d = weights.value.shape[0] / num_kv_heads;
  const int64_t joined = num_qo_heads / num_kv_heads;
  MatrixD values =
      inputs * block(weights.value, 0, num_kv_heads * d, weights.value.shape[1]).transpose();
  if (weights.value_bias.data != nullptr) {
    const VectorD bias = block(weights.value_bias, 0, 1, num_kv_heads * d);
    values.rowwise() += bias;
  }
  MatrixD given(inputs.rows(), num_qo_heads * d);  // to query heads
  for (int64_t j = 0; j < num_qo_heads; ++j) {
    given.middleCols(j * d, d) = values.middleCols(j / joined * d, d);
  }
  MatrixD result = given * block(weights.output, 0, hidden, num_qo_heads * d).transpose();
  if (weights.output_bias.data != nullptr) {
    const VectorD bias = block(weights.output_bias, 0, 1, hidden);
    result.rowwise() += bias;
  }
  return result;
}

// The order of folding: check, write shards, copy the rest, check what was written, write the
// bundle.

namespace {

namespace fs = std::filesystem;

constexpr int kProbes = 8;  // random inputs of the check

// Files that hold weights in a form that would not be folded.
constexpr const char* kWeightFiles[] = {".safetensors", ".bin", ".pt",  ".pth",  ".ckpt",
                                        ".gguf",        ".h5",  ".npz", ".onnx", ".msgpack"};

bool is_transformed(const LayerTransforms& layer) {
  const auto& kinds = layer.value.kind;
  return layer.geometry.quantized &&
         (is_centered(layer.value) || std::any_of(kinds.begin(), kinds.end(), [](auto kind) {
            return kind != TransformKind::kIdentity;
          }));
}

ValueMean settle_mean(const Bundle& bundle, const ModelConfig& config, ValueMean asked) {
  const bool centered =
      std::any_of(bundle.layers.begin(), bundle.layers.end(), [](const LayerTransforms& layer) {
        return layer.geometry.quantized && is_centered(layer.value);
      });
  if (!centered) return ValueMean::kAuto;
  const auto everywhere = [&](bool AttentionSpec::*bias) {
    return std::ranges::all_of(config.layers,
                               [&](const LayerSpec& layer) { return layer.attention.*bias; });
  };
  const bool on_v = everywhere(&AttentionSpec::qkv_bias);
  const bool biases = on_v && everywhere(&AttentionSpec::o_bias);
  if (asked == ValueMean::kFold && !biases) {
    throw Error(
        {.what = "the mean of values cannot be folded into this model",
         .where = config.architecture,
         .expected = "biases on v_proj and o_proj",
         .found = on_v ? "none on o_proj" : "none",
         .hint = "keep it in the bundle (--value-mean keep), or calibrate with --center off"});
  }
  if (asked != ValueMean::kAuto) return asked;
  return biases ? ValueMean::kFold : ValueMean::kKeep;
}

ValueFold layer_fold(const LayerTransforms& layer, ValueMean mean) {
  ValueFold fold;
  fold.num_qo_heads = layer.geometry.num_qo_heads;
  for (int head = 0; head < layer.value.forward.count; ++head) {
    // Inverted anew: the stored inverse is rounded.
    const MatrixD forward = layer.value.forward[head].cast<double>();
    fold.forward.push_back(forward);
    fold.inverse.push_back(forward.inverse());
    if (mean == ValueMean::kFold) fold.mean.push_back(layer.value.mean[head].cast<double>());
  }
  return fold;
}

// The tensors of a layer that take part; no data for biases that the model does not have.
ValueWeights value_weights(const ModelConfig& config, const WeightSource& weights, int layer) {
  ValueWeights result;
  for (const WeightSpec& spec : layer_weights(config, layer)) {
    const auto load = [&] { return weights.get(spec.name, spec.shape); };
    if (spec.role == WeightRole::kV) result.value = load();
    if (spec.role == WeightRole::kVBias) result.value_bias = load();
    if (spec.role == WeightRole::kO) result.output = load();
    if (spec.role == WeightRole::kOBias) result.output_bias = load();
  }
  return result;
}

using Fold = std::function<std::vector<std::byte>()>;
using Folds = std::map<std::string, Fold>;

// A gate between attention and W_O multiplies each dimension: it does not let a transform past.
void require_no_gates(const ModelConfig& config) {
  if (!config.has_output_gates()) return;
  throw Error({.what = "value transforms cannot be folded through an output gate",
               .where = config.architecture,
               .expected = "attention outputs that go straight into the output projection",
               .hint = "serve the bundle as it is: servers transform values back before the gate"});
}

// Quantized weights are rounded to a grid that a fold does not keep.
void require_plain(const ValueWeights& weights, const WeightSource& source) {
  for (const TensorView* view : {&weights.value, &weights.value_bias, &weights.output}) {
    const bool in_blocks = view->data == nullptr && view->decode != nullptr;
    if (!in_blocks && view->fp8 == nullptr) continue;
    throw Error({.what = "values cannot be folded into quantized weights, which would lose them",
                 .where = source.place(view->name),
                 .expected = "F32, F16 or BF16",
                 .found = source.quantization(),
                 .hint = in_blocks
                             ? "fold the file that convert_hf_to_gguf.py writes, then quantize it"
                             : "fold the checkpoint that was quantized"});
  }
}

// New bytes by tensor name, made when they are written.
void add_folds(const ValueWeights& old, const ValueFold& fold, Folds& folds) {
  folds[old.value.name] = [&old, &fold] { return fold_value_weight(old.value, fold); };
  folds[old.output.name] = [&old, &fold] { return fold_output_weight(old.output, fold); };
  if (old.value_bias.data != nullptr) {
    folds[old.value_bias.name] = [&old, &fold] { return fold_value_bias(old.value_bias, fold); };
  }
  if (old.output_bias.data != nullptr && !fold.mean.empty()) {
    folds[old.output_bias.name] = [&old, &fold] {
      return fold_output_bias(old.output_bias, old.output, fold);
    };
  }
}

// A LoRA beside the weights, which transformers would put over the folded ones: its config and
// weights.
bool is_adapter_file(const std::string& name) {
  return name.starts_with("adapter_config.") || name.starts_with("adapter_model.");
}

// Everything beside the weights; returns what stayed behind.
std::vector<std::string> copy_other_files(const fs::path& from, const fs::path& to) {
  std::vector<std::string> left_out;
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (fs::exists(to / name)) continue;  // a shard
    if (leads_outside(from, entry.path()) || !entry.is_regular_file() || is_adapter_file(name) ||
        std::find(std::begin(kWeightFiles), std::end(kWeightFiles), extension) !=
            std::end(kWeightFiles)) {
      left_out.push_back(name);
      continue;
    }
    fs::copy_file(entry.path(), to / name);
  }
  std::sort(left_out.begin(), left_out.end());
  return left_out;
}

// The new bytes of a tensor, of those that change.
std::optional<std::vector<std::byte>> folded_bytes(const Folds& folds, const std::string& name) {
  stop_if_requested("stopped; nothing was written");
  const auto fold = folds.find(name);
  if (fold == folds.end()) return std::nullopt;
  return fold->second();
}

// The same by the names of the files.
Folds by_stored_names(const Folds& folds, const WeightSource& weights) {
  Folds stored;
  for (const auto& [name, fold] : folds) {
    const auto tensor = weights.stored_name(name);
    if (!tensor) {
      throw Error({.what = "values cannot be folded into a tensor that holds several matrices",
                   .where = weights.place(name),
                   .expected = "a tensor for each of v_proj and o_proj",
                   .hint = "serve the bundle as it is"});
    }
    stored[*tensor] = fold;
  }
  return stored;
}

std::shared_ptr<const WeightSource> write_folder_model(const Checkpoint& checkpoint,
                                                       const Folds& folds, const fs::path& to,
                                                       FoldResult& result) {
  const Folds stored = by_stored_names(folds, *checkpoint.weights);
  for (const fs::path& shard : checkpoint.weights->shards()) {
    copy_safetensors(shard, to / shard.filename(), [&stored](const TensorEntry& tensor) {
      return folded_bytes(stored, tensor.name);
    });
  }
  result.left_out = copy_other_files(checkpoint.folder, to);
  const auto files = std::make_shared<const SafetensorsWeights>(to);
  return by_table_names(files, files, checkpoint.config);
}

std::shared_ptr<const WeightSource> write_gguf_model(const Checkpoint& checkpoint,
                                                     const Folds& folds, const fs::path& to) {
  std::map<std::string, std::string> names;  // of the file to those of the folds
  for (const WeightNames& weight : weight_names(checkpoint.config.num_layers)) {
    names[weight.gguf_name] = weight.name;
  }
  const fs::path copy = to / checkpoint.path.filename();
  copy_gguf(
      GgufFile(checkpoint.path), copy,
      [&](const std::string& name, const GgufTensor&) { return folded_bytes(folds, names[name]); },
      {});
  return std::make_shared<GgufWeights>(std::make_shared<GgufFile>(copy), checkpoint.config);
}

double rounding_unit(Dtype dtype) {
  return dtype == Dtype::kBf16 ? 0x1p-9 : dtype == Dtype::kFp16 ? 0x1p-12 : 0x1p-25;
}

// Relative change of what attention writes, held against what rounding may do.
double checked_change(const ValueWeights& before, const ValueWeights& after, const ValueFold& fold,
                      const std::string& where) {
  std::mt19937_64 random(0);
  MatrixD inputs(kProbes, before.value.shape[1]);
  for (int64_t i = 0; i < inputs.size(); ++i) {
    inputs.data()[i] = static_cast<double>(random() >> 11) * 0x1p-52 - 1;  // uniform in [-1, 1)
  }
  const auto attended = [&](const ValueWeights& weights) {
    return attended_to_self(weights, inputs, fold.num_qo_heads, fold.num_kv_heads());
  };
  const MatrixD expected = attended(before);
  const double change = (attended(after) - expected).norm() / expected.norm();
  double condition = 0;
  for (int head = 0; head < fold.num_kv_heads(); ++head) {
    condition = std::max(condition, fold.forward[head].norm() * fold.inverse[head].norm());
  }
  // Each product is rounded once, and the second one enlarges the first one's rounding by no more
  // than this condition number (Frobenius, d at least). Wrong matrices change about everything.
  const double unit =
      std::max(rounding_unit(before.value.dtype), rounding_unit(before.output.dtype));
  const double limit = std::min(0.5, 2 * unit * condition);
  if (!(change <= limit)) {
    throw Error({.what = "the folded weights do not compute what the model does",
                 .where = where,
                 .expected = fmt::format("a relative change of at most {:.2g}", limit),
                 .found = fmt::format("{:.2g}", change),
                 .hint = "the transform is too ill-conditioned for the dtype of the weights"});
  }
  return change;
}

// Values of the folded model are stored as they come.
void strip_value_transform(LayerTransforms& layer, ValueMean mean) {
  SideTransform& side = layer.value;
  for (int head = 0; head < side.forward.count; ++head) {
    if (mean == ValueMean::kKeep) {
      side.mean[head] =
          (side.mean[head].cast<double>() * side.forward[head].cast<double>()).cast<float>().eval();
    } else {
      side.mean[head].setZero();
    }
    side.forward[head].setIdentity();
    side.eigenvalues[head].setOnes();
    side.kind[head] = TransformKind::kIdentity;
    side.fallback[head].clear();
  }
  side.partner = {};
  std::fill(side.condition_number.begin(), side.condition_number.end(), 1.0);
  if (mean == ValueMean::kDrop) {
    side.clip_losses.reset();
    std::fill(layer.predicted_output_nmse.begin(), layer.predicted_output_nmse.end(), NAN);
  }
}

Bundle folded_bundle(Bundle bundle, ValueMean mean) {
  if (mean == ValueMean::kDrop) {
    const auto first = std::ranges::find_if(bundle.layers, [](const LayerTransforms& layer) {
      return layer.geometry.quantized && is_centered(layer.value);
    });
    if (first != bundle.layers.end()) first->warnings.emplace_back(kDroppedMean);
  }
  for (LayerTransforms& layer : bundle.layers) {
    if (layer.geometry.fitted()) strip_value_transform(layer, mean);
  }
  bundle.statistics.clear();
  bundle.collected.reset();
  bundle.portable.clear();
  bundle.evaluation.reset();
  bundle.run_key.clear();  // no run made this
  bundle.created_utc.clear();
  return bundle;
}

}  // namespace

const char* describe(ValueMean mean) {
  switch (mean) {
    case ValueMean::kFold:
      return "folded into biases";
    case ValueMean::kKeep:
      return "kept in the bundle, for servers that center values";
    case ValueMean::kDrop:
      return "dropped: values are not centered, the predicted errors do not hold";
    case ValueMean::kAuto:
      break;
  }
  return "none: values were not centered";
}

FoldResult fold_model(const Bundle& bundle, const std::string& bundle_name,
                      const Checkpoint& checkpoint, const fs::path& out, ValueMean asked) {
  AtomicFolder folder(out);
  const LongInputs weights(checkpoint.weights->shards());
  FoldResult result;
  result.warning = check_bundle_matches(bundle, checkpoint, bundle_name);
  require_no_gates(checkpoint.config);
  check_weights(checkpoint.config, *checkpoint.weights);
  result.mean = settle_mean(bundle, checkpoint.config, asked);

  // One entry a layer that changes; addresses stay, as the folds refer to them.
  std::map<int, ValueFold> layers;
  std::map<int, ValueWeights> before;
  Folds folds;
  for (const LayerTransforms& layer : bundle.layers) {
    const int id = layer.geometry.layer_id;
    if (!is_transformed(layer)) continue;
    layers[id] = layer_fold(layer, result.mean);
    before[id] = value_weights(checkpoint.config, *checkpoint.weights, id);
    require_plain(before[id], *checkpoint.weights);
    add_folds(before[id], layers[id], folds);
  }
  if (layers.empty()) {
    throw Error({.what = "there is nothing to fold: no layer transforms its values",
                 .where = bundle_name,
                 .expected = "a rotation bundle that is not of a folded model already"});
  }
  result.layers = static_cast<int>(layers.size());
  result.tensors = static_cast<int>(folds.size());

  const std::shared_ptr<const WeightSource> source =
      checkpoint.is_gguf() ? write_gguf_model(checkpoint, folds, folder.temporary())
                           : write_folder_model(checkpoint, folds, folder.temporary(), result);
  weights.require_unchanged();
  const WeightSource& written = *source;
  for (const auto& [id, fold] : layers) {
    const ValueWeights after = value_weights(checkpoint.config, written, id);
    result.largest_change =
        std::max(result.largest_change,
                 checked_change(before[id], after, fold, fmt::format("layer {}", id)));
  }

  Bundle folded = folded_bundle(bundle, result.mean);
  folded.model.name = checkpoint.name;
  if (checkpoint.is_gguf()) {
    folded.model.file_sha256 = sha256_of_file(folder.temporary() / checkpoint.path.filename());
  }
  folded.model.weights_fingerprint = written.fingerprint(false);
  folded.weight_samples = sample_weights(checkpoint.config, written);
  const Json record = {{"bundle_sha256", bundle.content_sha256},
                       {"weights_fingerprint", bundle.model.weights_fingerprint},
                       {"value_mean", describe(result.mean)},
                       {"layers", result.layers},
                       {"largest_relative_change", result.largest_change}};
  write_file_atomically(folder.temporary() / "oscar_fold.json", record.dump(2) + "\n");
  write_bundle(folded, folder.temporary() / kFoldedBundleName, false);
  folder.commit();
  return result;
}

}  // namespace oscar
