// Reading JSON and text files with errors that say where.
#include "oscar/base/json.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include "oscar/base/error.h"
#include "oscar/base/json_text.h"

namespace oscar {

std::string read_text_file(const std::filesystem::path& path, size_t max_bytes) {
  std::error_code status;
  if (std::filesystem::is_directory(path, status)) {
    throw Error({.what = "expected a file, found a folder", .where = path.string()});
  }
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  if (!stream) {
    throw Error(
        {.what = "cannot read file", .where = path.string(), .found = std::strerror(errno)});
  }
  const auto size = static_cast<size_t>(stream.tellg());
  if (size > max_bytes) {
    throw Error({.what = "file is larger than this program accepts",
                 .where = path.string(),
                 .expected = std::to_string(max_bytes) + " bytes at most",
                 .found = std::to_string(size) + " bytes"});
  }
  std::string text(size, '\0');
  stream.seekg(0);
  stream.read(text.data(), static_cast<std::streamsize>(size));
  if (!stream) throw Error({.what = "file ended while it was read", .where = path.string()});
  return text;
}

Json parse_json(std::string_view text, const std::string& source) {
  require_shallow_json(text, source);
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    throw Error({.what = "malformed JSON", .where = source, .found = json_problem(error, text)});
  }
}

Json read_json_file(const std::filesystem::path& path) {
  return parse_json(read_text_file(path), path.string());
}

}  // namespace oscar
