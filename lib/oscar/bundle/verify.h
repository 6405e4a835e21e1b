// Every check of a bundle as a list of findings, for reports that should not stop at the first.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace oscar {

struct Finding {
  bool ok = true;
  std::string check;   // what was looked at
  std::string detail;  // figures when ok, the error's text when not
};

// Reads `path` (bundle, statistics file or checkpoint) and checks, in this order: the file itself
// (hostile content, checksums), format and features, content_sha256, names, shapes, dtypes and
// finiteness, then each layer's numbers. A check that needs an earlier one is left out when that
// failed. Throws nothing for a bad file.
std::vector<Finding> verify_bundle(const std::filesystem::path& path);

}  // namespace oscar
