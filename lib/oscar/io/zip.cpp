// Little-endian records (PKWARE APPNOTE 4.3): a local header before each member, a directory behind
// all, and a record at the end that says where the directory is.
#include "oscar/io/zip.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "oscar/base/error.h"
#include "oscar/base/files.h"

namespace oscar {
namespace {

constexpr std::string_view kLocalMark = "PK\x03\x04", kEntryMark = "PK\x01\x02",
                           kEndMark = "PK\x05\x06";
constexpr size_t kLocalBytes = 30, kEntryBytes = 46, kEndBytes = 22;
constexpr size_t kMostEntries = 65534;          // 65535 stands for "see the 64-bit record"
constexpr uint64_t kFourGiB = 0xffffffff;       // stands for the same
constexpr uint16_t kEncrypted = 1, kDate = 33;  // 1 January 1980
constexpr uint16_t kVersion = 20;

std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
    table[byte] = value;
  }
  return table;
}

// CRC-32 (ISO 3309).
uint32_t crc32_of(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = make_crc_table();
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = crc >> 8 ^ table[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

void put(std::string& bytes, uint64_t value, int width) {
  for (int i = 0; i < width; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
}

// A number in a range that was checked.
uint64_t number_at(std::string_view bytes, size_t at, int width) {
  uint64_t value = 0;
  for (int i = width; i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

// What both headers of a member say alike.
void put_member(std::string& bytes, const ZipMember& member, uint32_t crc, size_t extra) {
  put(bytes, kVersion, 2);
  put(bytes, 0, 2);  // flags
  put(bytes, 0, 2);  // stored
  put(bytes, 0, 2);  // time
  put(bytes, kDate, 2);
  put(bytes, crc, 4);
  put(bytes, member.bytes.size(), 4);
  put(bytes, member.bytes.size(), 4);
  put(bytes, member.name.size(), 2);
  put(bytes, extra, 2);
}

struct Reading {
  std::string_view bytes;
  std::string where;

  [[noreturn]] void refuse(const std::string& what, const std::string& expected = "",
                           const std::string& found = "", const std::string& hint = "") const {
    throw Error(
        {.what = what,
         .where = where,
         .expected = expected,
         .found = found,
         .hint = hint.empty() ? "the file is damaged or incomplete; fetch it again" : hint});
  }
};

bool is_plain_path(std::string_view name) {
  if (name.empty() || name.front() == '/') return false;
  size_t begin = 0;
  while (begin <= name.size()) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part == ".." || part == ".") return false;
    begin = end + 1;
  }
  return std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f && c != '\\' && c != ':';
  });
}

// Where the end record begins: its comment reaches to the end of the file.
size_t find_end(const Reading& in) {
  const size_t size = in.bytes.size();
  if (size >= kEndBytes) {
    const size_t least = size - std::min<size_t>(size, kEndBytes + 0xffff);
    for (size_t at = size - kEndBytes + 1; at-- > least;) {
      if (in.bytes.substr(at, 4) == kEndMark &&
          number_at(in.bytes, at + 20, 2) == size - at - kEndBytes) {
        return at;
      }
    }
  }
  in.refuse("no zip archive, or one that is cut off");
}

struct Member {
  std::string name;
  size_t begin = 0, end = 0;  // of the local header, and of the content
  std::string_view content;
  uint32_t crc = 0;  // as stored
};

// The member of the directory entry at `at`, whose end `at` becomes.
Member read_entry(const Reading& in, size_t& at, size_t directory_end, size_t directory) {
  const auto number = [&](size_t offset, int width) {
    return number_at(in.bytes, at + offset, width);
  };
  if (directory_end - at < kEntryBytes || in.bytes.substr(at, 4) != kEntryMark) {
    in.refuse("malformed directory of a zip archive");
  }
  const uint64_t name_size = number(28, 2), flags = number(8, 2), method = number(10, 2);
  const uint64_t stored = number(20, 4), size = number(24, 4), local = number(42, 4);
  const uint64_t entry = kEntryBytes + name_size + number(30, 2) + number(32, 2);
  if (entry > directory_end - at) in.refuse("malformed directory of a zip archive");
  const Reading here{
      in.bytes, fmt::format("{}: {:?}", in.where, in.bytes.substr(at + kEntryBytes, name_size))};
  Member member;
  member.crc = static_cast<uint32_t>(number(16, 4));
  member.name = in.bytes.substr(at + kEntryBytes, name_size);
  at += entry;
  if (!is_plain_path(member.name)) {
    here.refuse("a member's name is no plain relative path", "", "", "do not trust this file");
  }
  if ((flags & kEncrypted) != 0) here.refuse("a member is encrypted");
  if (method != 0) {
    here.refuse("a member is compressed", "members stored as they are", fmt::format("{}", method),
                "save it with numpy.savez, not savez_compressed, or with torch.save");
  }
  if (stored != size || size == kFourGiB || local == kFourGiB) {
    here.refuse("a member's sizes make no sense, or are over 4 GiB");
  }
  // The sizes in the local header may be missing: the directory's count.
  if (local > directory || directory - local < kLocalBytes ||
      in.bytes.substr(local, 4) != kLocalMark) {
    here.refuse("a member lies outside the file");
  }
  const uint64_t local_name = number_at(in.bytes, local + 26, 2);
  const uint64_t head = kLocalBytes + local_name + number_at(in.bytes, local + 28, 2);
  if (head > directory - local || size > directory - local - head) {
    here.refuse("a member lies outside the file");
  }
  if (in.bytes.substr(local + kLocalBytes, local_name) != member.name) {
    here.refuse("a member has two names");
  }
  member.begin = local;
  member.end = local + head + size;
  member.content = in.bytes.substr(local + head, size);
  return member;
}

}  // namespace

