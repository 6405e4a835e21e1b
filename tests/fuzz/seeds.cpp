// A valid input or two of every program here, made by the writers and builders that tests use:
// fuzz_seeds FOLDER writes FOLDER/TARGET/NAME.
#include <cstdio>
#include <fstream>

#include "bundle/sample.h"
#include "eval/report/sample.h"
#include "io/gguf_bytes.h"
#include "oscar/base/error.h"
#include "oscar/bundle/export.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/io/hdf5.h"
#include "oscar/io/npy.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/torch_file.h"
#include "oscar/io/zip.h"
#include "text/tiny_tokenizer.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

struct Seeds {
  fs::path folder;

  fs::path path(const std::string& target, const std::string& name) const {
    fs::create_directories(folder / target);
    return folder / target / name;
  }
  void put(const std::string& target, const std::string& name, std::string_view bytes) const {
    std::ofstream(path(target, name), std::ios::binary) << bytes;
  }
};

const std::string kNul(1, '\0');

std::string source_file(const char* path) {
  return read_text_file(fs::path(OSCAR_SOURCE_DIR) / path);
}

// Parameters of every type of RoPE.
const char* const kRopes[] = {
    R"({"rope_type":"default","rope_theta":10000.0,"partial_rotary_factor":0.5})",
    R"({"rope_type":"linear","rope_theta":1e6,"factor":4.0})",
    R"({"rope_type":"llama3","rope_theta":5e5,"factor":8.0,"low_freq_factor":1.0,)"
    R"("high_freq_factor":4.0,"original_max_position_embeddings":64})",
    R"({"rope_type":"yarn","rope_theta":1e6,"factor":4.0,"beta_fast":32,"beta_slow":1,)"
    R"("original_max_position_embeddings":64,"mscale":0.7,"mscale_all_dim":0.7,"truncate":true})"};

Json small_config(const char* architecture, const char* type) {
  return {{"architectures", {architecture}},
          {"model_type", type},
          {"num_hidden_layers", 2},
          {"hidden_size", 16},
          {"intermediate_size", 32},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"head_dim", 8},
          {"vocab_size", 32},
          {"max_position_embeddings", 64},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", true}};
}

void json_files(const Seeds& seeds) {
  seeds.put("json", "values", R"({"a":[1,-2,3.5e-7,true,null,"\u00e9\n"],"b":{"c":{}}})");
  seeds.put("config", "tiny-gqa", source_file("datasets/tiny-gqa/config.json"));
  seeds.put("config", "llama", small_config("LlamaForCausalLM", "llama").dump());
  seeds.put("config", "mistral", small_config("MistralForCausalLM", "mistral").dump());
  Json experts = small_config("Qwen3MoeForCausalLM", "qwen3_moe");
  experts.update({{"num_experts", 4},
                  {"num_experts_per_tok", 2},
                  {"moe_intermediate_size", 8},
                  {"norm_topk_prob", true},
                  {"decoder_sparse_step", 1},
                  {"mlp_only_layers", Json::array({0})}});
  seeds.put("config", "experts", experts.dump());
  Json fp8 = small_config("Qwen3ForCausalLM", "qwen3");
  fp8["quantization_config"] = {{"quant_method", "fp8"},
                                {"activation_scheme", "dynamic"},
                                {"weight_block_size", {128, 128}},
                                {"modules_to_not_convert", {"lm_head"}}};
  seeds.put("config", "fp8", fp8.dump());
  Json sliding = small_config("Qwen2ForCausalLM", "qwen2");
  sliding.update({{"use_sliding_window", true}, {"sliding_window", 16}, {"max_window_layers", 1}});
  seeds.put("config", "sliding", sliding.dump());
  int number = 0;
  for (const char* rope : kRopes) {
    const std::string name = std::to_string(number++);
    seeds.put("rope", name, std::string("\x1f\x0d") + rope);
    Json config = small_config("Qwen3ForCausalLM", "qwen3");
    config["rope_scaling"] = Json::parse(rope);
    seeds.put("config", "rope" + name, config.dump());
  }
  seeds.put("memory_plan", "small", small_config("Qwen3ForCausalLM", "qwen3").dump());
  for (const char* method : {"bundle", "identity"}) {  // beside bf16: a report of all is long
    Json report = report_sample::report(2);
    for (const char* other : {"exact", "identity", "oscar", "bundle"}) {
      if (std::string_view(other) != method) report["methods"].erase(other);
    }
    seeds.put("report", method, report.dump());
  }
  seeds.put("jsonl", "lines",
            "{\"text\":\"a\"}\n\n{\"prompt\":\"b\",\"completion\":\"c\"}\n{\"title\":1}\n");
  seeds.put("chat_template", "text", R"({"chat_template":"{{ x }}"})");
  seeds.put("chat_template", "list",
            R"({"chat_template":[{"name":"default","template":"a"},{"name":"b","template":"c"}],)"
            R"("bos_token":"<s>","eos_token":{"content":"</s>"}})");
  seeds.put("licence", "front_matter",
            "---\nlicense: other\nlicense_name: \"a name\"\nlicense_link: LICENSE\n---\n# text\n");
  seeds.put("safetensors_index", "two",
            R"({"metadata":{"total_size":12},"weight_map":)"
            R"({"x":"a.safetensors","y":"a.safetensors"}})");
}

