// The licence that a checkpoint states of itself.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace oscar {

struct StatedLicence {
  std::string id = {};               // "apache-2.0", "other"
  std::string name = {}, link = {};  // of "other"; may be empty
  std::string place = {};            // where it stands: "README.md", "general.license"
};

// Of a Hugging Face folder the entries license, license_name and license_link of README.md's front
// matter, of a GGUF file general.license and general.license.name and .link. None where nothing is
// stated, or not in one plain word: a licence is never guessed. `model` is a Checkpoint's path.
std::optional<StatedLicence> read_licence(const std::filesystem::path& model);

}  // namespace oscar
