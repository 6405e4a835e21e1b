// Output files of a command line: none is an input or another output, and each can be written.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/files.h"

namespace oscar::app {

// A path with the word of the command line that names it. An empty path stands for none.
struct NamedPath {
  std::string name;  // for example "--json"
  std::filesystem::path path;
};

// Throws UsageError when an output is the same file as an input or as another output, whether it
// exists already or not, or is a file that lies in a folder among the inputs.
void check_outputs(const std::vector<NamedPath>& inputs, const std::vector<NamedPath>& outputs);

// Throws Error, before any work, for a place that cannot be written, or where something stands that
// `replace` spares. Leaves nothing behind.
void probe_outputs(const std::vector<NamedPath>& outputs, Replace replace = Replace::kYes);

// Writes the text of an option such as --json: to standard output for "-", else atomically.
void write_text_output(const std::filesystem::path& path, const std::string& text,
                       Replace replace = Replace::kYes);

// The files and folders of a CORPUS argument, each as `name`. Throws Error for a malformed one.
std::vector<NamedPath> corpus_paths(const std::string& name, const std::string& corpus);

// The files that the programs read of a MODEL argument. None where there is no such model, which
// is said when it is opened.
std::vector<NamedPath> model_paths(const std::string& model);

// The .gguf file that a MODEL argument stands for; none for a folder, or where there is no such
// model.
std::optional<std::filesystem::path> gguf_file_of(const std::string& model);

}  // namespace oscar::app
