// Matrices of others as a bundle.
#include "oscar/bundle/import.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/export.h"
#include "oscar/bundle/match.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/bundle/weight_samples.h"
#include "oscar/cache/numeric.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/head_fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/io/npy.h"
#include "oscar/io/safetensors.h"

namespace oscar {

// Which reader takes which file: by suffix, names inside, and the first letter of pairs.

namespace {

using Path = std::filesystem::path;

constexpr const char* kWhatIsRead =
    "a folder of an export, k_*.pt and v_*.pt, k_*.safetensors and v_*.safetensors, one .npz, "
    ".safetensors or .gguf";

[[noreturn]] void refuse_files(const std::string& where, const std::string& found) {
  throw Error({.what = "no transforms that can be read",
               .where = where,
               .expected = kWhatIsRead,
               .found = found});
}

bool starts_with(const Path& path, char letter) {
  const std::string name = path.filename().string();
  return !name.empty() && (name[0] == letter || name[0] == letter - 'a' + 'A');
}

// `matrix`: of read_torch_rotations.
ReadTransforms read_pair(const Path& keys, const Path& values, int num_layers,
                         const char* matrix = nullptr) {
  ReadTransforms out;
  out.files = {keys, values};
  const bool torch = keys.extension() == ".pt";
  out.kind = torch ? "rotation files of SGLang's layout" : "rotations of mlx-lm";
  for (const auto& [path, side] : {std::pair{keys, Side::kKey}, {values, Side::kValue}}) {
    if (torch) {
      out.fields.merge(read_torch_rotations(path, side, out.set, matrix));
    } else {
      read_mlx_rotations(path, side, num_layers, out.set);
    }
  }
  return out;
}

ReadTransforms read_one(const Path& path, int num_layers) {
  ReadTransforms out;
  out.files = {path};
  out.kind = "arrays";
  if (path.extension() == ".npz") {
    out.set = from_arrays(read_npz(path), path.string());
  } else if (path.extension() == ".gguf") {
    out.kind = "tensors of a GGUF file";
    out.set = read_gguf_rotations(path);
  } else if (path.extension() == ".safetensors" && has_mlx_keys(path)) {
    return read_pair(path, path, num_layers);
  } else if (path.extension() == ".safetensors") {
    out.set = from_arrays(read_safetensors(path), path.string());
  } else {
    refuse_files(path.string(), "another kind of file");
  }
  return out;
}

ReadTransforms read_folder(const Path& folder, int num_layers) {
  std::vector<Path> wholes, keys, values;  // of both sides, of one each
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const Path extension = entry.path().extension(), name = entry.path().filename();
    if (extension == ".npz" || extension == ".gguf" || name == "transforms.safetensors" ||
        name == "rotation.safetensors") {
      wholes.push_back(entry.path());
    }
    if (extension != ".pt" && extension != ".safetensors") continue;
    if (starts_with(entry.path(), 'k')) keys.push_back(entry.path());
    if (starts_with(entry.path(), 'v')) values.push_back(entry.path());
  }
  if (wholes.size() + (keys.empty() && values.empty() ? 0 : 1) > 1) {
    std::vector<std::string> names;
    for (const auto* group : {&wholes, &keys, &values}) {
      for (const Path& file : *group) names.push_back(file.filename().string());
    }
    std::ranges::sort(names);
    refuse_files(folder.string(),
                 fmt::format("{}: name those that are meant", fmt::join(names, ", ")));
  }
  if (!wholes.empty()) return read_one(wholes[0], num_layers);
  if (keys.size() != 1 || values.size() != 1 || keys[0].extension() != values[0].extension()) {
    refuse_files(folder.string(), std::to_string(keys.size()) + " files of keys, " +
                                      std::to_string(values.size()) + " of values");
  }
  return read_pair(keys[0], values[0], num_layers);
}

// What the manifest of the files' folder says of their bundle; nothing where there is none. Every
// file must be as the manifest has it, for what it says is said of these very files.
std::optional<ExportOrigin> read_origin(const std::vector<Path>& files) {
  const Path folder = files.front().parent_path(), place = folder / kManifestName;
  const std::string way_out = fmt::format(
      "export again; or take the files as matrices of unknown origin, from a folder without {}",
      kManifestName);
  const auto refuse = [&](const std::string& what, const std::string& expected = "",
                          const std::string& found = "") {
    throw Error({.what = what,
                 .where = place.string(),
                 .expected = expected,
                 .found = found,
                 .hint = way_out});
  };
  for (const Path& file : files) {
    const bool apart = file.parent_path() != folder;
    if (apart && (std::filesystem::exists(file.parent_path() / kManifestName) ||
                  std::filesystem::exists(place))) {
      refuse("files of two folders, of which one is an export", "", file.string());
    }
  }
  if (!std::filesystem::exists(place)) return std::nullopt;
  const Json manifest = read_json_file(place);
  try {
    require_files_of(manifest, files, way_out);
    const Json& from = manifest.at("created_from");
    ExportOrigin origin{.weights_fingerprint = from.at("weights_fingerprint").get<std::string>(),
                        .model = from.at("model").get<std::string>(),
                        .rope = from.value("rope", Json()),
                        .quantizer = {},
                        .clip = {}};
    CacheFormat& quantizer = origin.quantizer;
    const auto take = [&](const char* name, int least, int& value) {
      if (!manifest.contains(name)) return;
      const Json& given = manifest.at(name);
      const int64_t size = given.is_number_integer() ? given.get<int64_t>() : -1;
      if (size < least || size > kLargestWindow) {
        refuse("not a size of a cache", fmt::format("{} {} to {}", name, least, kLargestWindow),
               given.dump());
      }
      value = static_cast<int>(size);
    };
    take("sink_tokens", 0, quantizer.sink_tokens);
    take("recent_tokens", 1, quantizer.recent_tokens);
    take("demote_block", 1, quantizer.demote_block);
    take("quant_group_size", 1, quantizer.quant_group_size);
    const std::string dtype = manifest.value("metadata_dtype", "");
    if (!dtype.empty() && !parse_codec_word(dtype, quantizer.metadata_dtype)) {
      refuse("unknown metadata dtype", "", dtype);
    }
    if (manifest.contains("clip")) {
      const auto pair = manifest.at("clip").get<std::array<double, 2>>();
      origin.clip = {pair[0], pair[1]};
    }
    return origin;
  } catch (const nlohmann::json::exception& error) {
    refuse("not the manifest of an export", "", error.what());
  }
  return std::nullopt;
}

// Both sides of every layer must have come.
ReadTransforms complete(ReadTransforms read) {
  const std::string where = read.files.front().string();
  for (const auto& [id, layer] : read.set) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      if (!side_of(layer, side).forward.empty()) continue;
      throw Error({.what = std::string("a layer has no rotation of ") +
                           (side == Side::kKey ? "keys" : "values"),
                   .where = where,
                   .found = "layer " + std::to_string(id)});
    }
  }
  if (read.set.empty()) throw Error({.what = "no rotations", .where = where});
  return read;
}

}  // namespace

