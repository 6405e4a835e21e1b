// One corpus path to documents and ids: .npy, .h5, .txt, .jsonl and folders of these.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "oscar/data/corpus.h"

namespace oscar {

struct TextDocument {
  std::string text;      // valid UTF-8; conversations are rendered already
  bool is_chat = false;  // the template wrote BOS and the ends of turns
};

// What the files of one part hold.
struct CorpusContent {
  std::vector<TextDocument> texts;            // to be shuffled, tokenized and packed together
  std::vector<std::vector<int32_t>> streams;  // 1-D ids: each is packed on its own
  std::vector<std::vector<int32_t>> rows;     // 2-D ids: kept apart
  std::string kind, sha256, chat_template;    // as in CorpusSource and CorpusRecord
  int64_t documents_read = 0;
  int64_t empty_documents = 0, other_files = 0;
  uint64_t ids_left = 0;      // behind those that are needed: not read
  int64_t outside_links = 0;  // entries of a folder that lead out of it
};

// Whether `path` is a file of text, or a folder with one; by the names alone.
bool holds_text(const std::filesystem::path& path);

// What is hashed is what was read. Links that lead out of a folder are left out. Of a file of ids
// that can be read in parts (.h5), ids behind the first `ids_needed` are left alone. Throws Error
// with file and line, or file and position, for everything that cannot be used.
CorpusContent read_corpus_path(const std::filesystem::path& path, const CorpusOptions& options,
                               uint64_t ids_needed = UINT64_MAX);

}  // namespace oscar
