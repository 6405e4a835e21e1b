// What a model is called: by those who published it, where its files say so.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace oscar {

// The name of the model in `path`, a folder or a GGUF file that exists. `stated` is what its files
// say:
// `_name_or_path` of config.json, general.name of GGUF; empty where they say nothing.
//   a folder     OWNER/MODEL of the local Hugging Face cache, if it is in one; else `stated`, if it
//                has that form (others are paths of the machine that wrote the file); else the
//                folder's own name
//   a GGUF file  `stated`, if it is a line of printable ASCII, of 96 at most; else the file's own
//   name without
//                .gguf
// A label for people: whether two models are the same is decided by hashes alone.
std::string model_name(const std::filesystem::path& path, std::string_view stated);

}  // namespace oscar
