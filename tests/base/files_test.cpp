#include "oscar/base/files.h"

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

#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/checkpoint.h"

// An output file appears whole under its name, or leaves nothing behind; streams are written to.

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
  // A copy of the machine's own; who may not make one cannot harm it either.
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

// Output folders appear whole or not at all.

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

// Files that are read are told apart from what replaces or changes them, and links that lead out of
// a folder from those within.

namespace {

using namespace oscar;
using namespace oscar_test;
namespace fs = std::filesystem;

TEST(InputFiles, AreRegularFilesAndNeverWaitForAWriter) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder.path() / "fifo").c_str(), 0600), 0);
  EXPECT_THROW(InputFile(folder.path() / "fifo"), Error);
  EXPECT_THROW(InputFile(folder.path()), Error);
  EXPECT_THROW(InputFile(folder.path() / "none"), Error);
}

TEST(InputFiles, AreUnchangedUntilTheyAreWrittenTo) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "a";
  write_file(path, "123");
  const InputFile file(path);
  const LongInputs inputs({path});
  EXPECT_NO_THROW(file.require_unchanged());
  EXPECT_NO_THROW(inputs.require_unchanged());
  EXPECT_EQ(file.sha256(), sha256_of("123"));
  write_file(path, "1234");
  EXPECT_THROW(file.require_unchanged(), Error);
  EXPECT_THROW(inputs.require_unchanged(), Error);
}

TEST(InputFiles, AreReadAsTheyWereWhenAnotherTakesTheirName) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "a";
  write_file(path, "123");
  write_file(folder.path() / "b", "123");
  const InputFile file(path);
  const LongInputs inputs({path});
  fs::rename(folder.path() / "b", path);
  EXPECT_NO_THROW(file.require_unchanged());
  EXPECT_THROW(inputs.require_unchanged(), Error);
  fs::remove(path);
  EXPECT_THROW(inputs.require_unchanged(), Error);
}

template <typename Work>
std::string refusal(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(InputFiles, MayNotBeFifosWhereverAFileIsRead) {
  const TemporaryFolder folder;
  const auto fifo = folder.path() / "config.json";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& text :
       {refusal([&] { read_text_file(fifo); }), refusal([&] { sha256_of_file(fifo); }),
        refusal([&] { const MappedFile file(fifo); }),
        refusal([&] { open_checkpoint(folder.path().string()); })}) {
    EXPECT_NE(text.find("not a regular file"), std::string::npos) << text;
    EXPECT_NE(text.find("config.json"), std::string::npos) << text;
  }
}

TEST(InputFiles, MayNotBeFoldersOrMissing) {
  const TemporaryFolder folder;
  EXPECT_NE(refusal([&] { read_text_file(folder.path()); }).find("a folder"), std::string::npos);
  EXPECT_NE(refusal([&] { read_text_file(folder.path() / "no"); }).find("No such file"),
            std::string::npos);
}

TEST(InputFiles, AreRefusedBySizeWhereAConfigHasManyMegabytes) {
  const TemporaryFolder folder;
  const auto config = folder.path() / "config.json";
  write_file(config, "{}");
  std::filesystem::resize_file(config, 100 << 20);  // a hole: nothing is written
  const std::string text = refusal([&] { open_checkpoint(folder.path().string()); });
  EXPECT_NE(text.find("larger than this program accepts"), std::string::npos) << text;
  EXPECT_NE(text.find(std::to_string(kMaxConfigBytes)), std::string::npos) << text;
}

TEST(Links, LeadOutOfAFolderUnlessTheyStayInItOrInTheBlobsOfItsSnapshot) {
  const TemporaryFolder around;
  const fs::path folder = around.path() / "models" / "snapshots" / "rev";
  fs::create_directories(folder / "sub");
  fs::create_directories(around.path() / "models" / "blobs");
  write_file(around.path() / "key", "secret");
  write_file(around.path() / "models" / "blobs" / "123", "{}");
  write_file(folder / "file", "1");
  const auto outside = [&](const char* name, const char* target) {
    fs::create_symlink(target, folder / name);
    return leads_outside(folder, folder / name);
  };
  EXPECT_FALSE(leads_outside(folder, folder / "file"));
  EXPECT_FALSE(outside("a", "file"));
  EXPECT_FALSE(outside("b", "sub"));
  EXPECT_FALSE(outside("c", "../../blobs/123"));
  EXPECT_TRUE(outside("d", "../../../key"));
  EXPECT_TRUE(outside("e", "/etc/hostname"));
  EXPECT_TRUE(outside("f", "nowhere"));
  EXPECT_TRUE(outside("g", ".."));
}

}  // namespace
