// Opening a bundle: format and hash first, then structure, then the numbers.
#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/content_hash.h"
#include "oscar/bundle/derived.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/checks.h"

namespace oscar {
namespace {

// Statistics are barely compressible, and checkpoints hold hidden states as they are: a file that
// unpacks to far more than its size is not one of ours.
hdf5::Limits limits_for(const std::filesystem::path& path) {
  std::error_code code;
  const auto size = std::filesystem::file_size(path, code);
  const uint64_t most = std::max(uint64_t{4} << 30, code ? 0 : uint64_t{2} * size);
  return {.max_dataset_bytes = most, .max_total_bytes = most};
}

template <typename T>
const T& root_attribute(const RawFile& raw, const char* name, const char* hint) {
  const auto root = raw.attributes.find("/");
  if (root != raw.attributes.end()) {
    if (const auto slot = root->second.find(name); slot != root->second.end()) {
      if (const T* value = std::get_if<T>(&slot->second)) return *value;
    }
  }
  throw Error({.what = "required attribute is missing or has a wrong type",
               .where = raw.name + ": / attribute " + name,
               .hint = hint});
}

}  // namespace

RawFile load_raw(const std::filesystem::path& path) {
  const hdf5::Reader reader(path, limits_for(path));
  RawFile raw;
  raw.name = path.string();
  raw.objects = reader.objects();
  for (auto& attribute : reader.attributes()) {
    raw.attributes[attribute.object][attribute.name] = std::move(attribute.value);
  }
  for (const auto& object : raw.objects) {
    if (object.is_dataset) raw.datasets.emplace(object.path, reader.read(object.path));
  }
  reader.require_unchanged();
  restore_left_out(raw, limits_for(path).max_total_bytes);
  return raw;
}

FileKind check_format(const RawFile& raw) {
  const auto& format = root_attribute<std::string>(raw, "format", "this is not an OSCAR file");
  const bool statistics = format == schema::kStatisticsFormat;
  if (!statistics && format != schema::kRotationFormat) {
    throw Error(
        {.what = "this is not an OSCAR file",
         .where = raw.name + ": / attribute format",
         .expected = std::string(schema::kRotationFormat) + " or " + schema::kStatisticsFormat,
         .found = format});
  }
  const auto version = root_attribute<int64_t>(raw, "format_version", "");
  if (version < 1 || version > schema::kFormatVersion) {
    throw Error({.what = "file has a format version that this program cannot read",
                 .where = raw.name,
                 .expected = std::to_string(schema::kFormatVersion) + " at most",
                 .found = std::to_string(version),
                 .hint = "use a newer release of the toolkit"});
  }
  const Json features = parse_json(root_attribute<std::string>(raw, schema::kRequiredFeatures, ""),
                                   raw.name + ": / attribute required_features");
  for (const auto& feature : features) {
    const bool known = std::any_of(schema::kKnownFeatures.begin(), schema::kKnownFeatures.end(),
                                   [&feature](const char* name) { return feature == Json(name); });
    if (!known) {
      throw Error({.what = "file needs a feature that this program does not have",
                   .where = raw.name + ": / attribute required_features",
                   .found = feature.dump(-1, ' ', false, Json::error_handler_t::replace),
                   .hint = "use a newer release of the toolkit"});
    }
  }
  const bool resume = std::any_of(raw.objects.begin(), raw.objects.end(), [](const auto& object) {
    return object.path == schema::kResume;
  });
  return !statistics ? FileKind::kRotations
         : resume    ? FileKind::kCheckpoint
                     : FileKind::kStatistics;
}

void check_content_hash(const RawFile& raw) {
  const auto& stored = root_attribute<std::string>(raw, schema::kContentHash, "");
  std::vector<hdf5::DatasetView> views;
  std::vector<hdf5::Attribute> attributes;
  for (const auto& entry : raw.datasets) views.push_back(view(entry.second));
  for (const auto& [object, list] : raw.attributes) {
    for (const auto& [name, value] : list) attributes.push_back({object, name, value});
  }
  std::vector<const hdf5::DatasetView*> view_list;
  std::vector<const hdf5::Attribute*> attribute_list;
  for (const auto& entry : views) view_list.push_back(&entry);
  for (const auto& entry : attributes) attribute_list.push_back(&entry);
  const std::string computed = content_sha256(std::move(view_list), std::move(attribute_list));
  if (computed != stored) {
    throw Error({.what = "content is not what the file's content_sha256 says",
                 .where = raw.name,
                 .expected = stored,
                 .found = computed,
                 .hint = "the file was changed after it was written; fetch or make it again"});
  }
}

Bundle read_bundle(const std::filesystem::path& path) {
  RawFile raw = load_raw(path);
  const FileKind kind = check_format(raw);
  if (kind == FileKind::kCheckpoint) {
    throw Error({.what = "this file is a checkpoint of an unfinished run",
                 .where = path.string(),
                 .hint = "finish it with oscar-calibrate --resume"});
  }
  check_content_hash(raw);
  Bundle bundle = decode_bundle(raw, kind);
  const auto check = [&path](const LayerTransforms& layer, const char* below) {
    if (!layer.geometry.fitted()) return;
    const std::string where =
        path.string() + ": " + schema::layer_path(schema::kLayers, layer.geometry.layer_id) + below;
    require_valid(layer.key, Side::kKey, where + " keys");
    require_valid(layer.value, Side::kValue, where + " values");
  };
  for (const auto& layer : bundle.layers) check(layer, "");
  for (const auto& layer : bundle.portable) {
    check(layer.shared, " portable shared");
    check(layer.per_head, " portable per_head");
  }
  return bundle;
}

}  // namespace oscar
