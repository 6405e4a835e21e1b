#include <fstream>
#include <functional>
#include <limits>

#include "bundle/sample.h"
#include "oscar/base/error.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/merge.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/fit/fit.h"
#include "support/expect_transforms.h"

// Counts and spans that only a damaged or hostile file has are refused before anything is computed.

namespace {

using namespace oscar;
using sample::BundleTest;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

class LargeCounts : public BundleTest {
 protected:
  template <typename Work>
  static std::string refusal(const Work& work) {
    try {
      work();
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST_F(LargeCounts, SumsThatAreMoreThanANumberHoldsAreRefused) {
  const auto merged = [&](const std::function<void(Bundle&)>& change) {
    std::vector<Bundle> files(2, sample::statistics_bundle());
    change(files[0]);
    return refusal([&] { merge_statistics(std::move(files), {"a.h5", "b.h5"}, true); });
  };
  EXPECT_EQ(merged([](Bundle&) {}), "accepted");
  for (const auto& [word, change] :
       std::vector<std::pair<const char*, std::function<void(Bundle&)>>>{
           {"count_kv", [](Bundle& b) { b.statistics[0].count_kv = kMost; }},
           {"count_q", [](Bundle& b) { b.statistics[0].count_q = kMost; }},
           {"tokens", [](Bundle& b) { b.corpus.tokens = kMost; }},
           {"sequences_used", [](Bundle& b) { b.corpus.sequences_used = kMost; }}}) {
    const std::string text = merged(change);
    EXPECT_NE(text.find("too large to be added"), std::string::npos) << text;
    EXPECT_NE(text.find(word), std::string::npos) << text;
  }
}

TEST_F(LargeCounts, APositionSpanBeyondAnIntIsRefused) {
  const int64_t over = int64_t{1} << 31;
  const auto refit = [](int64_t span) {
    return refusal([&] {
      refit_bundle(sample::statistics_bundle(), {.fit = {.position_span = span}, .quantizer = {}},
                   "a.h5");
    });
  };
  for (const int64_t span : {over, kMost}) {
    EXPECT_NE(refit(span).find("--position-span"), std::string::npos) << refit(span);
    Bundle bundle = sample::statistics_bundle();
    bundle.position_span = span;
    const auto path = file("span.h5");
    write_bundle(bundle, path, true);
    const std::string text = refusal([&] { read_bundle(path); });
    EXPECT_NE(text.find("position_span"), std::string::npos) << text;
  }
}

}  // namespace

// What is written comes back exactly, equal inputs give equal bytes, and failures leave no file.

namespace {

using namespace oscar;
using sample::BundleTest;

class RoundTrip : public BundleTest {};

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string refusal_to_write(const Bundle& bundle, const std::filesystem::path& path) {
  try {
    write_bundle(bundle, path, false);
  } catch (const Error& error) {
    return error.what();
  }
  return "written";
}

void expect_equal_descriptions(const Bundle& a, const Bundle& b) {
  EXPECT_EQ(a.statistics_only, b.statistics_only);
  EXPECT_EQ(a.preset, b.preset);
  EXPECT_EQ(a.method, b.method);
  EXPECT_EQ(a.objective_k, b.objective_k);
  EXPECT_EQ(a.objective_v, b.objective_v);
  EXPECT_EQ(a.composition, b.composition);
  EXPECT_EQ(a.granularity, b.granularity);
  EXPECT_EQ(a.position_span, b.position_span);
  EXPECT_EQ(a.fit_seed, b.fit_seed);
  EXPECT_EQ(a.model.rope, b.model.rope);
  EXPECT_EQ(a.model.weights_fingerprint, b.model.weights_fingerprint);
  EXPECT_EQ(a.model.hidden_size, b.model.hidden_size);
  ASSERT_EQ(a.corpus.sources.size(), b.corpus.sources.size());
  EXPECT_EQ(a.corpus.sources[0].dropped, b.corpus.sources[0].dropped);
  EXPECT_EQ(a.corpus.sources[0].weight, b.corpus.sources[0].weight);
  EXPECT_EQ(a.corpus.tokens_sha256, b.corpus.tokens_sha256);
  EXPECT_EQ(a.corpus.chat_template, b.corpus.chat_template);
  EXPECT_EQ(a.quantizer.metadata_dtype, b.quantizer.metadata_dtype);
  EXPECT_EQ(a.quantizer.recent_tokens, b.quantizer.recent_tokens);
  EXPECT_EQ(a.evaluation, b.evaluation);
  EXPECT_EQ(a.search, b.search);
  EXPECT_EQ(a.statistics, b.statistics);
  EXPECT_EQ(a.weight_samples, b.weight_samples);
}

TEST_F(RoundTrip, EveryKindOfBundleComesBackExactly) {
  for (const auto kind : {TransformKind::kOscar, TransformKind::kBalanced}) {
    const Bundle bundle = sample::rotation_bundle(kind);
    write_bundle(bundle, file("a.h5"), true);
    const Bundle back = read_bundle(file("a.h5"));
    expect_equal_descriptions(bundle, back);
    ASSERT_EQ(back.layers.size(), bundle.layers.size());
    ASSERT_EQ(back.portable.size(), bundle.portable.size());
    for (size_t i = 0; i < bundle.layers.size(); ++i) {
      expect_equal(bundle.layers[i], back.layers[i]);
      expect_equal(bundle.portable[i].shared, back.portable[i].shared);
      expect_equal(bundle.portable[i].per_head, back.portable[i].per_head);
    }
    EXPECT_EQ(back.created_utc, "2023-11-14T22:13:20Z");
    EXPECT_EQ(back.content_sha256.size(), 64U);
  }
}

// With a local layer in place of the sliding one.
Bundle bundle_with_local_layer() {
  Bundle bundle = sample::rotation_bundle(TransformKind::kBalanced);
  LayerGeometry geometry = sample::geometry(1);
  geometry.attention = AttentionKind::kLocal;
  geometry.quantized = false;
  bundle.layers[1] = without_transforms(geometry);
  bundle.portable[1] = {bundle.layers[1], bundle.layers[1]};
  bundle.statistics[1] = {};
  bundle.statistics[1].geometry = geometry;
  return bundle;
}

TEST_F(RoundTrip, LocalLayersComeBackWithTheirGeometryAndNothingElse) {
  const Bundle bundle = bundle_with_local_layer();
  write_bundle(bundle, file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  ASSERT_EQ(back.layers.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    expect_equal(bundle.layers[i], back.layers[i]);
    expect_equal(bundle.portable[i].shared, back.portable[i].shared);
    EXPECT_EQ(bundle.statistics[i], back.statistics[i]);
  }
  Bundle statistics = bundle;
  statistics.statistics_only = true;
  statistics.layers.clear();
  statistics.portable.clear();
  write_bundle(statistics, file("b.h5"), false);
  EXPECT_EQ(read_bundle(file("b.h5")).statistics, bundle.statistics);
}

TEST_F(RoundTrip, ALocalLayerThatIsQuantizedOrHasNoWindowIsRefused) {
  const auto refusal = [&](auto change) {
    Bundle bundle = bundle_with_local_layer();
    for (LayerGeometry* geometry :
         {&bundle.layers[1].geometry, &bundle.statistics[1].geometry,
          &bundle.portable[1].shared.geometry, &bundle.portable[1].per_head.geometry}) {
      change(*geometry);
    }
    write_bundle(bundle, file("a.h5"), true);
    try {
      read_bundle(file("a.h5"));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const std::string expected = "a local layer keeps a window in BF16";
  EXPECT_NE(refusal([](LayerGeometry& g) { g.quantized = true; }).find(expected),
            std::string::npos);
  EXPECT_NE(refusal([](LayerGeometry& g) { g.sliding_window = 0; }).find(expected),
            std::string::npos);
}

TEST_F(RoundTrip, ALocalLayerMayHaveAnotherShapeThanWhatIsFitted) {
  Bundle bundle = bundle_with_local_layer();
  for (LayerGeometry* geometry :
       {&bundle.layers[1].geometry, &bundle.statistics[1].geometry,
        &bundle.portable[1].shared.geometry, &bundle.portable[1].per_head.geometry}) {
    geometry->num_qo_heads = 3 * geometry->num_qo_heads;
    geometry->head_dim_k = 24;
  }
  write_bundle(bundle, file("a.h5"), false);
  EXPECT_EQ(read_bundle(file("a.h5")).layers[1].geometry, bundle.layers[1].geometry);
}

// With a layer that holds no rows in place of the sliding one, and one that RoPE does not turn.
TEST_F(RoundTrip, LayersWithoutRowsOrRopeAndTheEngineComeBack) {
  Bundle bundle = bundle_with_local_layer();
  for (LayerGeometry* geometry :
       {&bundle.layers[1].geometry, &bundle.statistics[1].geometry,
        &bundle.portable[1].shared.geometry, &bundle.portable[1].per_head.geometry}) {
    geometry->attention = AttentionKind::kNone;
    geometry->sliding_window = 0;
  }
  for (LayerGeometry* geometry :
       {&bundle.layers[0].geometry, &bundle.statistics[0].geometry,
        &bundle.portable[0].shared.geometry, &bundle.portable[0].per_head.geometry}) {
    geometry->turned = false;
  }
  bundle.model.engine = "transformers 5.17.0, float32";
  write_bundle(bundle, file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  for (size_t i = 0; i < 2; ++i) {
    expect_equal(bundle.layers[i], back.layers[i]);
    EXPECT_EQ(back.layers[i].geometry, bundle.layers[i].geometry);
    EXPECT_EQ(bundle.statistics[i], back.statistics[i]);
  }
  EXPECT_EQ(back.model.engine, bundle.model.engine);
}

TEST_F(RoundTrip, StatisticsFilesComeBackExactly) {
  Bundle bundle = sample::statistics_bundle();
  bundle.statistics[0].v_energy_moment = bundle.statistics[0].v_moment;
  write_bundle(bundle, file("a.h5"), false);
  expect_equal_descriptions(bundle, read_bundle(file("a.h5")));
}

TEST_F(RoundTrip, SumsWeightedByAttentionAreThereAllOrNone) {
  Bundle bundle = sample::statistics_bundle();
  bundle.statistics[1].attended.k_weight.clear();
  write_bundle(bundle, file("a.h5"), false);
  try {
    read_bundle(file("a.h5"));
    FAIL() << "a sum that is missing went unnoticed";
  } catch (const Error& error) {
    EXPECT_NE(error.info().expected.find("weighted by attention"), std::string::npos);
  }
}

TEST_F(RoundTrip, UnmeasuredLossIsLeftOutAndComesBackAsNaN) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.layers[0].predicted_output_nmse.assign(2, std::numeric_limits<double>::quiet_NaN());
  write_bundle(bundle, file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  EXPECT_TRUE(std::isnan(back.layers[0].predicted_output_nmse[1]));
  EXPECT_EQ(back.layers[1].predicted_output_nmse, bundle.layers[1].predicted_output_nmse);
}

TEST_F(RoundTrip, LossesOfRatiosThatAReaderWouldRefuseAreNotWritten) {
  const auto expect_refused = [&](const char* word, void (*change)(ClipLosses&)) {
    Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
    change(*bundle.layers[1].key.clip_losses);
    const std::string said = refusal_to_write(bundle, file("a.h5"));
    EXPECT_NE(said.find("/layers/001/k_clip_tried"), std::string::npos) << said;
    EXPECT_NE(said.find(word), std::string::npos) << said;
  };
  expect_refused("a ratio of 1.5", [](ClipLosses& losses) { losses.ratio[1] = 1.5F; });
  expect_refused("a ratio of nan", [](ClipLosses& losses) { losses.ratio[1] = NAN; });
  expect_refused("0.96 twice", [](ClipLosses& losses) { losses.ratio[1] = 0.96F; });
  expect_refused("0 ratios", [](ClipLosses& losses) { losses = {}; });
  expect_refused("a loss of nan", [](ClipLosses& losses) { losses.nmse[2](1) = NAN; });
  expect_refused("a loss of -1", [](ClipLosses& losses) { losses.nmse[0](0) = -1; });
  expect_refused("for 2 ratios", [](ClipLosses& losses) { losses.ratio.pop_back(); });
  expect_refused("and 3 heads for",
                 [](ClipLosses& losses) { losses.nmse = VectorStack<double>(3, 3); });
}

TEST_F(RoundTrip, ARecordOfManyHeadsLosesItsTableButNotItsChoices) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  Json stages = Json::array();
  for (int i = 0; i < 20000; ++i) stages.push_back(0.125);
  bundle.layers[0].search = Json{{"key", Json{{"stages", stages}, {"heads", "kept"}}}};
  write_bundle(bundle, file("a.h5"), false);
  const Json back = read_bundle(file("a.h5")).layers[0].search;
  EXPECT_EQ(back, (Json{{"key", Json{{"heads", "kept"}}}}));
}

TEST_F(RoundTrip, EqualBundlesGiveEqualBytes) {
  const Bundle bundle = sample::rotation_bundle(TransformKind::kBalanced);
  write_bundle(bundle, file("a.h5"), false);
  ::sleep(1);
  write_bundle(bundle, file("b.h5"), false);
  EXPECT_TRUE(bytes_of(file("a.h5")) == bytes_of(file("b.h5")));
}

TEST_F(RoundTrip, ContentHashIgnoresTheClockAndSeesEveryNumber) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  write_bundle(bundle, file("a.h5"), false);
  ::setenv("SOURCE_DATE_EPOCH", "1800000000", 1);
  write_bundle(bundle, file("b.h5"), false);
  const std::string first = read_bundle(file("a.h5")).content_sha256;
  EXPECT_EQ(first, read_bundle(file("b.h5")).content_sha256);
  bundle.layers[1].value.eigenvalues.data.back() += 1e-9;
  write_bundle(bundle, file("b.h5"), true);
  EXPECT_NE(first, read_bundle(file("b.h5")).content_sha256);
}

TEST_F(RoundTrip, AnExistingOutputIsKeptUnlessForced) {
  const Bundle bundle = sample::statistics_bundle();
  std::ofstream(file("a.h5")) << "precious";
  EXPECT_NE(refusal_to_write(bundle, file("a.h5")).find("--force"), std::string::npos);
  EXPECT_EQ(bytes_of(file("a.h5")), "precious");
  write_bundle(bundle, file("a.h5"), true);
  EXPECT_NO_THROW(read_bundle(file("a.h5")));
}

TEST_F(RoundTrip, NonFiniteValuesAndWrongShapesAreNamedAndNothingIsWritten) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.statistics[1].k_sum.data[3] = std::numeric_limits<double>::infinity();
  EXPECT_NE(refusal_to_write(bundle, file("a.h5")).find("/layers/001/statistics/k_sum"),
            std::string::npos);
  bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.layers[0].key.mean = VectorStack<float>(2, 7);
  EXPECT_NE(refusal_to_write(bundle, file("a.h5")).find("[2, 8]"), std::string::npos);
  bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.layers.pop_back();
  EXPECT_NE(refusal_to_write(bundle, file("a.h5")).find("1 layers of 2"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(RoundTrip, CheckpointsKeepTheStateAndMayLackLayers) {
  Bundle bundle = sample::statistics_bundle();
  bundle.statistics.pop_back();
  ResumeState state;
  state.run_key = "key";
  state.order = "layer-major";
  state.shard = 3;
  state.layer = 1;
  const std::vector<uint8_t> bytes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 255};
  state.tensors = {{"hidden_000", "bf16", {2, 3}}};
  state.tensors[0].own(bytes);
  write_checkpoint(file("c.h5"), bundle, state);
  write_checkpoint(file("c.h5"), bundle, state);
  const RunCheckpoint back = read_checkpoint(file("c.h5"));
  EXPECT_EQ(back.bundle.statistics, bundle.statistics);
  EXPECT_EQ(back.state.run_key, "key");
  EXPECT_EQ(back.state.order, "layer-major");
  EXPECT_EQ(back.state.shard, 3);
  EXPECT_EQ(back.state.layer, 1);
  ASSERT_EQ(back.state.tensors.size(), 1U);
  EXPECT_EQ(back.state.tensors[0].name, "hidden_000");
  EXPECT_EQ(back.state.tensors[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(std::ranges::equal(back.state.tensors[0].bytes, bytes));
  EXPECT_THROW(read_bundle(file("c.h5")), Error);
  write_bundle(sample::statistics_bundle(), file("s.h5"), false);
  EXPECT_THROW(read_checkpoint(file("s.h5")), Error);
}

TEST_F(RoundTrip, ACheckpointBeforeTheFirstLayerIsPossible) {
  Bundle bundle = sample::statistics_bundle();
  bundle.statistics.clear();
  write_checkpoint(file("c.h5"), bundle, {.run_key = "k", .order = "o"});
  EXPECT_TRUE(read_checkpoint(file("c.h5")).bundle.statistics.empty());
}

}  // namespace
