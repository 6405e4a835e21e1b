// What each profile drops, from the structs and from the list of what would be written.
#include "oscar/bundle/strip.h"

#include "oscar/base/error.h"
#include "oscar/bundle/content_hash.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"

namespace oscar {
namespace {

// Whether an object of a bundle's file is gone from its serving profile.
bool is_dropped(const std::string& path) {
  const std::string statistics = std::string("/") + schema::kStatistics;
  return path == schema::kFingerprint || path.starts_with(schema::kPortable) ||
         path.ends_with(statistics) || path.find(statistics + "/") != std::string::npos;
}

}  // namespace

Bundle strip_bundle(Bundle bundle, StripProfile profile, const std::string& name) {
  if (bundle.statistics_only) {
    throw Error({.what = "a statistics file holds nothing but statistics to strip",
                 .where = name,
                 .expected = "a rotation bundle"});
  }
  bundle.statistics.clear();
  bundle.fingerprint = {};
  bundle.created_utc.clear();  // another file
  if (profile == StripProfile::kServing) bundle.portable.clear();
  return bundle;
}

std::string serving_sha256(const Bundle& bundle) {
  const EncodedFile file = encode_bundle(bundle, nullptr);
  std::vector<const hdf5::DatasetView*> datasets;
  std::vector<const hdf5::Attribute*> attributes;
  for (const auto& dataset : file.datasets) {
    if (!is_dropped(dataset.path)) datasets.push_back(&dataset);
  }
  for (const auto& attribute : file.attributes) {
    if (!is_dropped(attribute.object)) attributes.push_back(&attribute);
  }
  return content_sha256(std::move(datasets), std::move(attributes));
}

}  // namespace oscar
