// Files of torch.save: the pickle and the tensors in it.
#include "oscar/io/torch_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"

namespace oscar {

// A stack machine (PEP 307 and pickletools): each operation pushes, or takes what a mark set apart.

namespace {

using Kind = PickleNode::Kind;

constexpr size_t kLongestText = 1 << 16;

class Machine {
 public:
  Machine(std::string_view bytes, std::span<const std::string_view> globals,
          const std::string& where)
      : bytes_(bytes), globals_(globals), where_(where) {}

  PickleDocument run() {
    if (bytes_.size() > kLongestPickle) refuse(fmt::format("{} bytes", bytes_.size()));
    while (step(static_cast<uint8_t>(take(1)[0]))) {
    }
    if (stack_.size() != 1 || !marks_.empty()) refuse("it does not end with one value");
    if (at_ != bytes_.size()) refuse("bytes behind its end");
    document_.root = stack_[0];
    return std::move(document_);
  }

 private:
  [[noreturn]] void refuse(const std::string& found) const {
    throw Error({.what = "not a pickle of tensors",
                 .where = where_,
                 .expected = "dictionaries of numbers, texts and tensors, as torch.save writes",
                 .found = fmt::format("{} (at byte {})", found, at_),
                 .hint = "the file is damaged, or holds more than data: do not trust it"});
  }

  std::string_view take(size_t count) {
    if (count > bytes_.size() - at_) refuse("a cut end");
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  uint64_t number(int width) {
    const std::string_view digits = take(width);
    uint64_t value = 0;
    for (int i = width; i-- > 0;) value = value << 8 | static_cast<uint8_t>(digits[i]);
    return value;
  }
  std::string_view line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos || end - at_ > kLongestText) refuse("a cut name");
    const std::string_view text = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return text;
  }

  PickleNode& push(Kind kind) {
    document_.nodes.push_back(std::make_unique<PickleNode>());
    document_.nodes.back()->kind = kind;
    stack_.push_back(document_.nodes.back().get());
    return *document_.nodes.back();
  }
  PickleNode* pop() {
    if (stack_.size() <= floor()) refuse("a value is missing");
    PickleNode* node = stack_.back();
    stack_.pop_back();
    return node;
  }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  // What lies above the last mark, which goes.
  std::vector<const PickleNode*> since_mark() {
    if (marks_.empty()) refuse("a mark is missing");
    std::vector<const PickleNode*> items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()),
                                         stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  PickleNode& top(Kind kind) {
    if (stack_.size() <= floor() || stack_.back()->kind != kind) refuse("items of nothing");
    return *stack_.back();
  }
  void add(PickleNode& node, const std::vector<const PickleNode*>& items) {
    node.items.insert(node.items.end(), items.begin(), items.end());
  }

