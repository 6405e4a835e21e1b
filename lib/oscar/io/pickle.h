// The few operations of Python's pickle that tensors in dictionaries need, as data: nothing is
// imported, called or executed. Protocol 2, which torch.save writes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

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

}  // namespace oscar
