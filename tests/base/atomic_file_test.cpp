// An output file appears whole under its name, or leaves nothing behind.
#include "oscar/base/atomic_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"

namespace {

using namespace oscar;
using namespace oscar_test;

class AtomicFiles : public testing::Test {
 protected:
  long files() const {
    return std::distance(std::filesystem::directory_iterator(folder_.path()), {});
  }

  const TemporaryFolder folder_;
};

TEST_F(AtomicFiles, ReplaceWhatIsThereAndLeaveNoOtherName) {
  const auto path = folder_.path() / "a.txt";
  for (const char* content : {"first", "the second", ""}) {
    write_file_atomically(path, content);
    EXPECT_EQ(read_text_file(path), content);
    EXPECT_EQ(files(), 1);
  }
}

TEST_F(AtomicFiles, LeaveTheOldFileAndNothingElseUnlessCommitted) {
  const auto path = folder_.path() / "a.txt";
  write_file_atomically(path, "old");
  {
    const AtomicFile abandoned(path);
    EXPECT_EQ(files(), 2);
  }
  EXPECT_EQ(files(), 1);
  EXPECT_EQ(read_text_file(path), "old");
}

TEST_F(AtomicFiles, RefuseNamesThatCanNotBecomeAFile) {
  for (const auto& path :
       {std::filesystem::path(), folder_.path(), folder_.path() / "missing" / "a.txt"}) {
    EXPECT_THROW(AtomicFile{path}, Error) << path;
  }
  EXPECT_EQ(files(), 0);
}

}  // namespace
