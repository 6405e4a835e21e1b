// Entry points of the calibration sums: checks, and the choice of an instantiation.
#include "gram_kernel.cuh"

namespace oscar {
namespace {

constexpr int kMaxTokens = 1 << 30;  // row numbers of padded sequences stay in an int

bool valid_params(const GramParams& p) {
  if (p.num_kv_heads <= 0 || p.num_tensors <= 0 || p.num_tensors > kMaxGramTensors) return false;
  for (int i = 0; i < p.num_tensors; ++i) {
    const GramRows& t = p.tensors[i];
    if (t.batch < 0 || t.tokens < 0 || t.tokens > kMaxTokens) return false;
    if (t.num_heads <= 0 || t.num_heads % p.num_kv_heads != 0) return false;
    if (!t.rows || !t.moment || !t.sum) return false;
  }
  return true;
}

bool readable(const GramParams& p) {
  for (int i = 0; i < p.num_tensors; ++i) {
    const GramRows& t = p.tensors[i];
    const auto address = reinterpret_cast<uintptr_t>(t.rows);
    if (address % 16 != 0 || (t.batch_stride | t.head_stride | t.token_stride) % 8 != 0) {
      return false;
    }
  }
  return true;
}

// One wave of thread blocks.
template <int kHeadDim>
cudaError_t plan(const GramParams& params, GramWork* work) {
  using Shape = GramShape<kHeadDim>;
  int device = 0, multiprocessors = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(gram_kernel<kHeadDim>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Shape::kSharedBytes);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, gram_kernel<kHeadDim>,
                                                          Shape::kThreads, Shape::kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  const int shares = multiprocessors * resident / Shape::kSplits;
  *work = make_gram_work(params, shares > 0 ? shares : 1);
  return cudaSuccess;
}

template <int kHeadDim>
size_t workspace_bytes_for(const GramWork& work) {
  return static_cast<size_t>(work.shares + work.outputs()) * GramShape<kHeadDim>::kPartial *
         sizeof(double);
}

template <int kHeadDim>
cudaError_t launch(const GramWork& work, void* workspace, cudaStream_t stream) {
  using Shape = GramShape<kHeadDim>;
  if (work.shares == 0) return cudaSuccess;
  auto* partials = static_cast<double*>(workspace);
  gram_kernel<kHeadDim><<<static_cast<unsigned>(work.shares * Shape::kSplits), Shape::kThreads,
                          Shape::kSharedBytes, stream>>>(work, partials);
  const dim3 tiles(static_cast<unsigned>(work.outputs()), Shape::kTiles + 1);
  gram_total_kernel<kHeadDim><<<tiles, Shape::kTile, 0, stream>>>(work, partials);
  return cudaGetLastError();
}

// `call.template operator()<head_dim>()` for a supported head_dim.
template <typename Call>
cudaError_t with_head_dim(const GramParams& params, const Call& call) {
  if (!valid_params(params)) return cudaErrorInvalidValue;
  if (!readable(params)) return cudaErrorNotSupported;
  switch (params.head_dim) {
    case 64:
      return call.template operator()<64>();
    case 80:
      return call.template operator()<80>();
    case 96:
      return call.template operator()<96>();
    case 128:
      return call.template operator()<128>();
    case 192:
      return call.template operator()<192>();
    case 256:
      return call.template operator()<256>();
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace

cudaError_t gram_workspace(const GramParams& params, size_t* bytes) {
  return with_head_dim(params, [&]<int kHeadDim>() {
    GramWork work;
    const cudaError_t error = plan<kHeadDim>(params, &work);
    if (error == cudaSuccess) *bytes = workspace_bytes_for<kHeadDim>(work);
    return error;
  });
}

cudaError_t gram_add(const GramParams& params, void* workspace, size_t workspace_bytes,
                     cudaStream_t stream) {
  return with_head_dim(params, [&]<int kHeadDim>() {
    GramWork work;
    const cudaError_t error = plan<kHeadDim>(params, &work);
    if (error != cudaSuccess) return error;
    if (workspace_bytes_for<kHeadDim>(work) > workspace_bytes) return cudaErrorInvalidValue;
    return launch<kHeadDim>(work, workspace, stream);
  });
}

}  // namespace oscar
