// Corpora: files of texts, chats or ids, in an order that can be repeated.
#include "oscar/text/corpus.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/io/hdf5.h"
#include "oscar/io/npy.h"
#include "oscar/text/packing.h"
#include "oscar/text/unicode.h"

namespace oscar {

// Reading .jsonl line by line.

namespace {

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

// Columns that read_documents puts documents together from, and those that it reads beside a prompt
// with its completion; python/oscar_int2/documents.py says how.
constexpr const char* kChatColumns[] = {"messages",    "conversations", "conversation",
                                        "instruction", "output",        "response",
                                        "chosen",      "solution",      "answer"};
constexpr const char* kBesidePrompts[] = {"question", "query",        "problem", "input",
                                          "context",  "choices",      "options", "history",
                                          "system",   "system_prompt"};
// All that is read, and names of what is not: as python/oscar_int2/documents.py says it.
constexpr const char* kKnownColumns =
    "no 'messages', 'conversations', 'conversation', 'prompt' with 'completion' or 'chosen', "
    "'instruction', 'question', 'query' or 'problem' with 'output', 'response', 'solution' or "
    "'answer', 'text' or 'content'";
constexpr std::string_view kIdColumns[] = {"input_ids", "token_ids", "tokens", "ids"};

bool is_blank(const std::string& text) {
  return text.find_first_not_of(" \t\n\v\f\r") == std::string::npos;
}

bool has(const Json& row, const char* key) {
  const auto found = row.find(key);
  return found != row.end() && !found->is_null();
}

ReadDocument bad_row(const std::string& why) {
  ReadDocument document;
  document.error = why;
  return document;
}

// What is read, and what the row has in its place.
std::string no_known_column(const Json& row) {
  constexpr size_t kMostColumns = 8, kLongestColumn = 40;
  std::string columns;
  size_t shown = 0, more = 0;
  bool ids = false;
  for (const auto& [key, value] : row.items()) {
    if (value.is_null()) continue;
    ids = ids || std::ranges::find(kIdColumns, key) != std::end(kIdColumns);
    if (shown == kMostColumns || key.size() > kLongestColumn) {
      ++more;
    } else {
      columns += fmt::format("{}'{}'", shown++ == 0 ? "" : ", ", key);
    }
  }
  if (more > 0) columns += fmt::format("{}{} more", shown > 0 ? " and " : "", more);
  return fmt::format("{}; the row has {}{}", kKnownColumns, columns.empty() ? "nothing" : columns,
                     ids ? " (token ids are read from .npy and .h5)" : "");
}

// The text of a row that is no chat; none for one that is.
std::optional<ReadDocument> read_plain_row(const Json& row) {
  for (const char* key : kChatColumns) {
    if (has(row, key)) return std::nullopt;
  }
  if (has(row, "prompt") && row["prompt"].is_array()) return std::nullopt;
  ReadDocument document;
  const bool in_two = has(row, "prompt") || has(row, "completion");
  if (in_two && !(has(row, "prompt") && has(row, "completion"))) {
    return bad_row("'prompt' needs 'completion' beside it");
  }
  if (in_two) {
    for (const char* key : kBesidePrompts) {
      if (has(row, key)) return std::nullopt;
    }
    if (row["completion"].is_array() || row["completion"].is_object()) return std::nullopt;
  }
  if (!in_two && !has(row, "text")) {
    if (has(row, "content")) return std::nullopt;  // a text, or part of a chat
    for (const char* key : kBesidePrompts) {
      if (has(row, key)) return std::nullopt;  // a question that lacks its answer
    }
    return bad_row(no_known_column(row));
  }
  for (const char* key : {"prompt", "completion", "text"}) {
    if (in_two == (std::string_view(key) == "text")) continue;
    if (!row[key].is_string()) return bad_row("'" + std::string(key) + "' is not text");
    const auto& text = row[key].get_ref<const std::string&>();
    if (std::string_view(key) == "completion" && is_blank(text)) {
      return bad_row("'prompt' needs 'completion' beside it");
    }
    document.text += text;
  }
  return document;
}

std::optional<ReadDocument> read_plain_line(std::string_view line) {
  const std::string here = "the line";
  Json row;
  try {
    require_valid_utf8(line, here);
    row = parse_json(line, here);
  } catch (const Error& error) {
    const ErrorInfo& info = error.info();
    return bad_row(info.what + (info.found.empty() ? "" : ": " + info.found) +
                   (info.where == here ? "" : " (" + info.where + ")"));
  }
  if (!row.is_object()) return bad_row("no JSON object");
  return read_plain_row(row);
}

}  // namespace

std::optional<std::vector<ReadDocument>> read_plain_jsonl(std::string_view content) {
  if (content.starts_with(kByteOrderMark)) content.remove_prefix(kByteOrderMark.size());
  std::vector<ReadDocument> documents;
  int64_t number = 0;
  for (size_t begin = 0; begin < content.size();) {
    const size_t end = std::min(content.find('\n', begin), content.size());
    const std::string_view line = content.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    auto document = read_plain_line(line);
    if (!document) return std::nullopt;
    document->place = number;
    documents.push_back(std::move(*document));
  }
  return documents;
}

// SplitMix64 and Fisher-Yates; the standard library's shuffle differs between platforms.

uint64_t SplitMix64::next() {
  uint64_t z = state_ += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

uint64_t SplitMix64::below(uint64_t bound) {
  const uint64_t uneven = (0 - bound) % bound;  // 2^64 mod bound: values that would favour some
  uint64_t value = next();
  while (value < uneven) value = next();
  return value % bound;
}

std::vector<size_t> shuffled_order(size_t count, uint64_t seed) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  SplitMix64 random(seed);
  for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

// Readers by extension.

namespace {

constexpr const char* kKnown =
    ".npy, .h5, .txt, .jsonl, .json, .parquet, text with .gz or .zst behind that, or a folder";
constexpr size_t kMostBadRows = 3;  // that are shown

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

void add_text(std::string text, bool is_chat, CorpusContent& content) {
  content.documents_read += 1;
  if (is_blank(text)) {
    content.empty_documents += 1;
    return;
  }
  content.texts.push_back({std::move(text), is_chat});
}

// "line 3" of lines, "row 3" of what else holds rows.
std::string place_in(const std::string& kind, int64_t number) {
  return (kind == "jsonl" ? "line " : "row ") + std::to_string(number);
}

// A path as a word of a shell's command line.
std::string shell_word(const std::filesystem::path& path) {
  std::string word = path.string();
  if (word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                             "@%+=:,./_-") == std::string::npos) {
    return word;
  }
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

// The command that writes a file of this encoding anew.
std::string iconv_command(const char* encoding, const std::filesystem::path& path) {
  std::filesystem::path anew = path;
  anew.replace_filename(path.stem().string() + "-utf8" + path.extension().string());
  return fmt::format("iconv -f {} -t UTF-8 {} > {}", encoding, shell_word(path), shell_word(anew));
}

std::string if_latin_1(const std::filesystem::path& path) {
  return "if it is Latin-1: " + iconv_command("LATIN1", path);
}

// Whether a row is bad for its encoding, in the words of this file or of Python.
bool is_of_encoding(const std::string& error) {
  return error.find("not valid UTF-8") != std::string::npos ||
         error.find("'utf-8' codec") != std::string::npos;
}

// A file of which no row holds a document ends the run, or in a folder is left out and counted.
void add_documents(std::vector<ReadDocument> documents, const std::filesystem::path& path,
                   bool in_folder, const CorpusOptions& options, CorpusContent& content) {
  const size_t before = content.texts.size();
  const bool packed = path.extension() == ".gz" || path.extension() == ".zst";
  std::string first_bad, hint;
  for (ReadDocument& document : documents) {
    if (options.strict && document.error.empty() && is_blank(document.text)) {
      document.error = "its text is empty";
    }
    if (document.error.empty()) {
      if (document.is_chat) content.chat_template = options.chat_template.name();
      add_text(std::move(document.text), document.is_chat, content);
      continue;
    }
    const std::string place = place_in(content.kind, document.place);
    if (options.strict) {
      throw Error({.what = "a row holds no document",
                   .where = path.string() + ", " + place,
                   .found = document.error,
                   .hint = "without --strict such rows are left out and counted"});
    }
    content.num_bad_rows += 1;
    const std::string bad = place + ": " + document.error;
    const bool first_of_encoding = hint.empty() && !packed && is_of_encoding(document.error);
    if (first_of_encoding) hint = if_latin_1(path);
    if (first_bad.empty()) first_bad = bad;
    if (content.bad_rows.size() < kMostBadRows) {
      content.bad_rows.push_back((in_folder ? path.filename().string() + ", " : "") + bad +
                                 (first_of_encoding ? "; " + hint : ""));
    }
  }
  if (content.texts.size() > before || first_bad.empty()) return;
  if (in_folder) {
    content.files_without_documents += 1;
    return;
  }
  if (options.chat_template.empty() && first_bad.ends_with("no chat template")) {
    hint = "put a chat_template.jinja into the model's folder, or beside the .gguf file";
  }
  throw Error({.what = "no row of the file holds a document",
               .where = path.string(),
               .found = first_bad,
               .hint = hint});
}

// Packed bytes under the name of text. Text does not begin so: 1f and 04 are control characters.
void refuse_packed(std::string_view text, const std::filesystem::path& path) {
  struct Packed {
    std::string_view begin;
    const char *name, *suffix;
  };
  constexpr Packed kPacked[] = {{"\x1f\x8b", "gzip", ".gz"},
                                {"\x28\xb5\x2f\xfd", "Zstandard", ".zst"},
                                {"PK\x03\x04", "zip", ""}};
  for (const auto& [begin, name, suffix] : kPacked) {
    if (!text.starts_with(begin)) continue;
    const std::string word = shell_word(path);
    throw Error({.what = fmt::format("the file is packed with {}", name),
                 .where = path.string(),
                 .expected = "text",
                 .hint = *suffix == '\0' ? "unpack it: unzip " + word
                                         : fmt::format("say so in its name: mv {} {}", word,
                                                       shell_word(path.string() + suffix))});
  }
}

// A list of objects under the name of lines.
void refuse_list(std::string_view text, const std::filesystem::path& path, bool in_folder) {
  constexpr std::string_view kSpace = " \t\r\n";
  const auto behind = [&](size_t at) { return text.find_first_not_of(kSpace, at); };
  const auto before = [&](size_t at) { return text.find_last_not_of(kSpace, at); };
  const auto is = [&](size_t at, char c) { return at < text.size() && text[at] == c; };
  const size_t first = behind(text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0);
  const size_t last = before(std::string_view::npos);
  if (!is(first, '[') || !is(last, ']') || last == 0 || !is(behind(first + 1), '{') ||
      !is(before(last - 1), '}')) {
    return;
  }
  std::filesystem::path named = path;
  named.replace_extension(".json");
  const std::string list = in_folder ? named.filename().string() : named.string();
  throw Error({.what = "the file holds a list, not lines",
               .where = path.string(),
               .expected = "an object of JSON on each line",
               .hint = fmt::format("name it .json: mv {} {}{}", shell_word(path), shell_word(list),
                                   in_folder ? ", and give it beside the folder: " +
                                                   path.parent_path().string() + "," + list
                                             : "")});
}

// UTF-16 by its byte order mark, or by what ASCII becomes in it.
void refuse_utf16(std::string_view text, const std::string& where) {
  const bool marked = text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff");
  const bool halved = text.size() > 1 && (text[0] == '\0') != (text[1] == '\0');
  if (!marked && !halved) return;
  const char* const encoding = marked ? "UTF-16" : text[1] == '\0' ? "UTF-16LE" : "UTF-16BE";
  throw Error({.what = fmt::format("the text is {}", encoding),
               .where = where,
               .expected = "UTF-8",
               .hint = "write it anew: " + iconv_command(encoding, where)});
}

// Without what some editors put before UTF-8. Other encodings are named.
std::string decode_text(std::string text, const std::string& where) {
  refuse_utf16(text, where);
  if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
  const size_t bad = first_invalid_utf8(text);
  if (bad == kAllValid) return text;
  throw Error({.what = "text is not valid UTF-8",
               .where = fmt::format("{}, byte {}", where, bad),
               .found = fmt::format("byte 0x{:02x}", static_cast<uint8_t>(text[bad])),
               .hint = if_latin_1(where)});
}

std::string kind_of_ids(const std::vector<uint64_t>& shape) {
  return shape.size() == 2 ? "ids_2d" : "ids_1d";
}

// "a.jsonl.gz": ".jsonl" and ".gz"; without the latter "".
struct Suffixes {
  std::string kind, packed;
};

Suffixes suffixes_of(const std::filesystem::path& path) {
  const std::string last = path.extension().string();
  if (last != ".gz" && last != ".zst") return {last, ""};
  return {path.stem().extension().string(), last};
}

bool is_text(const std::filesystem::path& path) {
  const std::string kind = suffixes_of(path).kind;
  return kind == ".txt" || kind == ".jsonl" || kind == ".json" || kind == ".parquet";
}

// In a folder .json files are what describes it.
bool is_read_in_folder(const std::filesystem::path& path) {
  return path.extension() == ".npy" || path.extension() == ".h5" ||
         (is_text(path) && suffixes_of(path).kind != ".json");
}

// How a file of another kind becomes one that is read: tables and plain text.
std::string other_kind_hint(const std::filesystem::path& path) {
  const std::string extension = path.extension().string();
  std::filesystem::path named = path;
  if (extension == ".csv" || extension == ".tsv") {
    named.replace_extension(".jsonl");
    return fmt::format(
        "write its rows as lines: python3 -c \"import csv, json, sys; csv.field_size_limit(1 << "
        "30); "
        "sys.stdin.reconfigure(encoding='utf-8-sig', newline=''); [print(json.dumps(row)) for row "
        "in csv.DictReader(sys.stdin{})]\" < {} > {}",
        extension == ".tsv" ? ", delimiter='\\t'" : "", shell_word(path), shell_word(named));
  }
  constexpr std::string_view kPlain[] = {"",     ".md",  ".markdown", ".rst",
                                         ".log", ".tex", ".html",     ".htm"};
  if (std::ranges::find(kPlain, extension) == std::end(kPlain)) return "";
  named.replace_extension(".txt");
  return fmt::format("if it is text, read it as one document: cp {} {}", shell_word(path),
                     shell_word(named));
}

// Adds what the file holds; the sha256 of just that.
std::string read_file(const std::filesystem::path& path, bool in_folder,
                      const CorpusOptions& options, uint64_t ids_needed, CorpusContent& content) {
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
  if (is_text(path)) {
    const Suffixes suffixes = suffixes_of(path);
    content.kind = suffixes.kind == ".txt" ? "text" : suffixes.kind.substr(1);
    std::string text = read_text_file(path);
    std::string hash = sha256_of(text);
    if (suffixes.packed.empty() && extension != ".parquet") refuse_packed(text, path);
    if (extension == ".txt") {
      add_text(decode_text(std::move(text), where), false, content);
      return hash;
    }
    if (extension == ".json") {  // here, where its folder is known
      refuse_utf16(text, where);
      if (text.starts_with('[')) text = decode_text(std::move(text), where);
    }
    std::optional<std::vector<ReadDocument>> plain;
    if (extension == ".jsonl") {
      refuse_utf16(text, where);
      refuse_list(text, path, in_folder);
      plain = read_plain_jsonl(text);
    }
    if (!plain) plain = read_documents(text, where, options.chat_template);
    add_documents(std::move(*plain), path, in_folder, options, content);
    return hash;
  }
  throw Error({.what = "corpus file of unknown kind",
               .where = where,
               .expected = kKnown,
               .found = extension.empty() ? "no extension" : extension,
               .hint = other_kind_hint(path)});
}

void read_folder(const std::filesystem::path& folder, const CorpusOptions& options,
                 uint64_t ids_needed, CorpusContent& content) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (leads_outside(folder, entry.path())) {
      content.outside_links += 1;
    } else if (entry.is_regular_file() && is_read_in_folder(entry.path())) {
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
    const std::string hash = read_file(file, /*in_folder=*/true, options, ids_needed, content);
    digest.update(file.filename().string() + '\0' + hash + '\n');
  }
  if (content.files_without_documents == std::ssize(files)) {
    throw Error({.what = "no row of the folder's files holds a document",
                 .where = folder.string(),
                 .found = content.bad_rows.front()});
  }
  content.sha256 = digest.finish();
  content.kind = "folder";
}

}  // namespace

bool holds_text(const std::filesystem::path& path) {
  std::error_code status;
  if (!std::filesystem::is_directory(path, status)) return is_text(path);
  const std::filesystem::directory_iterator folder(path, status);
  return !status && std::any_of(begin(folder), end(folder), [](const auto& entry) {
    return is_text(entry.path()) && is_read_in_folder(entry.path());
  });
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
    content.sha256 = read_file(path, /*in_folder=*/false, options, ids_needed, content);
  }
  return content;
}

