// models--OWNER--MODEL/refs/main names a folder of models--OWNER--MODEL/snapshots.
#include "oscar/checkpoint/hub_cache.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/base/json.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLetters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
constexpr size_t kLongestName = 96;  // of the Hub
constexpr std::string_view kModelFolder = "models--";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

fs::path cache_folder() {
  if (const std::string cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const std::string home = variable("HF_HOME"); !home.empty()) return fs::path(home) / "hub";
  const std::string xdg = variable("XDG_CACHE_HOME");
  const fs::path cache = xdg.empty() ? fs::path(variable("HOME")) / ".cache" : fs::path(xdg);
  return cache / "huggingface" / "hub";
}

// "a1b2..." without white space; "" for what names no folder inside another.
std::string revision_in(const fs::path& file) {
  constexpr size_t kMostBytes = 256;
  std::string text = read_text_file(file, kMostBytes);
  text.erase(text.find_last_not_of(" \n\r\t") + 1);
  const bool plain =
      !text.empty() && text[0] != '.' && text.find_first_not_of(kLetters) == std::string::npos;
  return plain ? text : "";
}

}  // namespace

bool is_hub_name(const std::string& name) {
  const size_t slash = name.find('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == name.size()) return false;
  const std::string owner = name.substr(0, slash), model = name.substr(slash + 1);
  const auto plain = [](const std::string& part) {
    return part[0] != '.' && part[0] != '-' &&
           part.find_first_not_of(kLetters) == std::string::npos;
  };
  return name.size() <= kLongestName && plain(owner) && plain(model);
}

std::optional<fs::path> find_in_hub_cache(const std::string& name) {
  if (!is_hub_name(name)) return std::nullopt;
  std::string folder = std::string(kModelFolder) + name;
  folder.replace(folder.find('/'), 1, "--");
  const fs::path model = cache_folder() / folder;
  std::error_code status;
  if (!fs::is_regular_file(model / "refs" / "main", status)) return std::nullopt;
  const std::string revision = revision_in(model / "refs" / "main");
  const fs::path snapshot = model / "snapshots" / revision;
  if (revision.empty() || !fs::is_regular_file(snapshot / "config.json", status)) {
    return std::nullopt;
  }
  return snapshot;
}

std::optional<std::string> hub_name_of(const fs::path& folder) {
  if (folder.parent_path().filename() != "snapshots") return std::nullopt;
  std::string name = folder.parent_path().parent_path().filename().string();
  if (!name.starts_with(kModelFolder)) return std::nullopt;
  name.erase(0, kModelFolder.size());
  const size_t split = name.find("--");
  if (split == std::string::npos) return std::nullopt;
  name.replace(split, 2, "/");
  return is_hub_name(name) ? std::optional(name) : std::nullopt;
}

}  // namespace oscar
