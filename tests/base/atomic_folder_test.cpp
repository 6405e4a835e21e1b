// Output folders appear whole or not at all.
#include "oscar/base/atomic_folder.h"

#include <gtest/gtest.h>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"

namespace {

using namespace oscar;
using namespace oscar_test;
namespace fs = std::filesystem;

size_t entries(const fs::path& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), {}));
}

TEST(AtomicFolder, AppearsWithAllItsFilesWhenCommitted) {
  const TemporaryFolder around;
  AtomicFolder folder(around.path() / "out/");
  write_file(folder.temporary() / "a", "1");
  EXPECT_FALSE(fs::exists(around.path() / "out"));
  folder.commit();
  EXPECT_TRUE(fs::exists(around.path() / "out" / "a"));
  EXPECT_EQ(entries(around.path()), 1u);
}

TEST(AtomicFolder, LeavesNothingBehindWhenAbandoned) {
  const TemporaryFolder around;
  {
    const AtomicFolder folder(around.path() / "out");
    write_file(folder.temporary() / "a", "1");
  }
  EXPECT_EQ(entries(around.path()), 0u);
}

TEST(AtomicFolder, RefusesWhatExistsAndWhereNothingCanBeMade) {
  const TemporaryFolder around;
  write_file(around.path() / "file", "1");
  EXPECT_THROW(AtomicFolder(around.path() / "file"), Error);
  EXPECT_THROW(AtomicFolder(around.path()), Error);
  EXPECT_THROW(AtomicFolder(around.path() / "no" / "out"), Error);
  fs::create_symlink("nowhere", around.path() / "link");
  EXPECT_THROW(AtomicFolder(around.path() / "link"), Error);
  EXPECT_EQ(entries(around.path()), 2u);
}

TEST(AtomicFolder, KeepsWhatWasMadeWhileItWasFilled) {
  const TemporaryFolder around;
  AtomicFolder folder(around.path() / "out");
  fs::create_directory(around.path() / "out");
  EXPECT_THROW(folder.commit(), Error);
  EXPECT_TRUE(fs::is_empty(around.path() / "out"));
}

TEST(AtomicFolder, RemovesWhatAKilledRunLeftAndRefusesASecondRun) {
  const TemporaryFolder around;
  const fs::path left = around.path() / "out.0123456789abcdef.tmp";
  fs::create_directories(left / "sub");
  write_file(left / "sub" / "a", "1");
  const AtomicFolder folder(around.path() / "out");
  EXPECT_FALSE(fs::exists(left));
  EXPECT_THROW(AtomicFolder(around.path() / "out"), Error);
  EXPECT_EQ(entries(around.path()), 1u);
}

}  // namespace
