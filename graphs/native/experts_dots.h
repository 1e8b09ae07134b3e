// Routed experts by dot products (dots.h). The rows of an expert are gathered into groups. Its weights are packed when they are used;
// weights in quantised blocks are unpacked to bf16 or multiplied as they are.

#pragma once

#include "coded_dots.h"
#include "experts.h"
#include "grouped_dots.h"
#include "operand.h"

namespace xla_engine {

// How rows and the weights of two blocks of sixteen features become the operands of a kernel.
struct BFloat16Experts {
  using Kernel = DotKernel<>;

  static void Put(const BFloat16* row, int64_t width, int64_t r, int64_t rows, char* block) {
    Kernel::Spread(reinterpret_cast<const Word*>(row), width / 2, r, rows, block);
  }
  static Stream Ready(const Matrices<BFloat16>& weights, int64_t one, int64_t other) {
    if (!weights.coded) return Packed(weights, one, other);
    thread_local Lines kept;
    const int64_t bytes = weights.width * 32;
    char* to = kept.Bytes(2 * bytes);
    weights.coded->Unpack(one / 16, to);
    weights.coded->Unpack(other / 16, to + bytes);
    return {to, to + bytes};
  }
  template <typename T>
  static Stream Packed(const Matrices<T>& weights, int64_t one, int64_t other) {
    thread_local Lines kept, kept_scales;
    const int64_t words = weights.width * sizeof(T) / 4, of_k = weights.width / kScaleGroup;
    const Stream stored = PackedWeights<T>{weights.values, weights.scales, weights.width}.At(one, other);
    char* packed = kept.Bytes(2 * words * 64);
    Pack(reinterpret_cast<const Word*>(stored.one), words, 16, words, packed);
    Pack(reinterpret_cast<const Word*>(stored.other), words, 16, words, packed + words * 64);
    Stream stream = {packed, packed + words * 64};
    if (weights.scales) {
      auto* scales = reinterpret_cast<BFloat16*>(kept_scales.Bytes(of_k * kFeatures * sizeof(BFloat16)));
      stream.one_scales = scales, stream.other_scales = scales + of_k * 16;
      PackScales(stored.one_scales, of_k, 16, scales);
      PackScales(stored.other_scales, of_k, 16, scales + of_k * 16);
    }
    return stream;
  }
  static void Multiply(int64_t rows, const char* block, const Stream& weights, int64_t width, bool, Sums<float>& sums) {
    Kernel::MultiplyGroup(block, rows, width, weights, nullptr, sums);
  }
};

struct Int8Experts {
  using Kernel = GroupKernel;

  static void Put(const float* row, int64_t width, int64_t r, int64_t rows, char* block) {
    const int64_t apart = Apart(rows);
    for (int64_t k = 0; k < width; k += kScaleGroup) {
      Vec group[QuantizedGroup::kParts];
      for (int64_t part = 0; part < QuantizedGroup::kParts; ++part) group[part] = Load(row + k + part * kVector);
      alignas(64) int8_t bytes[kScaleGroup];
      Word* to = Kernel::At(block, k, apart);
      Kernel::Quantize(group, r, apart, bytes, to);
      for (int64_t word = 0; word < kGroupWords; ++word)
        Dots<int8_t>::Spread(LoadAs<Word>(bytes + 4 * word), to + word * Dots<int8_t>::kParts * apart + r, apart);
    }
  }
  static Stream Ready(const Matrices<int8_t>& weights, int64_t one, int64_t other) {
    return BFloat16Experts::Packed(weights, one, other);
  }
  static void Multiply(int64_t rows, const char* block, const Stream& weights, int64_t width, bool, Sums<float>& sums) {
    Kernel::MultiplyRows(rows, reinterpret_cast<const Word*>(block), weights, nullptr, width / kScaleGroup, sums);
  }
};

struct FoursExperts {
  using Kernel = FoursKernel;

