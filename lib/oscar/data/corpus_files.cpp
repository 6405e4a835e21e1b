// Readers by extension.
#include "oscar/data/corpus_files.h"

#include <algorithm>
#include <limits>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/data/jsonl.h"
#include "oscar/data/unicode.h"
#include "oscar/io/hdf5.h"
#include "oscar/io/npy.h"

namespace oscar {
namespace {

constexpr const char* kKnown = ".npy, .h5, .txt, .jsonl, or a folder of these";

void add_ids(const std::vector<uint64_t>& shape, const std::vector<int64_t>& values,
             const std::string& where, const CorpusOptions& options, CorpusContent& content) {
  const int64_t limit =
      options.vocab_size > 0 ? options.vocab_size : std::numeric_limits<int32_t>::max();
  if (values.empty()) return;  // however many rows of no ids
  const uint64_t columns = shape.back();
  const bool is_table = shape.size() == 2;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= 0 && values[i] < limit) continue;
    const std::string position =
        is_table ? "row " + std::to_string(i / columns) + ", column " + std::to_string(i % columns)
                 : "position " + std::to_string(i);
    throw Error(
        {.what = "token id is outside the vocabulary",
         .where = where + ", " + position,
         .expected = "0 to " + std::to_string(limit - 1),
         .found = std::to_string(values[i]),
         .hint = "tokenize with this model's own tokenizer; padding must not be in the file"});
  }
  if (!is_table) {
    content.streams.emplace_back(values.begin(), values.end());
    content.documents_read += 1;
    return;
  }
  for (uint64_t row = 0; row < shape[0]; ++row) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(row * columns);
    content.rows.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(columns));
  }
  content.documents_read += static_cast<int64_t>(shape[0]);
}

// Dataset "tokens", or the only one.
std::string token_dataset(const InputFile& file) {
  const auto objects = hdf5::list_datasets(file);
  std::string names, only;
  int count = 0;
  for (const hdf5::ObjectInfo& object : objects) {
    if (!object.is_dataset) continue;
    if (object.path == "/tokens") return object.path;
    names += (count++ == 0 ? "" : ", ") + object.path;
    only = object.path;
  }
  if (count != 1) {
    throw Error({.what = "cannot tell which dataset holds the token ids",
                 .where = file.path().string(),
                 .expected = "a dataset named 'tokens', or one dataset",
                 .found = count == 0 ? "no dataset" : names});
  }
  return only;
}

void add_text(std::string text, CorpusContent& content) {
  content.documents_read += 1;
  if (text.empty()) {
    content.empty_documents += 1;
    return;
  }
  content.texts.push_back({std::move(text), false});
}

std::string kind_of_ids(const std::vector<uint64_t>& shape) {
  return shape.size() == 2 ? "ids_2d" : "ids_1d";
}

bool is_text(const std::filesystem::path& path) {
  return path.extension() == ".txt" || path.extension() == ".jsonl";
}

bool has_reader(const std::filesystem::path& path) {
  return path.extension() == ".npy" || path.extension() == ".h5" || is_text(path);
}

// Adds what the file holds; the sha256 of just that.
std::string read_file(const std::filesystem::path& path, const CorpusOptions& options,
                      uint64_t ids_needed, CorpusContent& content) {
  const std::string extension = path.extension().string(), where = path.string();
  if (extension == ".npy") {
    const std::string bytes = read_text_file(path, kMostNpyBytes);
    const NpyIntegers ids = parse_npy_integers(bytes, where);
    content.kind = kind_of_ids(ids.shape);
    add_ids(ids.shape, ids.values, where, options, content);
    return sha256_of(bytes);
  }
  if (extension == ".h5") {
    const InputFile file(path);
    const std::string dataset = token_dataset(file);
    const hdf5::IntegerArray ids = hdf5::read_integers(file, dataset, ids_needed);
    content.ids_left += ids.left;
    content.kind = kind_of_ids(ids.shape);
    add_ids(ids.shape, ids.values, where + ":" + dataset, options, content);
    std::string hash = file.sha256();
    file.require_unchanged();
    return hash;
  }
  if (extension == ".txt") {
    content.kind = "text";
    std::string text = read_text_file(path);
    require_valid_utf8(text, where);
    std::string hash = sha256_of(text);
    add_text(std::move(text), content);
    return hash;
  }
  if (extension == ".jsonl") {
    content.kind = "jsonl";
    const std::string text = read_text_file(path);
    for (JsonlDocument& document : read_jsonl(text, path, options)) {
      if (!document.is_chat) {
        add_text(std::move(document.text), content);
        continue;
      }
      content.documents_read += 1;
      content.chat_template = document.chat_template;
      content.texts.push_back({std::move(document.text), true});
    }
    return sha256_of(text);
  }
  throw Error({.what = "corpus file of unknown kind",
               .where = where,
               .expected = kKnown,
               .found = extension.empty() ? "no extension" : extension});
}

void read_folder(const std::filesystem::path& folder, const CorpusOptions& options,
                 uint64_t ids_needed, CorpusContent& content) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (leads_outside(folder, entry.path())) {
      content.outside_links += 1;
    } else if (entry.is_regular_file() && has_reader(entry.path())) {
      files.push_back(entry.path());
    } else {
      content.other_files += 1;
    }
  }
  if (files.empty()) {
    throw Error({.what = "folder holds no corpus file",
                 .where = folder.string(),
                 .expected = kKnown,
                 .hint = content.outside_links > 0
                             ? "links that lead out of the folder are not read"
                             : ""});
  }
  std::sort(files.begin(), files.end());
  Sha256 digest;
  for (const auto& file : files) {
    const std::string hash = read_file(file, options, ids_needed, content);
    digest.update(file.filename().string() + '\0' + hash + '\n');
  }
  content.sha256 = digest.finish();
  content.kind = "folder";
}

}  // namespace

bool holds_text(const std::filesystem::path& path) {
  std::error_code status;
  if (!std::filesystem::is_directory(path, status)) return is_text(path);
  const std::filesystem::directory_iterator folder(path, status);
  return !status && std::any_of(begin(folder), end(folder),
                                [](const auto& entry) { return is_text(entry.path()); });
}

CorpusContent read_corpus_path(const std::filesystem::path& path, const CorpusOptions& options,
                               uint64_t ids_needed) {
  CorpusContent content;
  std::error_code status;
  if (!std::filesystem::exists(path, status)) {
    throw Error({.what = "corpus does not exist", .where = path.string(), .expected = kKnown});
  }
  if (std::filesystem::is_directory(path, status)) {
    read_folder(path, options, ids_needed, content);
  } else {
    content.sha256 = read_file(path, options, ids_needed, content);
  }
  return content;
}

}  // namespace oscar
