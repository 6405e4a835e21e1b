// What a file leaves out comes back to the bit, from files that are small; damage is named.
#include "oscar/bundle/derived.h"

#include <cmath>
#include <fstream>

#include "bundle/sample.h"
#include "oscar/base/error.h"
#include "oscar/bundle/schema.h"
#include "oscar/fit/metric.h"

namespace {

using namespace oscar;
using sample::BundleTest;

class Derived : public BundleTest {};

double wave(int i) { return std::sin(1.0 + 0.7 * i + 0.13 * i * i); }

// A side of balanced heads as a fit stores it: partners and factors are those of T and M.
SideTransform fitted_side(Side side, const sample::Size& size) {
  const int heads = size.heads, d = size.dim;
  SideTransform s = sample::side(0, TransformKind::kBalanced, size);
  s.kind.assign(static_cast<size_t>(heads), TransformKind::kBalanced);
  s.kind.back() = TransformKind::kOscar;  // its partner is implied
  s.forward = MatrixStack<float>(heads, d, d);
  s.partner = s.metric = s.feedback = s.forward;
  for (int head = 0; head < heads; ++head) {
    MatrixD t = MatrixD::Identity(d, d), weight = MatrixD::Zero(d, d);
    if (s.kind[head] == TransformKind::kBalanced) {
      for (int i = 0; i < d * d; ++i) t.data()[i] += 0.02 * wave(i + 7 * head);
    }
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) weight(i, j) = wave(i + 3 * j) * wave(j + 3 * i) / d;
      weight(i, i) += 1;
    }
    s.forward[head] = t.cast<float>();
    const MatrixD inverse = s.forward[head].cast<double>().inverse();
    s.partner[head] = (side == Side::kKey ? MatrixD(inverse.transpose()) : inverse).cast<float>();
    s.metric[head] = error_metric(s.partner[head], weight, side).cast<float>();
    s.feedback[head] = feedback_factor(s.metric[head].cast<double>(), "test").cast<float>();
  }
  return s;
}

// Layer 0 as a fit leaves it: nothing of it needs a correction but, perhaps, Eigen's inverse.
Bundle fitted_bundle(const sample::Size& size = {}) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kBalanced, size);
  bundle.layers[0].key = fitted_side(Side::kKey, size);
  bundle.layers[0].value = fitted_side(Side::kValue, size);
  for (LayerStatistics& statistics : bundle.statistics) {
    for (auto* moment : {&statistics.q_moment, &statistics.o_proj_metric}) {
      for (int head = 0; head < sample::kHeads; ++head) {
        (*moment)[head] = ((*moment)[head] + (*moment)[head].transpose()).eval();
      }
    }
  }
  return bundle;
}

bool same_bits(const MatrixStack<float>& a, const MatrixStack<float>& b) {
  return a.data.size() == b.data.size() &&
         (a.data.empty() ||
          std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0);
}

std::map<std::string, hdf5::Dataset> stored_datasets(const std::filesystem::path& path) {
  const hdf5::Reader reader(path);
  std::map<std::string, hdf5::Dataset> all;
  for (const auto& object : reader.objects()) {
    if (object.is_dataset) all.emplace(object.path, reader.read(object.path));
  }
  return all;
}

void expect_back_to_the_bit(const Bundle& bundle, const std::filesystem::path& path) {
  write_bundle(bundle, path, false);
  const Bundle back = read_bundle(path);
  for (size_t i = 0; i < bundle.layers.size(); ++i) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      const SideTransform& before = side_of(bundle.layers[i], side);
      const SideTransform& after = side_of(back.layers[i], side);
      EXPECT_TRUE(same_bits(before.forward, after.forward));
      EXPECT_TRUE(same_bits(before.partner, after.partner));
      EXPECT_TRUE(same_bits(before.metric, after.metric));
      EXPECT_TRUE(same_bits(before.feedback, after.feedback));
    }
  }
  EXPECT_EQ(bundle.statistics, back.statistics);
}

TEST_F(Derived, WhatIsLeftOutComesBackToTheBit) {
  expect_back_to_the_bit(fitted_bundle(), file("a.h5"));
}

