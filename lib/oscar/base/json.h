// JSON values, and reading them with errors that name the file and the key.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace oscar {

// Keys keep their order, so that what is written is stable and readable.
using Json = nlohmann::ordered_json;

// Reads a whole UTF-8 file. Throws Error when it cannot be read or is over max_bytes.
std::string read_text_file(const std::filesystem::path& path, size_t max_bytes = size_t{1} << 32);

// Parses `text`; `source` names the origin in errors. Throws Error with the byte position.
Json parse_json(std::string_view text, const std::string& source);

// read_text_file and parse_json in one.
Json read_json_file(const std::filesystem::path& path);

}  // namespace oscar
