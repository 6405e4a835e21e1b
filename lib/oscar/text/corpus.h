// Corpora: files of texts, chats or ids, in an order that can be repeated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oscar/text/chat_template.h"
#include "oscar/text/tokenizer.h"

namespace oscar {

// Short texts and the ids that they became: most words of a corpus have been there before.

struct HashOfText {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
template <typename Value>
using ByText = std::unordered_map<std::string, Value, HashOfText, std::equal_to<>>;

class KnownTexts {
 public:
  struct Ids {
    std::vector<int32_t> ids;
    int64_t lost = 0;  // bytes that none of them stands for
  };

  // Null for a text that is not known.
  const Ids* find(std::string_view text) const {
    if (text.size() > kMaxSize) return nullptr;
    const auto found = texts_.find(text);
    return found == texts_.end() ? nullptr : &found->second;
  }

  // Long texts are not kept. All are forgotten when they are too many.
  void add(std::string_view text, std::vector<int32_t> ids, int64_t lost) {
    if (text.size() > kMaxSize) return;
    if (texts_.size() >= kMaxTexts) texts_.clear();
    texts_.emplace(text, Ids{std::move(ids), lost});
  }

  static constexpr size_t kMaxSize = 128;       // bytes of a text
  static constexpr size_t kMaxTexts = 200'000;  // bounds the memory

 private:
  ByText<Ids> texts_;
};

// Corpora to token sequences: reading, joining with weights, packing, and the record of what was
// used.

// Everything that decides which tokens are read, in which order.
struct CorpusOptions {
  int sequence_length = 4096;               // tokens per sequence
  int64_t max_tokens = 0;                   // 0 = all
  uint64_t seed = 0;                        // order of documents and of the joined sources
  int32_t vocab_size = 0;                   // ids must be below this
  std::vector<int32_t> eos_token_ids = {};  // of the checkpoint; the first ends a document
  std::vector<int32_t> separators = {};     // put into the sequences (packing.h); empty: none are
  bool recall = false;                      // stretches are repeated (repeat_stretches)
  bool only_if_rare = false;                // not where the text has as many as would be put in
  ChatTemplate chat_template = {};          // renders messages
  bool strict = false;                      // rows without a document end the run
};

// What was read from one source, what became of it, and why something was dropped.
struct CorpusSource {
  std::string name = {}, sha256 = {}, kind = {};  // kind: ids_1d, ids_2d, text, jsonl, folder, self
  double weight = 1.0;
  int64_t documents_read = 0, documents_used = 0;
  int64_t tokens_read = 0, tokens_used = 0;
  int64_t lost_bytes = 0;                  // of text, which no token of the vocabulary stands for
  std::vector<std::string> dropped = {};   // "reason: count", for the log and the bundle
  std::vector<std::string> bad_rows = {};  // the first few without a document: "line 3: why"
};

struct CorpusRecord {
  std::vector<CorpusSource> sources;
  int64_t sequences_read = 0, sequences_used = 0, tokens = 0;
  int sequence_length = 0;
  uint64_t order_seed = 0;
  std::string tokens_sha256;   // over the sequences: length (int32 LE) then ids (int32 LE) of each
  std::string bos_eos_policy;  // in words, as stored in the bundle
  std::string chat_template;   // name of the template used (ChatTemplate::name), or "none"
  std::string recall;          // what was repeated (packing.h), in words; empty: nothing
  std::string separators = "none";  // put in (packing.h), in words; none: text as it came
};

// Sequences that attention runs over, each at most sequence_length long, in calibration order.
struct TokenSequences {
  std::vector<std::vector<int32_t>> sequences;
  CorpusRecord record;
};

// One part of a CORPUS argument: "a.jsonl:0.5,b.npy:0.5" has two. "self:N" has kind self.
struct CorpusPart {
  std::string path;  // empty for self
  double weight = 1.0;
  bool has_weight = false;  // all parts of an argument have one, or none has
  int64_t self_tokens = 0;  // > 0 for self:N
};

// Throws UsageError for an empty part, a malformed weight, or weights on some parts only. A path
// holds no comma, and no colon behind its last slash.
std::vector<CorpusPart> parse_corpus_argument(const std::string& argument);

// Reads every part and packs it into sequences. `tokenizer` may be null when all parts hold token
// ids. Parts of kind self are refused here: the model writes those (calibrate/corpus.h).
//
// Documents: a .txt file, a line of .jsonl, or what else read_documents (chat_template.h) makes of
// a file. Rows that hold none are left out and counted, or with `strict` an error. They begin as
// the tokenizer's post-processor or the chat template makes them and end with eos_token_ids[0],
// unless they end so already (a template may write one more token behind it). They are shuffled
// within their part (SplitMix64, seeded by seed and the part's place) and packed into one stream,
// cut every sequence_length tokens. A 1-D id file is one such stream as it is; rows of a 2-D file
// are kept apart and cut when longer than sequence_length. Of each stream or row the last sequence
// may be shorter; one of fewer than 2 tokens is dropped.
//
// Joining: with weights w, part i gives T w_i tokens, T being the largest total for which no part
// is short (and at most max_tokens); without, every part gives all, or under max_tokens the same
// fraction of what it has (counting at most max_tokens of each). Sequences of the parts alternate
// so that shares hold all along the order.
//
// Errors name file and line: empty corpus, no row that holds a document, invalid UTF-8, ids out of
// range, ids that are not integers, chats without a template.
TokenSequences load_corpus(const std::string& argument, const Tokenizer* tokenizer,
                           const CorpusOptions& options);

// Packs one stream of already tokenized documents; what load_corpus and self:N share.
TokenSequences pack_documents(const std::vector<std::vector<int32_t>>& documents,
                              CorpusSource source, const CorpusOptions& options);

// Writes the sequences as .npy int32: 2-D when all have one length, else 1-D with a warning text
// back.
std::string write_sequences_npy(const TokenSequences& sequences, const std::filesystem::path& path);

// What of it a user should know before a run: rows that were left out, bytes that are lost.
std::vector<std::string> corpus_warnings(const CorpusRecord& record);

// The documents of a .jsonl file whose lines hold `text`, or `prompt` and `completion` as text.
// Blank lines are skipped. None where a line holds a conversation, or further columns that may
// belong to its document: those are read by read_documents.
std::optional<std::vector<ReadDocument>> read_plain_jsonl(std::string_view content);

// The seeded order of documents, the same on every platform.

// SplitMix64 (Steele, Lea and Flood 2014).
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t next();
  // Uniform in [0, bound), by rejection; bound > 0.
  uint64_t below(uint64_t bound);

 private:
  uint64_t state_;
};

// Fisher-Yates shuffle of 0 .. count-1 driven by SplitMix64(seed).
std::vector<size_t> shuffled_order(size_t count, uint64_t seed);

// One corpus path to documents and ids: files of ids, files of text, and folders of both.

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
  int64_t num_bad_rows = 0;
  std::vector<std::string> bad_rows;  // the first few: "line 3: why"; of a folder "a.jsonl, line 3"
  int64_t files_without_documents = 0;
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
