// An evaluation that is stopped reports what it has counted, and continues to the report of one
// that was left alone.
#include <gtest/gtest.h>

#include "model/small_model.h"
#include "oscar/base/error.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/eval/evaluate.h"
#include "oscar/io/npy.h"

namespace {

using namespace oscar;
using namespace oscar_test;

std::string config_with_eos() {
  std::string text = kSmallConfig;
  return text.insert(text.rfind('}'), ",\"eos_token_id\":3");
}

// Stops the run at the n-th unit of work, as a signal would.
class Stopping final : public Progress {
 public:
  explicit Stopping(int after) : left_(after) {}
  void begin(const std::string&, int64_t, const std::string&) override {}
  void advance(int64_t) override {
    if (--left_ == 0) throw Interrupted("stopped");
  }
  void end() override {}
  void note(const std::string& text) override { said += text + "\n"; }
  std::string said;

 private:
  int left_;
};

class StoppedEvaluation : public testing::Test {
 protected:
  StoppedEvaluation() : model_(make_tensors(), config_with_eos()) {
    constexpr size_t kSequences = 100, kLength = 100;  // 40 of them in a batch: three batches
    std::vector<int32_t> ids;
    for (size_t i = 0; i < kSequences * kLength; ++i) {
      ids.push_back(static_cast<int32_t>(i * 7919 % 61));
    }
    const auto text = model_.folder.path() / "ids.npy";
    write_npy_int32(text, {kSequences, kLength}, ids);
    options_.model = model_.folder.path().string();
    options_.corpus = text.string();
    options_.compare = {"exact", "identity"};
    options_.sequence_length = kLength;
    options_.sink = 4;
    options_.recent = 16;
    options_.device = "cpu";
    options_.keep_units = true;
    options_.checkpoint = checkpoint_path(model_.folder.path() / "report.json");
  }

  Json stop_after(int units, bool resume) {
    EvaluateOptions options = options_;
    options.resume = resume;
    Stopping progress(units);
    try {
      return evaluate(options, ranks_, progress);
    } catch (const Interrupted& stop) {
      return stop.what();
    }
  }

  Model model_;
  EvaluateOptions options_;
  Ranks ranks_;  // one process
};

constexpr int kPreparations = 3;  // units of progress before the text: one a method
constexpr int kUnits = kPreparations + 2 * 2 * 3;  // two texts, two layers, three batches

TEST_F(StoppedEvaluation, ContinuesToTheSameReportFromAnyMoment) {
  SilentProgress silent;
  const std::string whole = evaluate(options_, ranks_, silent).dump();
  for (int units = kPreparations + 1; units <= kUnits; ++units) {
    std::filesystem::remove(options_.checkpoint);
    const Json stopped = stop_after(units, false);
    EXPECT_TRUE(stopped.is_string() || stopped.contains("partial")) << units;
    EXPECT_EQ(stop_after(1000, true).dump(), whole) << "stopped after " << units;
  }
  // Stopped again and again, a block further each time.
  std::filesystem::remove(options_.checkpoint);
  for (int round = 0; round < 6; ++round) stop_after(kPreparations + 3, round > 0);
  EXPECT_EQ(stop_after(kPreparations + 1, true).dump(), whole);
}

TEST_F(StoppedEvaluation, ReportsTheFiguresOfWhatWasCounted) {
  EXPECT_NE(stop_after(kPreparations + 2, false).dump().find("before anything was counted"),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(options_.checkpoint));
  const Json part = stop_after(kPreparations + 3, false);
  EXPECT_EQ(part["partial"]["text"], (Json{{"tokens", 40 * 80}, {"of", 100 * 80}}));
  EXPECT_EQ(part["partial"]["separators"], (Json{{"tokens", 0}, {"of", 100 * 80}}));
  EXPECT_EQ(part["tokens"], 40 * 80);
  EXPECT_EQ(part["sequences"], 40);
  EXPECT_FALSE(part.contains("separators"));
  const std::string table = format_table(part);
  EXPECT_NE(table.find("PARTIAL"), std::string::npos) << table;
  EXPECT_NE(table.find("3200 of 8000 tokens"), std::string::npos) << table;
  // They are those of the same sequences alone.
  EvaluateOptions alone = options_;
  alone.max_tokens = 40 * 100;
  alone.checkpoint.clear();
  SilentProgress silent;
  const Json first = evaluate(alone, ranks_, silent);
  EXPECT_EQ(first["tokens"], part["tokens"]);
  EXPECT_EQ(first["methods"].dump(), part["methods"].dump());
  const Json last = stop_after(kUnits, false);
  EXPECT_GE(last["separators"]["tokens"], 40 * 80);  // a block may have two batches
  EXPECT_LE(last["separators"]["tokens"], 80 * 80);
  EXPECT_FALSE(last["separators"].contains("rows"));
}

TEST_F(StoppedEvaluation, IsNotContinuedByAnotherRun) {
  stop_after(kPreparations + 3, false);
  for (const auto& change : std::vector<std::function<void(EvaluateOptions&)>>{
           [](EvaluateOptions& o) { o.recent = 17; }, [](EvaluateOptions& o) { o.seed = 1; },
           [](EvaluateOptions& o) { o.compare = {"exact"}; },
           [](EvaluateOptions& o) { o.separators = 32; },
           [](EvaluateOptions& o) { o.position_offset = 1; },
           [](EvaluateOptions& o) { o.max_tokens = 5000; }}) {
    EvaluateOptions other = options_;
    other.resume = true;
    change(other);
    SilentProgress silent;
    try {
      evaluate(other, ranks_, silent);
      ADD_FAILURE() << "continued";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("belongs to another run"), std::string::npos)
          << error.what();
    }
  }
}

TEST_F(StoppedEvaluation, BeginsAnewAndSaysSoWithoutACheckpoint) {
  options_.resume = true;
  Stopping progress(kPreparations + 1);
  EXPECT_THROW(evaluate(options_, ranks_, progress), Interrupted);
  EXPECT_NE(progress.said.find("starting anew"), std::string::npos) << progress.said;
}

TEST_F(StoppedEvaluation, CostsAreMeasuredWithoutWritingAnything) {
  SilentProgress silent;
  const EvaluationCost cost = estimate_evaluation(options_, ranks_, silent);
  EXPECT_EQ(cost.tokens, 100 * 80);
  EXPECT_EQ(cost.methods, 3u);
  EXPECT_GT(cost.text_seconds, 0);
  EXPECT_GT(cost.separated_seconds, 0);
  EXPECT_EQ(cost.needle_seconds, 0);
  EXPECT_EQ(cost.checkpoint_bytes, 2 * 100 * 80 * 3 * 3 * 8);  // two texts, methods, scores
  EXPECT_FALSE(std::filesystem::exists(options_.checkpoint));
}

}  // namespace