void tokenizers(const Seeds& seeds) {
  const std::string text = kNul + "the <bos>th\xc3\xa9 12345  end\n";
  nlohmann::json tiny = data_test::tiny_tokenizer();
  seeds.put("tokenizer", "byte_level", tiny.dump() + text);
  // Few tokens of characters, and one of every other component.
  nlohmann::json small = {
      {"added_tokens",
       {{{"id", 9},
         {"content", "<e>"},
         {"special", true},
         {"lstrip", true},
         {"rstrip", false},
         {"normalized", false},
         {"single_word", false}}}},
      {"normalizer",
       {{"type", "Sequence"},
        {"normalizers",
         {{{"type", "NFKC"}},
          {{"type", "Lowercase"}},
          {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}},
          {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "t"}},
          {{"type", "Prepend"}, {"prepend", "\xe2\x96\x81"}}}}}},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Digits"}, {"individual_digits", true}},
          {{"type", "Punctuation"}, {"behavior", "Isolated"}},
          {{"type", "Split"},
           {"pattern", {{"Regex", "\\s+(?!\\S)|\\p{L}{1,3}"}}},
           {"behavior", "MergedWithNext"},
           {"invert", false}},
          {{"type", "Metaspace"},
           {"replacement", "\xe2\x96\x81"},
           {"prepend_scheme", "first"},
           {"split", true}}}}}},
      {"post_processor", nullptr},
      {"decoder", nullptr},
      {"model",
       {{"type", "BPE"},
        {"unk_token", "<u>"},
        {"fuse_unk", true},
        {"byte_fallback", false},
        {"vocab",
         {{"t", 0},
          {"h", 1},
          {"e", 2},
          {"th", 3},
          {"the", 4},
          {"\xe2\x96\x81", 5},
          {"<u>", 6},
          {"1", 7}}},
        {"merges", {{"t", "h"}, {"th", "e"}}}}}};
  seeds.put("tokenizer", "characters", small.dump() + text);
  const std::string patterns[] = {
      R"((?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+)",
      R"([\p{P}\$\+<=>\^~\|]+)", R"([0-9][0-9][0-9])", R"((a+)+b|a{2,5}?)"};
  int number = 0;
  for (const std::string& pattern : patterns)
    seeds.put("regex", std::to_string(number++), pattern + text);
  seeds.put("unicode", "marks", "e\xcc\x81\xcc\xa7 \xef\xac\x81 \xe1\x84\x80\xe1\x85\xa1 \xc3");
}

void arrays(const Seeds& seeds) {
  const FloatTensors rotations = {{"k_rotation", {{1, 1, 2, 2}, {0, 1, -1, 0}}},
                                  {"k_mean", {{1, 1, 2}, {0.5F, 1}}},
                                  {"v_rotation", {{1, 1, 2, 2}, {1, 0, 0, 1}}}};
  write_safetensors(seeds.path("safetensors", "rotations"), rotations, {{"format", "pt"}});
  const std::string header = R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
                             R"("b":{"dtype":"F8_E4M3","shape":[2,1],"data_offsets":[4,6]},)"
                             R"("c":{"dtype":"F16","shape":[],"data_offsets":[6,8]}})";
  seeds.put("safetensors", "dtypes",
            oscar_test::bytes_of(uint64_t{header.size()}) + header + "\x01\x3f\x02\x40zw\x03\x3c");
  write_npz(seeds.path("npz", "rotations"), rotations);
  write_npy_int32(seeds.path("npy", "rows"), {2, 3}, {1, 2, 3, 4, 5, -6});
  seeds.put("npy", "big_endian", npy_header(">u2", {2}) + std::string("\0\1\2\3", 4));
  seeds.put("npz", "one", kNul + npy_header("<f2", {2, 2}) + std::string(8, '\x3c'));
  const TransformSet set = [] {
    TransformSet made;
    LayerTransforms& layer = made[0];
    for (SideTransform* side : {&layer.key, &layer.value}) {
      side->forward = MatrixStack<float>(1, 2, 2);
      side->forward.data = {0, 1, -1, 0};
    }
    return made;
  }();
  for (const bool per_head : {false, true}) {
    const std::string name = per_head ? "per_head" : "shared";
    const fs::path path = seeds.path("torch_file", name);
    write_torch_rotations(path, set, Side::kKey, {.per_head = per_head});
    const ZipArchive archive = ZipArchive::open(path);
    for (const auto& [member, content] : archive.members()) {
      if (!member.ends_with("data.pkl")) continue;
      seeds.put("pickle", name, content);
      seeds.put("pickle", name + "_in_file", kNul + std::string(content));
    }
  }
}