TEST_F(Derived, SoDoesWhatIsLargeEnoughForSeveralThreads) {
  expect_back_to_the_bit(fitted_bundle({.dim = 64}), file("a.h5"));
}

TEST_F(Derived, AMetricOfValuesIsNotStoredWhereItFollowsFromTheStatistics) {
  Bundle bundle = fitted_bundle();
  SideTransform& value = bundle.layers[0].value;
  for (int head = 0; head < sample::kHeads; ++head) {
    value.metric[head] =
        error_metric(value.partner[head], bundle.statistics[0].o_proj_metric[head], Side::kValue)
            .cast<float>();
  }
  write_bundle(bundle, file("a.h5"), false);
  EXPECT_FALSE(stored_datasets(file("a.h5")).contains("/layers/000/v_metric"));
  EXPECT_TRUE(same_bits(value.metric, read_bundle(file("a.h5")).layers[0].value.metric));
  value.metric[1](2, 2) += 1e-7F;
  write_bundle(bundle, file("b.h5"), false);
  EXPECT_TRUE(stored_datasets(file("b.h5")).contains("/layers/000/v_metric"));
  EXPECT_TRUE(same_bits(value.metric, read_bundle(file("b.h5")).layers[0].value.metric));
}

TEST_F(Derived, FactorsAreNotStoredAndOfSymmetricMatricesOnlyOneHalf) {
  write_bundle(fitted_bundle(), file("a.h5"), false);
  const auto stored = stored_datasets(file("a.h5"));
  EXPECT_FALSE(stored.contains("/layers/000/k_feedback"));
  EXPECT_FALSE(stored.contains("/layers/000/v_feedback"));
  for (const char* partner : {"/layers/000/q_rotation", "/layers/000/o_rotation"}) {
    // Made by another routine: all but the last bits are derived all the same.
    if (!stored.contains(partner)) continue;
    for (const int32_t step : std::get<std::vector<int32_t>>(stored.at(partner).data)) {
      EXPECT_LE(std::abs(step), 2) << partner;
    }
  }
  constexpr uint64_t kEntries = sample::kDim * (sample::kDim + 1) / 2;
  const hdf5::Shape triangles{sample::kHeads, kEntries};
  EXPECT_EQ(stored.at("/layers/000/k_metric").shape, triangles);
  EXPECT_EQ(stored.at("/layers/001/statistics/q_moment").shape, triangles);
  // Not symmetric, so whole.
  const hdf5::Shape whole{sample::kHeads, sample::kDim, sample::kDim};
  EXPECT_EQ(stored.at("/layers/001/statistics/k_moment").shape, whole);
}

