// Bundles, statistics and checkpoints behind HDF5, where checksums keep changed bytes away from
// what decodes them: a good file's objects are changed one by one as the input says.
//
// The first byte picks the file. Each change is a byte for its kind, two for its object and its
// place there, and what the kind asks for.
#include <algorithm>
#include <cstring>

#include "bundle/sample.h"
#include "fuzz_case.h"
#include "oscar/base/json.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/derived.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/encode.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/fit.h"

namespace oscar::fuzz {
namespace {

// As load_raw of bundle/decode.cpp before what the file leaves out is restored.
RawFile stored(const std::filesystem::path& path) {
  const hdf5::Reader reader(path);
  RawFile raw;
  raw.name = "input.h5";
  raw.objects = reader.objects();
  for (auto& attribute : reader.attributes()) {
    raw.attributes[attribute.object][attribute.name] = std::move(attribute.value);
  }
  for (const auto& object : raw.objects) {
    if (object.is_dataset) raw.datasets.emplace(object.path, reader.read(object.path));
  }
  return raw;
}

// Together they have every object that there can be, and each no more than it takes to tell layers
// and heads apart: what an input costs is what its file has.
std::vector<RawFile> good_files() {
  constexpr sample::Size kOneLayer{.layers = 1, .heads = 2, .query_heads = 2, .dim = 4};
  constexpr sample::Size kTwoLayers{.layers = 2, .heads = 2, .query_heads = 2, .dim = 4};
  Bundle balanced = sample::rotation_bundle(TransformKind::kBalanced, kOneLayer);
  balanced.portable.clear();
  Bundle portable = sample::rotation_bundle(TransformKind::kOscar, kOneLayer);
  Bundle plain = sample::rotation_bundle(TransformKind::kOscar, kTwoLayers);
  plain.portable.clear();
  for (Bundle* stripped : {&portable, &plain}) stripped->statistics.clear();
  const auto path = scratch_folder() / "good.h5";
  std::vector<RawFile> files;
  for (const Bundle& bundle : {balanced, portable, sample::statistics_bundle(kTwoLayers), plain}) {
    write_bundle(bundle, path, true);
    files.push_back(stored(path));
  }
  Bundle partial = sample::statistics_bundle(kTwoLayers);
  partial.statistics.pop_back();
  ResumeState state{.run_key = "key", .order = "layer-major", .shard = 1, .layer = 1};
  state.tensors = {{"h", "bf16", {1, 2}}};
  state.tensors[0].own({1, 2, 3, 4});
  write_checkpoint(path, partial, state);
  files.push_back(stored(path));
  return files;
}

// Bytes of the input, zeros behind its end.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }
  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const auto value = static_cast<uint8_t>(bytes_[0]);
    bytes_.remove_prefix(1);
    return value;
  }
  template <typename T>
  T number() {
    std::array<char, sizeof(T)> raw{};
    for (char& c : raw) c = static_cast<char>(byte());
    T value;
    std::memcpy(&value, raw.data(), sizeof value);
    return value;
  }
  std::string text() {
    const size_t size = std::min<size_t>(byte(), bytes_.size());
    const std::string text(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return text;
  }

 private:
  std::string_view bytes_;
};

template <typename Map>
auto pick(Map& map, uint8_t which) {
  return std::next(map.begin(), static_cast<std::ptrdiff_t>(which % map.size()));
}

enum class Change : uint8_t {
  kAttributeText,
  kAttributeInteger,
  kAttributeNumber,
  kWithoutAttribute,
  kWithoutObject,
  kNewDataset,
  kElement,
  kSameElements,
  kShape,
  kDtype,
  kOtherName,
  kCount
};

hdf5::Data zeros(uint8_t dtype, size_t count) {
  switch (static_cast<hdf5::Dtype>(dtype % 5)) {
    case hdf5::Dtype::kU8:
      return std::vector<uint8_t>(count);
    case hdf5::Dtype::kI32:
      return std::vector<int32_t>(count);
    case hdf5::Dtype::kI64:
      return std::vector<int64_t>(count);
    case hdf5::Dtype::kF32:
      return std::vector<float>(count);
    default:
      return std::vector<double>(count);
  }
}

// By value: `path` may be one of the names that are removed.
void remove_object(RawFile& raw, std::string path) {  // NOLINT(performance-unnecessary-value-param)
  std::erase_if(raw.objects, [&](const auto& object) { return object.path == path; });
  raw.datasets.erase(path);
  raw.attributes.erase(path);
}

void change_attribute(RawFile& raw, Change change, Bytes& bytes) {
  if (raw.attributes.empty()) return;
  auto& group = pick(raw.attributes, bytes.byte())->second;
  if (group.empty()) return;
  const auto attribute = pick(group, bytes.byte());
  if (change == Change::kAttributeText) attribute->second = bytes.text();
  if (change == Change::kAttributeInteger) attribute->second = bytes.number<int64_t>();
  if (change == Change::kAttributeNumber) attribute->second = bytes.number<double>();
  if (change == Change::kWithoutAttribute) group.erase(attribute);
}

void change_dataset(RawFile& raw, Change change, Bytes& bytes) {
  if (raw.datasets.empty()) return;
  const auto place = pick(raw.datasets, bytes.byte());
  hdf5::Dataset& dataset = place->second;
  const size_t at = bytes.byte();
  const auto set = [&](bool all) {
    std::visit(
        [&](auto& values) {
          if (values.empty()) return;
          using Value = std::decay_t<decltype(values[0])>;
          const auto value = bytes.number<Value>();
          if (all) std::fill(values.begin(), values.end(), value);
          values[at % values.size()] = value;
        },
        dataset.data);
  };
  if (change == Change::kElement || change == Change::kSameElements) {
    set(change == Change::kSameElements);
  } else if (change == Change::kOtherName) {
    hdf5::Dataset moved = dataset;
    const std::string from = moved.path;
    moved.path = from.substr(0, from.rfind('/') + 1) + bytes.text();
    remove_object(raw, from);
    if (moved.path.back() != '/' && !raw.datasets.contains(moved.path)) {
      raw.objects.push_back({moved.path, true, hdf5::dtype_name(moved.dtype()), moved.shape});
      raw.datasets.emplace(moved.path, std::move(moved));
    }
  } else {
    // Sizes of up to 15: a reader has what the file holds, of whatever shape.
    hdf5::Shape shape;
    for (size_t i = 0; i < at % 4; ++i) shape.push_back(1 + bytes.byte() % 15);
    if (change == Change::kShape) dataset.shape = shape;
    dataset.data =
        zeros(change == Change::kDtype ? bytes.byte() : static_cast<uint8_t>(dataset.data.index()),
              hdf5::element_count(dataset.shape));
    if (change == Change::kShape && at >= 128) set(true);
  }
}

void change(RawFile& raw, Bytes& bytes) {
  const auto kind = static_cast<Change>(bytes.byte() % static_cast<uint8_t>(Change::kCount));
  switch (kind) {
    case Change::kAttributeText:
    case Change::kAttributeInteger:
    case Change::kAttributeNumber:
    case Change::kWithoutAttribute:
      return change_attribute(raw, kind, bytes);
    case Change::kWithoutObject:
      if (!raw.objects.empty()) {
        remove_object(raw, raw.objects[bytes.number<uint16_t>() % raw.objects.size()].path);
      }
      return;
    case Change::kNewDataset: {
      const std::string path = "/" + bytes.text();
      const uint8_t dtype = bytes.byte();
      const hdf5::Shape shape{1U + bytes.byte() % 15};
      if (path == "/" || raw.datasets.contains(path)) return;
      raw.datasets[path] = {path, shape, zeros(dtype, shape[0])};
      raw.objects.push_back({path, true, hdf5::dtype_name(raw.datasets[path].dtype()), shape});
      return;
    }
    default:
      return change_dataset(raw, kind, bytes);
  }
}

struct Decoded {
  Bundle bundle;
  std::optional<ResumeState> state;
};

Decoded decode(RawFile raw) {
  const FileKind kind = check_format(raw);
  Decoded decoded;
  decoded.bundle = decode_bundle(raw, kind);
  if (kind == FileKind::kCheckpoint) decoded.state = decode_resume(raw);
  for (const auto& layer : decoded.bundle.layers) {
    require_valid(layer.key, Side::kKey, "keys");
    require_valid(layer.value, Side::kValue, "values");
  }
  for (const auto& layer : decoded.bundle.portable) {
    for (const LayerTransforms* one : {&layer.shared, &layer.per_head}) {
      require_valid(one->key, Side::kKey, "portable keys");
      require_valid(one->value, Side::kValue, "portable values");
    }
  }
  return decoded;
}

EncodedFile encode(const Decoded& decoded) {
  return encode_bundle(decoded.bundle, decoded.state ? &*decoded.state : nullptr);
}

std::string hash(const EncodedFile& file) {
  std::vector<const hdf5::DatasetView*> datasets;
  std::vector<const hdf5::Attribute*> attributes;
  for (const auto& dataset : file.datasets) datasets.push_back(&dataset);
  for (const auto& attribute : file.attributes) attributes.push_back(&attribute);
  return content_sha256(std::move(datasets), std::move(attributes));
}

// What a reader would find in the file, with its content's hash.
RawFile as_read(const EncodedFile& file, const std::string& content_hash) {
  RawFile raw;
  raw.name = "written.h5";
  raw.objects.push_back({"/", false, "", {}});
  for (const auto& group : file.groups) raw.objects.push_back({group, false, "", {}});
  for (const auto& view : file.datasets) {
    hdf5::Dataset dataset{view.path, view.shape,
                          zeros(static_cast<uint8_t>(view.dtype), hdf5::element_count(view.shape))};
    std::visit(
        [&](auto& values) {
          std::memcpy(values.data(), view.data, values.size() * sizeof values[0]);
        },
        dataset.data);
    raw.objects.push_back({view.path, true, hdf5::dtype_name(view.dtype), view.shape});
    raw.datasets.emplace(view.path, std::move(dataset));
  }
  for (const auto& attribute : file.attributes) {
    raw.attributes[attribute.object][attribute.name] = attribute.value;
  }
  raw.attributes["/"].emplace(schema::kContentHash, content_hash);
  std::sort(raw.objects.begin(), raw.objects.end(),
            [](const auto& a, const auto& b) { return a.path < b.path; });
  return raw;
}

}  // namespace

