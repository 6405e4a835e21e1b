// The whole job of oscar-eval: model, corpus and bundle in, one JSON report out (SCHEMA.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/base/progress.h"
#include "oscar/eval/needle_tasks.h"

namespace oscar {

struct EvaluateOptions {
  std::string model;             // folder, or the name of an embedded default
  std::string corpus;            // empty: heldout.jsonl beside an embedded model
  std::filesystem::path bundle;  // empty: only methods that need none
  // Further bundles, by the name that `compare` gives them.
  std::vector<std::pair<std::string, std::filesystem::path>> named_bundles;
  std::vector<std::string> compare;  // empty: default_methods
  bool perplexity = true, needles = false;
  bool sensitivity = false, clip_sweep = false, window_sweep = false;  // of the last method

  std::optional<int64_t> first_position;  // predicted tokens counted from here; sink + recent
  int64_t position_offset = 0;
  std::string engine = "simulate";  // engine_name() of cache_engine.h
  std::string mode = "decode";
  int64_t chunk_len = 0;  // 0 = the model's context, 4096 at most
  int64_t stride = 0;     // > 0: windows of chunk_len advance by this and score their last tokens
  int64_t max_tokens = 0;
  uint64_t seed = 0;
  bool keep_units = false;  // the report also holds the figures of each resampling unit

  // Windows and format; unset: the bundles', else the defaults of QuantizerSettings.
  std::optional<int> sink, recent, quant_group_size, demote_block;
  std::optional<std::string> metadata_dtype;

  NeedlePlan needle_plan;
  bool generate_needles = false;  // besides teacher forcing

  std::string device = "auto", dtype = "auto";
  std::optional<Json> rope_scaling;
  bool write_back = false;  // store the report in the bundle
  std::string command;      // what the user asked for, as the report quotes it; may be empty
};

// Throws Error for bad input before any long work, and Interrupted. Nothing is written unless the
// whole report exists. On the CPU equal inputs, seed and thread count give an equal report.
Json evaluate(const EvaluateOptions& options, Progress& progress);

// The report as a table of at most 80 columns.
std::string format_table(const Json& report);

}  // namespace oscar