  void tuple(size_t size) {
    std::vector<const PickleNode*> items(size);
    for (size_t i = size; i-- > 0;) items[i] = pop();
    push(Kind::kTuple).items = std::move(items);
  }
  void global() {
    const std::string_view module = line();
    const std::string name = fmt::format("{} {}", module, line());
    if (std::find(globals_.begin(), globals_.end(), name) == globals_.end()) {
      refuse(fmt::format("the foreign name {:?}", name));
    }
    push(Kind::kGlobal).text = name;
  }
  void call() {
    const PickleNode* arguments = pop();
    const PickleNode* function = pop();
    if (arguments->kind != Kind::kTuple || function->kind != Kind::kGlobal) {
      refuse("a call of no function");
    }
    if (function->text == "collections OrderedDict" && arguments->items.empty()) {
      push(Kind::kDict);
    } else {
      push(Kind::kCall).items = {function, arguments};
    }
  }
  void long_integer() {
    const std::string_view digits = take(number(1));
    if (digits.size() > 8) refuse("an integer of more than 64 bits");
    uint64_t value = !digits.empty() && (digits.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    for (size_t i = digits.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(digits[i]);
    push(Kind::kInteger).integer = static_cast<int64_t>(value);
  }
  void real() {  // big-endian, unlike all others
    uint64_t bits = 0;
    for (const char c : take(8)) bits = bits << 8 | static_cast<uint8_t>(c);
    push(Kind::kReal).real = std::bit_cast<double>(bits);
  }
  void remember(uint64_t key) {
    if (stack_.size() <= floor()) refuse("nothing to remember");
    memo_[key] = stack_.back();
  }
  void recall(uint64_t key) {
    const auto place = memo_.find(key);
    if (place == memo_.end()) refuse("a value that was not remembered");
    stack_.push_back(place->second);
  }

  // False at the end.
  bool step(uint8_t operation) {
    switch (operation) {
      case 0x80:
        if (number(1) != 2) refuse("another protocol than 2");
        break;
      case '.':
        return false;
      case 'N':
        push(Kind::kNone);
        break;
      case 0x88:
      case 0x89:
        push(Kind::kBool).integer = operation == 0x88;
        break;
      case 'K':
        push(Kind::kInteger).integer = static_cast<int64_t>(number(1));
        break;
      case 'M':
        push(Kind::kInteger).integer = static_cast<int64_t>(number(2));
        break;
      case 'J':
        push(Kind::kInteger).integer = static_cast<int32_t>(number(4));
        break;
      case 0x8a:
        long_integer();
        break;
      case 'G':
        real();
        break;
      case 'X':
        push(Kind::kText).text = take(number(4));
        break;
      case '(':
        marks_.push_back(stack_.size());
        break;
      case ')':
        push(Kind::kTuple);
        break;
      case 't':
        push(Kind::kTuple).items = since_mark();
        break;
      case 0x85:
      case 0x86:
      case 0x87:
        tuple(operation - 0x84);
        break;
      case ']':
        push(Kind::kList);
        break;
      case 'a': {
        const PickleNode* item = pop();
        top(Kind::kList).items.push_back(item);
        break;
      }
      case 'e': {
        const auto items = since_mark();
        add(top(Kind::kList), items);
        break;
      }
      case '}':
        push(Kind::kDict);
        break;
      case 's': {
        const PickleNode* value = pop();
        const PickleNode* key = pop();
        add(top(Kind::kDict), {key, value});
        break;
      }
      case 'u': {
        const auto items = since_mark();
        if (items.size() % 2 != 0) refuse("a key without a value");
        add(top(Kind::kDict), items);
        break;
      }
      case 'c':
        global();
        break;
      case 'Q': {
        const PickleNode* name = pop();
        if (name->kind != Kind::kTuple) refuse("an object outside that has no name");
        push(Kind::kPersistent).items = {name};
        break;
      }
      case 'R':
        call();
        break;
      case 'q':
        remember(number(1));
        break;
      case 'r':
        remember(number(4));
        break;
      case 'h':
        recall(number(1));
        break;
      case 'j':
        recall(number(4));
        break;
      default:
        refuse(fmt::format("the operation 0x{:02x}", operation));
    }
    return true;
  }

  std::string_view bytes_;
  std::span<const std::string_view> globals_;
  const std::string& where_;
  size_t at_ = 0;
  PickleDocument document_;
  std::vector<PickleNode*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleNode*> memo_;
};

template <typename Matches>
const PickleNode* find_value(const PickleNode& dict, const Matches& matches) {
  if (dict.kind != Kind::kDict) return nullptr;
  for (size_t i = dict.items.size(); i >= 2; i -= 2) {
    if (matches(*dict.items[i - 2])) return dict.items[i - 1];
  }
  return nullptr;
}

}  // namespace

const PickleNode* PickleNode::find(std::string_view key) const {
  return find_value(*this,
                    [key](const PickleNode& k) { return k.kind == Kind::kText && k.text == key; });
}

const PickleNode* PickleNode::find(int64_t key) const {
  return find_value(
      *this, [key](const PickleNode& k) { return k.kind == Kind::kInteger && k.integer == key; });
}

PickleDocument read_pickle(std::string_view bytes, std::span<const std::string_view> globals,
                           const std::string& where) {
  return Machine(bytes, globals, where).run();
}

void PickleWriter::none() { bytes_ += 'N'; }
void PickleWriter::boolean(bool value) { bytes_ += value ? '\x88' : '\x89'; }

void PickleWriter::integer(int64_t value) {
  const bool small =
      value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max();
  bytes_ += small ? std::string("J") : std::string("\x8a\x08");
  for (int i = 0; i < (small ? 4 : 8); ++i) {
    bytes_ += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i) & 0xff);
  }
}

void PickleWriter::text(std::string_view value) {
  bytes_ += 'X';
  for (int i = 0; i < 4; ++i) bytes_ += static_cast<char>(value.size() >> (8 * i) & 0xff);
  bytes_ += value;
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  bytes_ += fmt::format("c{}\n{}\n", module, name);
}

void PickleWriter::mark() { bytes_ += '('; }
void PickleWriter::empty_dict() { bytes_ += '}'; }
void PickleWriter::set_items() { bytes_ += 'u'; }
void PickleWriter::tuple() { bytes_ += 't'; }
void PickleWriter::persistent() { bytes_ += 'Q'; }
void PickleWriter::call() { bytes_ += 'R'; }
std::string PickleWriter::finish() { return std::move(bytes_) + "."; }

// An archive: FOLDER/data.pkl, and FOLDER/data/KEY with the raw bytes of each storage. A tensor is
// a call of _rebuild_tensor_v2(storage, offset, sizes, strides, ...), in elements.

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

constexpr std::array<StorageType, 4> kStorageTypes = {{
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
  for (const StorageType& known : kStorageTypes) {
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
