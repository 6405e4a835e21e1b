// Output files that appear whole or not at all: written beside their place, flushed, renamed.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "oscar/base/temporary.h"

namespace oscar {

// Where the links of `path` lead to; that need not exist. Throws Error for links in a loop.
std::filesystem::path follow_links(std::filesystem::path path);

// Whether what `target` leads to is written to rather than replaced: a FIFO, a terminal or another
// device of characters, this program's own standard output or error. Throws Error for a folder, a
// block device or a socket.
bool leads_to_stream(const std::filesystem::path& target);

// An output file on its way. Links are followed: the file that they lead to is replaced. What is no
// regular file (a FIFO, a terminal, standard output by whatever name) is written to when the file
// is committed, and never replaced.
class AtomicFile {
 public:
  // Throws Error when `target` is empty, a folder or a block device, its folder is missing or not
  // writable, something stands there and `replace` is kNo, or another run is writing it. The last
  // two hold as long as this object lives.
  explicit AtomicFile(const std::filesystem::path& target, Replace replace = Replace::kYes);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::filesystem::path& target() const { return target_; }
  bool is_stream() const { return memory_ >= 0; }
  // The one descriptor of the file, for writing and reading anywhere in it.
  int descriptor() const;
  void append(std::string_view bytes);
  // Has what was written so far on its way to disk, for commit() to wait less.
  void begin_to_flush() const;
  // Flushes file and folder to disk and takes the place. Throws Error on any failure (a full disk
  // shows here) and when `replace` does not allow it any more; the target is then untouched.
  // Interrupted while a FIFO has no reader and a stop was requested.
  void commit();

 private:
  std::filesystem::path target_;
  Replace replace_;
  std::optional<Temporary> file_;  // else a stream is the target
  int memory_ = -1;                // what goes to the stream
};

// Writes `content` to `target` atomically.
void write_file_atomically(const std::filesystem::path& target, std::string_view content,
                           Replace replace = Replace::kYes);

}  // namespace oscar
