// What two OSCAR files say differently, object by object.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace oscar {

// One line for each difference: attributes with both values, datasets with the largest absolute
// difference (or shapes and dtypes), objects that only one file has. created_utc and tool_* are
// not compared; content_sha256 follows from the rest. Throws Error when a file cannot be read.
std::vector<std::string> diff_bundles(const std::filesystem::path& a,
                                      const std::filesystem::path& b);

}  // namespace oscar
