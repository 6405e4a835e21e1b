// Progress of long work: one line with rate and time left on a terminal, plain lines otherwise.
#pragma once

#include <chrono>
#include <string>

#include "oscar/base/progress.h"

namespace oscar::app {

class TerminalProgress final : public Progress {
 public:
  explicit TerminalProgress(bool quiet);

  void begin(const std::string& stage, int64_t total, const std::string& unit) override;
  void advance(int64_t units) override;
  void end() override;
  void note(const std::string& text) override;

 private:
  using Clock = std::chrono::steady_clock;
  void draw(bool final_line);

  bool quiet_, terminal_;
  std::string stage_, unit_;
  int64_t total_ = 0, done_ = 0;
  Clock::time_point start_{}, last_draw_{};
};

// "1,234,567"; "12.3 MiB"; "1 min 05 s".
std::string format_count(int64_t value);
std::string format_bytes(int64_t bytes);
std::string format_duration(double seconds);

}  // namespace oscar::app