namespace {

ReadTransforms read_files(const std::vector<Path>& paths, int num_layers) {
  if (paths.size() == 1) {
    return std::filesystem::is_directory(paths[0]) ? read_folder(paths[0], num_layers)
                                                   : read_one(paths[0], num_layers);
  }
  if (paths.size() != 2) refuse_files(paths.at(0).string(), "more than two files");
  const bool turned = starts_with(paths[1], 'k') && starts_with(paths[0], 'v');
  const Path &keys = paths[turned ? 1 : 0], &values = paths[turned ? 0 : 1];
  const Path extension = keys.extension();
  if (!starts_with(keys, 'k') || !starts_with(values, 'v')) {
    refuse_files(keys.string(), "names that begin with neither k nor v, as " +
                                    keys.filename().string() + " and " +
                                    values.filename().string());
  }
  if (extension != values.extension() || (extension != ".pt" && extension != ".safetensors")) {
    refuse_files(keys.string(), "two files of another kind");
  }
  return read_pair(keys, values, num_layers);
}

}  // namespace

ReadTransforms read_transforms(const std::vector<Path>& paths, int num_layers) {
  ReadTransforms read = complete(read_files(paths, num_layers));
  read.origin = read_origin(read.files);
  return read;
}

ReadTransforms read_export(const ExchangeFormat& format, const Path& folder, int num_layers) {
  const Path keys = folder / format.key_file;
  if (format.value_file == nullptr) return complete(read_one(keys, num_layers));
  return complete(
      read_pair(keys, folder / format.value_file, num_layers, torch_layout(format.layout).matrix));
}

