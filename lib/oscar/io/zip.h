// Zip archives whose members are stored as they are: what torch.save and numpy.savez write.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/io/weight_source.h"

namespace oscar {

struct ZipMember {
  std::string name;
  std::string bytes;
};

// Writes the members in this order, atomically, the content of each at a multiple of `alignment`
// bytes. Equal members give equal bytes. Throws Error for an archive of 4 GiB and more, which needs
// another format, or when `path` cannot be written.
void write_zip(const std::filesystem::path& path, const std::vector<ZipMember>& members,
               size_t alignment = 1);

// An archive in a memory map. Nothing is unpacked to disk.
class ZipArchive {
 public:
  // Checks the directory and every member: not compressed, not encrypted, inside the file, apart
  // from each other, with the checksum that is stored, and of a name that occurs once and is a
  // plain relative path. Throws Error naming file and member.
  static ZipArchive open(const std::filesystem::path& path);

  // By name; valid as long as the archive.
  const std::map<std::string, std::string_view>& members() const { return members_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::map<std::string, std::string_view> members_;
};

}  // namespace oscar