TEST_F(Derived, MatricesThatNothingImpliesAreStoredWithTheirDifferences) {
  Bundle bundle = fitted_bundle();
  bundle.layers[0].key.partner[0](2, 3) += 1e-7F;
  bundle.layers[0].key.feedback[1](0, 5) = -0.75F;
  bundle.layers[0].value.metric[0](0, 1) += 1;  // no longer symmetric, factor of none
  write_bundle(bundle, file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  EXPECT_TRUE(same_bits(bundle.layers[0].key.partner, back.layers[0].key.partner));
  EXPECT_TRUE(same_bits(bundle.layers[0].key.feedback, back.layers[0].key.feedback));
  EXPECT_TRUE(same_bits(bundle.layers[0].value.metric, back.layers[0].value.metric));
  EXPECT_TRUE(same_bits(bundle.layers[0].value.feedback, back.layers[0].value.feedback));
}

// The same content, stored whole as earlier versions did.
void write_whole(const Bundle& bundle, const std::filesystem::path& path) {
  EncodedFile encoded = encode_bundle(bundle, nullptr);
  AtomicFile out(path);
  hdf5::Writer writer(out);
  for (const auto& group : encoded.groups) writer.create_group(group);
  for (const auto& dataset : encoded.datasets) writer.write(dataset);
  for (const auto& attribute : encoded.attributes) writer.write(attribute);
  writer.write(
      {"/", schema::kContentHash, read_bundle(path.parent_path() / "a.h5").content_sha256});
  writer.close();
  out.commit();
}

TEST_F(Derived, AFileThatLeavesNothingOutHasTheSameHashAndIsReadAsBefore) {
  const Bundle bundle = fitted_bundle();
  write_bundle(bundle, file("a.h5"), false);
  write_whole(bundle, file("whole.h5"));
  const Bundle back = read_bundle(file("whole.h5"));
  EXPECT_EQ(back.content_sha256, read_bundle(file("a.h5")).content_sha256);
  EXPECT_TRUE(same_bits(back.layers[0].key.feedback, bundle.layers[0].key.feedback));
}

// A copy of a.h5 with `change` applied to what is stored, under a hash that need not fit.
template <typename Change>
std::string refusal_after(const std::filesystem::path& from, const std::filesystem::path& to,
                          Change&& change) {
  const hdf5::Reader reader(from);
  auto datasets = stored_datasets(from);
  auto attributes = reader.attributes();
  change(datasets, attributes);
  {
    AtomicFile out(to);
    hdf5::Writer writer(out);
    for (const auto& object : reader.objects()) {
      if (!object.is_dataset && object.path != "/") writer.create_group(object.path);
    }
    for (const auto& entry : datasets) writer.write(view(entry.second));
    for (const auto& attribute : attributes) writer.write(attribute);
    writer.close();
    out.commit();
  }
  try {
    read_bundle(to);
  } catch (const Error& error) {
    return error.what();
  }
  return "read";
}

using Datasets = std::map<std::string, hdf5::Dataset>;
using Attributes = std::vector<hdf5::Attribute>;

TEST_F(Derived, CodingsThatDoNotFitAreRefusedByName) {
  write_bundle(fitted_bundle(), file("a.h5"), false);
  const auto refused = [&](const char* object, const char* words, auto&& change) {
    const std::string said = refusal_after(file("a.h5"), file("b.h5"), change);
    EXPECT_NE(said.find(object), std::string::npos) << said;
    EXPECT_NE(said.find(words), std::string::npos) << said;
  };
  const auto coding = [](Attributes& attributes, const std::string& text) {
    for (auto& a : attributes) {
      if (a.object == "/layers/000" && a.name == schema::kCoding) a.value = text;
    }
  };
  refused("/layers/000 attribute coding", "k_rotation, \"upper\"",
          [&](Datasets&, Attributes& a) { coding(a, R"({"k_rotation":"upper"})"); });
  refused("/layers/000 attribute coding", "k_feedback, \"wavelet\"",
          [&](Datasets&, Attributes& a) { coding(a, R"({"k_feedback":"wavelet"})"); });
  refused("/layers/000 attribute coding", "array",
          [&](Datasets&, Attributes& a) { coding(a, "[]"); });
  refused("/layers/000/k_metric", "missing",
          [](Datasets& d, Attributes&) { d.erase("/layers/000/k_metric"); });
  refused("/layers/000/k_metric", "upper triangles", [](Datasets& d, Attributes&) {
    hdf5::Dataset& metric = d.at("/layers/000/k_metric");
    metric.shape = {2, 35};
    std::get<std::vector<float>>(metric.data).resize(70);
  });
  refused("/layers/000/k_feedback", "no triangular factor", [](Datasets& d, Attributes&) {
    std::get<std::vector<float>>(d.at("/layers/000/k_metric").data)[0] = -9;
  });
  refused("/layers/000/q_rotation", "no inverse", [](Datasets& d, Attributes&) {
    auto& t = std::get<std::vector<float>>(d.at("/layers/000/k_rotation").data);
    std::fill(t.begin(), t.begin() + sample::kDim, 0.0F);
  });
  refused("/layers/000/q_rotation", "can't be derived",
          [](Datasets& d, Attributes&) { d.erase("/layers/000/k_kind"); });
  refused("/layers/000/k_feedback", "corrections", [](Datasets& d, Attributes&) {
    d.insert_or_assign("/layers/000/k_feedback",
                       hdf5::Dataset{"/layers/000/k_feedback", {1}, std::vector<int32_t>{1}});
  });
  refused("content_sha256", "the file was changed", [](Datasets& d, Attributes&) {
    std::get<std::vector<float>>(d.at("/layers/000/k_metric").data)[1] += 0.125F;
  });
}

}  // namespace