  static void Put(const float* row, int64_t width, int64_t r, int64_t rows, char* block) {
    const int64_t apart = Apart(rows);
    for (int64_t k = 0; k < width; k += Kernel::kStep) {
      const Vec both[] = {Load(row + k), Load(row + k + kVector)};
      Kernel::Quantize(both, apart, Kernel::At(block, k, apart) + r);
    }
  }
  static FoursTask Ready(const Matrices<Fours>& weights, int64_t one, int64_t other) {
    return {&*weights.coded, one / 16, other / 16};
  }
  static void Multiply(int64_t rows, const char* block, const FoursTask& weights, int64_t width, bool again, Sums<float>& sums) {
    Kernel::MultiplyTask(rows, block, weights, width, again ? 0 : kAhead, sums);
  }
};

template <typename T>
void RunExperts(ffi::ThreadPool& pool, const int32_t* expert, const ExpertLayer<T>& layer) {
  using Form = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16Experts,
                                  std::conditional_t<std::is_same_v<T, int8_t>, Int8Experts, FoursExperts>>;
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
      Form::Put(layer.x + assignment / per_row * width, width, r, groups[at].rows, rows + at * rows_bytes);
    }
  };
  auto prepare_hidden = [&](int64_t at) {
    for (int64_t r = 0; r < groups[at].rows; ++r)
      Form::Put(given + gathered.assignment[groups[at].first + r] * inner, inner, r, groups[at].rows, hidden + at * hidden_bytes);
  };

  // Calls take(at, sums) for every group with its sums by two blocks of sixteen rows of its expert's weights.
  auto multiply = [&](const Matrices<T>& weights, int64_t stride, int64_t one, int64_t other, const char* from, int64_t bytes,
                      const auto& take) {
    decltype(Form::Ready(weights, 0, 0)) ready;
    Sums<float> sums;
    int64_t held = -1;  // the expert whose weights are ready
    for (int64_t at = 0; at < group_count; ++at) {
      const int64_t e = groups[at].expert;
      const bool again = e == held;
      if (!again) ready = Form::Ready(weights, e * stride + one, e * stride + other);
      held = e;
      Form::Multiply(groups[at].rows, from + at * bytes, ready, weights.width, again, sums);
      take(at, sums);
    }
  };

  const auto put = [](Vec values, Value* to) {
    if constexpr (std::is_same_v<Value, float>) {
      Store(to, values);
    } else {
      Round(values, to);
    }
  };
  // A task has sixteen gates beside their ups, or thirty-two features without a gate.
  const int64_t features = layer.plain ? kFeatures : 16, apart = layer.plain ? 16 : inner;
  auto gate = [&](int64_t task) {
    const int64_t feature = features * task;
    const auto take = [&](int64_t at, auto& sums) {
      const float* bias = layer.gate_up_bias ? layer.gate_up_bias + groups[at].expert * layer.Rows() + feature : nullptr;
      for (int64_t r = 0; r < groups[at].rows; ++r) {
        Vec one = Load(sums.one + r * 16), other = Load(sums.other + r * 16);
        if (bias) one += Load(bias), other += Load(bias + apart);
        Value* to = gated + gathered.assignment[groups[at].first + r] * inner + feature;
        if (layer.plain) {
          put(SquaredRelu(one), to);
          put(SquaredRelu(other), to + 16);
        } else {
          put(Gate(one, other, layer.limit, layer.gelu), to);
        }
      }
    };
    multiply(layer.gate_up, layer.Rows(), feature, feature + apart, rows, rows_bytes, take);
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
    multiply(layer.down, width, feature, feature + 16, hidden, hidden_bytes, take);
  };

  const Phase first{group_count, prepare};
  const Phase again{group_count, prepare_hidden};
  if (layer.gated) return InPhases(pool, first, Phase{inner / features, gate});
  if (layer.given) return InPhases(pool, again, Phase{width / kFeatures, finish});
  InPhases(pool, first, Phase{inner / features, gate}, again, Phase{width / kFeatures, finish});
}

}  // namespace xla_engine
