// Files and folders that appear whole or not at all, and inputs that are read within bounds.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

// Files that are read: one descriptor from the first check to the last byte, and whether they
// change meanwhile.

// Which file a path leads to and in what state, as far as the system tells without reading it.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  int64_t bytes = 0, modified_ns = 0;
  bool operator==(const FileIdentity&) const = default;
};
// Links are followed. None where there is nothing.
std::optional<FileIdentity> identity_of(const std::filesystem::path& path);
std::optional<FileIdentity> identity_of(int descriptor);

// Files that a run reads for as long as it lasts, the weights of a model say: what it makes of them
// holds for what they were, if they were one thing all the time.
class LongInputs {
 public:
  explicit LongInputs(std::vector<std::filesystem::path> paths);
  // Throws Error when a path does not lead any more to what it led to, or that has been written to.
  void require_unchanged() const;

 private:
  std::vector<std::filesystem::path> paths_;
  std::vector<std::optional<FileIdentity>> identities_;
};

// A regular file, open for reading.
class InputFile {
 public:
  // Throws Error for what is missing, may not be read, is no regular file, or is a pointer of Git
  // LFS. Waits for nothing: a FIFO is refused.
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  uint64_t bytes() const { return static_cast<uint64_t>(identity_.bytes); }
  const FileIdentity& identity() const { return identity_; }
  // Up to `bytes` from `offset` on, fewer only at the end of the file. Throws Error when the system
  // fails to read.
  size_t read(char* to, size_t bytes, uint64_t offset = 0) const;
  // A name that leads to this descriptor, for libraries that open files by name.
  std::string alias() const;
  // Of the content, in hexadecimal. Throws Error when it cannot be read.
  std::string sha256() const;
  // Throws Error when the file has been written to since it was opened. One that was replaced is
  // still read as it was.
  void require_unchanged() const;
  // Throws Error when its name does not lead to it any more, too.
  void require_in_place() const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  FileIdentity identity_;
};

// Whether `entry`, of the listing of `folder`, is a link that leads out of it. A snapshot in a
// cache of the Hugging Face hub keeps its files beside it, in "blobs": these belong to it.
bool leads_outside(const std::filesystem::path& folder, const std::filesystem::path& entry);

// A temporary file or folder beside the place that it will take, which is also the lock on that
// place.

// Whether an output takes a place where something stands: never, only while that is what stood
// there at first, or always.
enum class Replace { kNo, kIfUnchanged, kYes };

// Throws Error with what `errno` says of `path`, and a way out of a full disk or a folder that may
// not be written.
[[noreturn]] void throw_file_error(const char* what, const std::filesystem::path& path);

// A file or folder on its way, by its name: known to remove_unfinished() as long as this lives.
class Unfinished {
 public:
  explicit Unfinished(std::filesystem::path path);
  ~Unfinished();
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;

 private:
  friend bool remove_unfinished() noexcept;
  std::filesystem::path path_;
  int process_;  // children have the list too
};

// Removes what this process has not finished, when a library ends it by calling exit(): destructors
// do not run then. Whether there was anything.
bool remove_unfinished() noexcept;

// Named TARGET.<16 random digits>.tmp, made anew, and held by one descriptor until it is published;
// removed otherwise. The descriptor is locked (flock), by which others see that a run lives: of two
// runs with one target the second one is refused, and what killed runs have left is removed by the
// next one. File systems without locks leave both out, and lose nothing else.
class Temporary {
 public:
  enum class Kind { kFile, kFolder };

  // Throws Error when the folder around `target` is missing or not writable, or another run is
  // writing the same target.
  Temporary(const std::filesystem::path& target, Kind kind);
  ~Temporary();
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  int descriptor() const { return descriptor_; }
  std::filesystem::path path() const { return target_.parent_path() / name_; }
  // Flushes to disk, takes the place, and flushes the folder around it. Throws Error on any
  // failure, and when `replace` does not allow it; what stood there is then untouched.
  void publish(Replace replace);

 private:
  bool create();
  bool sole_writer() const;
  void remove();
  void take_place(Replace replace) const;

  std::filesystem::path target_;  // with a folder: "./a" for "a"
  Kind kind_;
  std::optional<FileIdentity> before_;  // what stood at the target
  std::string name_;                    // within the folder; empty: published or not made
  std::optional<Unfinished> unfinished_;
  int folder_ = -1, descriptor_ = -1;
};

// Output files that appear whole or not at all: written beside their place, flushed, renamed.

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

// Output folders that appear whole or not at all: filled beside their place, flushed, renamed.

// Owns a temporary folder beside `target`; removed with all it holds unless committed.
class AtomicFolder {
 public:
  // Throws Error when `target` exists, the folder around it is missing or not writable, or another
  // run is writing it.
  explicit AtomicFolder(const std::filesystem::path& target);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const std::filesystem::path& target() const { return target_; }
  std::filesystem::path temporary() const { return folder_->path(); }
  // Flushes what was written to disk, takes the place and flushes the folder around it. Throws
  // Error on any failure, and when the target exists by now.
  void commit();

 private:
  std::filesystem::path target_;
  std::optional<Temporary> folder_;
};

}  // namespace oscar
