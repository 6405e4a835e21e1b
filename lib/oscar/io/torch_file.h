// Files of torch.save: the pickle and the tensors in it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "oscar/io/weight_source.h"
#include "oscar/io/zip.h"

namespace oscar {

// The few operations of Python's pickle that tensors in dictionaries need, as data: nothing is
// imported, called or executed. Protocol 2, which torch.save writes.

// A value. Others may hold it too, and a hostile file can make it hold itself: walk by name to a
// known depth, never to the bottom.
struct PickleNode {
  enum class Kind {
    kNone,
    kBool,     // integer 0 or 1
    kInteger,  // of 64 bits
    kReal,
    kText,
    kTuple,
    kList,
    kDict,        // items: key, value, key, value, ...
    kGlobal,      // text: "torch FloatStorage"
    kPersistent,  // items: the kTuple that names an object outside the pickle
    kCall,        // items: a kGlobal and the kTuple of its arguments
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<const PickleNode*> items;

  // The value of a key of a kDict, the last one where there are several; null: there is none.
  const PickleNode* find(std::string_view key) const;
  const PickleNode* find(int64_t key) const;
};

struct PickleDocument {
  std::vector<std::unique_ptr<PickleNode>> nodes;  // owns what `root` leads to
  const PickleNode* root = nullptr;
};

inline constexpr size_t kLongestPickle = size_t{1} << 24;

// Reads the whole of `bytes`, of which `where` names the file. A global that is not in `globals`
// ("module name") is refused by name, and so is any other operation. "collections OrderedDict"
// called without arguments is a kDict. Memory and time are linear in the number of bytes, of which
// there may be kLongestPickle.
PickleDocument read_pickle(std::string_view bytes, std::span<const std::string_view> globals,
                           const std::string& where);

// Writes one value, operation by operation in the order of pickle's own machine.
class PickleWriter {
 public:
  void none();
  void boolean(bool value);
  void integer(int64_t value);
  void text(std::string_view value);
  void global(std::string_view module, std::string_view name);
  void mark();
  void empty_dict();
  void set_items();   // a dictionary, a mark, then keys and values
  void tuple();       // a mark, then the items
  void persistent();  // a tuple
  void call();        // a global and a tuple
  std::string finish();

 private:
  std::string bytes_ = std::string("\x80\x02", 2);
};

// Files of torch.save (.pt), read and written without torch.

// A file that was read: values as pickled, tensors still in its bytes.
class TorchFile {
 public:
  // Reads the format of torch 1.6 and later. Throws Error naming the file for an older one, a
  // damaged archive, another byte order, or a pickle that holds more than data.
  static TorchFile open(const std::filesystem::path& path);

  const PickleNode& root() const { return *document_.root; }
  static bool is_tensor(const PickleNode& node);
  // Shape and values of a tensor in float32, float64, float16 or bfloat16. Throws Error naming the
  // file and `name` for another node, a view that leaves its storage, or a shape of more than
  // `most` values.
  FloatTensor tensor(const PickleNode& node, const std::string& name, int64_t most) const;

 private:
  std::string where_, folder_;
  ZipArchive archive_;
  PickleDocument document_;
};

// What a file to write holds.
struct TorchItem;
using TorchKey = std::variant<int64_t, std::string>;
using TorchDict = std::vector<TorchItem>;
struct TorchValue {
  std::variant<std::monostate, int64_t, std::string, FloatTensor, TorchDict> is;
};
struct TorchItem {
  TorchKey key;
  TorchValue value;
};

// Writes atomically what torch.load reads, weights_only or not. Equal values give equal bytes.
void write_torch_file(const std::filesystem::path& path, const TorchValue& value);

}  // namespace oscar
