// An archive: FOLDER/data.pkl, and FOLDER/data/KEY with the raw bytes of each storage. A tensor is
// a call of _rebuild_tensor_v2(storage, offset, sizes, strides, ...), in elements.
#include "oscar/io/torch_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <bit>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"

namespace oscar {
namespace {

using Kind = PickleNode::Kind;

constexpr std::string_view kRebuild = "torch._utils _rebuild_tensor_v2";
constexpr std::array<std::string_view, 6> kGlobals = {kRebuild,
                                                      "collections OrderedDict",
                                                      "torch FloatStorage",
                                                      "torch DoubleStorage",
                                                      "torch HalfStorage",
                                                      "torch BFloat16Storage"};
constexpr size_t kStorageAlignment = 64;  // of storages, as torch has it
constexpr size_t kMostTensorDimensions = 8;

struct StorageType {
  std::string_view name;
  int64_t width = 0;
  float (*value)(const char* bytes) = nullptr;
};

template <typename T>
T raw(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

constexpr std::array<StorageType, 4> kTypes = {{
    {"torch FloatStorage", 4, [](const char* b) { return raw<float>(b); }},
    {"torch DoubleStorage", 8, [](const char* b) { return static_cast<float>(raw<double>(b)); }},
    {"torch HalfStorage", 2, [](const char* b) { return fp16_to_float(raw<uint16_t>(b)); }},
    {"torch BFloat16Storage", 2, [](const char* b) { return bf16_to_float(raw<uint16_t>(b)); }},
}};
static_assert(std::endian::native == std::endian::little);

bool is_integers(const PickleNode& node) {
  if (node.kind != Kind::kTuple || node.items.size() > kMostTensorDimensions) return false;
  for (const PickleNode* item : node.items) {
    if (item->kind != Kind::kInteger || item->integer < 0) return false;
  }
  return true;
}

}  // namespace

TorchFile TorchFile::open(const std::filesystem::path& path) {
  TorchFile file;
  file.where_ = path.string();
  file.archive_ = ZipArchive::open(path);
  constexpr std::string_view kPickle = "/data.pkl";
  const auto& members = file.archive_.members();
  for (const auto& [name, bytes] : members) {
    const bool is_pickle = name.size() > kPickle.size() && name.ends_with(kPickle) &&
                           name.find('/') == name.size() - kPickle.size();
    if (!is_pickle) continue;
    file.folder_ = name.substr(0, name.size() - kPickle.size());
    file.document_ = read_pickle(bytes, kGlobals, file.where_);
  }
  if (file.document_.root == nullptr) {
    throw Error({.what = "not a file of torch.save",
                 .where = file.where_,
                 .expected = "an archive with FOLDER/data.pkl"});
  }
  const auto order = members.find(file.folder_ + "/byteorder");
  if (order != members.end() && order->second != "little") {
    throw Error({.what = "tensors of another byte order", .where = file.where_});
  }
  return file;
}

bool TorchFile::is_tensor(const PickleNode& node) {
  return node.kind == Kind::kCall && node.items[0]->text == kRebuild;
}

FloatTensor TorchFile::tensor(const PickleNode& node, const std::string& name, int64_t most) const {
  const auto refuse = [&](const std::string& what, const std::string& found = "") {
    throw Error({.what = what, .where = fmt::format("{}: {}", where_, name), .found = found});
  };
  if (!is_tensor(node)) refuse("not a tensor");
  const std::vector<const PickleNode*>& arguments = node.items[1]->items;
  if (arguments.size() < 4 || arguments[0]->kind != Kind::kPersistent ||
      arguments[1]->kind != Kind::kInteger || arguments[1]->integer < 0 ||
      !is_integers(*arguments[2]) || !is_integers(*arguments[3]) ||
      arguments[2]->items.size() != arguments[3]->items.size()) {
    refuse("malformed tensor");
  }
  const std::vector<const PickleNode*>& storage = arguments[0]->items[0]->items;
  if (storage.size() != 5 || storage[0]->text != "storage" || storage[1]->kind != Kind::kGlobal ||
      storage[2]->kind != Kind::kText) {
    refuse("malformed storage");
  }
  const StorageType* type = nullptr;
  for (const StorageType& known : kTypes) {
    if (known.name == storage[1]->text) type = &known;
  }
  if (type == nullptr) refuse("not a storage of numbers", storage[1]->text);
  const auto member = archive_.members().find(fmt::format("{}/data/{}", folder_, storage[2]->text));
  if (member == archive_.members().end()) refuse("its storage is missing", storage[2]->text);
  const std::string_view bytes = member->second;

  FloatTensor tensor;
  std::vector<int64_t> strides;
  int64_t count = 1, last = arguments[1]->integer;
  bool fits = true;
  for (size_t i = 0; i < arguments[2]->items.size(); ++i) {
    const int64_t size = arguments[2]->items[i]->integer, stride = arguments[3]->items[i]->integer;
    tensor.shape.push_back(size);
    strides.push_back(stride);
    int64_t reach = 0;
    fits = fits && !__builtin_mul_overflow(count, size, &count) &&
           (size == 0 || !__builtin_mul_overflow(size - 1, stride, &reach)) &&
           !__builtin_add_overflow(last, reach, &last);
  }
  if (!fits || count > most) {
    refuse("a tensor of an unexpected size", fmt::format("[{}]", fmt::join(tensor.shape, ", ")));
  }
  const auto room = static_cast<int64_t>(bytes.size()) / type->width;
  if (count > 0 && last >= room) refuse("a tensor lies outside its storage");
  tensor.values.reserve(static_cast<size_t>(count));
  std::vector<int64_t> index(tensor.shape.size(), 0);
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = arguments[1]->integer;
    for (size_t k = 0; k < index.size(); ++k) at += index[k] * strides[k];
    tensor.values.push_back(type->value(bytes.data() + at * type->width));
    for (size_t k = index.size(); k-- > 0 && ++index[k] == tensor.shape[k];) index[k] = 0;
  }
  return tensor;
}

namespace {

struct Writing {
  PickleWriter pickle;
  std::vector<ZipMember> storages;

