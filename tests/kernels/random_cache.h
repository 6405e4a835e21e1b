// A whole paged cache with random, hostile content, on host and device, for kernel tests.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>

#include "kernels/device_memory.h"
#include "oscar/cache/pages.h"

namespace oscar_test {

// What the rows look like.
enum class Content {
  kRandom,
  kDominantToken,  // one key far above the rest
  kFlat,           // all logits equal, almost
  kAscending,      // each tile's logits above the last: the reference moves all the time
  kWideScales,     // scales from 2^-14 to 2^10
  kQueryOutliers,  // some |q| x 100
};

struct CacheShape {
  int head_dim = 128, quant_group_size = 128;
  oscar::MetadataDtype metadata = oscar::MetadataDtype::kFp16;
  int num_qo_heads = 8, num_kv_heads = 2, q_len = 1;
  int sink = 64, recent = 256;
  std::vector<int> seq_lens;
  int table_pages = 0;  // entries of a request in the block table; 0: two more than the longest has
  Content content = Content::kRandom;
  int center_segments = 0;   // of key centers; 0: none
  float center_size = 2.0f;  // of their entries; with such queries also of logits
};

struct RandomCache {
  static constexpr int32_t kGarbage = 0x70000007;  // in tables and lengths that no call may follow
  CacheShape shape;
  oscar::PageFormat format;
  std::vector<uint8_t> pool;
  std::vector<int32_t> table, history, lens, slots;
  int table_stride = 0;
  std::vector<uint16_t> wk, wv, q;
  std::vector<uint16_t> centers;
  std::vector<int32_t> first_position;
  int ring = 0;

  explicit RandomCache(const CacheShape& s, unsigned seed = 1) : shape(s) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    format = {s.head_dim, {s.quant_group_size, s.metadata}};
    const int batch = static_cast<int>(s.seq_lens.size());
    ring = s.recent + 1 + s.q_len;
    lens.assign(s.seq_lens.begin(), s.seq_lens.end());
    int most = 0, used = 0;
    for (const int length : lens) {
      history.push_back(oscar::history_for_length(length, s.sink, s.recent, 1));
      most = std::max(most, pages_of(history.back()));
      used += pages_of(history.back());
    }
    const int pages = used + 3;  // some stay unused
    std::vector<int32_t> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    table_stride = s.table_pages > 0 ? s.table_pages : most + 2;
    table.assign(static_cast<size_t>(batch) * table_stride, kGarbage);
    for (int b = 0, at = 0; b < batch; ++b) {
      for (int page = 0; page < pages_of(history[b]); ++page) row(b)[page] = order[at++];
    }
    slots.resize(batch);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    for (int b = 0; b < batch; ++b) {
      if (lens[b] == 0) history[b] = slots[b] = kGarbage;  // an unused place of the batch
    }

    const int bytes_of_page = page_bytes(format), d = s.head_dim;
    pool.assign(static_cast<size_t>(pages) * s.num_kv_heads * bytes_of_page, 0xff);  // NaN metadata
    for (int b = 0; b < batch; ++b) {
      const int tokens = lens[b] > 0 ? history[b] : 0, dominant = tokens / 2;
      for (int token = 0; token < tokens; ++token) {
        for (int head = 0; head < s.num_kv_heads; ++head) {
          uint8_t* c = &pool[(static_cast<size_t>(row(b)[token / 64]) * s.num_kv_heads + head) *
                             bytes_of_page];
          for (int side = 0; side < 2; ++side) {
            uint8_t* codes = c + code_offset(format, side, token % 64);
            for (int i = 0; i < d / 4; ++i) codes[i] = static_cast<uint8_t>(rng());
            for (int g = 0; g < groups_per_row(format); ++g) {
              float scale = 0.3f + 0.5f * uniform(rng), zero = 1.0f + uniform(rng);
              if (s.content == Content::kDominantToken && side == 0 && token == dominant) {
                scale = 20.0f;
              }
              if (s.content == Content::kFlat && side == 0) scale = 6.1035e-5f;
              if (s.content == Content::kAscending && side == 0) {
                zero = -0.02f * static_cast<float>(token);
              }
              if (s.content == Content::kWideScales) {
                scale = std::exp2(side ? 24.0f * uniform(rng) - 14.0f : -8.0f * uniform(rng));
              }
              void* metadata = c + metadata_offset(format, side, token % 64);
              oscar::store_metadata(metadata, 2 * g, scale, s.metadata);
              oscar::store_metadata(metadata, 2 * g + 1, zero, s.metadata);
            }
          }
        }
      }
    }
    const size_t rows = static_cast<size_t>(batch) * s.num_kv_heads * (s.sink + ring);
    wk.assign(rows * d, 0x7fc0);  // NaN until written
    wv.assign(rows * d, 0x7fc0);
    const oscar::ExactWindows w = windows(wk.data(), wv.data(), nullptr);
    for (int b = 0; b < batch; ++b) {
      for (int position = 0; position < lens[b]; ++position) {
        if (position >= s.sink && position < s.sink + history[b]) continue;
        for (int head = 0; head < s.num_kv_heads; ++head) {
          const int64_t at =
              window_offset(w, slots[b], head, s.num_kv_heads, window_row(w, position), d);
          for (int i = 0; i < d; ++i) {
            wk[at + i] = oscar::float_to_bf16(normal(rng));
            wv[at + i] = oscar::float_to_bf16(normal(rng));
          }
        }
      }
    }
    q.resize(static_cast<size_t>(batch) * s.q_len * s.num_qo_heads * d);
    for (uint16_t& value : q) {
      float x = normal(rng);
      if (s.content == Content::kQueryOutliers && rng() % 64 == 0) x *= 100.0f;
      if (s.content == Content::kAscending) x = 0.05f + std::fabs(x) * 0.1f;
      value = oscar::float_to_bf16(x);
    }
    if (s.center_segments > 0) add_centers(rng);
  }

