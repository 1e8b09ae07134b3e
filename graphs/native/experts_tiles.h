// Routed experts on matrix tiles (Intel AMX): rows are gathered into tiles, and activated while still in the tiles' order.

#pragma once

#include "experts_dots.h"
#include "tiles.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

constexpr int64_t kRows = 16;  // of a group: the rows of one expert that share a tile

// Two features of sixteen rows as the words of an operand tile: the first in the lower halves.
inline __m512i Words16(Vec first, Vec second) {
  const auto low = (__m256i)_mm512_cvtneps_pbh((__m512)first), high = (__m256i)_mm512_cvtneps_pbh((__m512)second);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

inline Columns ColumnsOf(const std::vector<Group>& groups, size_t at) {
  const bool pair = at + 1 < groups.size() && groups[at + 1].expert == groups[at].expert;
  return {groups[at].rows, pair ? groups[at + 1].rows : 0};
}

// Calls step(group, columns, experts to the next) for all groups, two of one expert at a time.
template <typename Step>
void ByPairs(const std::vector<Group>& groups, Step step) {
  for (size_t at = 0; at < groups.size();) {
    const Columns columns = ColumnsOf(groups, at);
    const size_t next = at + (columns.second ? 2 : 1);
    const int64_t ahead = next < groups.size() ? groups[next].expert - groups[at].expert : 0;
    step(static_cast<int64_t>(at), columns, ahead);
    at = next;
  }
}

inline uint32_t* Aligned(std::vector<uint32_t>& buffer, int64_t words) {
  if (static_cast<int64_t>(buffer.size()) < words + 16) buffer.resize(words + 16);
  return buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64 / 4;
}

// The weights of two blocks of sixteen features, as rows. Weights in quantised blocks are unpacked, which gives the order of a right operand,
// and transposed, because weights are the left operand here.
inline Rows RowsOf(const Matrices<BFloat16>& weights, int64_t one, int64_t other, int64_t step) {
  const int64_t width = weights.width;
  if (!weights.coded) return {weights.values + one * width, weights.values + other * width, step};
  thread_local Lines kept;
  char* unpacked = kept.Bytes(width * 96);
  auto* rows = reinterpret_cast<Word*>(unpacked + width * 32);  // [32, K / 2]
  for (int64_t half : {0, 1}) {
    weights.coded->Unpack((half ? other : one) / 16, unpacked);
    const auto* words = reinterpret_cast<const Word*>(unpacked);
    for (int64_t word = 0; word < width / 2; word += 4)
      for (int64_t f = 0; f < 16; f += 4) TurnFour(words + word * 16 + f, 16, rows + (half * 16 + f) * (width / 2) + word, width / 2);
  }
  Written();
  const auto* upper = reinterpret_cast<const BFloat16*>(rows);
  return {upper, upper + 16 * width, 0};
}

inline void RunExperts(ffi::ThreadPool& pool, const int32_t* expert, const ExpertLayer<BFloat16>& layer) {
  const int64_t count = layer.count, width = layer.width, per_row = layer.per_row, inner = layer.inner;
  const Gathered gathered(expert, count * per_row, layer.experts, kRows);
  const std::vector<Group>& groups = gathered.groups;
  const int64_t group_count = static_cast<int64_t>(groups.size());
  const int64_t words = width / 2, inner_words = inner / 2;
  thread_local std::vector<uint32_t> rows_buffer, hidden_buffer;
  uint32_t* tiles = layer.given ? nullptr : Aligned(rows_buffer, group_count * kRows * words);
  uint32_t* hidden = layer.gated ? nullptr : Aligned(hidden_buffer, group_count * kRows * inner_words);

  // A task has sixteen gates beside their ups, or thirty-two features without a gate, of all experts in use.
  const int64_t per_task = layer.plain ? kFeatures : 16, apart = layer.plain ? 16 : inner;
  const int64_t gate_tasks = inner / per_task;
  const int64_t down_tasks = width / kFeatures;

  auto prepare = [&](int64_t at) {
    thread_local std::vector<BFloat16> taken;
    const Group& group = groups[at];
    const int64_t features = layer.given ? inner : width;
    taken.resize(kRows * features);
    for (int64_t r = 0; r < group.rows; ++r) {
      const int64_t assignment = gathered.assignment[group.first + r];
      const BFloat16* from = layer.given ? layer.given + assignment * inner : layer.x + assignment / per_row * width;
      std::memcpy(taken.data() + r * features, from, features * sizeof(BFloat16));
    }
    Interleave(taken.data(), group.rows, features / 2, (layer.given ? hidden : tiles) + at * kRows * features / 2);
  };

  auto multiply = [&](int64_t task) {
    int64_t held = -1;  // the expert whose weights are ready
    Rows weights;
    ByPairs(groups, [&](int64_t at, Columns columns, int64_t next) {
      const int64_t e = groups[at].expert, feature = per_task * task, first = e * layer.Rows() + feature;
      if (e != held || !layer.gate_up.coded) weights = RowsOf(layer.gate_up, first, first + apart, next * layer.Rows() * width);
      held = e;
      Configure(columns);
      Multiply(weights, tiles + at * kRows * words, width, columns.second > 0, next > 0 && !layer.gate_up.coded);
      for (int half = 0; half < (columns.second ? 2 : 1); ++half) {
        alignas(64) float sums[2][256];  // [block of features][16 features][16 rows]
        Take(2 * half, sums[0], 64);
        Take(2 * half + 1, sums[1], 64);
        const auto sum = [&](int block, int64_t f) {
          const Vec each = Load(sums[block] + f * 16);
          return layer.gate_up_bias ? each + layer.gate_up_bias[first + block * apart + f] : each;
        };
        const auto between = [&](int block, int64_t f) {
          return layer.plain ? SquaredRelu(sum(block, f)) : Gate(sum(0, f), sum(1, f), layer.limit, layer.gelu);
        };
        const auto put = [&](int64_t f, Vec even, Vec odd) {  // features f and f + 1
          const __m512i both = Words16(even, odd);
          if (!layer.gated) return _mm512_storeu_si512(hidden + ((at + half) * inner_words + f / 2) * kRows, both);
          alignas(64) uint32_t by_row[kRows];
          _mm512_store_si512(by_row, both);
          const Group& group = groups[at + half];
          for (int64_t r = 0; r < group.rows; ++r)
            std::memcpy(layer.gated + gathered.assignment[group.first + r] * inner + f, by_row + r, sizeof(uint32_t));
        };
        for (int block = 0; block < per_task / 16; ++block)
          for (int64_t f = 0; f < 16; f += 2) put(feature + 16 * block + f, between(block, f), between(block, f + 1));
      }
    });
    _tile_release();
  };

  auto finish = [&](int64_t task) {  // features 32 task .. of every row
    const int64_t feature = task * kFeatures;
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(layer.out + row * width + feature, layer.residual + row * width + feature,
                  kFeatures * sizeof(float));
    int64_t held = -1;
    Rows weights;
    ByPairs(groups, [&](int64_t at, Columns columns, int64_t next) {
      const int64_t e = groups[at].expert, first = e * width + feature;
      if (e != held || !layer.down.coded) weights = RowsOf(layer.down, first, first + 16, next * width * inner);
      held = e;
      Configure(columns);
      Multiply(weights, hidden + at * kRows * inner_words, inner, columns.second > 0, next > 0 && !layer.down.coded);
      for (int tile = 0; tile < (columns.second ? 4 : 2); ++tile) {
        Turned turned;
        Take(tile, turned.sums, 64);
        const Group& group = groups[at + tile / 2];
        const int64_t first = feature + tile % 2 * 16;
        Vec bias = {};
        if (layer.down_bias) bias = Load(layer.down_bias + e * width + first);
        for (int64_t r = 0; r < group.rows; ++r) {
          const int64_t assignment = gathered.assignment[group.first + r];
          float* to = layer.out + assignment / per_row * width + first;
          Store(to, Fused(turned.Row(r) + bias, layer.weight[assignment], Load(to)));
        }
      }
    });
    _tile_release();
  };

  const Phase first{group_count, prepare};
  if (layer.gated) return InPhases(pool, first, Phase{gate_tasks, multiply});
  if (layer.given) return InPhases(pool, first, Phase{down_tasks, finish});
  InPhases(pool, first, Phase{gate_tasks, multiply}, Phase{down_tasks, finish});
}

}  // namespace xla_engine

#endif
