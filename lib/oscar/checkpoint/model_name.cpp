// Stated names are bytes of others: only those that look like a name are taken.
#include "oscar/checkpoint/model_name.h"

#include <algorithm>

#include "oscar/checkpoint/hub_cache.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLongestTitle = 96;

bool is_title(std::string_view text) {
  const bool plain =
      std::ranges::all_of(text, [](unsigned char c) { return c >= 0x20 && c < 0x7F; });
  const bool framed = !text.empty() && text.front() != ' ' && text.back() != ' ';
  return framed && plain && text.size() <= kLongestTitle;
}

}  // namespace

std::string model_name(const fs::path& path, std::string_view stated) {
  if (!fs::is_directory(path)) return is_title(stated) ? std::string(stated) : path.stem().string();
  const fs::path folder = fs::weakly_canonical(path);
  if (const auto cached = hub_name_of(folder)) return *cached;
  return is_hub_name(std::string(stated)) ? std::string(stated) : folder.filename().string();
}

}  // namespace oscar
