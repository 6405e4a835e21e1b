// Files that are read are told apart from what replaces or changes them, and links that lead out of
// a folder from those within.
#include "oscar/base/input_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/json_text.h"
#include "oscar/base/sha256.h"
#include "oscar/checkpoint/checkpoint.h"
#include "oscar/io/mapped_file.h"

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
