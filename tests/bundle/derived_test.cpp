// What files of version 0.1 leave out comes back to the bit; damage is named. The files in
// version_0_1 were written by it: their content_sha256 is that of the whole content.
#include "oscar/bundle/derived.h"

#include <fstream>

#include "bundle/sample.h"
#include "oscar/base/error.h"
#include "oscar/bundle/schema.h"

namespace {

using namespace oscar;
using sample::BundleTest;

class Derived : public BundleTest {};

std::filesystem::path earlier(const char* name) {
  return std::filesystem::path(OSCAR_SOURCE_DIR) / "tests/bundle/version_0_1" / name;
}

std::map<std::string, hdf5::Dataset> stored_datasets(const std::filesystem::path& path) {
  const hdf5::Reader reader(path);
  std::map<std::string, hdf5::Dataset> all;
  for (const auto& object : reader.objects()) {
    if (object.is_dataset) all.emplace(object.path, reader.read(object.path));
  }
  return all;
}

// Reading compares the hash of the whole content, written without anything left out.
TEST_F(Derived, WhatIsLeftOutComesBackToTheBit) {
  for (const char* name : {"left_out.h5", "wide.h5", "implied_metric.h5", "corrected.h5"}) {
    const Bundle bundle = read_bundle(earlier(name));
    ASSERT_FALSE(bundle.layers[0].key.feedback.empty()) << name;
    write_bundle(bundle, file(name), false);
    const Bundle anew = read_bundle(file(name));
    EXPECT_EQ(anew.content_sha256, bundle.content_sha256) << name;
    EXPECT_EQ(anew.statistics, bundle.statistics) << name;
  }
}

TEST_F(Derived, FilesAreWrittenWithoutLeavingOutAnything) {
  write_bundle(read_bundle(earlier("left_out.h5")), file("a.h5"), false);
  const auto before = stored_datasets(earlier("left_out.h5")),
             after = stored_datasets(file("a.h5"));
  const hdf5::Shape whole{sample::kHeads, sample::kDim, sample::kDim};
  EXPECT_FALSE(before.contains("/layers/000/k_feedback"));
  EXPECT_EQ(after.at("/layers/000/k_feedback").shape, whole);
  EXPECT_NE(before.at("/layers/000/k_metric").shape, whole);
  EXPECT_EQ(after.at("/layers/000/k_metric").shape, whole);
  EXPECT_EQ(after.at("/layers/000/q_rotation").dtype(), hdf5::Dtype::kF32);
}

// A copy of a file with `change` applied to what is stored, under a hash that need not fit.
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
  const auto refused = [&](const char* object, const char* words, auto&& change) {
    const std::string said = refusal_after(earlier("left_out.h5"), file("b.h5"), change);
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