void write_zip(const std::filesystem::path& path, const std::vector<ZipMember>& members,
               size_t alignment) {
  std::string bytes, directory;
  for (const ZipMember& member : members) {
    const size_t local = bytes.size(), unpadded = local + kLocalBytes + member.name.size();
    // An extra field that readers skip: its head of 4 bytes and zeros.
    size_t extra = (alignment - unpadded % alignment) % alignment;
    while (extra != 0 && extra < 4) extra += alignment;
    const uint32_t crc = crc32_of(member.bytes);
    if (member.bytes.size() >= kFourGiB || local >= kFourGiB || members.size() > kMostEntries ||
        member.name.size() > 0xffff || extra > 0xffff) {
      throw Error({.what = "too large for a zip archive", .where = path.string()});
    }
    bytes += kLocalMark;
    put_member(bytes, member, crc, extra);
    bytes += member.name;
    if (extra != 0) {
      bytes += "FB";
      put(bytes, extra - 4, 2);
      bytes.append(extra - 4, '\0');
    }
    bytes += member.bytes;
    directory += kEntryMark;
    put(directory, kVersion, 2);
    put_member(directory, member, crc, 0);
    put(directory, 0, 2);  // comment
    put(directory, 0, 2);  // disk
    put(directory, 0, 2);  // internal attributes
    put(directory, 0, 4);  // external attributes
    put(directory, local, 4);
    directory += member.name;
  }
  const size_t begin = bytes.size();
  if (begin >= kFourGiB || directory.size() >= kFourGiB) {
    throw Error({.what = "too large for a zip archive", .where = path.string()});
  }
  bytes += directory;
  bytes += kEndMark;
  put(bytes, 0, 4);  // disks
  put(bytes, members.size(), 2);
  put(bytes, members.size(), 2);
  put(bytes, directory.size(), 4);
  put(bytes, begin, 4);
  put(bytes, 0, 2);  // comment
  write_file_atomically(path, bytes);
}

ZipArchive ZipArchive::open(const std::filesystem::path& path) {
  ZipArchive archive;
  archive.file_ = std::make_shared<const MappedFile>(path);
  const Reading in{{reinterpret_cast<const char*>(archive.file_->data()), archive.file_->size()},
                   path.string()};
  const size_t end = find_end(in);
  const uint64_t count = number_at(in.bytes, end + 10, 2), size = number_at(in.bytes, end + 12, 4),
                 directory = number_at(in.bytes, end + 16, 4);
  if (number_at(in.bytes, end + 4, 4) != 0 || number_at(in.bytes, end + 8, 2) != count) {
    in.refuse("a zip archive in several parts");
  }
  if (count > kMostEntries || size == kFourGiB || directory == kFourGiB) {
    in.refuse("a zip archive of 4 GiB or more", "", "", "save fewer arrays in one file");
  }
  if (directory > end || size > end - directory) in.refuse("malformed directory of a zip archive");
  std::vector<Member> found;
  size_t at = directory;
  for (uint64_t i = 0; i < count; ++i) {
    found.push_back(read_entry(in, at, directory + size, directory));
  }
  std::sort(found.begin(), found.end(),
            [](const Member& a, const Member& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < found.size(); ++i) {
    if (i > 0 && found[i].begin < found[i - 1].end) {
      in.refuse("members of a zip archive overlap", "", found[i].name);
    }
  }
  // Now that they are apart: the sum over members that all lie at one place would take as many
  // times the file's size as the directory has entries.
  for (const Member& member : found) {
    if (crc32_of(member.content) != member.crc) {
      in.refuse("a member's checksum differs", "", fmt::format("{:?}", member.name));
    }
    if (!archive.members_.emplace(member.name, member.content).second) {
      in.refuse("a member's name occurs twice", "", member.name);
    }
  }
  return archive;
}

}  // namespace oscar
