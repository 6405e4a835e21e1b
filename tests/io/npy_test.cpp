// .npy files: every integer type and order, and everything that is refused.
#include "oscar/io/npy.h"

#include "oscar/text/corpus.h"
#include "text/tiny_tokenizer.h"

namespace {

using namespace oscar;
using oscar::data_test::contains;
using oscar::data_test::error_of;
using oscar::data_test::Folder;

std::string npy(const std::string& dictionary, const std::string& data) {
  const std::string header = dictionary + "\n";
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header +
         data;
}

std::string header_of(const std::string& type, const std::string& shape, bool fortran = false) {
  return "{'descr': '" + type + "', 'fortran_order': " + (fortran ? "True" : "False") +
         ", 'shape': " + shape + ", }";
}

TEST(Npy, ReadsEveryIntegerTypeAndByteOrder) {
  const Folder folder;
  const auto values = [&](const std::string& type, const std::string& data) {
    return read_npy_integers(folder.write("a.npy", npy(header_of(type, "(2,)"), data))).values;
  };
  using V = std::vector<int64_t>;
  EXPECT_EQ(values("|i1", "\x01\xff"), (V{1, -1}));
  EXPECT_EQ(values("|u1", "\x01\xff"), (V{1, 255}));
  EXPECT_EQ(values("<i2", std::string("\x01\x02\xfe\xff", 4)), (V{513, -2}));
  EXPECT_EQ(values(">u2", std::string("\x01\x02\xfe\xff", 4)), (V{258, 65279}));
  EXPECT_EQ(values("<u4", std::string("\1\0\0\0\xff\xff\xff\xff", 8)), (V{1, 4294967295}));
  EXPECT_EQ(values(">i8", std::string("\0\0\0\0\0\0\1\0\xff\xff\xff\xff\xff\xff\xff\xff", 16)),
            (V{256, -1}));
  EXPECT_EQ(values("<u8", std::string(16, '\xff')), (V(2, INT64_MAX)));
}

TEST(Npy, ReadsFortranOrderAsRows) {
  const Folder folder;
  const auto table = read_npy_integers(
      folder.write("a.npy", npy(header_of("|i1", "(2, 3)", true), "\1\2\3\4\5\6")));
  EXPECT_EQ(table.shape, (std::vector<uint64_t>{2, 3}));
  EXPECT_EQ(table.values, (std::vector<int64_t>{1, 3, 5, 2, 4, 6}));
}

TEST(Npy, ReadsWhatItWrites) {
  const Folder folder;
  write_npy_int32(folder / "a.npy", {2, 2}, {1, -2, 1 << 30, 0});
  const auto table = read_npy_integers(folder / "a.npy");
  EXPECT_EQ(table.shape, (std::vector<uint64_t>{2, 2}));
  EXPECT_EQ(table.values, (std::vector<int64_t>{1, -2, 1 << 30, 0}));
}

// "Trte" was once taken for False, which put the values of a Fortran array into another order.
TEST(Npy, RefusesHeadersThatNumPyDoesNotWrite) {
  const Folder folder;
  for (const char* header :
       {"{'descr': '|i1', 'fortran_order': Trte, 'shape': (2,), }",
        "{'descr': '|i1', 'fortran_order': False, 'shape': (2), }",
        "{'descr': '|i1', 'fortran_order': False, 'shape': (1 2,), }",
        "{'descr': '|i1', 'fortran_order': False, 'shape': (02,), }",
        "{'descr': '|i1', 'fortran_order': False, 'shape': (2,), 'shape': (2,), }",
        "{'descr': '|i1', 'fortran_order': False, 'shape': (2,), 'other': 1, }",
        "{'descr': '|i1' 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '|\\x691', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': [('a', '|i1'), 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '|i1', 'fortran_order': False, 'shape': (2,), } x"}) {
    const std::string path = folder.write("a.npy", npy(header, "\1\2"));
    EXPECT_TRUE(contains(error_of([&] { read_npy_integers(path); }), "malformed")) << header;
  }
  const std::string path = folder.write(
      "a.npy", npy("{\"shape\": (2L,),\t'fortran_order':True,'descr':'|i1'}  ", "\1\2"));
  EXPECT_EQ(read_npy_integers(path).values, (std::vector<int64_t>{1, 2}));
}

TEST(Npy, RefusesOtherTypesAndDamage) {
  const Folder folder;
  const auto error = [&](const std::string& content) {
    const std::string path = folder.write("a.npy", content);
    return error_of([&] { read_npy_integers(path); });
  };
  EXPECT_TRUE(contains(error(npy(header_of("<f4", "(1,)"), "abcd")), "token ids are floats"));
  EXPECT_TRUE(contains(error(npy(header_of("|b1", "(1,)"), "a")), "not integers"));
  EXPECT_TRUE(contains(error(npy(header_of("|O", "(1,)"), "a")), "'|O'"));
  EXPECT_TRUE(contains(error(npy(header_of("<i4", "()"), "abcd")), "0 dimensions"));
  EXPECT_TRUE(contains(error(npy(header_of("<i4", "(1,1,1)"), "abcd")), "3 dimensions"));
  EXPECT_TRUE(contains(error(npy(header_of("<i4", "(2,)"), "abcd")), "truncated"));
  EXPECT_TRUE(contains(error(npy(header_of("<i4", "(1,)"), "abcde")), "too long"));
  EXPECT_TRUE(
      contains(error(npy(header_of("<i4", "(4294967296, 4294967296)"), "abcd")), "truncated"));
  EXPECT_TRUE(contains(error(npy(header_of("<i4", "(99999999999999999999,)"), "")), "malformed"));
  EXPECT_TRUE(contains(
      error(npy("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1,)}", "abcd")),
      "structured"));
  EXPECT_TRUE(contains(error(npy("{'descr': '<i4'}", "abcd")), "fortran_order"));
  EXPECT_TRUE(contains(error(npy("{'shape': ", "")), "malformed"));
  EXPECT_TRUE(contains(error(""), "malformed"));
  EXPECT_TRUE(contains(error(std::string("\x93NUMPY\x01\x00\xff\xff{", 11)), "malformed"));
  EXPECT_TRUE(contains(error(std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{}", 14)), "malformed"));
}

TEST(Npy, RowsOfNoValuesTakeNoTimeHoweverMany) {
  const Folder folder;
  const auto table =
      read_npy_integers(folder.write("a.npy", npy(header_of("<i4", "(281474976710656, 0)"), "")));
  EXPECT_TRUE(table.values.empty());
  CorpusOptions options;
  options.sequence_length = 4;
  EXPECT_NE(error_of([&] {
              load_corpus((folder / "a.npy").string(), nullptr, options);
            }).find("corpus is empty"),
            std::string::npos);
}

}  // namespace
