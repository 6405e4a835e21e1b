// What the search writes down: which variants it compared, and in which words.
#pragma once

#include <string>

#include "oscar/search/search_candidate.h"

namespace oscar {

// "metric shaped".
std::string writer_text(const HeadChoice& head);
// "balanced centred per-head".
std::string fit_text(const FitVariant& fit);

// The fit that a head's choice is from.
const FitVariant& fit_of(const HeadChoice& head, Side side, const std::vector<FitVariant>& fits);

// Four digits: the record is for people, and has to stay small. 0 when not finite.
double shortened(double value);
double per_energy(double loss, double energy);

// Losses of variants that differ in nothing but the ratio, as note_stage takes them.
ClipLosses clip_losses(const std::vector<SideVariant>& variants, const LossTable& table, int first);

// Adds a comparison to the side's record. Pairing `first + i` of `table` is variants[i], the first
// of which is what was chosen before.
void note_stage(SideState& state, const char* stage, const Candidate& candidate,
                const std::vector<SideVariant>& variants, const LossTable& table, int first);

}  // namespace oscar
