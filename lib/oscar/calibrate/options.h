// Everything that decides what a calibration run computes and where it may keep it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/fit/fit.h"

namespace oscar {

struct CalibrateOptions {
  std::string model;                   // as of find_model (model/checkpoint/checkpoint.h)
  std::string corpus;                  // as in text/corpus.h
  std::filesystem::path output;        // OUT.h5; the checkpoint stands beside it
  std::string preset = "best";         // recorded; `fit` already holds its values
  FitOptions fit;                      // position_span -1 = the positions the model serves
  SearchOptions search;                // what of `fit` held-out loss may change
  CacheFormat quantizer;               // quant_group_size 0 = head_dim
  std::vector<int> quant_group_sizes;  // as of BackendChoice (bundle/backends.h)

  std::optional<Json> rope_scaling;
  int sequence_length = 0;  // 0 = the model's context, 4096 at most
  int64_t max_tokens = 0;   // 0 = all
  bool strict = false;      // rows of text that hold no document end the run
  // What is done to the text (text/packing.h); kAuto: to text, not to token ids.
  enum class Change { kAuto, kOn, kOff };
  Change separators = Change::kAuto;  // put into it; kAuto: where it has few
  Change recall = Change::kAuto;      // stretches of it are repeated; kAuto: in long sequences
  uint64_t seed = 0;

  std::string device = "auto", dtype = "auto";
  int64_t host_memory = 0;   // bytes; 0 = what is free
  int64_t gpu_memory = 0;    // bytes; 0 = what is free
  int64_t batch_tokens = 0;  // 0 = 4096 on the CPU, 32768 on a GPU; part of the result's identity

  int checkpoint_every = 16;  // sequences
  bool resume = false;
  bool force = false;
  bool statistics_only = false;
  bool keep_statistics = true;
  bool hash_weights = false;
  bool dry_run = false;
  std::filesystem::path tokens_out;  // empty = none
};

}  // namespace oscar
