// From a checkpoint and a corpus to a rotation bundle: the whole job of oscar-calibrate.
#pragma once

#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"
#include "oscar/calibrate/cost_estimate.h"
#include "oscar/calibrate/options.h"
#include "oscar/model/ranks.h"

namespace oscar {

struct CalibrateResult {
  bool already_done = false;  // --resume found a finished OUT of the same run
  bool dry_run = false;
  std::string device;  // as in describe(ComputeOptions)
  CorpusRecord corpus;
  CostEstimate cost;                                                // filled for a dry run
  Bundle bundle;                                                    // filled unless dry_run
  int64_t held_back_tokens = 0;                                     // what the search decided on
  double collect_seconds = 0, fit_seconds = 0, search_seconds = 0;  // fits included in the search
  double convergence_seconds = 0;                                   // judging the collected text
  std::vector<std::string> warnings;
};

// Runs the job and writes options.output. Throws Error for bad input (nothing is written then) and
// Interrupted after saving a checkpoint.
// Several processes share the collecting and the search; the first does all the rest, and the
// result of the others says nothing. The bundle has the same bytes with any number of them. Where
// one is lost (ranks.h), that is Interrupted too.
CalibrateResult calibrate(const CalibrateOptions& options, Ranks& ranks, Progress& progress);

}  // namespace oscar