// From what a file holds of a side to all that a bundle keeps of it.

namespace {

// One head's number, or vector or matrix, for all heads.
template <typename Value>
void spread(std::vector<Value>& values, int heads) {
  if (values.empty()) return;
  const std::vector<Value> one = values;
  for (int head = 1; head < heads; ++head) values.insert(values.end(), one.begin(), one.end());
}

template <typename AnyStack>
void spread(AnyStack& stack, int heads) {
  if (stack.count != 1) return;
  spread(stack.data, heads);
  stack.count = heads;
}

struct Importing {
  ClipPair clips;  // where the files hold no ratios
  std::string file;
  int rescaled = 0;  // matrices

  [[noreturn]] void refuse(const std::string& where, const std::string& what,
                           const std::string& expected = "", const std::string& found = "") const {
    throw Error({.what = what, .where = file + ": " + where, .expected = expected, .found = found});
  }

  // Every part for all heads, and nothing of another shape.
  void widen(SideTransform& side, int heads, int d, const std::string& where) const {
    for (MatrixStack<float>* stack :
         {&side.forward, &side.partner, &side.metric, &side.feedback, &side.centers}) {
      if (stack->empty()) continue;
      spread(*stack, heads);
      const bool centers = stack == &side.centers;
      if (stack->count != heads || stack->cols != d || (stack->rows != d && !centers)) {
        refuse(where, "matrices are of another model",
               fmt::format("{} heads of {} dimensions, or one for all", heads, d),
               fmt::format("{} of {}", stack->count, stack->cols));
      }
    }
    if (side.mean.empty()) side.mean = VectorStack<float>(heads, d);
    spread(side.mean, heads);
    if (side.mean.count != heads || side.mean.cols != d) {
      refuse(where, "means are of another model");
    }
  }

  void set_inverse(SideTransform& side, Side which, int head) const {
    const MatrixD inverse = MatrixD(side.forward[head].cast<double>()).inverse();
    side.partner[head] =
        (which == Side::kKey ? MatrixD(inverse.transpose()) : inverse).cast<float>();
  }

  // Rows of zeros have no inverse. All are zeros where a tool has left a layer out.
  void require_rows(const MatrixF& forward, const std::string& where, int head) const {
    const auto empty = (forward.rowwise().squaredNorm().array() == 0).count();
    if (empty == 0) return;
    throw Error({.what = "a rotation is not orthogonal, and has no inverse",
                 .where = fmt::format("{}: {}, head {}", file, where, head),
                 .expected = "rows of length 1, or any matrix with an inverse",
                 .found = fmt::format("{} of {} rows of length 0", empty, forward.rows()),
                 .hint = empty == forward.rows()
                             ? "the matrix holds zeros alone: look at how the file was written"
                             : ""});
  }

  // Of matrices from elsewhere, which this toolkit did not fit.
  void require_sound(const SideTransform& side, Side which, const std::string& where) const {
    try {
      require_valid(side, which, where);
    } catch (const Error& error) {
      ErrorInfo info = error.info();
      info.hint =
          "a rotation is orthogonal, or has an inverse that 16 bits hold; look at how the "
          "file was written";
      throw Error(std::move(info));
    }
  }

