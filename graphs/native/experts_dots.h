// Routed experts by sums of products (`dots.h`): the rows of an expert are gathered into groups, its weights packed on the way.

#pragma once

#include "experts.h"
#include "operand.h"
#include "packed_dots.h"

namespace xla_engine {

inline void RunExperts(ffi::ThreadPool& pool, const int32_t* expert, const ExpertLayer& layer) {
  using Kernel = DotKernel<BFloat16>;
  const int64_t count = layer.count, width = layer.width, per_row = layer.per_row, inner = layer.inner;
  const Gathered gathered(expert, count * per_row, layer.experts, kBlockRows);
  const std::vector<Group>& groups = gathered.groups;
  const int64_t group_count = static_cast<int64_t>(groups.size());
  const int64_t words = width / 2, inner_words = inner / 2;
  const int64_t rows_bytes = Kernel::GroupBytes(width), hidden_bytes = Kernel::GroupBytes(inner);
  thread_local Lines rows_buffer, hidden_buffer;
  char* rows = layer.given ? nullptr : rows_buffer.Bytes(group_count * rows_bytes);
  char* hidden = layer.gated ? nullptr : hidden_buffer.Bytes(group_count * hidden_bytes);

  auto prepare = [&](int64_t at) {
    for (int64_t r = 0; r < groups[at].rows; ++r) {
      const int64_t assignment = gathered.assignment[groups[at].first + r];
      if (layer.given) {
        Kernel::Spread(reinterpret_cast<const Word*>(layer.given + assignment * inner), inner_words, r, hidden + at * hidden_bytes);
      } else {
        Kernel::Spread(reinterpret_cast<const Word*>(layer.x + assignment / per_row * width), words, r, rows + at * rows_bytes);
      }
    }
  };

  // Calls take(at, sums) for every group with its sums by two blocks of sixteen rows of its expert's weights.
  auto multiply = [&](const BFloat16* weights, int64_t stride, int64_t one, int64_t other, const char* from, int64_t bytes,
                      int64_t row_words, const auto& take) {
    thread_local Lines kept;
    char* packed = kept.Bytes(2 * row_words * 64);
    const Stream stream = {packed, packed + row_words * 64};
    const auto* all = reinterpret_cast<const Word*>(weights);
    Sums<float> sums;
    int64_t held = -1;  // the expert whose weights are packed
    for (int64_t at = 0; at < group_count; ++at) {
      const int64_t e = groups[at].expert;
      if (e != held) {
        Pack(all + (e * stride + one) * row_words, row_words, 16, row_words, packed);
        Pack(all + (e * stride + other) * row_words, row_words, 16, row_words, packed + row_words * 64);
        held = e;
      }
      MultiplyRows<BFloat16>(groups[at].rows, reinterpret_cast<const Word*>(from + at * bytes), stream, nullptr, row_words, sums);
      take(at, sums);
    }
  };

  auto gate = [&](int64_t task) {  // gates and ups of features 16 task ..
    const int64_t feature = 16 * task;
    multiply(layer.gate_up, 2 * inner, feature, inner + feature, rows, rows_bytes, words, [&](int64_t at, auto& sums) {
      const float* bias = layer.gate_up_bias ? layer.gate_up_bias + groups[at].expert * 2 * inner + feature : nullptr;
      for (int64_t r = 0; r < groups[at].rows; ++r) {
        Vec g = Load(sums.one + r * 16), u = Load(sums.other + r * 16);
        if (bias) g += Load(bias), u += Load(bias + inner);
        alignas(64) BFloat16 rounded[16];
        Round(Gate(g, u, layer.limit), rounded);
        if (layer.gated) {
          std::memcpy(layer.gated + gathered.assignment[groups[at].first + r] * inner + feature, rounded, sizeof(rounded));
          continue;
        }
        auto* to = reinterpret_cast<Word*>(hidden + at * hidden_bytes) + feature / 2 * Dots<BFloat16>::kParts * kBlockRows + r;
        for (int64_t word = 0; word < 8; ++word)
          Dots<BFloat16>::Spread(LoadAs<Word>(rounded + 2 * word), to + word * Dots<BFloat16>::kParts * kBlockRows, kBlockRows);
      }
    });
  };

  auto finish = [&](int64_t task) {  // features 32 task .. of every row
    const int64_t feature = task * kFeatures;
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(layer.out + row * width + feature, layer.residual + row * width + feature, kFeatures * sizeof(float));
    multiply(layer.down, width, feature, feature + 16, hidden, hidden_bytes, inner_words, [&](int64_t at, auto& sums) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t first = feature + 16 * half;
        Vec bias = {};
        if (layer.down_bias) bias = Load(layer.down_bias + groups[at].expert * width + first);
        for (int64_t r = 0; r < groups[at].rows; ++r) {
          const int64_t assignment = gathered.assignment[groups[at].first + r];
          float* to = layer.out + assignment / per_row * width + first;
          Store(to, Fused(Load((half ? sums.other : sums.one) + r * 16) + bias, layer.weight[assignment], Load(to)));
        }
      }
    });
  };

  const Phase first{group_count, prepare};
  if (layer.gated) return InPhases(pool, first, Phase{inner / 16, gate});
  if (layer.given) return InPhases(pool, first, Phase{width / kFeatures, finish});
  InPhases(pool, first, Phase{inner / 16, gate}, Phase{width / kFeatures, finish});
}

}  // namespace xla_engine