  static int pages_of(int tokens) { return (tokens + 63) / 64; }
  int32_t* row(int b) { return &table[static_cast<size_t>(b) * table_stride]; }

  // Random centers, and keys that have either of them.
  void add_centers(std::mt19937& rng) {
    std::normal_distribution<float> normal(0.0f, shape.center_size);
    centers.resize(static_cast<size_t>(shape.center_segments) * shape.num_kv_heads * 2 *
                   shape.head_dim);
    for (uint16_t& value : centers) value = oscar::float_to_bf16(normal(rng));
    for (size_t b = 0; b < lens.size(); ++b) {
      first_position.push_back(static_cast<int32_t>(rng() % 2000));
    }
    const int bytes_of_page = page_bytes(format);
    for (size_t at = 0; at < pool.size(); at += bytes_of_page) {
      for (int token = 0; token < 64; ++token) {
        uint8_t* metadata = &pool[at] + metadata_offset(format, 0, token);
        const float scale = oscar::load_metadata(metadata, 0, shape.metadata);
        oscar::store_metadata(metadata, 0, oscar::scale_with_center(scale, rng() % 2),
                              shape.metadata);
      }
    }
  }

  oscar::KeyCenters key_centers(const uint16_t* rows, const int32_t* positions) const {
    if (shape.center_segments == 0) return {};
    return {rows, shape.center_segments, positions};
  }
  oscar::ExactWindows windows(uint16_t* k, uint16_t* v, const int32_t* slot) const {
    return {k, v, slot, shape.sink, ring};
  }
  oscar::AttentionParams host_params() {
    oscar::AttentionParams p;
    p.format = format;
    p.history = {pool.data(), table.data(), table_stride, history.data()};
    p.windows = windows(wk.data(), wv.data(), slots.data());
    p.centers = key_centers(centers.data(), first_position.data());
    p.seq_lens = lens.data();
    p.q = q.data();
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    p.batch = static_cast<int>(lens.size());
    p.q_len = shape.q_len;
    p.num_qo_heads = shape.num_qo_heads;
    p.num_kv_heads = shape.num_kv_heads;
    return p;
  }
};

// The same cache in device memory.
struct DeviceCache {
  DeviceBuffer<uint8_t> pool;
  DeviceBuffer<int32_t> table, history, lens, slots, first_position;
  DeviceBuffer<uint16_t> wk, wv, q, centers, o;
  DeviceBuffer<float> lse;
  oscar::AttentionParams params;

  explicit DeviceCache(RandomCache& host)
      : pool(host.pool),
        table(host.table),
        history(host.history),
        lens(host.lens),
        slots(host.slots),
        first_position(host.first_position),
        wk(host.wk),
        wv(host.wv),
        q(host.q),
        centers(host.centers),
        o(host.q.size()),
        lse(host.q.size() / host.shape.head_dim),
        params(host.host_params()) {
    params.history = {pool.get(), table.get(), host.table_stride, history.get()};
    params.windows = host.windows(wk.get(), wv.get(), slots.get());
    params.centers = host.key_centers(centers.get(), first_position.get());
    params.seq_lens = lens.get();
    params.q = q.get();
    params.o = o.get();
    params.lse = lse.get();
  }
  bool guards_intact() const {
    return pool.guards_intact() && wk.guards_intact() && wv.guards_intact() && o.guards_intact() &&
           lse.guards_intact() && q.guards_intact();
  }
};

}  // namespace oscar_test