  // Kinds, inverses and condition numbers from the matrices.
  void describe_heads(SideTransform& side, Side which, const std::string& where,
                      std::vector<std::string>& warnings) const {
    const int heads = side.forward.count, d = side.forward.rows;
    const bool given = !side.partner.empty();
    side.kind.clear();
    for (int head = 0; head < heads; ++head) {
      const MatrixF forward = side.forward[head];
      require_rows(forward, where, head);
      const auto orthogonal =
          transform_deviation(forward, which == Side::kKey ? forward : MatrixF(forward.transpose()),
                              which, TransformKind::kOscar);
      const bool is_rotation = orthogonal.orthogonality <= kInverseLimit;
      side.kind.push_back(is_rotation ? TransformKind::kOscar : TransformKind::kBalanced);
      if (!is_rotation && !given && orthogonal.orthogonality <= kInverseLimitBf16) {
        warnings.push_back(fmt::format(
            "{}, head {}: {:.2g} from orthogonal, so it comes with its inverse; servers that take "
            "it for orthogonal lose a little more",
            where, head, orthogonal.orthogonality));
      }
    }
    const bool any =
        std::find(side.kind.begin(), side.kind.end(), TransformKind::kBalanced) != side.kind.end();
    if (!given && any) {
      side.partner = MatrixStack<float>(heads, d, d);
      for (int head = 0; head < heads; ++head) set_inverse(side, which, head);
    }
    if (given && !any) side.partner = {};  // what the matrices imply
    side.condition_number.clear();
    for (int head = 0; head < heads; ++head) {
      if (side.kind[static_cast<size_t>(head)] == TransformKind::kOscar) {
        side.condition_number.push_back(1);
        continue;
      }
      side.condition_number.push_back(
          condition_number(side.forward[head].cast<double>(), fmt::format("{}: {}", file, where)));
      // As the balanced fit does: exact in bf16, then inverted, so that rounding hurts once.
      const auto deviation = transform_deviation(side.forward[head], side.partner[head], which,
                                                 TransformKind::kBalanced);
      if (!given && deviation.inverse_bf16 > kInverseLimitBf16Balanced) {
        side.forward[head] =
            side.forward[head].unaryExpr([](float x) { return bf16_to_float(float_to_bf16(x)); });
        set_inverse(side, which, head);
      }
    }
  }

  // The size of a matrix is free: rows and scales grow with it, codes stay. But scales are fp16
  // numbers with a floor of 2^-14. A matrix far from a rotation's size, whose rows have length 1,
  // is brought there by a power of two, which changes no digit.
  void rescale(SideTransform& side) {
    constexpr int kSmallestScale = -6, kLargestScale = 12;  // powers of two; balanced ones between
    for (int head = 0; head < side.forward.count; ++head) {
      const double d = side.forward.cols;
      const double length = side.forward[head].cast<double>().norm() / std::sqrt(d);
      if (!std::isfinite(length) || length == 0) continue;  // refused below
      const int exponent = std::ilogb(length);
      if (exponent >= kSmallestScale && exponent <= kLargestScale) continue;
      const auto scaled = [](int power) {
        return [power](float x) { return std::ldexp(x, power); };
      };
      side.forward[head] = side.forward[head].unaryExpr(scaled(-exponent));
      if (!side.partner.empty()) {
        side.partner[head] = side.partner[head].unaryExpr(scaled(exponent));
      }
      ++rescaled;
    }
  }

