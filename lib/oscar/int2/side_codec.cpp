// The INT2 codec on whole layers: the cache library on the CPU, a kernel on a GPU.
#include "oscar/int2/side_codec.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/cache/page_layout.h"
#include "oscar/fit/key_centres.h"
#include "oscar/int2/device_rows.h"

namespace oscar {
namespace {

torch::Tensor to_device(const float* data, at::IntArrayRef shape, torch::Device device) {
  // The blob is only read: clone before the bundle may go away.
  return torch::from_blob(const_cast<float*>(data), shape, torch::kFloat32).clone().to(device);
}

torch::Tensor quantize_dequantize_host(const SideCodec& side, const torch::Tensor& x,
                                       const std::string& where) {
  const int64_t heads = x.size(1), tokens = x.size(2), d = x.size(3);
  auto out = torch::empty_like(x);
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t offset = (b * heads + h) * tokens * d;
      const RowsStatus status =
          quantize_rows(row_quantizer(side, h), x.data_ptr<float>() + offset, tokens,
                        {.dequantized = out.data_ptr<float>() + offset}, at::get_num_threads());
      if (status.status != RowStatus::kOk) {
        refuse_rows(where + ", head " + std::to_string(h) + ", token " + std::to_string(status.row),
                    status.status);
      }
    }
  }
  return out;
}

// Other stacks' codecs neither shape rounding nor correct scales.
void require_plain(const SideCodec& side, const std::string& where) {
  const SideRecipe& recipe = side.recipe;
  const bool plain = !recipe.any(Rounding::kShaped) && !recipe.any(ScaleCorrection::kUnbiased) &&
                     !recipe.any(ScaleCorrection::kMetric);
  if (side.format.rules == CodecRules{} || plain) return;
  throw Error({.what = "only this toolkit's codec shapes rounding and corrects scales",
               .where = where,
               .hint = "calibrate with --for the stack that is to serve it"});
}

// What writing rows needs of a codec, in host memory.
SideCodec on_host(const SideCodec& side) {
  const auto host = [](const torch::Tensor& t) { return t.defined() ? t.to(torch::kCPU) : t; };
  SideCodec result = side;
  result.forward = host(side.forward);
  result.feedback = host(side.feedback);
  result.metric = host(side.metric);
  return result;
}

// Rows less the nearer centre of their segment through the codec, and the centre added again.
torch::Tensor about_centres(const SideCodec& side, const torch::Tensor& rows,
                            const std::string& where, const std::vector<SegmentRun>& runs) {
  assert(!runs.empty() && runs.back().end == rows.size(2));
  const auto z = rows.to(torch::kBFloat16).to(torch::kFloat32);
  std::vector<torch::Tensor> parts;
  for (const SegmentRun& run : runs) {
    const auto centres = side.centres[run.segment];  // [Hkv, 2, d]
    const auto own = z.slice(2, run.begin, run.end);
    const auto scores = torch::matmul(own, centres.transpose(1, 2)) -
                        0.5 * centres.square().sum(2).unsqueeze(1);  // [batch, Hkv, tokens, 2]
    const auto second = scores.select(3, 1).gt(scores.select(3, 0)).unsqueeze(3);
    parts.push_back(
        torch::where(second, centres.select(1, 1).unsqueeze(1), centres.select(1, 0).unsqueeze(1)));
  }
  const auto nearer = torch::cat(parts, 2);
  SideCodec plain = side;
  plain.centres = torch::Tensor();
  return quantize_dequantize(plain, z - nearer, where).add_(nearer);
}

}  // namespace

void refuse_rows(const std::string& where, RowStatus status) {
  const bool finite = status == RowStatus::kMetadataOverflow;
  throw Error({.what = finite ? "the range of a cache row does not fit the metadata dtype"
                              : "a cache row holds values that are not finite",
               .where = where,
               .hint = finite ? "use --metadata-dtype fp32"
                              : "check the weights, or run with --dtype fp32"});
}

