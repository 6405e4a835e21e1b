// Model folders are found by path or by name, and what they hold is hashed.
#include "oscar/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/sha256.h"

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
  write_file(folder.path() / "chat_template.jinja", "three");
  EXPECT_EQ(template_hash(), sha256_of("three"));
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
  write_file(folder.path() / "config.json", "{\"model_type\":");
  EXPECT_EQ(message(), "malformed JSON");
  write_file(folder.path() / "config.json", kConfig);
  EXPECT_EQ(message(), "no weights were found");
  write_model(folder.path());
  EXPECT_EQ(message(), "opened");
}

}  // namespace
