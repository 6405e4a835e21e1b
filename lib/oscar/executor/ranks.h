// Processes that share one run: which of them this is, bytes from the others to the first, and that
// one which ends is noticed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace oscar {

// What a store of torch carries between processes, on one machine or several, on CPUs and GPUs
// alike: sums are small beside the work that they take, so nothing needs NCCL.
class Ranks {
 public:
  // As RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, which
  // torchrun sets; one process where there is no WORLD_SIZE. Returns once all have begun. Throws
  // Error for values that are none and when a process does not appear.
  Ranks();
  // Says that this process has ended; of the first, the others have then heard it.
  ~Ranks();
  Ranks(const Ranks&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_size() const { return local_size_; }  // on this machine
  bool first() const { return rank_ == 0; }
  bool several() const { return size_ > 1; }

  // `device` of --device, with this process' own GPU for "cuda" where there are several.
  std::string own_device(const std::string& device) const;

  // From the first to each of the others, once.
  void publish(const std::vector<uint8_t>& bytes);
  std::vector<uint8_t> published();

  // From one of the others to the first, in order.
  void send(const std::vector<uint8_t>& bytes);
  void wait_until_taken();  // of everything sent
  std::vector<uint8_t> receive(int from);

  // Of a process other than the first: its error, for the first to report.
  void report(const std::string& error);
  void stopped();  // on request, which the first then does too
  // How another process ended that should not have, for a message; "" as long as none did. A stop
  // is requested then (base/interrupt.h), and what waits throws Error.
  std::string lost() const;
  // That was the first, and it has said itself why.
  bool first_failed() const;

 private:
  struct Connection;

  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::unique_ptr<Connection> connection_;  // null for one process
};

}  // namespace oscar
