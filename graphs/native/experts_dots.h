// Routed experts by sums of products (`dots.h`): the rows of an expert are gathered into groups, its weights packed on the way, or
// unpacked if they are as in a quantised file.

#pragma once

#include "coded_weights.h"
#include "experts.h"
#include "grouped_dots.h"
#include "operand.h"

namespace xla_engine {

// How rows of T become operands: bf16 is multiplied as it is, floats are quantised (`GroupKernel`).
struct BFloat16Experts {
  using Kernel = DotKernel<BFloat16>;

  static void Put(const BFloat16* row, int64_t width, int64_t r, char* block) {
    Kernel::Spread(reinterpret_cast<const Word*>(row), width / 2, r, block);
  }
  static void Multiply(int64_t rows, const char* block, const Stream& weights, int64_t width, Sums<float>& sums) {
    MultiplyRows<BFloat16>(rows, reinterpret_cast<const Word*>(block), weights, nullptr, width / 2, sums);
  }
};

struct Int8Experts {
  using Kernel = GroupKernel;

  static void Put(const float* row, int64_t width, int64_t r, char* block) {
    for (int64_t k = 0; k < width; k += kScaleGroup) {
      Vec group[QuantizedGroup::kParts];
      for (int64_t part = 0; part < QuantizedGroup::kParts; ++part) group[part] = Load(row + k + part * kVector);
      alignas(64) int8_t bytes[kScaleGroup];
      Kernel::Quantize(group, r, bytes, Kernel::At(block, k));
      for (int64_t word = 0; word < kGroupWords; ++word)
        Dots<int8_t>::Spread(LoadAs<Word>(bytes + 4 * word), Kernel::At(block, k) + word * Dots<int8_t>::kParts * kBlockRows + r, kBlockRows);
    }
  }
  static void Multiply(int64_t rows, const char* block, const Stream& weights, int64_t width, Sums<float>& sums) {
    Kernel::MultiplyRows(rows, reinterpret_cast<const Word*>(block), weights, nullptr, width / kScaleGroup, sums);
  }
};

template <typename T>
void RunExperts(ffi::ThreadPool& pool, const int32_t* expert, const ExpertLayer<T>& layer) {
  using Form = std::conditional_t<std::is_same_v<T, int8_t>, Int8Experts, BFloat16Experts>;
  using Value = typename ExpertLayer<T>::Value;
  const int64_t count = layer.count, width = layer.width, per_row = layer.per_row, inner = layer.inner;
  const Gathered gathered(expert, count * per_row, layer.experts, kBlockRows);
  const std::vector<Group>& groups = gathered.groups;
  const int64_t group_count = static_cast<int64_t>(groups.size());
  const int64_t rows_bytes = Form::Kernel::GroupBytes(width), hidden_bytes = Form::Kernel::GroupBytes(inner);
  thread_local Lines rows_buffer, hidden_buffer, between_buffer;
  char* rows = layer.given ? nullptr : rows_buffer.Bytes(group_count * rows_bytes);
  char* hidden = layer.gated ? nullptr : hidden_buffer.Bytes(group_count * hidden_bytes);
  Value* gated = layer.gated;  // by assignment, [N K, F]
  if (!layer.given && !gated) gated = reinterpret_cast<Value*>(between_buffer.Bytes(count * per_row * inner * sizeof(Value)));
  const Value* given = layer.given ? layer.given : gated;

  auto prepare = [&](int64_t at) {
    for (int64_t r = 0; r < groups[at].rows; ++r) {
      const int64_t assignment = gathered.assignment[groups[at].first + r];
      Form::Put(layer.x + assignment / per_row * width, width, r, rows + at * rows_bytes);
    }
  };
  auto prepare_hidden = [&](int64_t at) {
    for (int64_t r = 0; r < groups[at].rows; ++r)
      Form::Put(given + gathered.assignment[groups[at].first + r] * inner, inner, r, hidden + at * hidden_bytes);
  };

  // Calls take(at, sums) for every group with its sums by two blocks of sixteen rows of its expert's weights.
  auto multiply = [&](const T* values, const CodedWeights* coded, const BFloat16* scales, int64_t stride, int64_t one, int64_t other, const char* from,
                      int64_t bytes, int64_t k, const auto& take) {
    thread_local Lines kept, kept_scales;
    const PackedWeights<T> weights = {values, scales, k};
    const int64_t words = k * sizeof(T) / 4, of_k = k / kScaleGroup;
    char* packed = kept.Bytes(2 * words * 64);
    Stream stream = {packed, packed + words * 64};
    BFloat16* packed_scales = nullptr;
    if (scales) {
      packed_scales = reinterpret_cast<BFloat16*>(kept_scales.Bytes(of_k * kFeatures * sizeof(BFloat16)));
      stream.one_scales = packed_scales, stream.other_scales = packed_scales + of_k * 16;
    }
    Sums<float> sums;
    int64_t held = -1;  // the expert whose weights are packed
    for (int64_t at = 0; at < group_count; ++at) {
      const int64_t e = groups[at].expert;
      if (e != held && coded) {
        coded->Unpack((e * stride + one) / 16, packed);
        coded->Unpack((e * stride + other) / 16, packed + words * 64);
        held = e;
      }
      if (e != held) {
        const Stream stored = weights.At(e * stride + one, e * stride + other);
        Pack(reinterpret_cast<const Word*>(stored.one), words, 16, words, packed);
        Pack(reinterpret_cast<const Word*>(stored.other), words, 16, words, packed + words * 64);
        if (scales) PackScales(stored.one_scales, of_k, 16, packed_scales), PackScales(stored.other_scales, of_k, 16, packed_scales + of_k * 16);
        held = e;
      }
      Form::Multiply(groups[at].rows, from + at * bytes, stream, k, sums);
      take(at, sums);
    }
  };

  auto gate = [&](int64_t task) {  // gates and ups of features 16 task ..
    const int64_t feature = 16 * task;
    const auto take = [&](int64_t at, auto& sums) {
      const float* bias = layer.gate_up_bias ? layer.gate_up_bias + groups[at].expert * 2 * inner + feature : nullptr;
      for (int64_t r = 0; r < groups[at].rows; ++r) {
        Vec g = Load(sums.one + r * 16), u = Load(sums.other + r * 16);
        if (bias) g += Load(bias), u += Load(bias + inner);
        Value* to = gated + gathered.assignment[groups[at].first + r] * inner + feature;
        const Vec values = Gate(g, u, layer.limit);
        if constexpr (std::is_same_v<Value, float>) {
          Store(to, values);
        } else {
          Round(values, to);
        }
      }
    };
    multiply(layer.gate_up, layer.coded_gate_up, layer.gate_up_scale, 2 * inner, feature, inner + feature, rows, rows_bytes, width, take);
  };

  auto finish = [&](int64_t task) {  // features 32 task .. of every row
    const int64_t feature = task * kFeatures;
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(layer.out + row * width + feature, layer.residual + row * width + feature, kFeatures * sizeof(float));
    const auto take = [&](int64_t at, auto& sums) {
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
    };
    multiply(layer.down, layer.coded_down, layer.down_scale, width, feature, feature + 16, hidden, hidden_bytes, inner, take);
  };

  const Phase first{group_count, prepare};
  const Phase again{group_count, prepare_hidden};
  if (layer.gated) return InPhases(pool, first, Phase{inner / 16, gate});
  if (layer.given) return InPhases(pool, again, Phase{width / kFeatures, finish});
  InPhases(pool, first, Phase{inner / 16, gate}, again, Phase{width / kFeatures, finish});
}

}  // namespace xla_engine
