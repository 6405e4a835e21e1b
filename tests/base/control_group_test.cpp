// A container's memory limit counts where there is one.
#include "oscar/base/control_group.h"

#include <gtest/gtest.h>

#include "checkpoint/model_folder.h"

namespace {

using namespace oscar;
using namespace oscar_test;
namespace fs = std::filesystem;

struct ControlGroups : testing::Test {
  void write(const fs::path& name, const std::string& text) const {
    fs::create_directories((folder.path() / name).parent_path());
    write_file(folder.path() / name, text);
  }
  int64_t left() const { return control_group_memory(folder.path() / "membership", folder.path()); }
  TemporaryFolder folder;
};

TEST_F(ControlGroups, HaveNoLimitWhereNoneIsWritten) {
  EXPECT_EQ(left(), kNoMemoryLimit);
  write("membership", "0::/a\n");
  EXPECT_EQ(left(), kNoMemoryLimit);
  write("a/memory.max", "max\n");
  write("a/memory.current", "5\n");
  EXPECT_EQ(left(), kNoMemoryLimit);
}

TEST_F(ControlGroups, LeaveTheirLimitLessWhatIsUsedAndCannotBeDropped) {
  write("membership", "0::/a/b\n");
  write("a/b/memory.max", "1000\n");
  write("a/b/memory.current", "400\n");
  write("a/b/memory.stat", "anon 100\ninactive_file 120\nactive_file 80\nslab 1\n");
  EXPECT_EQ(left(), 800);
  write("a/memory.max", "700\n");  // of all groups in it
  write("a/memory.current", "600\n");
  EXPECT_EQ(left(), 100);
  write("a/memory.current", "900\n");
  EXPECT_EQ(left(), 0);
}

TEST_F(ControlGroups, AreSlowAboveTheirHighMark) {
  write("membership", "0::/a\n");
  write("a/memory.max", "max\n");
  write("a/memory.high", "600\n");
  write("a/memory.current", "100\n");
  EXPECT_EQ(left(), 500);
}

TEST_F(ControlGroups, ThatCanDropMoreThanTheyUseLeaveTheirLimit) {
  write("membership", "0::/\n");
  write("memory.max", "1000\n");
  write("memory.current", "100\n");
  write("memory.stat", "inactive_file 300\n");
  EXPECT_EQ(left(), 1000);
}

TEST_F(ControlGroups, OfAContainerAreTheMountItself) {
  write("membership", "0::/../outside\n");
  write("memory.max", "1000\n");
  write("memory.current", "250\n");
  EXPECT_EQ(left(), 750);
}

TEST_F(ControlGroups, OfTheFirstVersionCountToo) {
  write("membership", "5:cpu:/x\n4:memory:/a\n");
  write("memory/a/memory.limit_in_bytes", "1000\n");
  write("memory/a/memory.usage_in_bytes", "500\n");
  write("memory/a/memory.stat", "cache 300\ntotal_inactive_file 300\n");
  EXPECT_EQ(left(), 800);
  write("membership", "4:memory:/a\n0::/b\n");  // beside the second one
  EXPECT_EQ(left(), 800);
  write("memory/a/memory.limit_in_bytes", "9223372036854771712\n");  // none
  EXPECT_GT(left(), int64_t{1} << 60);
}

}  // namespace