  void operator()(std::monostate) { pickle.none(); }
  void operator()(int64_t value) { pickle.integer(value); }
  void operator()(const std::string& value) { pickle.text(value); }
  void operator()(const FloatTensor& tensor) {
    const std::string key = std::to_string(storages.size());
    pickle.global("torch._utils", "_rebuild_tensor_v2");
    pickle.mark();
    pickle.mark();
    pickle.text("storage");
    pickle.global("torch", "FloatStorage");
    pickle.text(key);
    pickle.text("cpu");
    pickle.integer(static_cast<int64_t>(tensor.values.size()));
    pickle.tuple();
    pickle.persistent();
    pickle.integer(0);  // offset
    std::vector<int64_t> strides(tensor.shape.size(), 1);
    for (size_t i = strides.size(); i-- > 1;) strides[i - 1] = strides[i] * tensor.shape[i];
    for (const auto& sizes : {tensor.shape, strides}) {
      pickle.mark();
      for (const int64_t size : sizes) pickle.integer(size);
      pickle.tuple();
    }
    pickle.boolean(false);  // requires_grad
    pickle.global("collections", "OrderedDict");
    pickle.mark();
    pickle.tuple();
    pickle.call();  // no hooks
    pickle.tuple();
    pickle.call();
    storages.push_back({"data/" + key, std::string(tensor.values.size() * sizeof(float), '\0')});
    std::memcpy(storages.back().bytes.data(), tensor.values.data(), storages.back().bytes.size());
  }
  void operator()(const TorchDict& dict) {
    pickle.empty_dict();
    pickle.mark();
    for (const auto& [key, value] : dict) {
      std::visit([this](const auto& k) { (*this)(k); }, key);
      std::visit([this](const auto& v) { (*this)(v); }, value.is);
    }
    pickle.set_items();
  }
};

}  // namespace

void write_torch_file(const std::filesystem::path& path, const TorchValue& value) {
  Writing writing;
  std::visit([&writing](const auto& v) { writing(v); }, value.is);
  const std::string folder = path.stem().string() + "/";
  std::vector<ZipMember> members = {{folder + "data.pkl", writing.pickle.finish()},
                                    {folder + "byteorder", "little"}};
  for (ZipMember& storage : writing.storages) {
    members.push_back({folder + storage.name, std::move(storage.bytes)});
  }
  members.push_back({folder + "version", "3\n"});
  write_zip(path, members, kStorageAlignment);
}

}  // namespace oscar
