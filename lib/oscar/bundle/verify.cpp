// The reader's own checks, one after the other, each failure kept as a finding.
#include "oscar/bundle/verify.h"

#include <functional>

#include "oscar/base/error.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/checks.h"

namespace oscar {
namespace {

// Runs one check; its text is the detail. Returns whether it passed.
bool add(std::vector<Finding>& findings, const std::string& name,
         const std::function<std::string()>& check) {
  try {
    findings.push_back({true, name, check()});
  } catch (const Error& error) {
    findings.push_back({false, name, error.what()});
  }
  return findings.back().ok;
}

std::string counted(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

std::vector<Finding> verify_bundle(const std::filesystem::path& path) {
  std::vector<Finding> findings;
  RawFile raw;
  FileKind kind{};
  Bundle bundle;
  const bool opened = add(findings, "file structure and checksums", [&] {
    std::error_code status;
    if (std::filesystem::is_directory(path, status)) {
      throw Error({.what = "not a regular file",
                   .where = path.string(),
                   .found = "a folder",
                   .hint = "a folder of an export is verified with --stack NAME"});
    }
    raw = load_raw(path);
    return counted(raw.datasets.size(), "dataset");
  });
  if (!opened) return findings;
  const bool known = add(findings, "format, version and features", [&] {
    kind = check_format(raw);
    return kind == FileKind::kRotations    ? schema::kRotationFormat
           : kind == FileKind::kStatistics ? schema::kStatisticsFormat
                                           : "checkpoint of an unfinished run";
  });
  if (!known) return findings;
  add(findings, "content_sha256", [&] {
    check_content_hash(raw);
    return std::get<std::string>(raw.attributes["/"][schema::kContentHash]);
  });
  const bool decoded = add(findings, "names, shapes, dtypes and values", [&] {
    if (kind == FileKind::kCheckpoint) decode_resume(raw);
    bundle = decode_bundle(raw, kind);
    return counted(kind == FileKind::kRotations ? bundle.layers.size() : bundle.statistics.size(),
                   "layer") +
           (bundle.portable.empty() ? "" : ", portable variant");
  });
  if (!decoded || kind != FileKind::kRotations) return findings;
  size_t good = 0;
  const auto check_layer = [&](const LayerTransforms& layer, const std::string& where) {
    if (!layer.geometry.fitted()) return;
    for (const Side side : {Side::kKey, Side::kValue}) {
      std::vector<Finding> one;
      const char* name = side == Side::kKey ? " keys" : " values";
      if (add(one, where + name, [&] {
            require_valid(side_of(layer, side), side, where + name);
            return std::string();
          })) {
        ++good;
      } else {
        findings.push_back(one[0]);
      }
    }
  };
  for (const auto& layer : bundle.layers) {
    check_layer(layer, schema::layer_path(schema::kLayers, layer.geometry.layer_id));
  }
  for (const auto& layer : bundle.portable) {
    const std::string where =
        schema::layer_path(schema::kPortableLayers, layer.shared.geometry.layer_id);
    check_layer(layer.shared, where + "/" + schema::kShared);
    check_layer(layer.per_head, where + "/" + schema::kPerHead);
  }
  findings.push_back({true, "inverse, orthogonality, eigenvalues",
                      counted(good, "transform") + " within the limits"});
  return findings;
}

}  // namespace oscar