  void complete(SideTransform& side, Side which, const LayerGeometry& geometry,
                std::vector<std::string>& warnings) {
    const bool key = which == Side::kKey;
    const int heads = geometry.num_kv_heads, d = key ? geometry.head_dim_k : geometry.head_dim_v;
    const std::string where =
        fmt::format("layer {}, {}", geometry.layer_id, key ? "keys" : "values");
    widen(side, heads, d, where);
    rescale(side);
    describe_heads(side, which, where, warnings);
    side.fallback.assign(static_cast<size_t>(heads), "");
    if (side.eigenvalues.count == 1) spread(side.eigenvalues, heads);
    if (side.eigenvalues.count != heads || side.eigenvalues.cols != d) {
      side.eigenvalues = VectorStack<double>(heads, d);
      std::fill(side.eigenvalues.data.begin(), side.eigenvalues.data.end(), 1.0);
    }
    SideRecipe& recipe = side.recipe;
    const double clip = key ? clips.key : clips.value;
    recipe.rounding.clear();
    recipe.widen(static_cast<size_t>(heads), {.clip_ratio = static_cast<float>(clip)});
    for (const float ratio : recipe.clip_ratio) {
      if (!(ratio >= 0 && ratio <= 1)) {
        refuse(where, "a clipping ratio is out of range", "0 to 1", std::to_string(ratio));
      }
    }
    if (recipe.any(ScaleCorrection::kMetric) && side.metric.empty()) {
      refuse(where, "a scale correction needs a metric that is not there");
    }
    for (int head = 0; head < heads; ++head) {
      recipe.rounding[static_cast<size_t>(head)] = rounding_of(side.feedback, head);
    }
    require_sound(side, which, fmt::format("{}: layer {}", file, geometry.layer_id));
  }
};

SideTransform identity_side(int d) {
  SideTransform side;
  side.forward = MatrixStack<float>(1, d, d);
  side.forward[0].setIdentity();
  return side;
}

bool is_portable(const SideTransform& side) {
  const RowRecipe clipped{.clip_ratio = side.recipe[0].clip_ratio};  // and nothing else
  for (int head = 0; head < side.forward.count; ++head) {
    const auto i = static_cast<size_t>(head);
    if (side.kind[i] == TransformKind::kBalanced || side.forward[head] != side.forward[0] ||
        side.recipe[i] != clipped) {
      return false;
    }
  }
  return !is_centered(side) && !has_centers(side);
}

void check_name(const std::string& name) {
  const bool plain =
      !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '-' || c == '_' || c == '.';
      });
  if (!plain) {
    throw UsageError({.what = "a method can't have this name",
                      .where = "--name",
                      .expected = "letters, digits, - _ and .",
                      .found = name});
  }
}

// Throws Error unless the bundle that the files were exported from had the model's RoPE. Returns
// what a bundle must say of it; "": nothing.
std::string check_rope(const ExportOrigin& origin, const Checkpoint& checkpoint,
                       const std::string& manifest) {
  const Json& own = checkpoint.config.rope.as_run;
  if (origin.rope.is_null()) {
    return "the export does not say with which RoPE its transforms were fitted";
  }
  if (origin.rope.dump() == own.dump()) return "";
  throw Error({.what = "the files were exported from a bundle with another RoPE",
               .where = manifest,
               .expected = own.dump() + " (of --model)",
               .found = origin.rope.dump(),
               .hint = "give the bundle's rope scaling with --rope-scaling, or calibrate with the "
                       "one that is served"});
}

// Whether the files were exported from a bundle of other weights. Throws Error unless `accepted`
// allows it.
bool has_other_weights(const ExportOrigin& origin, const Checkpoint& checkpoint,
                       AcceptedWeights accepted, const std::string& manifest) {
  const std::string& theirs = origin.weights_fingerprint;
  const std::string own = checkpoint.weights->fingerprint(false);
  if (theirs == own || theirs == checkpoint.weights->fingerprint(true)) return false;
  if (accepted == AcceptedWeights::kAny) return true;
  throw Error(
      {.what = "the files were exported from a bundle of other weights",
       .where = manifest,
       .expected = fmt::format("weights_fingerprint {} ({}, of --model)", own, checkpoint.name),
       .found = fmt::format("weights_fingerprint {} ({})", theirs, origin.model),
       .hint = "calibrate this model with oscar-calibrate; for a fine-tune, --weights any "
               "takes them (KL on tiny-gqa: .0030 after a light fine-tune, .36 with other "
               "weights)"});
}

}  // namespace

