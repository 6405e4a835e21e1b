// How long work reports where it stands. The library never prints: programs pass a sink.
#pragma once

#include <cstdint>
#include <string>

namespace oscar {

class Progress {
 public:
  virtual ~Progress() = default;
  // A named stage begins; `total` units (0 = unknown) of `unit`, for example "tokens".
  virtual void begin(const std::string& stage, int64_t total, const std::string& unit) = 0;
  virtual void advance(int64_t units) = 0;
  virtual void end() = 0;
  // One remark for the user, for example a warning with its numbers.
  virtual void note(const std::string& text) = 0;
};

// Swallows everything; for tests and quiet runs.
class SilentProgress final : public Progress {
 public:
  void begin(const std::string&, int64_t, const std::string&) override {}
  void advance(int64_t) override {}
  void end() override {}
  void note(const std::string&) override {}
};

}  // namespace oscar
