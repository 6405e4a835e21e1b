// The byte stream of content_hash.h, fed to SHA-256.
#include "oscar/bundle/content_hash.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>
#include <tuple>

#include "oscar/base/sha256.h"
#include "oscar/bundle/schema.h"

namespace oscar {
namespace {

static_assert(std::endian::native == std::endian::little,
              "values are hashed as they lie in memory");

bool is_left_out(const hdf5::Attribute& attribute) {
  return attribute.object == "/" &&
         (attribute.name == schema::kContentHash || attribute.name == schema::kCreated ||
          attribute.name.starts_with(schema::kToolPrefix));
}

struct FieldHash {
  Sha256 hash;

  void field(const void* data, uint64_t bytes) {
    hash.update(&bytes, sizeof(bytes));
    hash.update(data, bytes);
  }
  void field(std::string_view text) { field(text.data(), text.size()); }

  void value(const std::string& text) {
    field("str");
    field(text);
  }
  void value(int64_t number) {
    field("i64");
    field(&number, sizeof(number));
  }
  void value(double number) {
    field("f64");
    field(&number, sizeof(number));
  }
};

}  // namespace

std::string content_sha256(std::vector<const hdf5::DatasetView*> datasets,
                           std::vector<const hdf5::Attribute*> attributes,
                           const std::function<void()>& between) {
  std::sort(datasets.begin(), datasets.end(),
            [](const auto* a, const auto* b) { return a->path < b->path; });
  std::sort(attributes.begin(), attributes.end(), [](const auto* a, const auto* b) {
    return std::tie(a->object, a->name) < std::tie(b->object, b->name);
  });
  FieldHash stream;
  stream.field("oscar-content-1");
  for (const auto* dataset : datasets) {
    if (between) between();
    std::string shape;
    for (const uint64_t extent : dataset->shape) {
      shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    }
    stream.field("dataset");
    stream.field(dataset->path);
    stream.field(hdf5::dtype_name(dataset->dtype));
    stream.field(shape);
    stream.field(dataset->data,
                 hdf5::element_count(dataset->shape) * hdf5::dtype_bytes(dataset->dtype));
  }
  for (const auto* attribute : attributes) {
    if (is_left_out(*attribute)) continue;
    stream.field("attribute");
    stream.field(attribute->object);
    stream.field(attribute->name);
    std::visit([&stream](const auto& value) { stream.value(value); }, attribute->value);
  }
  return stream.hash.finish();
}

}  // namespace oscar
