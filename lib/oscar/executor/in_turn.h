// Pieces of work that the processes of a run are dealt in turn, and their results in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "oscar/executor/ranks.h"

namespace oscar {

using PieceDone = std::function<void(size_t piece, std::vector<uint8_t> result)>;

// Of the pieces from `begin` to `end`, `work` does this process' own, given in ascending order, and
// calls `done` for each of them in that order. In the first process `take` then gets the results of
// all pieces in ascending order, as soon as they and those before them are there: waiting for
// others comes behind its own work. `own`: this process has done that piece. Another process may
// end once wait_until_taken() has returned.
void work_in_turn(
    Ranks& ranks, size_t begin, size_t end,
    const std::function<void(const std::vector<size_t>& pieces, const PieceDone& done)>& work,
    const std::function<void(size_t piece, const std::vector<uint8_t>& result, bool own)>& take);

}  // namespace oscar