const MemoryBound kMemoryBound{.fixed = size_t{4} << 20, .per_byte = 4096};

void read_untrusted(std::string_view input) {
  static const std::vector<RawFile> files = good_files();
  static const RawFile earlier =
      stored(std::string(OSCAR_SOURCE_DIR) + "/tests/bundle/version_0_1/left_out.h5");
  constexpr uint8_t kEarlier = 255;  // a file that leaves out what the rest of it implies
  Bytes bytes(input);
  const uint8_t which = bytes.byte();
  RawFile raw = which == kEarlier ? earlier : files[which % files.size()];
  while (!bytes.empty()) change(raw, bytes);
  for (auto& object : raw.objects) {  // as a reader lists them
    if (!object.is_dataset) continue;
    const hdf5::Dataset& dataset = raw.datasets.at(object.path);
    object.type = hdf5::dtype_name(dataset.dtype());
    object.shape = dataset.shape;
  }
  std::sort(raw.objects.begin(), raw.objects.end(),
            [](const auto& a, const auto& b) { return a.path < b.path; });
  constexpr uint64_t kMostBytes = 1 << 20;
  restore_left_out(raw, kMostBytes);
  const Decoded decoded = decode(std::move(raw));
  const EncodedFile encoded = must("writing what was read", [&] { return encode(decoded); });
  const std::string content_hash = hash(encoded);
  const Decoded again =
      must("reading what was written", [&] { return decode(as_read(encoded, content_hash)); });
  const EncodedFile twice = must("writing again", [&] { return encode(again); });
  require(content_hash == hash(twice), "a file differs after writing");
  if (!decoded.bundle.statistics_only) {
    must("plans", [&] { return plans_text(plan_for_all(decoded.bundle)); });
    must("the serving profile", [&] { return serving_sha256(decoded.bundle); });
  }
}

}  // namespace oscar::fuzz