SideCodec make_side_codec(const SideTransform& transform, Side side,
                          const QuantizerSettings& quantizer, int layer, const Rope& rope,
                          torch::Device device) {
  const std::string where = "layer " + std::to_string(layer);
  const int d = transform.forward.rows;
  SideCodec codec;
  codec.format = quantizer.row_format();
  int& size = codec.format.quant_group_size;
  if (size <= 0) size = d;
  if (size > d || d % size != 0 || d % 8 != 0 || d > kMaxHeadDim) {
    throw Error({.what = "quantization groups do not fit the head",
                 .where = where,
                 .expected = "a group size that divides head_dim " + std::to_string(d) +
                             " (a multiple of 8, at most " + std::to_string(kMaxHeadDim) + ")",
                 .found = std::to_string(size)});
  }
  codec.forward = to_tensor(transform.forward, device);
  if (!transform.partner.empty()) {
    codec.partner = to_tensor(transform.partner, device);
  } else {
    codec.partner = side == Side::kKey ? codec.forward : codec.forward.transpose(1, 2).contiguous();
  }
  if (is_centred(transform)) {
    const auto& mean = transform.mean;
    codec.mean = to_device(mean.data.data(), {mean.count, mean.cols}, device);
  }
  if (has_centres(transform)) {
    const std::vector<float> rows = centre_rows(transform, rope);
    const int64_t heads = transform.forward.count;
    const auto segments = static_cast<int64_t>(rows.size()) / (heads * kCentres * d);
    codec.centres = to_device(rows.data(), {segments, heads, kCentres, d}, device);
  }
  codec.recipe = transform.recipe;
  if (codec.recipe.any(Rounding::kShaped)) codec.feedback = to_tensor(transform.feedback, device);
  if (codec.recipe.any(ScaleCorrection::kMetric)) {
    if (transform.metric.empty()) {
      throw Error({.what = "the metric of the scale correction is missing", .where = where});
    }
    codec.metric = to_tensor(transform.metric, device);
  }
  return codec;
}

RowQuantizer row_quantizer(const SideCodec& side, int64_t head) {
  const int64_t d = side.forward.size(2), matrix = head * d * d;
  const auto of_head = [&](const torch::Tensor& stacked) {
    return stacked.defined() ? stacked.data_ptr<float>() + matrix : nullptr;
  };
  return {.head_dim = static_cast<int>(d),
          .format = side.format,
          .recipe = side.recipe[static_cast<size_t>(head)],
          .feedback = of_head(side.feedback),
          .metric = of_head(side.metric)};
}

torch::Tensor to_cache_basis(const SideCodec& side, const torch::Tensor& x) {
  auto rows = x.to(torch::kFloat32);
  if (side.mean.defined()) rows = rows - side.mean.unsqueeze(1);
  return torch::matmul(rows, side.forward);
}

torch::Tensor to_tensor(const MatrixStack<float>& stack, torch::Device device) {
  return to_device(stack.data.data(), {stack.count, stack.rows, stack.cols}, device);
}

torch::Tensor to_tensor(const MatrixStack<double>& stack, torch::Device device) {
  return torch::from_blob(const_cast<double*>(stack.data.data()),
                          {stack.count, stack.rows, stack.cols}, torch::kFloat64)
      .to(torch::kFloat32)
      .to(device);
}

std::vector<SegmentRun> segment_runs(const SideCodec& side, const RowPlaces& places, int64_t rows) {
  std::vector<SegmentRun> runs;
  if (!side.centres.defined()) return runs;
  const int64_t segments = side.centres.size(0);
  const auto segment_of = [&](int64_t token) {
    const int64_t page = std::max<int64_t>(0, token - places.sink) / kPageTokens;
    return static_cast<int64_t>(
        segment_of_page(static_cast<int>(places.first_position), static_cast<int>(places.sink),
                        static_cast<int>(page), static_cast<int>(segments)));
  };
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t segment = segment_of(places.first_token + i);
    if (runs.empty() || runs.back().segment != segment) runs.push_back({i, i, segment});
    runs.back().end = i + 1;
  }
  return runs;
}

torch::Tensor quantize_dequantize(const SideCodec& side, const torch::Tensor& rows,
                                  const std::string& where, const std::vector<SegmentRun>& runs) {
  require_plain(side, where);
  if (side.centres.defined()) return about_centres(side, rows, where, runs);
  const auto x = rows.to(torch::kBFloat16).to(torch::kFloat32).contiguous();
  if (x.is_cpu()) return quantize_dequantize_host(side, x, where);
  if (x.is_cuda() && has_device_rows()) return quantize_dequantize_device(side, x, where);
  return quantize_dequantize_host(on_host(side), x.to(torch::kCPU), where).to(x.device());
}

}  // namespace oscar
