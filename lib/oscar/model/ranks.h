// The processes of a run, and what they tell each other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// Processes that share one run: which of them this is, bytes between the first and the others, and
// that one which ends is noticed.

inline constexpr int kMostProcesses = 8;  // a calibration deals eighths of its text

// What a store of torch carries between processes, on one machine or several, on CPUs and GPUs
// alike, without NCCL.
class Ranks {
 public:
  // As RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, which
  // torchrun sets; one process where there is no WORLD_SIZE. Throws Error for values that are
  // none, and where the first does not answer; of others that do not begin, lost() tells.
  Ranks();
  // Says that this process has ended; of the first, the others have then heard it.
  ~Ranks();
  Ranks(const Ranks&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_size() const { return local_size_; }  // on this machine
  bool first() const { return rank_ == 0; }
  bool several() const { return size_ > 1; }

  int local_rank() const { return local_rank_; }  // its number there

  // Of pieces of work that are dealt in turn: whose number `turn` is.
  int owner(size_t turn) const { return static_cast<int>(turn % static_cast<size_t>(size_)); }
  bool owns(size_t turn) const { return owner(turn) == rank_; }

  // Where all begin: `start` of the first, which tells it. Throws Error where another would do
  // another run, or is of another version.
  Json agree(const std::string& run_key, const Json& start);

  // From the first to another, or from another to the first; in order.
  void send(int to, const std::vector<uint8_t>& bytes);
  void send_to_all(const std::vector<uint8_t>& bytes);  // of the others
  std::vector<uint8_t> receive(int from);
  bool arrived(int from);   // whether receive() finds something
  void wait_until_taken();  // of everything sent

  // Of a process other than the first: that it has done its part, so that nobody waits for it.
  void done();
  // Likewise: its error, for the first to report.
  void report(const std::string& error);
  void stopped();  // on request, which the first then does too
  // Of the first: that it has failed and says why itself.
  void failed();
  // How another process ended that should not have, for a message; "" as long as none did. A stop
  // is requested then (base/process.h): work and waiting end with Interrupted.
  std::string lost() const;
  // That was the first, and it has said itself why.
  bool first_failed() const;

 private:
  struct Connection;

  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::unique_ptr<Connection> connection_;  // null for one process
};

}  // namespace oscar
