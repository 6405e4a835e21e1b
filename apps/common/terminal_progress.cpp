// Drawing progress on stderr, so that stdout holds results only.
#include "common/terminal_progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>

#include "common/standard_streams.h"
#include "oscar/base/printable.h"

namespace oscar::app {
namespace {

constexpr auto kTerminalInterval = std::chrono::milliseconds(200);
constexpr auto kPlainInterval = std::chrono::seconds(15);

}  // namespace

TerminalProgress::TerminalProgress(bool quiet)
    : quiet_(quiet), terminal_(::isatty(STDERR_FILENO) == 1) {}

void TerminalProgress::begin(const std::string& stage, int64_t total, const std::string& unit) {
  stage_ = stage;
  unit_ = unit;
  total_ = total;
  done_ = 0;
  start_ = last_draw_ = Clock::now();
  if (!quiet_ && terminal_) draw(false);
}

void TerminalProgress::advance(int64_t units) {
  done_ += units;
  if (quiet_) return;
  const auto now = Clock::now();
  if (now - last_draw_ < (terminal_ ? Clock::duration(kTerminalInterval) : kPlainInterval)) return;
  last_draw_ = now;
  draw(false);
}

void TerminalProgress::end() {
  if (!quiet_) draw(true);
}

void TerminalProgress::note(const std::string& text) {
  if (quiet_) return;
  say("{}note: {}\n", terminal_ ? "\r\033[K" : "", printable_lines(text));
}

void TerminalProgress::draw(bool final_line) {
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;
  std::string line = fmt::format("{}: ", stage_);
  if (final_line) {
    line += fmt::format("{} {} in {}", format_count(done_), unit_, format_duration(elapsed));
  } else if (total_ > 0) {
    line += fmt::format("{:3d}%", static_cast<int>(100.0 * static_cast<double>(done_) /
                                                   static_cast<double>(total_)));
    if (rate > 0) {
      line += fmt::format("  {} {}/s  {} left", format_count(static_cast<int64_t>(rate)), unit_,
                          format_duration(static_cast<double>(total_ - done_) / rate));
    }
  } else {
    line += fmt::format("{} {}", format_count(done_), unit_);
  }
  if (terminal_) {
    say("\r\033[K{}{}", line.substr(0, 79), final_line ? "\n" : "");
  } else {
    say("{}\n", line);
  }
}

std::string format_count(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto i = static_cast<int64_t>(digits.size()) - 3; i > (value < 0 ? 1 : 0); i -= 3) {
    digits.insert(static_cast<size_t>(i), ",");
  }
  return digits;
}

std::string format_bytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return fmt::format("{:.2f} GiB", value / (1 << 30));
  if (bytes >= 1 << 20) return fmt::format("{:.1f} MiB", value / (1 << 20));
  return fmt::format("{:.1f} KiB", value / 1024);
}

std::string format_duration(double seconds) {
  if (seconds < 10) return fmt::format("{:.1f} s", seconds);
  if (seconds < 100) return fmt::format("{:.0f} s", seconds);
  const auto whole = std::llround(seconds);
  if (whole < 6000) return fmt::format("{} min {:02d} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02d} min", whole / 3600, whole / 60 % 60);
}

}  // namespace oscar::app
