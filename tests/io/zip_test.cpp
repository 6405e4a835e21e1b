// Zip archives and the .npz in them: what is written is read, what is bent is refused.
#include "oscar/io/zip.h"

#include <gtest/gtest.h>
#include <random>

#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/io/npy.h"
#include "oscar/io/safetensors.h"

namespace oscar {
namespace {

using oscar_test::TemporaryFolder;
using oscar_test::write_file;

struct ZipTest : testing::Test {
  TemporaryFolder folder;
  std::filesystem::path path = folder.path() / "a.zip";

  std::string refusal() const {
    try {
      ZipArchive::open(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  // The archive of two members with `from` replaced by `to` wherever it occurs.
  void write_bent(const std::string& from, const std::string& to) {
    write_zip(path, {{"one", "111"}, {"two", "22"}});
    std::string bytes = read_text_file(path);
    for (size_t at = 0; (at = bytes.find(from, at)) != std::string::npos; at += to.size()) {
      bytes.replace(at, from.size(), to);
    }
    write_file(path, bytes);
  }
};

TEST_F(ZipTest, GivesBackWhatWasWrittenAtItsAlignment) {
  for (const size_t alignment : {1, 2, 8, 64}) {
    write_zip(path, {{"one", "1"}, {"b/two", ""}, {"three", std::string(1000, 'x')}}, alignment);
    const std::string bytes = read_text_file(path);
    EXPECT_EQ(bytes.find(std::string(1000, 'x')) % alignment, 0u);
    const ZipArchive archive = ZipArchive::open(path);
    ASSERT_EQ(archive.members().size(), 3u);
    EXPECT_EQ(archive.members().at("three"), std::string(1000, 'x'));
    EXPECT_EQ(archive.members().at("b/two"), "");
  }
  write_zip(path, {});
  EXPECT_TRUE(ZipArchive::open(path).members().empty());
}

TEST_F(ZipTest, RefusesNamesThatLeaveTheFolder) {
  for (const char* name :
       {"../x", "a/../../x", "/etc/passwd", "..", "a\\b", "c:x", "a\nb", "", "./a"}) {
    write_zip(path, {{name, "1"}});
    EXPECT_NE(refusal().find("no plain relative path"), std::string::npos) << name;
  }
}

TEST_F(ZipTest, RefusesWhatIsCutBentOrDoubled) {
  write_zip(path, {{"one", "1"}, {"one", "2"}});
  EXPECT_NE(refusal().find("occurs twice"), std::string::npos);
  write_bent("111", "112");
  EXPECT_NE(refusal().find("checksum"), std::string::npos);
  write_bent("two", "tow");
  EXPECT_EQ(refusal(), "");  // both headers agree
  write_zip(path, {{"one", "111"}, {"two", "22"}});
  const std::string good = read_text_file(path);
  for (size_t size = 1; size < good.size(); ++size) {
    write_file(path, good.substr(0, size));
    EXPECT_NE(refusal(), "") << size;
  }
  for (const auto& [at, value, word] :
       {std::tuple{8, 8, "compressed"}, {6, 1, "encrypted"}}) {  // in both headers
    std::string bytes = good;
    bytes[at] = static_cast<char>(value);
    bytes[bytes.find("PK\x01\x02") + static_cast<size_t>(at) + 2] = static_cast<char>(value);
    write_file(path, bytes);
    EXPECT_NE(refusal().find(word), std::string::npos) << word;
  }
}

TEST_F(ZipTest, RefusesMembersThatOverlap) {
  write_zip(path, {{"one", "111"}, {"one", "111"}});
  std::string bytes = read_text_file(path);
  const size_t first = bytes.find("PK\x01\x02"), second = bytes.find("PK\x01\x02", first + 1);
  bytes[second + 42] = 0;  // both entries at the first member
  write_file(path, bytes);
  EXPECT_NE(refusal().find("overlap"), std::string::npos) << refusal();
}

// 65,534 entries at one member of a gigabyte would be summed for hours.
TEST_F(ZipTest, SumsNoMemberBeforeItIsKnownThatNoneOverlap) {
  write_zip(path, {{"one", "111"}, {"one", "111"}});
  std::string bytes = read_text_file(path);
  const size_t first = bytes.find("PK\x01\x02"), second = bytes.find("PK\x01\x02", first + 1);
  bytes[second + 42] = 0;  // both entries at the first member
  bytes[first + 16] ^= 1;  // of the checksum
  write_file(path, bytes);
  EXPECT_NE(refusal().find("overlap"), std::string::npos) << refusal();
}

TEST_F(ZipTest, NoChangeOfAByteIsMoreThanARefusal) {
  write_npz(path, FloatTensors{{"a", {{2, 2}, {1, 2, 3, 4}}}, {"b", {{3}, {1, 2, 3}}}});
  const std::string good = read_text_file(path);
  std::mt19937_64 random(5);
  for (int i = 0; i < 1000; ++i) {
    std::string bytes = good;
    for (uint64_t n = random() % 3 + 1; n-- > 0;) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    write_file(path, bytes);
    try {
      read_npz(path);
    } catch (const Error&) {
    }
  }
}

std::string array(const std::string& type, const std::string& shape, const std::string& data,
                  const char* fortran = "False") {
  std::string text =
      "{'descr': '" + type + "', 'fortran_order': " + fortran + ", 'shape': (" + shape + "), }";
  text.resize(118, ' ');
  return npy_header("<f4", {1}).substr(0, 10) + text + data;
}

TEST_F(ZipTest, ReadsArraysOfEveryNumericTypeAndOrder) {
  const std::string header = npy_header("<f4", {1});
  ASSERT_EQ(header.size(), 128u);
  const std::string f4("\x00\x00\x80\x3f\x00\x00\x00\x40", 8);
  write_zip(path, {{"f4.npy", array("<f4", "2,", f4)},
                   {"big.npy", array(">f4", "1,", std::string("\x3f\x80\x00\x00", 4))},
                   {"f2.npy", array("<f2", "1,", std::string("\x00\x3c", 2))},
                   {"f8.npy", array("<f8", "", std::string("\0\0\0\0\0\0\xf0\x3f", 8))},
                   {"i1.npy", array("|i1", "2,", "\xff\x02")},
                   {"u1.npy", array("|u1", "2,", "\xff\x02")},
                   {"turned.npy", array("|u1", "2, 3", "\1\2\3\4\5\6", "True")},
                   {"empty.npy", array("<f4", "0, 5", "")}});
  const FloatTensors found = read_npz(path);
  EXPECT_EQ(found.at("f4"), (FloatTensor{{2}, {1, 2}}));
  EXPECT_EQ(found.at("big"), (FloatTensor{{1}, {1}}));
  EXPECT_EQ(found.at("f2"), (FloatTensor{{1}, {1}}));
  EXPECT_EQ(found.at("f8"), (FloatTensor{{}, {1}}));
  EXPECT_EQ(found.at("i1"), (FloatTensor{{2}, {-1, 2}}));
  EXPECT_EQ(found.at("u1"), (FloatTensor{{2}, {255, 2}}));
  EXPECT_EQ(found.at("turned"), (FloatTensor{{2, 3}, {1, 3, 5, 2, 4, 6}}));
  EXPECT_EQ(found.at("empty"), (FloatTensor{{0, 5}, {}}));
}

TEST_F(ZipTest, RefusesArraysThatAreNoNumbersOrOfAnotherSize) {
  for (const std::string& bytes :
       {array("|O", "1,", "12345678"), array("<c8", "1,", "12345678"),
        array("<U2", "1,", "12345678"), array("|V8", "1,", "12345678"),
        array("<f4", "3,", "12345678"), array("<f4", "1,", "12345678"),
        array("<f4", "281474976710656, 281474976710656, 281474976710656", ""),
        array("<f4", "1,1,1,1,1,1,1,1,2", "12345678"), std::string("\x93NUMPY"), std::string()}) {
    write_zip(path, {{"x.npy", bytes}});
    EXPECT_THROW(read_npz(path), Error) << bytes.substr(0, 60);
  }
  write_zip(path, {{"x.txt", "1"}});
  EXPECT_THROW(read_npz(path), Error);
}

TEST_F(ZipTest, ArraysComeBackFromNpzAndSafetensors) {
  const FloatTensors arrays = {
      {"a", {{2, 3}, {1, 2, 3, 4, 5, 6}}}, {"s", {{}, {7}}}, {"e", {{0}, {}}}};
  write_npz(path, arrays);
  EXPECT_EQ(read_npz(path), arrays);
  write_safetensors(path, arrays, {{"made by", "a test"}});
  EXPECT_EQ(read_safetensors(path), arrays);
}

}  // namespace
}  // namespace oscar
