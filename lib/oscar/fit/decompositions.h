// Eigen-decompositions that several fits of one layer need, each computed once.
#pragma once

#include <future>
#include <list>
#include <mutex>
#include <string>

#include "oscar/linalg/eigh.h"

namespace oscar {

// Fits of a layer look at the same few moments. May be used from several threads at a time; what
// it returns lives as long as it does.
class Decompositions {
 public:
  // `eigh` of `moment`; of equal matrices only the first is decomposed. Throws as `eigh` does.
  const Eigh& of(const MatrixD& moment, const std::string& where);

 private:
  struct Entry {
    MatrixD moment;
    std::shared_future<Eigh> result;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
};

}  // namespace oscar
