// A recorded run: a calibration whose model another engine ran, with its sums and its held-back
// rows in a folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/edit.h"
#include "oscar/fit/fit.h"

namespace oscar {

// What the folder holds (SCHEMA.md).

// What the search has to know of a layer beside its rows.
struct RecordedLayer {
  double sm_scale = 1;       // factor on the scores before softmax
  bool gated = false;        // outputs are multiplied by a gate before W_O
  std::string not_searched;  // why there are no rows to search on; "" when there are
};

struct Recording {
  std::filesystem::path folder;
  Bundle all;                             // statistics of all text
  Bundle fitted;                          // statistics of the text that is not held back
  std::vector<int64_t> sequence_lengths;  // [sequences of the corpus], in tokens
  std::vector<RecordedLayer> layers;      // by layer id
};

// Whether `folder` is one.
bool is_recording(const std::filesystem::path& folder);

// Reads all but the rows. Throws Error naming the file for what is missing or malformed, and for
// sums of two different models.
Recording read_recording(const std::filesystem::path& folder);

// The search on it.

struct RecordedOptions {
  RefitOptions refit;
  SearchOptions search;
  std::string device = "auto";              // that searches: choose_compute
  int64_t host_memory = 0, gpu_memory = 0;  // bytes; 0 = what is free
};

struct RecordedResult {
  Bundle bundle;
  std::string device;
  int64_t held_back_tokens = 0;
  std::vector<std::string> warnings;
};

// The bundle that a calibration makes of this text: candidates are fitted to the sums of the text
// that is not held back and chosen on the rows that are; what was chosen is fitted to the sums of
// all text. Rows are in memory for one layer at a time. A layer without rows is fitted without
// a search and warned of. What is searched is held back by the rule of hold_back; the folder's
// seed is that of its statistics. Throws Error naming the file for rows that are missing, of
// another shape or of another run than the sums, for windows that leave held-back sequences too
// few queries, and where a layer's search does not fit into memory.
RecordedResult calibrate_recorded(Recording recording, const RecordedOptions& options,
                                  Progress& progress);

}  // namespace oscar