void gguf(const Seeds& seeds) {
  using oscar_test::GgufBuilder;
  GgufBuilder model;
  model.text("general.architecture", "qwen3");
  for (const auto& [key, value] : {std::pair{"block_count", 1},
                                   {"embedding_length", 32},
                                   {"feed_forward_length", 32},
                                   {"attention.head_count", 2},
                                   {"attention.head_count_kv", 1},
                                   {"attention.key_length", 16},
                                   {"attention.value_length", 16},
                                   {"context_length", 64}}) {
    model.integer(std::string("qwen3.") + key, static_cast<uint32_t>(value));
  }
  model.number("qwen3.rope.freq_base", 1e6F)
      .number("qwen3.attention.layer_norm_rms_epsilon", 1e-6F);
  model.text("tokenizer.ggml.model", "llama");
  model.texts("tokenizer.ggml.tokens", {"<unk>", "<s>", "</s>", "a", "b", "ab"});
  model.numbers<float>("tokenizer.ggml.scores", GgufType::kFloat32, {0, 0, 0, -1, -2, -3});
  model.numbers<int32_t>("tokenizer.ggml.token_type", GgufType::kInt32, {2, 3, 3, 1, 1, 1});
  model.integer("tokenizer.ggml.bos_token_id", 1).integer("tokenizer.ggml.eos_token_id", 2);
  model.tensor("blk.0.attn_q.weight", {32, 1}, 8, std::string(34, '\x01'));  // Q8_0
  model.tensor("blk.0.attn_k.weight", {32, 1}, 2, std::string(18, '\x02'));  // Q4_0
  model.f32("blk.0.attn_k_rot.weight", {2, 2}, {0, 1, -1, 0});
  model.f32("blk.0.attn_v_rot.weight", {2, 2}, {1, 0, 0, 1});
  seeds.put("gguf", "llama_tokens", model.bytes());
  GgufBuilder bytes;
  bytes.text("general.architecture", "llama").flag("tokenizer.ggml.add_bos_token", true);
  bytes.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "llama-bpe");
  bytes.texts("tokenizer.ggml.tokens", {"a", "b", "ab", "<|e|>"});
  bytes.texts("tokenizer.ggml.merges", {"a b"});
  bytes.numbers<int32_t>("tokenizer.ggml.token_type", GgufType::kInt32, {1, 1, 1, 3});
  bytes.integer("tokenizer.ggml.bos_token_id", 3).integer("tokenizer.ggml.eos_token_id", 3);
  seeds.put("gguf", "byte_tokens", bytes.bytes());
}

// A small file that is no bundle.
void token_ids(const fs::path& path) {
  AtomicFile file(path);
  hdf5::Writer writer(file);
  writer.create_group("/corpus");
  const hdf5::Dataset rows{"/corpus/rows", {2, 3}, std::vector<int32_t>{1, 2, 3, 4, 5, 6}};
  const hdf5::Dataset ids{"/ids", {4}, std::vector<int64_t>{7, 8, 9, 10}};
  writer.write(hdf5::view(rows));
  writer.write(hdf5::view(ids));
  writer.close();
  file.commit();
}

void bundles(const Seeds& seeds) {
  for (const char which : {'\0', '\1', '\2', '\3', '\4'}) {
    seeds.put("bundle", std::to_string(which), std::string(1, which));
  }
  seeds.put("bundle", "earlier", "\xff");
  // One change of every kind.
  for (char kind = 0; kind < 11; ++kind) {
    seeds.put("bundle", "change" + std::to_string(kind),
              std::string{'\0', kind, '\3', '\2', '\4', 'x', 'y', 'z', 'w', '\0', '\0', '\0'});
  }
  Bundle bundle = sample::statistics_bundle({.layers = 1, .heads = 1, .query_heads = 1, .dim = 2});
  bundle.fingerprint = {};
  bundle.statistics[0].attended = {};
  write_bundle(bundle, seeds.path("hdf5", "statistics"), true);
  token_ids(seeds.path("hdf5", "ids"));
  const fs::path exported = seeds.folder / "export";
  constexpr sample::Size kSmall{.layers = 1, .heads = 2, .query_heads = 2, .dim = 4};
  export_bundle(sample::rotation_bundle(TransformKind::kOscar, kSmall), "x.h5",
                find_exchange_format("npz"), false, exported);
  fs::rename(exported / kManifestName, seeds.path("export_manifest", "npz"));
  fs::remove_all(exported);
}

}  // namespace
}  // namespace oscar

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "fuzz_seeds FOLDER\n");
    return 2;
  }
  ::setenv("SOURCE_DATE_EPOCH", "1700000000", 1);
  try {
    const oscar::Seeds seeds{arguments[1]};
    oscar::json_files(seeds);
    oscar::tokenizers(seeds);
    oscar::arrays(seeds);
    oscar::gguf(seeds);
    oscar::bundles(seeds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz_seeds: %s\n", error.what());
    return 1;
  }
  return 0;
}
