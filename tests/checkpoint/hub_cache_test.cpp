// A model's name on the Hub is looked up where Hugging Face's tools keep what they have fetched.
#include "oscar/checkpoint/hub_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/checkpoint/checkpoint.h"

namespace {

using namespace oscar;
using oscar_test::TemporaryFolder;
using oscar_test::write_file;

// The environment with the cache in a folder of the test.
class HubCache : public testing::Test {
 protected:
  HubCache() { ::setenv("HF_HUB_CACHE", folder_.path().c_str(), 1); }
  ~HubCache() override { ::unsetenv("HF_HUB_CACHE"); }

  void add(const std::string& revision) {
    const auto model = folder_.path() / "models--Owner--Model-1.5B";
    std::filesystem::create_directories(model / "refs");
    std::filesystem::create_directories(model / "snapshots" / "abc");
    write_file(model / "refs" / "main", revision);
    write_file(model / "snapshots" / "abc" / "config.json", "{}");
  }

  TemporaryFolder folder_;
};

TEST_F(HubCache, FindsTheRevisionThatMainNames) {
  EXPECT_EQ(find_in_hub_cache("Owner/Model-1.5B"), std::nullopt);
  add("abc\n");
  EXPECT_EQ(find_in_hub_cache("Owner/Model-1.5B"),
            folder_.path() / "models--Owner--Model-1.5B" / "snapshots" / "abc");
  EXPECT_EQ(find_model("Owner/Model-1.5B").filename(), "abc");
  EXPECT_EQ(find_in_hub_cache("Owner/Other"), std::nullopt);
}

TEST_F(HubCache, FollowsNoRevisionThatLeadsElsewhere) {
  for (const char* revision : {"", "..", "../../elsewhere", "/etc", "abd"}) {
    add(revision);
    EXPECT_EQ(find_in_hub_cache("Owner/Model-1.5B"), std::nullopt) << revision;
  }
}

TEST_F(HubCache, AModelThatIsNotThereIsAnsweredWithTheCommandThatFetchesIt) {
  try {
    find_model("Owner/Other");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("hf download Owner/Other --local-dir Other"),
              std::string::npos)
        << error.what();
  }
}

TEST(HubName, HasAnOwnerAndAModel) {
  EXPECT_TRUE(is_hub_name("Qwen/Qwen3-8B"));
  for (const char* name :
       {"tiny-gqa", "/models/a", "models/", "a/b/c", "../a", "a/..", "a/b c", ""}) {
    EXPECT_FALSE(is_hub_name(name)) << name;
  }
}

}  // namespace
