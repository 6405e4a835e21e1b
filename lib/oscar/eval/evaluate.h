// An evaluation: its options, its parts in order, and what caches hold in it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/cache/codec.h"
#include "oscar/eval/methods.h"
#include "oscar/eval/needles.h"
#include "oscar/model/memory.h"
#include "oscar/model/ranks.h"

namespace oscar {

// The whole job of oscar-eval: model, corpus and bundles in, one JSON report out (SCHEMA.md).

struct EvaluateOptions {
  std::string model;             // as of find_model (model/checkpoint/checkpoint.h)
  std::string corpus;            // empty: heldout.jsonl in the model's folder
  std::filesystem::path bundle;  // of the methods that need one; may be empty
  // Further bundles, by the name that `compare` gives them.
  std::vector<std::pair<std::string, std::filesystem::path>> named_bundles;
  std::vector<std::string> compare;  // names of make_method; empty: default_methods
  bool perplexity = true, needles = false;

  // Index of the first predicted token that counts; unset: the largest sink + recent compared.
  // With `stride`, at least sequence_length - stride.
  std::optional<int64_t> first_position;
  int64_t position_offset = 0;      // added to every position, in tokens
  std::string engine = "simulate";  // engine_name() of int2_attention.h
  std::string mode = "decode";      // parse_cache_mode() of int2_attention.h
  int64_t sequence_length = 0;      // tokens of a sequence; 0 = the model's context, 4096 at most
  int64_t stride =
      0;  // > 0: windows of sequence_length advance by this and score their last tokens
  int64_t max_tokens = 0;  // of the corpus; 0 = all
  bool strict = false;     // rows of text that hold no document end the run
  uint64_t seed = 0;       // of document order, bootstrap and random rotations
  // Tokens from one separator to the next where the text is measured once more with the
  // checkpoint's own separators inside (text/packing.h); 0 = it is not.
  int64_t separators = 64;
  bool keep_units = false;    // the report also holds the figures of each resampling unit
  bool layer_errors = false;  // and each layer's own error (layer_errors.h)

  // Windows in tokens, and format; unset: the bundles', else the defaults of CacheFormat.
  std::optional<int> sink, recent, quant_group_size, demote_block;
  std::optional<MetadataDtype> metadata_dtype;

  NeedlePlan needle_plan;
  bool generate_needles = false;  // besides teacher forcing

  std::string device = "auto", dtype = "auto";  // choose_compute
  int64_t host_memory = 0, gpu_memory = 0;      // bytes; 0 = what is free; no figure depends on it
  std::optional<Json> rope_scaling;             // replaces the checkpoint's
  bool write_back = false;                      // store the report in `bundle`
  // Where the run keeps what it has counted, to be continued by `resume`; empty: nowhere.
  std::filesystem::path checkpoint;
  bool resume = false;
  // A report that stands where this one is to be, of which `resume` finds no checkpoint.
  std::optional<Json> finished;
  std::string command;  // what the user asked for, as the report quotes it; may be empty
};

// Throws Error for bad input (options, files, bundles of another model, too little text, rows or
// predictions that are not finite) and for memory in which one batch does not fit. The tokenizer is
// opened for text and for needle tasks alone.
// `finished` is returned as it is, without work, where it is the whole report of the same run; of
// any other an Error is thrown.
// `bundle` is rewritten, for write_back, only when the whole report exists. On the CPU equal
// inputs, seed and thread count give an equal report, resumed or not.
// When a stop was requested, the report holds the figures of what was counted, and says so with the
// key "partial"; Interrupted is thrown where that is nothing. `checkpoint` stays behind in any
// case, so that reports are written before the caller removes it (remove_checkpoint).
// Several processes share the texts and the prompts; the first does all the rest, and the others
// return null. The report is the same with any number of them. Where one is lost (ranks.h) the
// others throw Interrupted.
Json evaluate(const EvaluateOptions& options, Ranks& ranks, Progress& progress);

// What an evaluation would cost (--dry-run).
struct EvaluationCost {
  std::string device;
  int64_t sequences = 0, tokens = 0;  // of the text, and of its tokens those that count
  int64_t prompts = 0;                // of needle tasks
  size_t methods = 0;
  // Reading the text, once more with separators, and the prompts. Without opening what the run
  // begins with, and without answers that are generated beyond their prompts.
  double text_seconds = 0, separated_seconds = 0, needle_seconds = 0;
  MemoryPeak peak = {};
  int64_t checkpoint_bytes = 0;  // while the run lasts
};

// What the run would cost, measured on one batch of the text; nothing is written. Throws as
// evaluate() does. Seconds are of all processes together, memory of the first.
EvaluationCost estimate_evaluation(const EvaluateOptions& options, const Ranks& ranks,
                                   Progress& progress);

// The report as a table of at most 80 columns.
std::string format_table(const Json& report);

// The cache that every method of a comparison fills: windows, groups, metadata and codec.

// As reports hold it (SCHEMA.md, `quantizer`).
Json format_json(const CacheFormat& settings);

// What `options` give, else what the first bundle is for (`bundle`, which may be null, before
// `named`), else the defaults with one group a head. Throws Error when another bundle is for a
// cache of another format and the options do not settle it.
CacheFormat common_format(const EvaluateOptions& options, int head_dim, const Bundle* bundle,
                          std::span<const NamedBundle> named);

}  // namespace oscar