// CORPUS arguments to sequences: reading, tokenizing, and the policy on documents in words.

namespace {

using Ids = std::vector<int32_t>;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();  // more tokens than there are

void check_options(const CorpusOptions& options) {
  if (options.sequence_length < 2) {
    throw Error({.what = "sequences are too short to predict a token",
                 .where = "--sequence-length",
                 .expected = "2 or more",
                 .found = std::to_string(options.sequence_length)});
  }
  if (options.max_tokens < 0) {
    throw Error({.what = "max_tokens is negative", .found = std::to_string(options.max_tokens)});
  }
}

bool is_eos(int32_t id, const CorpusOptions& options) {
  const auto& ids = options.eos_token_ids;
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// A template may write a line break behind the token that ends a turn: the last two are looked at.
void end_document(Ids& ids, bool is_chat, const CorpusOptions& options) {
  if (options.eos_token_ids.empty()) return;
  const size_t last = std::min<size_t>(is_chat ? 2 : 1, ids.size());
  const bool has_end = std::any_of(ids.end() - static_cast<std::ptrdiff_t>(last), ids.end(),
                                   [&](int32_t id) { return is_eos(id, options); });
  if (!has_end) ids.push_back(options.eos_token_ids.front());
}

void check_vocabulary(const Ids& ids, const std::string& name, const CorpusOptions& options) {
  if (options.vocab_size == 0) return;
  for (const int32_t id : ids) {
    if (id >= 0 && id < options.vocab_size) continue;
    throw Error({.what = "tokenizer gives an id outside the model's vocabulary",
                 .where = name,
                 .expected = "0 to " + std::to_string(options.vocab_size - 1),
                 .found = std::to_string(id),
                 .hint = "use the tokenizer.json that belongs to the checkpoint"});
  }
}

// Documents in seeded order until `needed` tokens are there.
std::vector<Ids> tokenize(std::vector<TextDocument>& texts, const Tokenizer* tokenizer,
                          uint64_t seed, int64_t needed, const CorpusOptions& options,
                          CorpusSource& source) {
  if (!texts.empty() && tokenizer == nullptr) {
    throw Error({.what = "text needs a tokenizer",
                 .where = source.name,
                 .hint = "put tokenizer.json into the model's folder, or pass ids as .npy "
                         "(python -m oscar_int2 prepare-corpus)"});
  }
  std::vector<Ids> documents;
  int64_t tokens = 0, lost_bytes = 0;
  for (const size_t index : shuffled_order(texts.size(), seed)) {
    if (tokens >= needed) break;
    TextDocument& text = texts[index];
    Ids ids = tokenizer->encode(text.text, !text.is_chat, &lost_bytes);
    end_document(ids, text.is_chat, options);
    check_vocabulary(ids, source.name, options);
    tokens += static_cast<int64_t>(ids.size());
    documents.push_back(std::move(ids));
    text.text = {};
  }
  source.lost_bytes = lost_bytes;
  if (lost_bytes > 0) {
    source.dropped.push_back("bytes of text that the vocabulary cannot write: " +
                             std::to_string(lost_bytes));
  }
  const size_t unread = texts.size() - documents.size();
  if (unread > 0) {
    source.dropped.push_back("documents not needed for max_tokens: " + std::to_string(unread));
  }
  return documents;
}

// What was done to the documents of all parts.
struct Policy {
  bool text = false, chat = false, streams = false, rows = false;
  std::string chat_template = "none";

  std::string in_words(const CorpusOptions& options) const {
    std::string words;
    const auto add = [&words](const std::string& sentence) {
      words += (words.empty() ? "" : "; ") + sentence;
    };
    if (text) add("text begins as the tokenizer's post-processor makes it");
    if (chat) add("conversations are rendered by template: " + chat_template);
    if (text || chat) {
      add(options.eos_token_ids.empty()
              ? "no EOS is known, none is added"
              : "documents end with EOS " + std::to_string(options.eos_token_ids.front()) +
                    " unless they end with one already");
      add("documents are packed without document masks");
    }
    if (streams) add("1-D ids are one stream as they are");
    if (rows) add("2-D rows are kept apart");
    return words;
  }
};

// `whole`: the size of the part decides its share.
PackedPart load_part(const CorpusPart& part, int64_t needed, bool whole, size_t place,
                     const Tokenizer* tokenizer, const CorpusOptions& options, Policy& policy) {
  if (part.self_tokens > 0) {
    throw Error({.what = "self:N is written by the model, not read",
                 .where = "CORPUS part self:" + std::to_string(part.self_tokens)});
  }
  const std::filesystem::path path(part.path);
  // Twice as many: of each row one id may be dropped, and rows have three or more that can be used.
  const uint64_t ids = needed < kAll / 2 ? 2 * static_cast<uint64_t>(needed) : UINT64_MAX;
  CorpusContent content = read_corpus_path(path, options, whole ? UINT64_MAX : ids);
  PackedPart packed;
  packed.has_weight = part.has_weight;
  CorpusSource& source = packed.source;
  const auto name = path.has_filename() ? path.filename() : path.parent_path().filename();
  source.name = name.string();
  source.sha256 = content.sha256;
  source.kind = content.kind;
  source.weight = part.weight;
  source.documents_read = content.documents_read;
  const auto note = [&source](const char* reason, int64_t count) {
    if (count > 0) source.dropped.push_back(std::string(reason) + ": " + std::to_string(count));
  };
  note("empty documents", content.empty_documents);
  note("rows without a document", content.num_bad_rows);
  note("files of which no row holds a document", content.files_without_documents);
  source.bad_rows = content.bad_rows;
  note("other files in the folder", content.other_files);
  note("token ids not needed for max_tokens, not read", static_cast<int64_t>(content.ids_left));
  note("links that lead out of the folder", content.outside_links);
  for (const TextDocument& text : content.texts) {
    (text.is_chat ? policy.chat : policy.text) = true;
  }
  if (!content.chat_template.empty()) policy.chat_template = content.chat_template;
  policy.streams = policy.streams || !content.streams.empty();
  policy.rows = policy.rows || !content.rows.empty();

  const uint64_t seed = options.seed + 0x9E3779B97F4A7C15ULL * place;
  pack_stream(tokenize(content.texts, tokenizer, seed, needed, options, source),
              options.sequence_length, packed);
  for (Ids& stream : content.streams)
    pack_stream({std::move(stream)}, options.sequence_length, packed);
  for (Ids& row : content.rows) pack_stream({std::move(row)}, options.sequence_length, packed);
  return packed;
}

// Tokens of a part that max_tokens can ever use.
int64_t tokens_needed(const CorpusPart& part, double weight_sum, const CorpusOptions& options) {
  if (options.max_tokens == 0) return kAll;
  if (!part.has_weight) return options.max_tokens;
  const double share =
      std::ceil(static_cast<double>(options.max_tokens) * part.weight / weight_sum) + 1;
  return share < static_cast<double>(kAll) ? static_cast<int64_t>(share) : kAll;
}

}  // namespace

TokenSequences load_corpus(const std::string& argument, const Tokenizer* tokenizer,
                           const CorpusOptions& options) {
  check_options(options);
  const std::vector<CorpusPart> parts = parse_corpus_argument(argument);
  double weight_sum = 0;
  for (const CorpusPart& part : parts) weight_sum += part.weight;
  std::vector<PackedPart> packed;
  Policy policy;
  for (const CorpusPart& part : parts) {
    const bool whole = parts.size() > 1 && !part.has_weight;
    packed.push_back(load_part(part, tokens_needed(part, weight_sum, options), whole, packed.size(),
                               tokenizer, options, policy));
  }
  TokenSequences result = join_parts(std::move(packed), options);
  result.record.bos_eos_policy = policy.in_words(options);
  result.record.chat_template = policy.chat_template;
  return result;
}

std::vector<std::string> corpus_warnings(const CorpusRecord& record) {
  std::vector<std::string> warnings;
  for (const CorpusSource& source : record.sources) {
    if (source.lost_bytes > 0) {
      warnings.push_back(source.name + ": left out " + std::to_string(source.lost_bytes) +
                         " bytes that the vocabulary cannot write");
    }
    if (source.bad_rows.empty()) continue;
    std::string warning = source.name + ": left out rows that hold no document";
    for (const std::string& dropped : source.dropped) {
      if (dropped.starts_with("rows without")) warning = source.name + ": left out " + dropped;
    }
    for (const std::string& row : source.bad_rows) warning += "\n  " + row;
    warnings.push_back(std::move(warning));
  }
  return warnings;
}

TokenSequences pack_documents(const std::vector<std::vector<int32_t>>& documents,
                              CorpusSource source, const CorpusOptions& options) {
  check_options(options);
  PackedPart packed;
  packed.source = std::move(source);
  packed.source.documents_read = static_cast<int64_t>(documents.size());
  packed.source.tokens_read = 0;
  for (const Ids& ids : documents) check_vocabulary(ids, packed.source.name, options);
  pack_stream(documents, options.sequence_length, packed);
  std::vector<PackedPart> parts;
  parts.push_back(std::move(packed));
  TokenSequences result = join_parts(std::move(parts), options);
  result.record.bos_eos_policy = "documents as given, packed without document masks";
  result.record.chat_template = "none";
  return result;
}

std::string write_sequences_npy(const TokenSequences& sequences,
                                const std::filesystem::path& path) {
  std::vector<int32_t> ids;
  bool same_length = true;
  for (const Ids& sequence : sequences.sequences) {
    same_length = same_length && sequence.size() == sequences.sequences.front().size();
    ids.insert(ids.end(), sequence.begin(), sequence.end());
  }
  if (same_length && !sequences.sequences.empty()) {
    write_npy_int32(path, {sequences.sequences.size(), sequences.sequences.front().size()}, ids);
    return "";
  }
  write_npy_int32(path, {ids.size()}, ids);
  return "sequences differ in length: " + path.string() +
         " is one stream, and where sequences begin is not in it";
}

}  // namespace oscar
