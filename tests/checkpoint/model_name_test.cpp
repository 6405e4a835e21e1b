// A model is called what its publisher calls it, and what its folder is called only without that.
#include "oscar/checkpoint/model_name.h"

#include <gtest/gtest.h>

#include "checkpoint/model_folder.h"

namespace {

using oscar::model_name;
using oscar_test::TemporaryFolder;
using oscar_test::write_file;
namespace fs = std::filesystem;

TEST(ModelName, OfAFolderIsTheOneThatItsConfigStates) {
  const TemporaryFolder place;
  const fs::path folder = place.path() / "my-copy";
  fs::create_directories(folder);
  EXPECT_EQ(model_name(folder, "Qwen/Qwen3-8B"), "Qwen/Qwen3-8B");
  EXPECT_EQ(model_name(folder, ""), "my-copy");
  EXPECT_EQ(model_name(folder / "", ""), "my-copy");
}

TEST(ModelName, OfAFolderIsNeverAPathThatItsConfigStates) {
  const TemporaryFolder place;
  const fs::path folder = place.path() / "my-copy";
  fs::create_directories(folder);
  for (const char* path : {"/home/someone/out", "./out", "out/run/3", "../out", "C:\\models\\a",
                           "a/b\n", "<b>/x", "model"}) {
    EXPECT_EQ(model_name(folder, path), "my-copy") << path;
  }
}

TEST(ModelName, InTheHubsCacheIsTheOneThatItWasFetchedBy) {
  const TemporaryFolder cache;
  const fs::path snapshot = cache.path() / "models--Owner--A-Fine--Tune" / "snapshots" / "0abc";
  fs::create_directories(snapshot);
  EXPECT_EQ(model_name(snapshot, ""), "Owner/A-Fine--Tune");
  EXPECT_EQ(model_name(snapshot, "Other/Base"), "Owner/A-Fine--Tune")
      << "configurations of fine-tunes name what they were made from";
  const fs::path other = cache.path() / "datasets--Owner--Texts" / "snapshots" / "0abc";
  fs::create_directories(other);
  EXPECT_EQ(model_name(other, ""), "0abc");
  const fs::path odd = cache.path() / "models--Owner" / "snapshots" / "0abc";
  fs::create_directories(odd);
  EXPECT_EQ(model_name(odd, ""), "0abc");
}

TEST(ModelName, OfAGgufFileIsItsTitle) {
  const TemporaryFolder place;
  const fs::path file = place.path() / "small-1.5B.Q8_0.gguf";
  write_file(file, "");
  EXPECT_EQ(model_name(file, "Small Model 1.5B"), "Small Model 1.5B");
  for (const std::string& title : {std::string(), std::string("two\nlines"), std::string(" "),
                                   std::string("\x1b[31m"), std::string(97, 'a')}) {
    EXPECT_EQ(model_name(file, title), "small-1.5B.Q8_0") << title;
  }
}

}  // namespace
