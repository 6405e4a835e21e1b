// Sampling rule and hashes, to the file and back.
#include "oscar/bundle/corpus_fingerprint.h"

#include "oscar/base/error.h"
#include "oscar/bundle/schema.h"

namespace oscar {
namespace {

// What decides which hashes a text has (SCHEMA.md). Another number at its end, another rule.
constexpr const char* kRule = "smallest of ngram_hash 1";
constexpr const char *kNgram = "ngram", *kCapacity = "capacity", *kRuleName = "rule";

[[noreturn]] void refuse(const RawFile& raw, const std::string& what, const std::string& expected,
                         const std::string& found) {
  throw Error({.what = what,
               .where = raw.name + ": " + schema::kFingerprint,
               .expected = expected,
               .found = found});
}

bool has_attribute(const RawFile& raw, const char* name, const hdf5::AttributeValue& value) {
  const auto object = raw.attributes.find(schema::kFingerprint);
  if (object == raw.attributes.end()) return false;
  const auto attribute = object->second.find(name);
  return attribute != object->second.end() && attribute->second == value;
}

}  // namespace

void encode_fingerprint(const NgramFingerprint& fingerprint, EncodedFile& file) {
  if (fingerprint.empty()) return;
  file.datasets.push_back({schema::kFingerprint,
                           hdf5::Dtype::kI64,
                           {fingerprint.hashes.size()},
                           fingerprint.hashes.data(),
                           true});
  file.attributes.push_back({schema::kFingerprint, kNgram, int64_t{kNgramTokens}});
  file.attributes.push_back({schema::kFingerprint, kCapacity, kFingerprintCapacity});
  file.attributes.push_back({schema::kFingerprint, kRuleName, std::string(kRule)});
}

NgramFingerprint decode_fingerprint(const RawFile& raw) {
  const auto place = raw.datasets.find(schema::kFingerprint);
  const bool known = place != raw.datasets.end() &&
                     has_attribute(raw, kRuleName, std::string(kRule)) &&
                     has_attribute(raw, kNgram, int64_t{kNgramTokens}) &&
                     has_attribute(raw, kCapacity, kFingerprintCapacity);
  if (!known) return {};
  const hdf5::Dataset& dataset = place->second;
  const auto* hashes = std::get_if<std::vector<int64_t>>(&dataset.data);
  if (hashes == nullptr) {
    refuse(raw, "dataset has a wrong dtype", hdf5::dtype_name(hdf5::Dtype::kI64),
           hdf5::dtype_name(dataset.dtype()));
  }
  const auto capacity = static_cast<uint64_t>(kFingerprintCapacity);
  if (dataset.shape.size() != 1 || dataset.shape[0] > capacity) {
    refuse(raw, "dataset has a wrong shape", "at most " + hdf5::shape_text({capacity}),
           hdf5::shape_text(dataset.shape));
  }
  for (size_t i = 0; i < hashes->size(); ++i) {
    const int64_t hash = (*hashes)[i];
    if (hash < 0 || (i > 0 && hash <= (*hashes)[i - 1])) {
      refuse(raw, "hashes are not in ascending order", "each above the one before, from 0 on",
             std::to_string(hash) + " at element " + std::to_string(i));
    }
  }
  return {*hashes};
}

}  // namespace oscar
