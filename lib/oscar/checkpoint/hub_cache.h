// Models that Hugging Face's tools have downloaded, by the names that the Hub gives them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace oscar {

// Whether `name` has the form of a model's name on the Hub: "owner/model".
bool is_hub_name(const std::string& name);

// The folder of a model in the local cache ($HF_HUB_CACHE, $HF_HOME/hub or
// ~/.cache/huggingface/hub) at the revision that "main" was when it was fetched; nullopt when it is
// not there. Nothing is downloaded.
std::optional<std::filesystem::path> find_in_hub_cache(const std::string& name);

// The name under which a folder of such a cache was fetched; nullopt for other folders. `folder` is
// canonical.
std::optional<std::string> hub_name_of(const std::filesystem::path& folder);

}  // namespace oscar