Bundle import_bundle(const ReadTransforms& read, const Checkpoint& checkpoint,
                     const ImportOptions& options) {
  check_name(options.name);
  const ModelConfig& config = checkpoint.config;
  Bundle bundle;
  std::vector<std::string> warnings;  // of all layers, said by the first
  bundle.preset = kImportedPreset;
  bundle.method = options.name;
  bundle.objective_k = bundle.objective_v = bundle.composition = "unknown";
  bundle.model = describe_model(checkpoint, false);
  if (read.origin) {
    const std::string manifest = (read.files.front().parent_path() / kManifestName).string();
    const std::string unknown = check_rope(*read.origin, checkpoint, manifest);
    if (!unknown.empty()) warnings.push_back(unknown);
    if (has_other_weights(*read.origin, checkpoint, options.weights, manifest)) {
      bundle.model.fitted_weights_fingerprint = read.origin->weights_fingerprint;
      bundle.model.fitted_model = read.origin->model;
      warnings.push_back(
          fmt::format("the transforms were fitted to other weights than the bundle names: to "
                      "weights_fingerprint {} ({})",
                      read.origin->weights_fingerprint, read.origin->model));
    }
  }
  bundle.weight_samples = sample_weights(config, *checkpoint.weights);
  bundle.quantizer = options.quantizer;
  int& group = bundle.quantizer.quant_group_size;
  if (group == 0) group = config.head_dim;
  if (config.head_dim % group != 0) {
    throw Error({.what = "quantization groups do not divide a head",
                 .where = "--quant-group-size",
                 .expected = fmt::format("a divisor of {}", config.head_dim),
                 .found = std::to_string(group)});
  }
  for (const std::filesystem::path& file : read.files) {
    bundle.corpus.sources.push_back(
        {.name = file.filename().string(), .sha256 = sha256_of_file(file), .kind = read.kind});
  }
  bundle.corpus.bos_eos_policy = bundle.corpus.chat_template = "none";
  const std::optional<ClipPair> exported = read.origin ? read.origin->clip : std::nullopt;
  Importing importing{.clips = options.clip.value_or(exported.value_or(options.default_clip)),
                      .file = read.files.front().string()};
  if (!read.set.empty() && read.set.rbegin()->first >= config.num_layers) {
    importing.refuse(fmt::format("layer {}", read.set.rbegin()->first),
                     "more layers than the model", fmt::format("{} layers", config.num_layers));
  }
  bool shared = true, portable = true;
  for (int id = 0; id < config.num_layers; ++id) {
    const LayerGeometry geometry = config.geometry(id, options.quantizer.recent_tokens);
    const auto place = read.set.find(id);
    if (!geometry.fitted()) {  // whatever the files have for it: its rows stay as they are
      bundle.layers.push_back(without_transforms(geometry));
      continue;
    }
    LayerTransforms layer;
    if (place != read.set.end()) {
      layer = place->second;
    } else if (geometry.quantized) {
      importing.refuse(fmt::format("layer {}", id), "the layer is missing",
                       fmt::format("{} layers", config.num_layers),
                       fmt::format("{}", read.set.size()));
    } else {
      layer.key = layer.value = identity_side(config.head_dim);
    }
    layer.geometry = geometry;
    for (std::string& warning : std::exchange(warnings, {})) {
      layer.warnings.push_back(std::move(warning));
    }
    shared = shared && layer.key.forward.count == 1 && layer.value.forward.count == 1;
    importing.complete(layer.key, Side::kKey, geometry, layer.warnings);
    importing.complete(layer.value, Side::kValue, geometry, layer.warnings);
    layer.predicted_output_nmse.assign(static_cast<size_t>(geometry.num_kv_heads),
                                       std::numeric_limits<double>::quiet_NaN());
    portable = portable && is_portable(layer.key) && is_portable(layer.value);
    bundle.layers.push_back(std::move(layer));
  }
  if (importing.rescaled > 0) {
    const auto first = std::ranges::find_if(
        bundle.layers, [](const LayerTransforms& layer) { return layer.geometry.fitted(); });
    first->warnings.push_back(
        fmt::format("{} matrices were far from the size of a rotation, whose rows have length 1, "
                    "and were multiplied by powers of two: scales of rows are 16-bit numbers",
                    importing.rescaled));
  }
  bundle.granularity = shared ? "shared" : "per-head";
  for (size_t i = 0; portable && i < bundle.layers.size(); ++i) {
    bundle.portable.push_back({bundle.layers[i], bundle.layers[i]});
  }
  return bundle;
}

}  // namespace oscar
