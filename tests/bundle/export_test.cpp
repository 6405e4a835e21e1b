#include "oscar/bundle/export.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cstring>

#include "bundle/plain_bundle.h"
#include "bundle/rotated_bundle.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/import.h"
#include "oscar/bundle/rotation_files.h"
#include "oscar/bundle/verify_export.h"
#include "oscar/io/torch_file.h"

namespace oscar {

// One row in the bytes of each backend: the golden row, and one that has ties.

namespace {

// Groups of the whole row, in the metadata dtype that the backend has first.
BackendRun run_on(const char* name, int group) {
  const Backend& backend = find_backend(name);
  CacheFormat quantizer = default_codec(backend);
  quantizer.quant_group_size = group;
  BackendRun run;
  run.format = quantizer.row_format();
  run.packing = backend.packing;
  return run;
}

std::vector<float> floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Scale 2 and minimum 0: 1, 3 and 5 lie half way between codes.
const std::vector<float> kGoldenRow = {-1.5f, .3f, .8f, 3.0f, -.5f, 1.1f, 0.0f, 2.0f};
const std::vector<float> kTieRow = {0, 6, 1, 3, 5, 2, 4, 0};

struct Golden {
  const char* backend;
  const char* codes;      // of kGoldenRow at ratio .75: 0 2 2 3 1 2 1 3
  const char* metadata;   // scale 1.1666667 and zero point 1.2857143, or minimum -1.5
  const char* tie_codes;  // of kTieRow, unclipped
};

// fp16: 1.1666667 is 3cab, 1.2857143 is 3d25, -1.5 is be00; lowest byte first. With the scale
// rounded before coding the zero point would be 1.5 / 1.1669922 = 1.2853556, 3d24.
const Golden kGolden[] = {
    {"sglang-v1", "58ee", "5555953f4a92a43f", "b41b"},
    {"sglang-v2", "58ee", "5555953f4a92a43f", "b41b"},
    {"sglang-0c88a", "58ee", "5555953f4a92a43f", "b41b"},
    {"vllm-pr46774", "e8d9", "ab3c00be", "9c27"},
    {"onnxruntime", "e8d9", "5555953f0000c0bf", "8c26"},
    {"mlx", "e8d9", "ab3c253d", "9c27"},
    {"oscar_int2", "e8d9", "ab3c243d", "9c27"},
};

TEST(CodedRow, TheGoldenRowHasTheBytesOfEachBackend) {
  for (const Golden& golden : kGolden) {
    const CodedRow row = code_row(run_on(golden.backend, 8), .75, kGoldenRow);
    EXPECT_EQ(hex(row.codes), golden.codes) << golden.backend;
    EXPECT_EQ(hex(row.metadata), golden.metadata) << golden.backend;
  }
}

TEST(CodedRow, TiesGoUpExceptWhereABackendRoundsThemToEven) {
  for (const Golden& golden : kGolden) {
    const CodedRow row = code_row(run_on(golden.backend, 8), 0, kTieRow);
    EXPECT_EQ(hex(row.codes), golden.tie_codes) << golden.backend;
  }
}

// A row of 128 values, clipped at .96; numpy's reference of these rules is
// tests/parity/test_coded_rows.py.
TEST(CodedRow, ARowOf128ValuesHasTheBytesOfEachBackend) {
  const std::vector<float> row = probe_row(128, 0);
  const struct {
    const char* backend;
    int group;
    const char *codes, *metadata;
  } goldens[] = {
      {"sglang-v1", 128, "e46dab9eb6ea791bfe27a10fe21a50deb1a5dd6b3add16932dc12962fc92b6af",
       "abaa9a3f0000c03f"},
      {"vllm-pr46774", 128, "b4dade8ad5e695e8eda9c7c8b41e23d36a7b2b569b57a2b7a71e23d37a8c4cab",
       "d53c40bf"},
      {"onnxruntime", 32, "b4dedf8ad5e695e8eda9c7c8b41e23d37a7f2b569b57a2f7a71e23d37a8c4cab",
       "abaa923f0000e8bfabaa9a3f0000e8bfabaa923f0000e8bfabaa9a3f0000e8bf"},
      {"mlx", 64, "b4dade8ad5e695e8eda9c7c8b41e23d36a7b2b569b57a2b7a71e23d37a8c4cab",
       "eb3c1a3ed53c003e"},
  };
  for (const auto& golden : goldens) {
    const CodedRow coded = code_row(run_on(golden.backend, golden.group), .96, row);
    EXPECT_EQ(hex(coded.codes), golden.codes) << golden.backend;
    EXPECT_EQ(hex(coded.metadata), golden.metadata) << golden.backend;
  }
}

TEST(CodedRow, ScaleAndZeroOfEachGroupStandSideBySide) {
  std::vector<float> row = kTieRow;
  for (const float x : kTieRow) row.push_back(2 * x - 4);  // scale 4, minimum -4
  const CodedRow coded = code_row(run_on("sglang-v1", 8), 0, row);
  EXPECT_EQ(floats(coded.metadata), (std::vector<float>{2, 0, 4, 1}));
  const CodedRow minimum = code_row(run_on("onnxruntime", 8), 0, row);
  EXPECT_EQ(floats(minimum.metadata), (std::vector<float>{2, 0, 4, -4}));
}

TEST(CodedRow, WhatCannotBeCodedIsRefused) {
  EXPECT_THROW(code_row(BackendRun{}, 0, kTieRow), Error);  // levels of its own
  EXPECT_THROW(code_row(run_on("vllm-pr46774", 5), 0, kTieRow), Error);
  std::vector<float> row = kTieRow;
  row[3] = NAN;
  EXPECT_THROW(code_row(run_on("vllm-pr46774", 8), 0, row), Error);
}

}  // namespace

// Exports of a small bundle: what is refused, what is written, and what verify makes of changes.

namespace {

using oscar_test::TemporaryFolder;
using plain::kHeads;
using plain::rotated_bundle;

ExportResult export_to(const char* format, const Bundle& bundle,
                       const std::filesystem::path& folder, bool reduce = false) {
  return export_bundle(bundle, "x.h5", find_exchange_format(format), reduce, folder);
}

std::string refusal(const char* format, const Bundle& bundle) {
  TemporaryFolder folder;
  try {
    export_to(format, bundle, folder.path() / "out");
  } catch (const Error& error) {
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    return error.what();
  }
  return "";
}

bool passes(const char* format, const std::filesystem::path& folder) {
  const auto findings = verify_export(find_exchange_format(format), folder);
  return std::all_of(findings.begin(), findings.end(), [](const auto& f) { return f.ok; });
}

std::string first_failure(const char* format, const std::filesystem::path& folder) {
  for (const Finding& finding : verify_export(find_exchange_format(format), folder)) {
    if (!finding.ok) return finding.check;
  }
  return "";
}

// Leaves the checksums of the manifest out, as someone who edits a file and fits them would.
void forget_checksums(const char* format, const std::filesystem::path& folder) {
  const auto path = folder / kManifestName;
  Json manifest = read_json_file(path);
  const ExchangeFormat& found = find_exchange_format(format);
  for (const char* file : {found.key_file, found.value_file}) {
    manifest["files"][file] = sha256_of_file(folder / file);
  }
  oscar_test::write_file(path, manifest.dump());
}

TEST(Export, WhatRunsAsItIsComesBackWithTheSameNumbers) {
  for (const char* format : {"sglang-v1", "sglang-v2", "npz", "safetensors"}) {
    const bool shared = std::string(format) == "sglang-v1";
    const Bundle bundle = rotated_bundle(shared);
    TemporaryFolder folder;
    const auto out = folder.path() / "out";
    const ExportResult result = export_to(format, bundle, out);
    EXPECT_EQ(result.layers, 2u);
    EXPECT_TRUE(passes(format, out)) << format;
    const ReadTransforms read = read_export(find_exchange_format(format), out, 2);
    for (const LayerTransforms& layer : bundle.layers) {
      for (const Side side : {Side::kKey, Side::kValue}) {
        const auto& found = side_of(read.set.at(layer.geometry.layer_id), side).forward;
        ASSERT_EQ(found.count, shared ? 1 : kHeads) << format;
        for (int head = 0; head < kHeads; ++head) {
          EXPECT_EQ(found[shared ? 0 : head], side_of(layer, side).forward[head]) << format;
        }
      }
    }
  }
}

TEST(Export, TheSameBundleGivesTheSameBytes) {
  const Bundle bundle = rotated_bundle(true);
  TemporaryFolder folder;
  for (const char* format : {"sglang-v1", "npz", "safetensors"}) {
    const ExportResult one = export_to(format, bundle, folder.path() / "one");
    export_to(format, bundle, folder.path() / "two");
    for (const std::string& file : one.files) {
      EXPECT_EQ(sha256_of_file(folder.path() / "one" / file),
                sha256_of_file(folder.path() / "two" / file));
    }
    std::filesystem::remove_all(folder.path() / "one");
    std::filesystem::remove_all(folder.path() / "two");
  }
}

TEST(Export, WhatABackendCannotExpressIsRefusedWithTheReasonOrReduced) {
  const Bundle bundle = rotated_bundle(false);
  const std::string said = refusal("sglang-v1", bundle);
  EXPECT_NE(said.find("heads of keys differ (layer 0)"), std::string::npos) << said;
  EXPECT_NE(said.find("--reduce"), std::string::npos);
  EXPECT_NE(said.find("predicted error"), std::string::npos);
  EXPECT_NE(said.find("oscar-calibrate --for sglang-v1"), std::string::npos);

  TemporaryFolder folder;
  for (const char* format : {"sglang-v1", "vllm-pr46774", "mlx"}) {
    const auto out = folder.path() / format;
    const ExportResult result = export_to(format, bundle, out, true);
    EXPECT_EQ(result.plan->verdict(), BackendVerdict::kPortable) << format;
    EXPECT_TRUE(passes(format, out)) << format;
    const Json manifest = read_json_file(out / kManifestName);
    EXPECT_EQ(manifest["variant"], "portable") << format;
    EXPECT_NEAR(manifest["relative_error"].get<double>(), result.plan->run->relative_error.value(),
                1e-9);
    const std::string readme = read_text_file(out / "README.md");
    EXPECT_NE(readme.find("0.93"), std::string::npos) << readme;  // the pooled ratio
  }
}

TEST(Export, WhatNeedsAnInverseOrAMeanGoesOnlyWhereTheServerReadsIt) {
  Bundle bundle = rotated_bundle(false);
  for (LayerTransforms& layer : bundle.layers) {
    SideTransform& key = layer.key;
    key.partner = key.forward;
    for (int head = 0; head < kHeads; ++head) {
      key.kind[head] = TransformKind::kBalanced;
      key.forward[head] *= 2.0f;
      key.partner[head] *= 0.5f;
      key.mean[head].setConstant(0.25f);
    }
    SideTransform& value = layer.value;
    value.partner = MatrixStack<float>(kHeads, plain::kHeadDim, plain::kHeadDim);
    for (int head = 0; head < kHeads; ++head) {
      value.kind[head] = TransformKind::kBalanced;
      value.partner[head] = value.forward[head].transpose() * 4.0f;
      value.forward[head] *= 0.25f;
    }
  }
  TemporaryFolder folder;
  const auto out = folder.path() / "out";
  for (const char* format : {"sglang-v1", "sglang-v2", "mlx"}) {
    EXPECT_NE(refusal(format, bundle).find("keys need q_rotation"), std::string::npos) << format;
  }
  export_to("sglang-0c88a", bundle, out);
  const TransformSet set = read_export(find_exchange_format("sglang-0c88a"), out, 2).set;
  const LayerTransforms& layer = bundle.layers[1];
  EXPECT_EQ(set.at(1).key.partner, layer.key.partner);
  EXPECT_EQ(set.at(1).key.mean, layer.key.mean);
  EXPECT_EQ(set.at(1).value.partner, layer.value.partner);
  // In the file it stands transposed: R_v^-T.
  const TorchFile file = TorchFile::open(out / "v_transform.pt");
  const PickleNode& entry = *file.root().find("layers")->find(int64_t{1});
  const FloatTensor stored = file.tensor(*entry.find("o_rotation"), "o_rotation", 1 << 20);
  EXPECT_EQ(stored.values[1], layer.value.partner[0](1, 0));
  // Older servers take `rotation` without what stands beside it: it is not there.
  EXPECT_EQ(entry.find("rotation"), nullptr);
  EXPECT_THROW(
      read_export({"x", "sglang-v2", FileLayout::kTorchPerHead, "k_transform.pt", "v_transform.pt"},
                  out, 2),
      Error);
}

// That server's decode kernel reads over KV heads where its block of query heads is no divisor.
TEST(Export, TheReadmeSetsTheBlockOfQueryHeadsWhereTheServersOwnReadsOverKvHeads) {
  Bundle bundle = rotated_bundle(true);
  for (const auto& [queries, block] : {std::pair{3, ""},
                                       {4, ""},
                                       {5, "=8\n"},
                                       {7, "=8\n"},
                                       {8, ""},
                                       {9, "=16\n"},
                                       {15, "=16\n"},
                                       {16, ""}}) {
    bundle.model.num_kv_heads = kHeads;
    bundle.model.num_qo_heads = queries * kHeads;
    TemporaryFolder folder;
    export_to("sglang-v1", bundle, folder.path() / "out");
    const std::string readme = read_text_file(folder.path() / "out" / "README.md");
    const std::string line = "\nexport SGL_INT2_BLOCK_H";
    EXPECT_EQ(readme.find(line) != std::string::npos, *block != 0) << queries;
    EXPECT_TRUE(*block == 0 || readme.find(line + block) != std::string::npos) << queries;
  }
}

TEST(Export, NoFolderIsLeftWhenNothingCanBeExported) {
  Bundle bundle = rotated_bundle(true);
  bundle.quantizer.quant_group_size = 16;
  EXPECT_NE(refusal("mlx", bundle).find("quantization groups of 16"), std::string::npos);
  bundle.quantizer.quant_group_size = 64;
  bundle.portable.clear();
  EXPECT_NE(refusal("vllm-pr46774", bundle).find("no portable variant"), std::string::npos);
  bundle.statistics_only = true;
  EXPECT_NE(refusal("npz", bundle).find("a statistics file"), std::string::npos);
}

TEST(Export, FormatsThatDoNotExistAreRefusedByName) {
  for (const auto& [name, word] : {std::pair{"onnxruntime", "1.31.1"},
                                   {"llama.cpp", "GGUF"},
                                   {"oscar_int2", "reads the bundle itself"},
                                   {"tgi", "sglang-v1, sglang-v2"}}) {
    try {
      find_exchange_format(name);
      FAIL() << name;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
}

// Each change is one that a reader of the backend would take without a word.
TEST(VerifyExport, ATransposeAndASwapOfLayersAreNoticed) {
  const Bundle bundle = rotated_bundle(true);
  TemporaryFolder folder;
  const auto out = folder.path() / "out";
  export_to("sglang-v1", bundle, out);
  const auto path = out / "k_rotation_qqt_r_h_pbr.pt";
  const TransformSet good = read_export(find_exchange_format("sglang-v1"), out, 2).set;
  EXPECT_TRUE(passes("sglang-v1", out));

  TransformSet set = good;
  set[1].key.forward[0].transposeInPlace();
  write_torch_rotations(path, set, Side::kKey, {});
  EXPECT_EQ(first_failure("sglang-v1", out), "checksums");
  forget_checksums("sglang-v1", out);
  EXPECT_EQ(first_failure("sglang-v1", out), "direction");

  set = good;
  std::swap(set[0].key.forward, set[1].key.forward);
  write_torch_rotations(path, set, Side::kKey, {});
  forget_checksums("sglang-v1", out);
  EXPECT_EQ(first_failure("sglang-v1", out), "direction");

  set = good;
  set.erase(0);
  set[7] = good.at(0);
  write_torch_rotations(path, set, Side::kKey, {});
  forget_checksums("sglang-v1", out);
  EXPECT_EQ(first_failure("sglang-v1", out), "files");  // layers 0 and 7 have one side

  set = good;
  set[0].key.forward[0] *= 1.01f;
  write_torch_rotations(path, set, Side::kKey, {});
  forget_checksums("sglang-v1", out);
  EXPECT_EQ(first_failure("sglang-v1", out), "inverses in bf16");

  write_torch_rotations(path, transform_set({&bundle.layers[0], &bundle.layers[1]}, false),
                        Side::kKey, {.per_head = true});
  forget_checksums("sglang-v1", out);
  EXPECT_EQ(first_failure("sglang-v1", out), "layers and shapes");
}

// The files of earlier versions of this toolkit: that server served them at perplexity 3.5e8.
TEST(VerifyExport, FieldsThatTheServerDropsAreAFailureAndTheRestIsSeenWithoutThem) {
  const Bundle bundle = rotated_bundle(true);
  TemporaryFolder folder;
  const auto out = folder.path() / "out";
  export_to("sglang-v1", bundle, out);
  std::filesystem::remove(out / kManifestName);
  TransformSet set = read_export(find_exchange_format("sglang-v1"), out, 2).set;
  for (auto& [id, layer] : set) {
    layer.key.partner = layer.key.forward;
    layer.key.forward[0] *= 2.0f;
    layer.key.partner[0] *= 0.5f;
  }
  write_torch_rotations(out / "k_rotation_qqt_r_h_pbr.pt", set, Side::kKey, {});
  std::vector<std::string> failed;
  for (const Finding& finding : verify_export(find_exchange_format("sglang-v1"), out)) {
    if (finding.ok) continue;
    failed.push_back(finding.check);
    if (finding.check == "fields") {
      EXPECT_NE(finding.detail.find("q_rotation"), std::string::npos) << finding.detail;
    }
  }
  EXPECT_EQ(failed, (std::vector<std::string>{"fields", "inverses in bf16", "scores and outputs"}));
}

TEST(VerifyExport, FilesOfOthersAreCheckedWithoutAManifest) {
  const Bundle bundle = rotated_bundle(true);
  TemporaryFolder folder;
  const auto out = folder.path() / "out";
  export_to("sglang-v1", bundle, out);
  std::filesystem::remove(out / kManifestName);
  const auto findings = verify_export(find_exchange_format("sglang-v1"), out);
  EXPECT_EQ(findings.size(), 6u);
  EXPECT_TRUE(passes("sglang-v1", out));
  std::filesystem::remove(out / "v_rotation_sst_r_h_pbr.pt");
  EXPECT_EQ(first_failure("sglang-v1", out), "files");
}

TEST(VerifyExport, AHostileManifestIsAFailedCheck) {
  const Bundle bundle = rotated_bundle(true);
  TemporaryFolder folder;
  const auto out = folder.path() / "out";
  export_to("sglang-v1", bundle, out);
  const std::string good = read_text_file(out / kManifestName);
  for (const char* text : {"", "[]", "{}", "{\"format\": 3}", "{\"format\": \"sglang-v1\"}"}) {
    oscar_test::write_file(out / kManifestName, text);
    EXPECT_FALSE(passes("sglang-v1", out)) << text;
  }
  for (const char* key : {"layers", "heads_k", "head_dim_v", "probe", "files", "clip"}) {
    for (const Json& value : {Json(nullptr), Json(-1), Json::array(), Json("x"), Json(3e108)}) {
      Json manifest = Json::parse(good);
      manifest[key] = value;
      oscar_test::write_file(out / kManifestName, manifest.dump());
      EXPECT_FALSE(passes("sglang-v1", out)) << key << " " << value.dump();
    }
  }
  Json manifest = Json::parse(good);
  manifest["quant_group_size"] = 0;
  oscar_test::write_file(out / kManifestName, manifest.dump());
  EXPECT_FALSE(passes("sglang-v1", out));
}

}  // namespace
}  // namespace oscar
