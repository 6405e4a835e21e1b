// Short texts and the ids that they became: most words of a corpus have been there before.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace oscar {

struct HashOfText {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
template <typename Value>
using ByText = std::unordered_map<std::string, Value, HashOfText, std::equal_to<>>;

class KnownTexts {
 public:
  struct Ids {
    std::vector<int32_t> ids;
    int64_t lost = 0;  // bytes that none of them stands for
  };

  // Null for a text that is not known.
  const Ids* find(std::string_view text) const {
    if (text.size() > kMaxSize) return nullptr;
    const auto found = texts_.find(text);
    return found == texts_.end() ? nullptr : &found->second;
  }

  // Long texts are not kept. All are forgotten when they are too many.
  void add(std::string_view text, std::vector<int32_t> ids, int64_t lost) {
    if (text.size() > kMaxSize) return;
    if (texts_.size() >= kMaxTexts) texts_.clear();
    texts_.emplace(text, Ids{std::move(ids), lost});
  }

  static constexpr size_t kMaxSize = 128;       // bytes of a text
  static constexpr size_t kMaxTexts = 200'000;  // bounds the memory

 private:
  ByText<Ids> texts_;
};

}  // namespace oscar
