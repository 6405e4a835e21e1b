// Structs to a bundle's file, and the hash of its content.
#include "oscar/bundle/encode.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <future>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/base/sha256.h"
#include "oscar/base/version.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/fit.h"
#include "oscar/io/hdf5.h"

namespace oscar {

// The byte stream of encode.h, fed to SHA-256.

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

// From structs to the flat list of groups, datasets and attributes that a file holds.

std::string utc_now() {
  std::time_t seconds = std::time(nullptr);
  if (const char* fixed = std::getenv("SOURCE_DATE_EPOCH"); fixed != nullptr && *fixed != '\0') {
    char* end = nullptr;
    const long long value = std::strtoll(fixed, &end, 10);
    if (*end != '\0' || value < 0 || value > 253402300799) {
      throw Error({.what = "SOURCE_DATE_EPOCH is not a number of seconds", .found = fixed});
    }
    seconds = static_cast<std::time_t>(value);
  }
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

namespace {

Json sources_json(const std::vector<CorpusSource>& sources) {
  Json list = Json::array();
  for (const auto& s : sources) {
    list.push_back({{"name", s.name},
                    {"sha256", s.sha256},
                    {"kind", s.kind},
                    {"weight", s.weight},
                    {"documents_read", s.documents_read},
                    {"documents_used", s.documents_used},
                    {"tokens_read", s.tokens_read},
                    {"tokens_used", s.tokens_used},
                    {"dropped", s.dropped}});
  }
  return list;
}

// File names may hold any bytes; JSON may not.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Whether an attribute is left out where it says nothing.
bool is_extra(std::string_view name) {
  return name == schema::kRecall ||
         std::ranges::find(schema::kModelExtras, name) != schema::kModelExtras.end();
}

struct AttributeWriter {
  EncodedFile& file;
  std::string object;

  void put(const char* name, hdf5::AttributeValue value) const {
    file.attributes.push_back({object, name, std::move(value)});
  }
  void operator()(const char* name, const std::string& value) const {
    if (value.empty() && is_extra(name)) return;
    put(name, value);
  }
  void operator()(const char* name, const Json& value) const {
    if (value.is_null() && is_extra(name)) return;
    put(name, dump(value));
  }
  void operator()(const char* name, AttentionKind kind) const {
    put(name, std::string(schema::attention_name(kind)));
  }
  template <typename Choice>
  requires requires(Choice choice) { codec_word(choice); }
  void operator()(const char* name, Choice choice) const {
    put(name, std::string(codec_word(choice)));
  }
  void operator()(const char* name, const std::vector<CorpusSource>& sources) const {
    put(name, dump(sources_json(sources)));
  }
  template <typename Integer>
  requires std::is_integral_v<Integer>
  void operator()(const char* name, Integer value) const {
    if (value != 0 && std::string_view(name) == schema::kTurned) return;
    put(name, static_cast<int64_t>(value));
  }
};

struct DatasetWriter {
  EncodedFile& file;
  std::string object;
  const LayerGeometry& geometry;

  template <typename T>
  void put(const schema::DatasetSpec& spec, const T* values, uint64_t count,
           uint64_t ratios = 0) const {
    const std::string path = object + "/" + spec.name;
    const hdf5::Shape shape = schema::shape_of(spec, geometry, ratios);
    if (count == 0 && !spec.required) return;
    if (count != hdf5::element_count(shape)) {
      throw Error({.what = "bundle to be written has a wrong shape",
                   .where = path,
                   .expected = hdf5::shape_text(shape),
                   .found = std::to_string(count) + " values"});
    }
    if constexpr (std::is_floating_point_v<T>) {
      for (uint64_t i = 0; i < count; ++i) {
        if (!std::isfinite(values[i])) {
          throw Error({.what = "bundle to be written holds a value that is not finite",
                       .where = path,
                       .found = std::to_string(values[i]) + " at element " + std::to_string(i)});
        }
      }
    }
    file.datasets.push_back({path, spec.dtype, shape, values, true});
  }

  template <typename T>
  void operator()(const schema::DatasetSpec& spec, const MatrixStack<T>& stack) const {
    put(spec, stack.data.data(), stack.data.size());
  }
  template <typename T>
  void operator()(const schema::DatasetSpec& spec, const VectorStack<T>& stack) const {
    put(spec, stack.data.data(), stack.data.size());
  }
  template <typename T>
  void operator()(const schema::DatasetSpec& spec, const std::vector<T>& values) const {
    static_assert(!std::is_enum_v<T> || sizeof(T) == 1, "enums are stored as u8");
    put(spec, values.data(), values.size());
  }
  void operator()(const schema::DatasetSpec& spec, const int64_t& value) const {
    put(spec, &value, 1);
  }
  void operator()(const schema::ClipLossSpecs& specs,
                  const std::optional<ClipLosses>& losses) const {
    if (!losses) return;
    const std::string problem = clip_losses_problem(*losses, geometry.num_kv_heads);
    if (!problem.empty()) {
      throw Error(
          {.what = "bundle to be written holds losses of clipping ratios that make no sense",
           .where = object + "/" + specs.ratio.name,
           .found = problem});
    }
    const uint64_t ratios = losses->ratio.size();
    put(specs.ratio, losses->ratio.data(), ratios, ratios);
    put(specs.nmse, losses->nmse.data.data(), losses->nmse.data.size(), ratios);
  }
};

// HDF5 keeps an attribute within 64 KiB. Of many heads or layers the `table` behind a record's
// figures may be more; the figures themselves stay.
Json within_attribute(Json value, const char* table) {
  constexpr size_t kLargest = 60000;
  if (dump(value).size() > kLargest && value.is_object()) value.erase(table);
  return value;
}

bool any_text(const std::vector<std::string>& list) {
  for (const auto& text : list) {
    if (!text.empty()) return true;
  }
  return false;
}

void add_transforms(EncodedFile& file, const std::string& path, const LayerTransforms& layer) {
  if (!layer.geometry.fitted()) return;
  const DatasetWriter write{file, path, layer.geometry};
  const AttributeWriter note{file, path};
  schema::visit_side(layer.key, schema::kKeySpecs, write);
  schema::visit_side(layer.value, schema::kValueSpecs, write);
  bool measured = !layer.predicted_output_nmse.empty();
  for (const double nmse : layer.predicted_output_nmse) measured = measured && !std::isnan(nmse);
  if (measured) write(schema::kPredictedNmse, layer.predicted_output_nmse);
  if (any_text(layer.key.fallback)) note(schema::kKeySpecs.fallback, Json(layer.key.fallback));
  if (any_text(layer.value.fallback))
    note(schema::kValueSpecs.fallback, Json(layer.value.fallback));
  if (!layer.warnings.empty()) note(schema::kWarnings, Json(layer.warnings));
  for (const auto& [part, value] : layer.search.items()) {
    note((schema::kSearchPrefix + part).c_str(), within_attribute(value, "stages"));
  }
}

void add_resume(EncodedFile& file, const ResumeState& state) {
  const AttributeWriter note{file, schema::kResume};
  file.groups.push_back(schema::kResume);
  note("run_key", state.run_key);
  note("order", state.order);
  note("shard", state.shard);
  note("layer", state.layer);
  for (const auto& tensor : state.tensors) {
    if (tensor.name.empty() || tensor.name.find('/') != std::string::npos || tensor.bytes.empty()) {
      throw Error({.what = "checkpoint tensor needs a name without '/' and at least one byte",
                   .where = tensor.name});
    }
    const std::string path = std::string(schema::kResume) + "/" + tensor.name;
    file.datasets.push_back(
        {path, hdf5::Dtype::kU8, {tensor.bytes.size()}, tensor.bytes.data(), false});
    const AttributeWriter describe{file, path};
    describe("dtype", tensor.dtype);
    describe("shape", Json(tensor.shape));
  }
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error({.what = "bundle to be written is not complete", .found = what});
}

void check_layers(const Bundle& bundle, bool partial) {
  const auto complete = static_cast<size_t>(bundle.model.num_layers);
  const auto check_order = [](const auto& list) {
    for (size_t i = 1; i < list.size(); ++i) {
      if (list[i].geometry.layer_id <= list[i - 1].geometry.layer_id) {
        refuse("layers are not in ascending order");
      }
    }
  };
  check_order(bundle.layers);
  check_order(bundle.statistics);
  if (bundle.statistics_only && (!bundle.layers.empty() || !bundle.portable.empty())) {
    refuse("a statistics file holds transforms");
  }
  if (!bundle.statistics_only && bundle.layers.size() != complete) {
    refuse(std::to_string(bundle.layers.size()) + " layers of " + std::to_string(complete));
  }
  if (bundle.statistics_only && !partial && bundle.statistics.size() != complete) {
    refuse("statistics of " + std::to_string(bundle.statistics.size()) + " layers of " +
           std::to_string(complete));
  }
  if (!bundle.statistics_only && !bundle.statistics.empty()) {
    if (bundle.statistics.size() != complete) refuse("statistics of some layers only");
    for (size_t i = 0; i < complete; ++i) {
      if (!(bundle.layers[i].geometry == bundle.statistics[i].geometry)) {
        refuse("transforms and statistics of layer " +
               std::to_string(bundle.layers[i].geometry.layer_id) + " have different shapes");
      }
    }
  }
  if (!bundle.portable.empty() && bundle.portable.size() != complete) {
    refuse("portable transforms of some layers only");
  }
}

}  // namespace

EncodedFile encode_bundle(const Bundle& bundle, const ResumeState* state) {
  check_layers(bundle, state != nullptr);
  EncodedFile file;
  const AttributeWriter root{file, "/"};
  root("format",
       std::string(bundle.statistics_only ? schema::kStatisticsFormat : schema::kRotationFormat));
  root("format_version", schema::kFormatVersion);
  root(schema::kRequiredFeatures, Json(schema::features_of(bundle)));
  root("tool_version", std::string(kToolVersion));
  root("tool_commit", std::string(kToolCommit));
  if (!bundle.layers.empty()) {
    root(schema::kFittedBy, bundle.fitted_by.empty()
                                ? schema::tool_and_commit(kToolVersion, kToolCommit)
                                : bundle.fitted_by);
  }
  root(schema::kCreated, bundle.created_utc.empty() ? utc_now() : bundle.created_utc);
  schema::visit_root(bundle, root);
  if (!bundle.search.is_null()) root(schema::kSearch, bundle.search);
  if (!bundle.convergence.is_null()) {
    root(schema::kConvergence, within_attribute(bundle.convergence, "layers"));
  }
  file.groups = {schema::kModel, schema::kCorpus, schema::kQuantizer};
  schema::visit_model(bundle.model, AttributeWriter{file, schema::kModel});
  schema::visit_corpus(bundle.corpus, AttributeWriter{file, schema::kCorpus});
  encode_fingerprint(bundle.fingerprint, file);
  schema::visit_quantizer(bundle.quantizer, AttributeWriter{file, schema::kQuantizer});
  if (bundle.evaluation) {
    file.groups.push_back(schema::kEvaluation);
    const AttributeWriter note{file, schema::kEvaluation};
    for (const auto& [key, value] : bundle.evaluation->items()) note(key.c_str(), value);
  }
  file.groups.push_back(schema::kLayers);
  const auto add_layer = [&](const LayerGeometry& geometry) {
    std::string path = schema::layer_path(schema::kLayers, geometry.layer_id);
    file.groups.push_back(path);
    schema::visit_geometry(geometry, AttributeWriter{file, path});
    if (state == nullptr && !bundle.weight_samples.empty()) {
      const auto& samples = bundle.weight_samples.at(static_cast<size_t>(geometry.layer_id));
      DatasetWriter{file, path, geometry}(schema::kMatrixSampleSpec, samples.matrices);
      DatasetWriter{file, path, geometry}(schema::kVectorSampleSpec, samples.vectors);
    }
    return path;
  };
  for (const auto& layer : bundle.layers) {
    add_transforms(file, add_layer(layer.geometry), layer);
  }
  for (const auto& statistics : bundle.statistics) {
    const LayerGeometry& geometry = statistics.geometry;
    const std::string path = bundle.statistics_only
                                 ? add_layer(geometry)
                                 : schema::layer_path(schema::kLayers, geometry.layer_id);
    const std::string below = path + "/" + schema::kStatistics;
    file.groups.push_back(below);
    if (bundle.collected) schema::visit_windows(*bundle.collected, AttributeWriter{file, below});
    if (geometry.fitted())
      schema::visit_statistics(statistics, DatasetWriter{file, below, geometry});
  }
  if (!bundle.portable.empty()) {
    file.groups.push_back(schema::kPortable);
    file.groups.push_back(schema::kPortableLayers);
  }
  for (const auto& layer : bundle.portable) {
    const std::string path =
        schema::layer_path(schema::kPortableLayers, layer.shared.geometry.layer_id);
    for (const auto& group : {path, path + "/" + schema::kShared, path + "/" + schema::kPerHead}) {
      file.groups.push_back(group);
    }
    schema::visit_geometry(layer.shared.geometry, AttributeWriter{file, path});
    add_transforms(file, path + "/" + schema::kShared, layer.shared);
    add_transforms(file, path + "/" + schema::kPerHead, layer.per_head);
  }
  if (state != nullptr) add_resume(file, *state);
  return file;
}

namespace {

// `work` in a thread of its own, or, where none can be had, in the one that asks for the result. It
// is copied: libstdc++ would have moved it into the thread that could not be had.
template <typename Work>
auto begin_or_defer(const Work& work) {
  return std::async(std::launch::async | std::launch::deferred, work);
}

// Datasets that are prepared side by side, small ones between large ones.
size_t datasets_of_a_batch() { return static_cast<size_t>(2 * parallel_cores()); }

// A dataset with its chunks as they will be in the file.
struct Prepared {
  const hdf5::DatasetView* dataset = nullptr;
  std::vector<hdf5::Chunk> chunks;  // of a compressed one
};

// Chunks that are not packed take as long as writing them, and may be many.
Prepared prepare(const hdf5::DatasetView& dataset) {
  const bool packed = dataset.compress && !dataset.shape.empty();
  return {&dataset, packed ? encode_chunks(dataset) : std::vector<hdf5::Chunk>()};
}

// Writes all datasets: some are prepared while those before them are written.
void write_datasets(const std::vector<hdf5::DatasetView>& datasets, hdf5::Writer& writer,
                    const AtomicFile& file, const std::function<void()>& between) {
  const auto prepare_batch = [&](size_t first) {
    std::vector<Prepared> batch(std::min(datasets_of_a_batch(), datasets.size() - first));
    parallel_for(static_cast<int64_t>(batch.size()), [&](int64_t i) {
      const auto index = static_cast<size_t>(i);
      batch[index] = prepare(datasets[first + index]);
    });
    return batch;
  };
  const auto write_batch = [&](const std::vector<Prepared>& batch) {
    for (const auto& [dataset, chunks] : batch) {
      if (between) between();
      if (dataset->compress) {
        writer.write(*dataset, chunks);
      } else {
        writer.write(*dataset);
      }
    }
    file.begin_to_flush();
  };
  std::vector<Prepared> ready;
  std::future<void> writing;  // of those
  for (size_t first = 0; first < datasets.size(); first += datasets_of_a_batch()) {
    auto batch = prepare_batch(first);
    if (writing.valid()) writing.get();
    ready = std::move(batch);
    writing = begin_or_defer([&] { write_batch(ready); });
  }
  if (writing.valid()) writing.get();
}

}  // namespace

int64_t datasets_together() { return 2 * static_cast<int64_t>(datasets_of_a_batch()); }

void write_encoded(EncodedFile encoded, const AtomicFile& file,
                   const std::function<void()>& between) {
  std::vector<const hdf5::DatasetView*> datasets;
  std::vector<const hdf5::Attribute*> attributes;
  for (const auto& dataset : encoded.datasets) datasets.push_back(&dataset);
  for (const auto& attribute : encoded.attributes) attributes.push_back(&attribute);
  auto hash = begin_or_defer(
      [&] { return content_sha256(std::move(datasets), std::move(attributes), between); });
  hdf5::Writer writer(file);
  for (const auto& group : encoded.groups) writer.create_group(group);
  write_datasets(encoded.datasets, writer, file, between);
  encoded.attributes.push_back({"/", schema::kContentHash, hash.get()});
  for (const auto& attribute : encoded.attributes) writer.write(attribute);
  writer.close();
}

// Bundles to disk, whole or not at all.

void write_bundle(const Bundle& bundle, AtomicFile& file) {
  const auto stop = [] { stop_if_requested("stopped; nothing was written"); };
  write_encoded(encode_bundle(bundle, nullptr), file, stop);
  stop();
  file.commit();
}

void write_bundle(const Bundle& bundle, const std::filesystem::path& path, bool force) {
  AtomicFile file(path, force ? Replace::kYes : Replace::kNo);
  write_bundle(bundle, file);
}

}  // namespace oscar
