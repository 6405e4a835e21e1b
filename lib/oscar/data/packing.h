// Streams of tokens to chunks, and several packed parts to one calibration order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/data/corpus.h"

namespace oscar {

// Where a document's first token went.
struct DocumentStart {
  size_t chunk, offset;
};

// One part of the corpus, cut into chunks.
struct PackedPart {
  CorpusSource source;
  std::vector<std::vector<int32_t>> chunks;
  std::vector<DocumentStart> starts;
  int64_t tail_tokens_dropped = 0;
  bool has_weight = false;
};

// Appends one stream of documents, cut every chunk_len tokens, attention running across documents.
// Counts tokens_read. A last chunk of fewer than 2 tokens is dropped: it predicts nothing.
void pack_stream(const std::vector<std::vector<int32_t>>& documents, int chunk_len,
                 PackedPart& part);

// Takes each part's share (corpus.h states the rule), alternates their chunks, and fills the record
// but for bos_eos_policy and chat_template. Throws Error when a part or the result is empty.
TokenChunks join_parts(std::vector<PackedPart> parts, const CorpusOptions& options);

}  // namespace oscar
