#include "oscar/model/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <cstdlib>

#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/sha256.h"

// Model folders are found by path or by name, and what they hold is hashed.

namespace {

using namespace oscar;
using namespace oscar_test;

const char* const kConfig =
    R"({"model_type":"qwen3","hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":4,"vocab_size":16})";

void write_model(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  write_file(folder / "config.json", kConfig);
  write_file(folder / "model.safetensors", safetensors_bytes({{"a", {{1}, {1.0f}}}}));
}

// Sets $OSCAR_DATASETS for one test.
struct Datasets {
  explicit Datasets(const std::string& path) { ::setenv("OSCAR_DATASETS", path.c_str(), 1); }
  ~Datasets() { ::unsetenv("OSCAR_DATASETS"); }
};

TEST(Checkpoint, IsFoundByNameUnderTheDatasetsVariable) {
  TemporaryFolder folder;
  write_model(folder.path() / "some-model");
  const Datasets variable(folder.path().string());
  EXPECT_EQ(find_model("some-model"), folder.path() / "some-model");
  const Checkpoint checkpoint = open_checkpoint("some-model");
  EXPECT_EQ(checkpoint.name, "some-model");
  EXPECT_EQ(checkpoint.config.num_layers, 1);
}

TEST(Checkpoint, TinyGqaResolvesInTheSourceTree) {
  const auto found = find_model("tiny-gqa");
  EXPECT_EQ(found, std::filesystem::path(OSCAR_SOURCE_DIR) / "datasets/tiny-gqa");
}

TEST(Checkpoint, DataOfTheToolkitIsFoundWhereNoEmbeddedModelLies) {
  TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "needle");
  const Datasets variable(folder.path().string());
  EXPECT_EQ(find_data("needle"), folder.path() / "needle");
  EXPECT_EQ(find_data("real-text"), std::filesystem::path(OSCAR_SOURCE_DIR) / "datasets/real-text");
  EXPECT_THROW(find_data("no-such-data"), Error);
}

TEST(Checkpoint, AnUnknownNameListsTheModelsThatExist) {
  TemporaryFolder folder;
  write_model(folder.path() / "some-model");
  const Datasets variable(folder.path().string());
  for (const char* name : {"other-model", "/nowhere/at/all", "", "../some-model"}) {
    try {
      find_model(name);
      FAIL() << name << " was found";
    } catch (const Error& error) {
      EXPECT_NE(error.info().expected.find("some-model"), std::string::npos);
    }
  }
}

TEST(Checkpoint, NamesTheFolderEvenWithATrailingSlash) {
  TemporaryFolder folder;
  write_model(folder.path() / "m");
  EXPECT_EQ(open_checkpoint((folder.path() / "m/").string()).name, "m");
}

TEST(Checkpoint, HashesConfigTokenizerAndChatTemplate) {
  TemporaryFolder folder;
  write_model(folder.path());
  Checkpoint bare = open_checkpoint(folder.path().string());
  EXPECT_EQ(bare.config_sha256, sha256_of(kConfig));
  EXPECT_EQ(bare.tokenizer_sha256, "");
  EXPECT_EQ(bare.chat_template_sha256, "");
  write_file(folder.path() / "tokenizer.json", "{}");
  const auto template_hash = [&] {
    return open_checkpoint(folder.path().string()).chat_template_sha256;
  };
  write_file(folder.path() / "tokenizer_config.json", R"({"chat_template":"one"})");
  EXPECT_EQ(open_checkpoint(folder.path().string()).tokenizer_sha256, sha256_of("{}"));
  EXPECT_EQ(template_hash(), sha256_of("one"));
  write_file(folder.path() / "tokenizer_config.json",
             R"({"chat_template":[{"name":"tool_use","template":"no"},
                                  {"name":"default","template":"two"}]})");
  EXPECT_EQ(template_hash(), sha256_of("two"));
  EXPECT_EQ(read_chat_template(folder.path()).texts,
            (std::map<std::string, std::string>{{"default", "two"}, {"tool_use", "no"}}));
  write_file(folder.path() / "chat_template.jinja", "three");
  EXPECT_EQ(template_hash(), sha256_of("three"));
}

TEST(Checkpoint, KnowsTheTokensThatItsTemplateMayWrite) {
  TemporaryFolder folder;
  write_model(folder.path());
  write_file(folder.path() / "tokenizer_config.json",
             R"({"chat_template": "one", "bos_token": {"content": "<s>", "lstrip": false},
                 "eos_token": "</s>", "unk_token": null, "add_bos_token": true,
                 "extra_special_tokens": {"image_token": "<img>"}})");
  write_file(folder.path() / "special_tokens_map.json",
             R"({"eos_token": "<other>", "pad_token": "<pad>"})");
  EXPECT_EQ(read_chat_template(folder.path()).special_tokens,
            (std::map<std::string, std::string>{{"bos_token", "<s>"},
                                                {"eos_token", "</s>"},
                                                {"image_token", "<img>"},
                                                {"pad_token", "<pad>"}}));
}

TEST(Checkpoint, SaysWhatIsMissingOrMalformed) {
  TemporaryFolder folder;
  const auto message = [&] {
    try {
      open_checkpoint(folder.path().string());
    } catch (const Error& error) {
      return error.info().what;
    }
    return std::string("opened");
  };
  EXPECT_EQ(message(), "the model folder has no config.json");
  write_file(folder.path() / "mmproj-a.gguf", "");
  EXPECT_EQ(message(), "the model folder has no config.json");
  write_file(folder.path() / "model.gguf", "");
  EXPECT_EQ(message(), "the folder holds GGUF files and no config.json");
  write_file(folder.path() / "config.json", "{\"model_type\":");
  EXPECT_EQ(message(), "malformed JSON");
  write_file(folder.path() / "config.json", kConfig);
  EXPECT_EQ(message(), "no weights were found");
  write_model(folder.path());
  EXPECT_EQ(message(), "opened");
}

}  // namespace

// A model's name on the Hub is looked up where Hugging Face's tools keep what they have fetched.

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

// A model is called what its publisher calls it, and what its folder is called only without that.

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
