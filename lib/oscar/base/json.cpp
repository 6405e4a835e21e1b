// Reading JSON and text files with errors that say where.
#include "oscar/base/json.h"

#include "oscar/base/error.h"
#include "oscar/base/input_file.h"
#include "oscar/base/strict_json.h"

namespace oscar {

std::string read_text_file(const std::filesystem::path& path, size_t max_bytes) {
  const InputFile file(path);
  const auto size = static_cast<size_t>(file.bytes());
  if (size > max_bytes) {
    throw Error({.what = "file is larger than this program accepts",
                 .where = path.string(),
                 .expected = std::to_string(max_bytes) + " bytes at most",
                 .found = std::to_string(size) + " bytes"});
  }
  std::string text(size, '\0');
  if (file.read(text.data(), size) != size) {
    throw Error({.what = "file ended while it was read", .where = path.string()});
  }
  return text;
}

Json parse_json(std::string_view text, const std::string& source) {
  return parse_strict_json<Json>(text, source);
}

Json read_json_file(const std::filesystem::path& path) {
  return parse_json(read_text_file(path, kMaxJsonBytes), path.string());
}

}  // namespace oscar
