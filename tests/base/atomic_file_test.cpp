// An output file appears whole under its name, or leaves nothing behind.
#include "oscar/base/atomic_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>

#include "oscar/base/error.h"
#include "oscar/base/json.h"

namespace {

using namespace oscar;

class AtomicFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("oscar_atomic_file_" + std::to_string(::getpid()) + "_" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  long files() const { return std::distance(std::filesystem::directory_iterator(folder_), {}); }

  std::filesystem::path folder_;
};

TEST_F(AtomicFiles, ReplaceWhatIsThereAndLeaveNoOtherName) {
  const auto path = folder_ / "a.txt";
  for (const char* content : {"first", "the second", ""}) {
    write_file_atomically(path, content);
    EXPECT_EQ(read_text_file(path), content);
    EXPECT_EQ(files(), 1);
  }
}

TEST_F(AtomicFiles, LeaveTheOldFileAndNothingElseUnlessCommitted) {
  const auto path = folder_ / "a.txt";
  write_file_atomically(path, "old");
  {
    const AtomicFile abandoned(path);
    EXPECT_EQ(files(), 2);
  }
  EXPECT_EQ(files(), 1);
  EXPECT_EQ(read_text_file(path), "old");
}

TEST_F(AtomicFiles, RefuseNamesThatCanNotBecomeAFile) {
  for (const auto& path : {std::filesystem::path(), folder_, folder_ / "missing" / "a.txt"}) {
    EXPECT_THROW(AtomicFile{path}, Error) << path;
  }
  EXPECT_EQ(files(), 0);
}

}  // namespace
