// Comparing paths as files, and writing a place for a try.
#include "common/output_paths.h"

#include <algorithm>

#include "common/program.h"
#include "common/terminal.h"
#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/text/corpus.h"

namespace oscar::app {
namespace {

namespace fs = std::filesystem;

// Where `path` leads, through links to what is not there yet too; its last components need not
// exist.
fs::path place_of(const fs::path& path) {
  std::error_code status;
  return fs::weakly_canonical(follow_links(fs::absolute(path)), status);
}

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code status;
  return fs::equivalent(a, b, status) || place_of(a) == place_of(b);
}

bool overwrites(const fs::path& output, const fs::path& input) {
  std::error_code status;
  if (same_file(output, input)) return true;
  return fs::is_regular_file(output, status) && fs::is_directory(input, status) &&
         same_file(place_of(output).parent_path(), input);
}

}  // namespace

void check_outputs(const std::vector<NamedPath>& inputs, const std::vector<NamedPath>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const NamedPath& output = outputs[i];
    if (output.path.empty()) continue;
    for (const NamedPath& input : inputs) {
      if (input.path.empty() || !overwrites(output.path, input.path)) continue;
      throw UsageError({.what = "an output would overwrite an input",
                        .where = output.name + ", " + input.name,
                        .found = output.path.string(),
                        .hint = "give the output another name"});
    }
    for (size_t other = 0; other < i; ++other) {
      if (outputs[other].path.empty() || !same_file(output.path, outputs[other].path)) continue;
      throw UsageError({.what = "two outputs can't be one file",
                        .where = outputs[other].name + ", " + output.name,
                        .found = output.path.string(),
                        .hint = "give them different names"});
    }
  }
}

void probe_outputs(const std::vector<NamedPath>& outputs, Replace replace) {
  for (const NamedPath& output : outputs) {
    if (output.path.empty() || output.path == kStandardOutput) continue;
    const AtomicFile probe(output.path, replace);
  }
}

void write_text_output(const fs::path& path, const std::string& text, Replace replace) {
  if (path == kStandardOutput) {
    print_text(text);
  } else {
    write_file_atomically(path, text, replace);
  }
}

std::vector<NamedPath> corpus_paths(const std::string& name, const std::string& corpus) {
  std::vector<NamedPath> paths;
  for (const CorpusPart& part : parse_corpus_argument(corpus)) paths.push_back({name, part.path});
  return paths;
}

std::vector<NamedPath> model_paths(const std::string& model) {
  fs::path folder;
  try {
    folder = find_model(model);
  } catch (const Error&) {
    return {};
  }
  if (!fs::is_directory(folder)) return {{"MODEL", folder}};
  const std::vector<std::string> names = {"config.json",
                                          "tokenizer.json",
                                          "tokenizer_config.json",
                                          "chat_template.json",
                                          "model.safetensors.index.json",
                                          "README.md"};  // states the licence
  std::vector<NamedPath> paths;
  std::error_code status;
  for (const auto& entry : fs::directory_iterator(folder, status)) {
    const std::string extension = entry.path().extension().string();
    const bool read = extension == ".safetensors" || extension == ".jinja" ||
                      extension == ".jsonl" ||
                      std::find(names.begin(), names.end(), entry.path().filename()) != names.end();
    if (read) paths.push_back({"MODEL", entry.path()});
  }
  return paths;
}

std::optional<fs::path> gguf_file_of(const std::string& model) {
  const std::vector<NamedPath> files = model_paths(model);
  if (files.size() != 1 || files.front().path.extension() != ".gguf") return {};
  return files.front().path;
}

}  // namespace oscar::app
