// An output file appears whole under its name, or leaves nothing behind; streams are written to.
#include "oscar/base/atomic_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <optional>
#include <thread>
#include <vector>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"

namespace {

using namespace oscar;
using namespace oscar_test;
namespace fs = std::filesystem;

class AtomicFiles : public testing::Test {
 protected:
  long files() const { return std::distance(fs::directory_iterator(folder_.path()), {}); }
  // A name as temporaries have it, as a killed run leaves it.
  fs::path left_by_a_killed_run(const std::string& target) const {
    const fs::path path = folder_.path() / (target + ".0123456789abcdef.tmp");
    std::ofstream(path) << "half";
    return path;
  }
  std::string refusal(const fs::path& path, Replace replace = Replace::kYes) const {
    try {
      write_file_atomically(path, "new", replace);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  const TemporaryFolder folder_;
  const fs::path path_ = folder_.path() / "a.txt";
};

TEST_F(AtomicFiles, ReplaceWhatIsThereAndLeaveNoOtherName) {
  for (const char* content : {"first", "the second", ""}) {
    write_file_atomically(path_, content);
    EXPECT_EQ(read_text_file(path_), content);
    EXPECT_EQ(files(), 1);
  }
}

TEST_F(AtomicFiles, LeaveTheOldFileAndNothingElseUnlessCommitted) {
  write_file_atomically(path_, "old");
  {
    const AtomicFile abandoned(path_);
    EXPECT_EQ(files(), 2);
  }
  EXPECT_EQ(files(), 1);
  EXPECT_EQ(read_text_file(path_), "old");
}

TEST_F(AtomicFiles, RefuseNamesThatCanNotBecomeAFile) {
  fs::create_symlink("loop", folder_.path() / "loop");
  for (const auto& path : {fs::path(), folder_.path(), folder_.path() / "missing" / "a.txt",
                           folder_.path() / "loop"}) {
    EXPECT_THROW(AtomicFile{path}, Error) << path;
  }
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFiles, ReplaceOnlyWhereTheyMay) {
  write_file_atomically(path_, "old", Replace::kNo);
  EXPECT_NE(refusal(path_, Replace::kNo).find("--force"), std::string::npos);
  EXPECT_EQ(read_text_file(path_), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFiles, KeepWhatWasMadeWhileTheyWereWritten) {
  AtomicFile file(path_, Replace::kNo);
  file.append("late");
  write_file(path_, "early");
  EXPECT_THROW(file.commit(), Error);
  EXPECT_EQ(read_text_file(path_), "early");
}

TEST_F(AtomicFiles, KeepWhatReplacedTheFileThatTheyWereToReplace) {
  for (const bool replaced : {false, true}) {
    write_file(path_, "one");
    AtomicFile file(path_, Replace::kIfUnchanged);
    file.append("two");
    if (replaced) {
      write_file(folder_.path() / "other", "three");
      fs::rename(folder_.path() / "other", path_);
      EXPECT_THROW(file.commit(), Error);
    } else {
      file.commit();
    }
    EXPECT_EQ(read_text_file(path_), replaced ? "three" : "two");
  }
}

TEST_F(AtomicFiles, ReplaceWhatLinksLeadToAndKeepTheLinks) {
  fs::create_directory(folder_.path() / "sub");
  fs::create_symlink("sub/b.txt", folder_.path() / "link");
  fs::create_symlink("link", folder_.path() / "link to link");
  for (const char* content : {"made", "replaced"}) {
    write_file_atomically(folder_.path() / "link to link", content);
    EXPECT_EQ(read_text_file(folder_.path() / "sub" / "b.txt"), content);
  }
  EXPECT_TRUE(fs::is_symlink(folder_.path() / "link"));
  EXPECT_TRUE(fs::is_symlink(folder_.path() / "link to link"));
  EXPECT_EQ(files(), 3);
}

TEST_F(AtomicFiles, AreWrittenIntoAFifoAndLeaveItThere) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  const std::string content(300000, 'x');  // more than a pipe holds
  std::string read;
  std::thread reader([&] {
    std::ifstream stream(path_, std::ios::binary);
    read.assign(std::istreambuf_iterator<char>(stream), {});
  });
  write_file_atomically(path_, content, Replace::kNo);
  reader.join();
  EXPECT_TRUE(read == content);
  EXPECT_TRUE(fs::is_fifo(path_));
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFiles, AreWrittenIntoADeviceAndLeaveItThere) {
  // A twin of the machine's own; who may not make one cannot harm it either.
  if (::mknod(path_.c_str(), S_IFCHR | 0600, makedev(1, 3)) != 0) GTEST_SKIP() << "not root";
  try {
    write_file_atomically(path_, "gone");
  } catch (const Error&) {  // a folder mounted without devices
  }
  EXPECT_TRUE(fs::is_character_file(path_));
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFiles, AreNotMadeWhereAPlantedNameStands) {
  // No name can be foreseen, but one that is met by chance is not followed either.
  write_file(folder_.path() / "precious", "precious");
  fs::create_symlink("precious", folder_.path() / "a.txt.0123456789abcdef.tmp");
  write_file_atomically(path_, "new");
  EXPECT_EQ(read_text_file(folder_.path() / "precious"), "precious");
  EXPECT_EQ(read_text_file(path_), "new");
}

TEST_F(AtomicFiles, RemoveWhatAKilledRunLeftOfTheSameTargetAlone) {
  const fs::path mine = left_by_a_killed_run("a.txt"), other = left_by_a_killed_run("b.txt");
  const fs::path users = folder_.path() / "a.txt.notes.tmp";
  write_file(users, "mine");
  write_file_atomically(path_, "new");
  EXPECT_FALSE(fs::exists(mine));
  EXPECT_TRUE(fs::exists(other));
  EXPECT_TRUE(fs::exists(users));
}

TEST_F(AtomicFiles, AreRemovedWhenALibraryEndsTheProcessAndThoseOfItsParentAreNot) {
  EXPECT_FALSE(remove_unfinished());
  write_file_atomically(path_, "done");
  EXPECT_FALSE(remove_unfinished()) << "what is in its place is finished";
  const AtomicFile parents(folder_.path() / "parents.txt");
  const pid_t child = ::fork();
  if (child == 0) {
    bool well = !remove_unfinished();
    const AtomicFile own(folder_.path() / "own.txt");
    well = well && files() == 3 && remove_unfinished() && files() == 2;
    ::_exit(well ? 0 : 1);  // runs no destructor, as exit() would not
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(files(), 2);
  EXPECT_TRUE(remove_unfinished());
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFiles, RefuseATargetThatAnotherRunIsWriting) {
  const fs::path theirs = left_by_a_killed_run("a.txt");
  const int held = ::open(theirs.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(held, LOCK_EX), 0);
  EXPECT_NE(refusal(path_).find("another run is writing"), std::string::npos);
  EXPECT_EQ(read_text_file(theirs), "half");
  EXPECT_EQ(files(), 1);
  ::close(held);
  EXPECT_EQ(refusal(path_), "");
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFiles, RefuseATargetThatAnotherRunMadeWhileTheyWaitedForIt) {
  std::optional<AtomicFile> first(std::in_place, path_, Replace::kNo);
  auto second = std::async(std::launch::async, [&] { AtomicFile(path_, Replace::kNo); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  first->commit();
  first.reset();
  EXPECT_THROW(second.get(), Error);
}

TEST_F(AtomicFiles, HaveOneWriterOfManyThatBeginAtOnce) {
  constexpr int kRounds = 100, kRuns = 2;
  for (int round = 0; round < kRounds; ++round) {
    fs::remove(path_);
    std::vector<int> written(kRuns), refused(kRuns);
    std::vector<std::thread> runs;
    for (int run = 0; run < kRuns; ++run) {
      runs.emplace_back([&, run] {
        try {
          AtomicFile file(path_, Replace::kNo);
          file.append(std::to_string(run));
          file.commit();
          written[run] = 1;
        } catch (const Error&) {
          refused[run] = 1;
        }
      });
    }
    for (std::thread& run : runs) run.join();
    ASSERT_EQ(written[0] + written[1], 1) << round;
    ASSERT_EQ(refused[0] + refused[1], 1) << round;
    ASSERT_EQ(read_text_file(path_), written[0] == 1 ? "0" : "1");
    ASSERT_EQ(files(), 1);
  }
}

}  // namespace
