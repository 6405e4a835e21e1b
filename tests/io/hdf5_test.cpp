// HDF5 files written here come back exactly; damaged ones are refused with a message.
#include "oscar/io/hdf5.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>
#include <csignal>
#include <fstream>
#include <numeric>

#include "oscar/base/error.h"

namespace {

using namespace oscar::hdf5;

class Hdf5 : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("oscar_hdf5_" + std::to_string(::getpid()) + "_" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path file(const char* name) const { return folder_ / name; }

  std::filesystem::path folder_;
};

std::vector<float> counted(size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

// One of everything; `values` goes to /group/large, [3, 300, 400].
void write_sample(const std::filesystem::path& path, const std::vector<float>& values) {
  oscar::AtomicFile out(path);
  Writer writer(out);
  writer.create_group("/group");
  writer.write(DatasetView{"/group/large", Dtype::kF32, {3, 300, 400}, values.data(), true});
  const int64_t count = -7;
  writer.write(DatasetView{"/group/count", Dtype::kI64, {}, &count});
  const std::vector<uint8_t> kinds = {0, 255};
  writer.write(DatasetView{"/group/kinds", Dtype::kU8, {2}, kinds.data()});
  writer.write(Attribute{"/", "text", std::string("π and more")});
  writer.write(Attribute{"/", "empty", std::string()});
  writer.write(Attribute{"/", "long", std::string(200000, 'x')});
  writer.write(Attribute{"/group", "integer", int64_t{1} << 62});
  writer.write(Attribute{"/group", "real", 0.1});
  writer.close();
  out.commit();
}

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string refusal_of(const std::filesystem::path& path) {
  try {
    const Reader reader(path);
  } catch (const oscar::Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST_F(Hdf5, EverythingWrittenComesBackExactly) {
  const auto values = counted(3 * 300 * 400);
  write_sample(file("a.h5"), values);
  const Reader reader(file("a.h5"));
  ASSERT_EQ(reader.objects().size(), 5U);
  EXPECT_EQ(reader.objects()[2].path, "/group/count");
  const Dataset large = reader.read("/group/large");
  EXPECT_EQ(large.shape, (Shape{3, 300, 400}));
  EXPECT_EQ(std::get<std::vector<float>>(large.data), values);
  EXPECT_EQ(std::get<std::vector<int64_t>>(reader.read("/group/count").data),
            std::vector<int64_t>{-7});
  EXPECT_EQ(std::get<std::vector<uint8_t>>(reader.read("/group/kinds").data),
            (std::vector<uint8_t>{0, 255}));
  const auto attributes = reader.attributes();
  ASSERT_EQ(attributes.size(), 5U);
  EXPECT_EQ(attributes[0].name, "empty");
  EXPECT_EQ(std::get<std::string>(attributes[0].value), "");
  EXPECT_EQ(std::get<std::string>(attributes[1].value), std::string(200000, 'x'));
  EXPECT_EQ(std::get<std::string>(attributes[2].value), "π and more");
  EXPECT_EQ(std::get<int64_t>(attributes[3].value), int64_t{1} << 62);
  EXPECT_EQ(std::get<double>(attributes[4].value), 0.1);
}

// A chunk is stored in full: a list just longer than one would take two.
TEST_F(Hdf5, AListJustAboveAChunkTakesHardlyMoreThanItself) {
  const std::vector<uint8_t> bytes((1 << 20) + 5000, 7);
  oscar::AtomicFile out(file("a.h5"));
  Writer writer(out);
  writer.write(DatasetView{"/bytes", Dtype::kU8, {bytes.size()}, bytes.data()});
  writer.close();
  out.commit();
  EXPECT_LT(std::filesystem::file_size(file("a.h5")), bytes.size() + 8192);
}

TEST_F(Hdf5, EqualCallsGiveEqualBytes) {
  const auto values = counted(3 * 300 * 400);
  write_sample(file("a.h5"), values);
  ::sleep(1);  // object times have a resolution of one second
  write_sample(file("b.h5"), values);
  EXPECT_TRUE(bytes_of(file("a.h5")) == bytes_of(file("b.h5")));
}

TEST_F(Hdf5, EveryFlippedByteOfStoredDataIsNoticed) {
  const auto values = counted(64);
  {
    oscar::AtomicFile out(file("a.h5"));
    Writer writer(out);
    writer.write(DatasetView{"/data", Dtype::kF32, {64}, values.data()});
    writer.close();
    out.commit();
  }
  const std::string whole = bytes_of(file("a.h5"));
  const std::string raw(reinterpret_cast<const char*>(values.data()), 64 * sizeof(float));
  const size_t begin = whole.find(raw);
  ASSERT_NE(begin, std::string::npos);
  for (const size_t offset : {size_t{0}, size_t{101}, raw.size() - 1}) {
    std::string damaged = whole;
    damaged[begin + offset] = static_cast<char>(damaged[begin + offset] ^ 0x10);
    write_bytes(file("b.h5"), damaged);
    EXPECT_NE(refusal_of(file("b.h5")).find("checksum"), std::string::npos) << offset;
  }
}

TEST_F(Hdf5, TruncationAtAnyPointIsRefused) {
  write_sample(file("a.h5"), counted(3 * 300 * 400));
  const std::string whole = bytes_of(file("a.h5"));
  for (const size_t length :
       {size_t{0}, size_t{7}, size_t{100}, whole.size() / 2, whole.size() - 1}) {
    write_bytes(file("b.h5"), whole.substr(0, length));
    EXPECT_NE(refusal_of(file("b.h5")).find("cut short"), std::string::npos) << length;
  }
}

TEST_F(Hdf5, DamagedMetadataNeverEndsTheProgram) {
  write_sample(file("a.h5"), counted(3 * 300 * 400));
  const std::string whole = bytes_of(file("a.h5"));
  for (size_t place = 8; place < 1600; place += 97) {
    std::string damaged = whole;
    damaged[place] = static_cast<char>(~damaged[place]);
    write_bytes(file("b.h5"), damaged);
    refusal_of(file("b.h5"));  // any answer but a crash; the bytes may be unused ones
  }
}

TEST_F(Hdf5, SizesAboveTheLimitsAreRefusedBeforeAllocation) {
  write_sample(file("a.h5"), counted(3 * 300 * 400));
  Limits limits;
  limits.max_dataset_bytes = 1000;
  try {
    const Reader reader(file("a.h5"), limits);
    FAIL() << "accepted";
  } catch (const oscar::Error& error) {
    EXPECT_NE(error.info().where.find("/group/large"), std::string::npos);
    EXPECT_NE(error.info().expected.find("1000"), std::string::npos);
  }
}

TEST_F(Hdf5, IntegersOfAnyWidthAreReadAndFloatsAreRefused) {
  {
    oscar::AtomicFile out(file("ids.h5"));
    Writer writer(out);
    const std::vector<int32_t> ids = {5, -1, 7, 8, 9, 10};
    writer.write(DatasetView{"/ids", Dtype::kI32, {2, 3}, ids.data()});
    const std::vector<float> floats = {1, 2};
    writer.write(DatasetView{"/floats", Dtype::kF32, {2}, floats.data()});
    writer.close();
    out.commit();
  }
  const oscar::InputFile input(file("ids.h5"));
  EXPECT_EQ(list_datasets(input).size(), 2U);
  const IntegerArray array = read_integers(input, "ids");
  EXPECT_EQ(array.shape, (Shape{2, 3}));
  EXPECT_EQ(array.values, (std::vector<int64_t>{5, -1, 7, 8, 9, 10}));
  EXPECT_THROW(read_integers(input, "/floats"), oscar::Error);
  EXPECT_THROW(read_integers(input, "/absent"), oscar::Error);
}

TEST_F(Hdf5, AFileThatMayNotGrowIsNamedInTheSystemsWordsWithAHint) {
  const auto values = counted(1 << 20);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 1 << 16, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  try {
    oscar::AtomicFile out(file("a.h5"));
    Writer writer(out);
    writer.write(DatasetView{"/data", Dtype::kF32, {1 << 20}, values.data()});
    writer.close();
    ADD_FAILURE() << "written";
  } catch (const oscar::Error& error) {
    EXPECT_EQ(error.info().found, "File too large");
    EXPECT_NE(error.info().hint.find("choose another folder"), std::string::npos);
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(Hdf5, WhatIsReadIsWhatWasCheckedWhateverTakesItsName) {
  const auto values = counted(3 * 300 * 400);
  write_sample(file("a.h5"), values);
  write_bytes(file("b.h5"), "something else");
  const Reader reader(file("a.h5"));
  std::filesystem::rename(file("b.h5"), file("a.h5"));
  EXPECT_EQ(std::get<std::vector<float>>(reader.read("/group/large").data), values);
  EXPECT_NO_THROW(reader.require_unchanged());
}

TEST_F(Hdf5, AFileThatIsWrittenToWhileItIsReadIsNamed) {
  write_sample(file("a.h5"), counted(3 * 300 * 400));
  const Reader reader(file("a.h5"));
  std::ofstream(file("a.h5"), std::ios::app) << "more";
  EXPECT_THROW(reader.require_unchanged(), oscar::Error);
}

TEST_F(Hdf5, MissingFilesAndFoldersAreErrorsWithTheirName) {
  EXPECT_NE(refusal_of(file("absent.h5")).find("No such file"), std::string::npos);
  EXPECT_NE(refusal_of(folder_).find("not a regular file"), std::string::npos);
}

TEST_F(Hdf5, OnlyTheLeadingPartThatIsNeededIsDecoded) {
  {
    oscar::AtomicFile out(file("ids.h5"));
    Writer writer(out);
    const std::vector<int32_t> ids(1 << 20, 7);
    writer.write(DatasetView{"/stream", Dtype::kI32, {1 << 20}, ids.data(), true});
    writer.write(DatasetView{"/rows", Dtype::kI32, {1 << 10, 1 << 10}, ids.data(), true});
    writer.close();
    out.commit();
  }
  const oscar::InputFile ids(file("ids.h5"));
  const IntegerArray stream = read_integers(ids, "stream", 1000);
  EXPECT_EQ(stream.shape, (Shape{1000}));
  EXPECT_EQ(stream.values, std::vector<int64_t>(1000, 7));
  EXPECT_EQ(stream.left, (1U << 20) - 1000U);
  const IntegerArray rows = read_integers(ids, "rows", 1025);
  EXPECT_EQ(rows.shape, (Shape{2, 1 << 10}));
  EXPECT_EQ(rows.left, (1U << 20) - 2048U);
  EXPECT_EQ(read_integers(ids, "stream").left, 0U);
  EXPECT_EQ(read_integers(ids, "rows", 0).values.size(), 0U);
}

}  // namespace
