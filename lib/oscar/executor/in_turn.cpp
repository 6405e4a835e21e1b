// Results wait for those before them.
#include "oscar/executor/in_turn.h"

#include <map>
#include <utility>

namespace oscar {

void work_in_turn(
    Ranks& ranks, size_t begin, size_t end,
    const std::function<void(const std::vector<size_t>& pieces, const PieceDone& done)>& work,
    const std::function<void(size_t piece, const std::vector<uint8_t>& result, bool own)>& take) {
  std::vector<size_t> own;
  for (size_t piece = begin; piece < end; ++piece) {
    if (ranks.owns(piece - begin)) own.push_back(piece);
  }
  if (!ranks.first()) {
    return work(own, [&](size_t, const std::vector<uint8_t>& result) { ranks.send(0, result); });
  }
  std::map<size_t, std::vector<uint8_t>> results;  // own ones that others come before
  size_t next = begin;
  const auto take_next = [&](bool wait) {
    for (; next < end; ++next) {
      const int owner = ranks.owner(next - begin);
      if (owner != 0) {
        if (!wait && !ranks.arrived(owner)) return;
        take(next, ranks.receive(owner), false);
      } else {
        const auto result = results.extract(next);
        if (!result) return;
        take(next, result.mapped(), true);
      }
    }
  };
  work(own, [&](size_t piece, std::vector<uint8_t> result) {
    results.emplace(piece, std::move(result));
    take_next(false);
  });
  take_next(true);
}

}  // namespace oscar
