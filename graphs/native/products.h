// Runs a product on a pool of threads: rows are prepared, then tasks of features are multiplied.

#pragma once

#include "grouped_dots.h"
#include "operand.h"
#include "packed_dots.h"
#include "packed_tiles.h"
#include "parallel.h"
#include "scaled_tiles.h"

namespace xla_engine {

#ifdef XLA_ENGINE_AMX
using HalvesKernel = TileKernel;
#else
using HalvesKernel = DotKernel<>;
#endif

// The type of `adapters` for a product that can have none.
struct NoAdapters {};
template <typename Added>
constexpr bool kAdds = !std::is_same_v<Added, NoAdapters>;

template <typename Kernel, typename Take>
void MultiplyTask(const char* blocks, int64_t count, int64_t width, Stream weights, Stream next, const Take& take) {
  Kernel::Multiply(blocks, count, width, weights, next, take);
}

// Whether many rows have a kernel of their own, with the same bits.
template <typename Kernel, typename = void>
constexpr bool kHasMany = false;
template <typename Kernel>
constexpr bool kHasMany<Kernel, std::void_t<typename Kernel::Many>> = true;

// Multiplies the live rows of a source by weights, in phases: `clear`, then the preparation of the rows, then the tasks.
//
// pick(task): a task's two blocks of features. Those of the first `whole` tasks are prefetched.
// finish(task, n, rows, sums): receives the sums of rows n to n + rows. The results of `adapters`, if there are any, are ready by then.
template <typename Kernel, typename Clear, typename Pick, typename Finish, typename Added>
void PackedProduct(ffi::ThreadPool& pool, const Source& source, int64_t tasks, int64_t whole, const Phase<Clear>& clear,
                   const Pick& pick, const Finish& finish, [[maybe_unused]] Added* adapters) {
  if constexpr (kHasMany<Kernel>) {
    if (source.count >= Kernel::kMany)
      return PackedProduct<typename Kernel::Many>(pool, source, tasks, whole, clear, pick, finish, adapters);
  }
  thread_local Lines prepared;
  const int64_t count = source.count, width = source.width;
  const int64_t group = Kernel::GroupRows(count), groups = (count + group - 1) / group;
  const int64_t bytes = Kernel::GroupBytes(width);
  char* blocks = prepared.Bytes(groups * bytes);
  const auto fill = [&](int64_t g) {
    Kernel::Fill(source, g * group, std::min(group, count - g * group), blocks + g * bytes);
  };
  const auto multiply = [&](int64_t task) {
    const auto weights = pick(task);
    MultiplyTask<Kernel>(blocks, count, width, weights, task + 1 < whole ? pick(task + 1) : weights,
                            [&](int64_t n, int64_t rows, const auto& sums) { finish(task, n, rows, sums); });
  };
  if constexpr (kAdds<Added>) {
    if (adapters) {
      const auto prepare = [&](int64_t task) { task < groups ? fill(task) : adapters->Read(task - groups); };
      const auto shrink = [&](int64_t task) { adapters->Shrink(task); };
      return InPhases(pool, clear, Phase{groups + adapters->Rows(), prepare}, Phase{adapters->Shrinks(), shrink},
                      Phase{count ? tasks : 0, multiply});
    }
  }
  InPhases(pool, clear, Phase{groups, fill}, Phase{count ? tasks : 0, multiply});
}

// Multiplies the live rows of a source by weights of a kind (linear.h), and writes the sums to their rows of out [N, features].
//
// The features that fill tasks are packed; the last ones, fewer than a task, are rows as in the checkpoint and are packed here. (Weights in
// quantised blocks always fill their tasks.) clear: the first phase, which sets the other rows.
template <typename Kind, typename Clear>
void RowsProduct(ffi::ThreadPool& pool, const Source& source, const Kind& kind, const Phase<Clear>& clear, float* out) {
  using T = typename Kind::Element;
  const auto& weights = kind.weights;
  const int64_t features = kind.features, width = source.width, words = width * sizeof(T) / 4, block = words * 64, groups_of_k = width / kScaleGroup;
  const int64_t tasks = (features + kFeatures - 1) / kFeatures;
  const auto at = [&](int64_t task) { return weights.At(task * kFeatures, task * kFeatures + 16); };
  const auto packed = [&](auto task, int64_t left) {  // the last ones, which fill no task
    thread_local Lines kept, kept_scales;
    const Stream rows = at(task);
    const int64_t lower = std::min<int64_t>(left, 16), upper = left - lower;
    char* to = kept.Bytes(2 * block);
    Pack(reinterpret_cast<const Word*>(rows.one), words, lower, words, to);
    Pack(reinterpret_cast<const Word*>(rows.other), words, upper, words, to + block);
    Stream stream = {to, to + block};
    if (rows.one_scales) {
      auto* scales = reinterpret_cast<BFloat16*>(kept_scales.Bytes(groups_of_k * kFeatures * sizeof(BFloat16)));
      PackScales(rows.one_scales, groups_of_k, lower, scales);
      PackScales(rows.other_scales, groups_of_k, upper, scales + groups_of_k * 16);
      stream.one_scales = scales, stream.other_scales = scales + groups_of_k * 16;
    }
    return stream;
  };
  const auto pick = [&](int64_t task) {
    if constexpr (Kind::kWholeTasks) {
      return at(task);
    } else {
      const int64_t left = features - task * kFeatures;
      return left < kFeatures ? packed(task, left) : at(task);
    }
  };
  const auto take = [&](int64_t task, int64_t n, int64_t rows, const Sums<float>& sums) {
    const int64_t first = task * kFeatures, left = std::min(kFeatures, features - first);
    for (int64_t r = 0; r < rows; ++r) {
      float* to = out + source.places[n + r] * features + first;
      if (left == kFeatures) {
        Store(to, Load(sums.one + r * 16));
        Store(to + 16, Load(sums.other + r * 16));
      } else {
        for (int64_t f = 0; f < left; ++f) to[f] = (f < 16 ? sums.one : sums.other)[r * 16 + f % 16];
      }
    }
  };
  PackedProduct<typename Kind::Kernel>(pool, source, tasks, features / kFeatures, clear, pick, take, static_cast<NoAdapters*>(nullptr));
}

}  // namespace xla_engine
