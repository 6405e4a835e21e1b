// CORPUS arguments to chunks: reading, tokenizing, and the policy on documents in words.
#include "oscar/data/corpus.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oscar/base/error.h"
#include "oscar/data/corpus_files.h"
#include "oscar/data/document_order.h"
#include "oscar/data/packing.h"
#include "oscar/io/npy.h"

namespace oscar {
namespace {

using Ids = std::vector<int32_t>;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();  // more tokens than there are

void check_options(const CorpusOptions& options) {
  if (options.chunk_len < 2) {
    throw Error({.what = "chunks are too short to predict a token",
                 .where = "--chunk-len",
                 .expected = "2 or more",
                 .found = std::to_string(options.chunk_len)});
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
                         "(scripts/prepare_corpus.py)"});
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
    if (chat) add("conversations are rendered by template " + chat_template);
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
  pack_stream(tokenize(content.texts, tokenizer, seed, needed, options, source), options.chunk_len,
              packed);
  for (Ids& stream : content.streams) pack_stream({std::move(stream)}, options.chunk_len, packed);
  for (Ids& row : content.rows) pack_stream({std::move(row)}, options.chunk_len, packed);
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

TokenChunks load_corpus(const std::string& argument, const Tokenizer* tokenizer,
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
  TokenChunks result = join_parts(std::move(packed), options);
  result.record.bos_eos_policy = policy.in_words(options);
  result.record.chat_template = policy.chat_template;
  return result;
}

TokenChunks pack_documents(const std::vector<std::vector<int32_t>>& documents, CorpusSource source,
                           const CorpusOptions& options) {
  check_options(options);
  PackedPart packed;
  packed.source = std::move(source);
  packed.source.documents_read = static_cast<int64_t>(documents.size());
  packed.source.tokens_read = 0;
  for (const Ids& ids : documents) check_vocabulary(ids, packed.source.name, options);
  pack_stream(documents, options.chunk_len, packed);
  std::vector<PackedPart> parts;
  parts.push_back(std::move(packed));
  TokenChunks result = join_parts(std::move(parts), options);
  result.record.bos_eos_policy = "documents as given, packed without document masks";
  result.record.chat_template = "none";
  return result;
}

std::string write_chunks_npy(const TokenChunks& chunks, const std::filesystem::path& path) {
  std::vector<int32_t> ids;
  bool same_length = true;
  for (const Ids& chunk : chunks.chunks) {
    same_length = same_length && chunk.size() == chunks.chunks.front().size();
    ids.insert(ids.end(), chunk.begin(), chunk.end());
  }
  if (same_length && !chunks.chunks.empty()) {
    write_npy_int32(path, {chunks.chunks.size(), chunks.chunks.front().size()}, ids);
    return "";
  }
  write_npy_int32(path, {ids.size()}, ids);
  return "chunks differ in length: " + path.string() +
         " is one stream, and where chunks begin is not in it";
}

}  // namespace oscar
