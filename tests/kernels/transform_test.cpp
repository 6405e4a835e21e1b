// Rows in and out of the cache's basis on the GPU against float64 loops.
#include "oscar_kernels/transform.h"

#include <gtest/gtest.h>

#include <memory>

#include "cache/transform_case.h"
#include "kernels/device_memory.h"

namespace {

using oscar_test::DeviceBuffer;
using oscar_test::TransformCase;
using oscar_test::TransformSetup;
using oscar_test::TransformTensor;

// The tensors of a setup in device memory.
class DeviceTransform {
 public:
  explicit DeviceTransform(TransformSetup& host) : host_(host), params_(host.params()) {
    for (size_t t = 0; t < host.tensors.size(); ++t) {
      tensors_.push_back(std::make_unique<Tensor>(host.tensors[t]));
      const Tensor& on_device = *tensors_.back();
      oscar::TransformRows& rows = params_.tensors[t];
      rows.x.data = on_device.x.get();
      rows.out = on_device.out.get();
      rows.matrix = on_device.matrix.get();
      if (rows.subtracted) rows.subtracted = on_device.subtracted.get();
      if (rows.added) rows.added = on_device.added.get();
    }
  }
  const oscar::TransformParams& params() const { return params_; }

  void upload_rows() {
    for (size_t t = 0; t < tensors_.size(); ++t) tensors_[t]->x.upload(host_.tensors[t].x);
  }
  void poison_outputs() {
    for (auto& tensor : tensors_) tensor->out.fill(0xff);
  }
  // The outputs to the setup; nothing else may have been written.
  void download() {
    ASSERT_CUDA(cudaDeviceSynchronize());
    for (size_t t = 0; t < tensors_.size(); ++t) {
      host_.tensors[t].out = tensors_[t]->out.download();
      EXPECT_TRUE(tensors_[t]->out.guards_intact());
      EXPECT_TRUE(tensors_[t]->x.download() == host_.tensors[t].x);
    }
  }

 private:
  struct Tensor {
    explicit Tensor(const TransformTensor& from)
        : x(from.x),
          out(from.out),
          matrix(from.matrix),
          subtracted(from.subtracted),
          added(from.added) {}
    DeviceBuffer<uint16_t> x, out;
    DeviceBuffer<float> matrix, subtracted, added;
  };
  TransformSetup& host_;
  oscar::TransformParams params_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
};

void run(TransformSetup& setup) {
  DeviceTransform device(setup);
  ASSERT_CUDA(transform_rows(device.params(), nullptr));
  device.download();
}

class TransformKernel : public testing::TestWithParam<TransformCase> {};

TEST_P(TransformKernel, EqualsFloat64UpToTheRoundingOfItsOutput) {
  OSCAR_NEEDS_DEVICE();
  for (const bool output : {false, true}) {
    TransformSetup setup(GetParam(), output);
    ASSERT_NO_FATAL_FAILURE(run(setup));
    setup.expect_outputs();
  }
}

std::vector<TransformCase> cases() {
  std::vector<TransformCase> all = oscar_test::transform_cases();
  for (const int rows : {2, 3, 8, 9, 16, 17, 53, 64, 128}) {
    all.push_back({rows, 8, 4, 128, true, rows % 2 == 0});
  }
  all.push_back({20000, 1, 3, 128, true, true});  // many tiles a block
  all.push_back({20000, 1, 1, 64, true, false});
  all.push_back({9000, 1, 4, 256, true, true});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, TransformKernel, testing::ValuesIn(cases()));

// A prompt's rows and the same rows one by one have to give the same cache.
TEST(TransformKernelBits, OfARowDependOnNoOtherRow) {
  OSCAR_NEEDS_DEVICE();
  for (const int d : {64, 128, 256}) {
    TransformSetup all({70, 2, 4, d, true, true});
    ASSERT_NO_FATAL_FAILURE(run(all));
    for (const int row : {0, 8, 31, 69}) {
      TransformSetup one({1, 2, 4, d, true, true});
      for (size_t t = 0; t < one.tensors.size(); ++t) {
        const TransformTensor& from = all.tensors[t];
        one.tensors[t].matrix = from.matrix;
        one.tensors[t].subtracted = from.subtracted;
        const auto begin = from.x.begin() + row * from.row_stride;
        one.tensors[t].x.assign(begin, begin + from.row_stride);
      }
      ASSERT_NO_FATAL_FAILURE(run(one));
      for (size_t t = 0; t < one.tensors.size(); ++t) {
        const std::vector<uint16_t>& out = one.tensors[t].out;
        EXPECT_TRUE(std::equal(out.begin(), out.end(),
                               all.tensors[t].out.begin() + row * static_cast<int64_t>(out.size())))
            << "d " << d << " row " << row << " tensor " << t;
      }
    }
  }
}

TEST(TransformKernelGraph, IsOneKernelAndReadsWhatIsThereAtReplay) {
  OSCAR_NEEDS_DEVICE();
  TransformSetup setup({53, 8, 4, 128, true, true});
  DeviceTransform device(setup);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_CUDA(transform_rows(device.params(), stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  ASSERT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1u);
  cudaGraphExec_t exec;
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (const unsigned seed : {5u, 6u}) {
    TransformSetup other({53, 8, 4, 128, true, true}, false, seed);
    for (size_t t = 0; t < setup.tensors.size(); ++t) setup.tensors[t].x = other.tensors[t].x;
    device.upload_rows();
    device.poison_outputs();
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    device.download();
    setup.expect_outputs();
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Each launch reads what the one ahead wrote, and may begin before that has ended.
TEST(TransformKernelChain, AdjacentLaunchesGiveTheBitsOfSeparateOnes) {
  OSCAR_NEEDS_DEVICE();
  constexpr int kSteps = 40;
  const auto chain = [](bool synchronise) {
    TransformSetup setup({300, 4, 4, 128, true, false}, true);
    for (float& value : setup.tensors[0].added) value *= 0.1f;
    DeviceTransform device(setup);
    DeviceBuffer<uint16_t> other(setup.tensors[0].out.size());
    oscar::TransformParams p = device.params();
    uint16_t* to[2] = {other.get(), device.params().tensors[0].out};
    for (int step = 0; step < kSteps; ++step) {
      p.tensors[0].out = to[step % 2];
      EXPECT_EQ(transform_rows(p, nullptr), cudaSuccess);
      if (synchronise) {
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      }
      p.tensors[0].x = oscar::contiguous_rows(to[step % 2], 16, 128);
    }
    device.download();
    return setup.tensors[0].out;
  };
  const std::vector<uint16_t> apart = chain(true);
  for (const uint16_t x : apart) ASSERT_LT(x & 0x7fff, 0x7f80) << "not finite";
  EXPECT_TRUE(chain(false) == apart);
}

TEST(TransformKernelArguments, ShapesThatCannotWorkAreRefusedBeforeAnyLaunch) {
  TransformSetup setup({3, 2, 4, 128});
  const auto status = [&](auto change) {
    oscar::TransformParams p = setup.params();
    change(p);
    return transform_rows(p, nullptr);
  };
  EXPECT_EQ(status([](auto& p) { p.head_dim = 96; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.num_tensors = 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.tensors[0].num_heads = 7; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.tensors[0].num_heads = 34; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.tensors[1].x.row_stride += 4; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.tensors[2].matrix = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.rows = 0; }), cudaSuccess);
}

}  // namespace
