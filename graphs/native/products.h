// Runs a product on a pool of threads: rows are prepared, then tasks of features are multiplied.

#pragma once

#include "lora.h"
#include "operand.h"
#include "packed_dots.h"
#include "packed_tiles.h"
#include "parallel.h"

namespace xla_engine {

#ifdef XLA_ENGINE_AMX
template <typename T>
using Kernel = TileKernel<T>;
#else
template <typename T>
using Kernel = DotKernel<T>;
#endif

// Live rows of an operand times packed weights. `pick(task)` names two blocks of features; `finish(task, n, rows, sums)` takes
// the sums of rows n .. n + rows away. `clear` is what else there is to do. What `adapters` add is known in `finish`, if any.
template <typename T, typename Clear, typename Pick, typename Finish>
void PackedProduct(ffi::ThreadPool& pool, Operand<T>& operand, int64_t tasks, const Phase<Clear>& clear, const Pick& pick,
                   const Finish& finish, Adapters* adapters) {
  thread_local Lines prepared;
  const int64_t count = operand.count, width = operand.width;
  const int64_t group = Kernel<T>::GroupRows(count), groups = (count + group - 1) / group;
  const int64_t bytes = Kernel<T>::GroupBytes(width);
  char* blocks = prepared.Bytes(groups * bytes);
  const auto fill = [&](int64_t g) {
    Kernel<T>::Fill(operand, g * group, std::min(group, count - g * group), blocks + g * bytes);
  };
  const auto multiply = [&](int64_t task) {
    Kernel<T>::Multiply(blocks, count, width, pick(task), pick(std::min(task + 1, tasks - 1)),
                        [&](int64_t n, int64_t rows, const auto& sums) { finish(task, n, rows, sums); });
  };
  if (!adapters) {
    InPhases(pool, clear, Phase{groups, fill}, Phase{count ? tasks : 0, multiply});
    return;
  }
  const auto prepare = [&](int64_t task) { task < groups ? fill(task) : adapters->Read(task - groups); };
  const auto shrink = [&](int64_t task) { adapters->Shrink(task); };
  InPhases(pool, clear, Phase{groups + adapters->Rows(), prepare}, Phase{adapters->Shrinks(), shrink},
           Phase{count ? tasks : 0, multiply});
}

#ifndef XLA_ENGINE_AMX

// Live rows of an operand times `features` rows of weights, packed as far as they fill tasks, those behind as in a checkpoint, to
// their places in out [N, features]. `clear` is what else there is to do.
template <typename T, typename Clear>
void RowsProduct(ffi::ThreadPool& pool, Operand<T>& operand, const T* weights, int64_t features, const Phase<Clear>& clear,
                 float* out) {
  const int64_t width = operand.width, words = width * sizeof(T) / 4, block = words * 64;
  const auto* rows = reinterpret_cast<const char*>(weights);
  const auto at = [&](int64_t task) { return rows + task * 2 * block; };  // sixteen rows are as long as their block
  thread_local Lines prepared;
  const int64_t count = operand.count, group = DotKernel<T>::GroupRows(count), groups = (count + group - 1) / group;
  const int64_t bytes = DotKernel<T>::GroupBytes(width), tasks = (features + kFeatures - 1) / kFeatures;
  char* blocks = prepared.Bytes(groups * bytes);
  const auto fill = [&](int64_t g) {
    DotKernel<T>::Fill(operand, g * group, std::min(group, count - g * group), blocks + g * bytes);
  };
  const auto multiply = [&](int64_t task) {
    thread_local Lines packed;
    const int64_t first = task * kFeatures, left = std::min(kFeatures, features - first);
    const char* from = at(task);
    if (left < kFeatures) {
      char* to = packed.Bytes(2 * block);
      Pack(reinterpret_cast<const Word*>(from), words, std::min<int64_t>(left, 16), words, to);
      Pack(reinterpret_cast<const Word*>(from + block), words, std::max<int64_t>(left - 16, 0), words, to + block);
      from = to;
    }
    const char* next = task + 1 < features / kFeatures ? at(task + 1) : from;
    const auto put = [&](int64_t n, const auto* one, const auto* other) {
      float* to = out + operand.places[n] * features + first;
      if (left == kFeatures) {
        Store(to, operand.Value(one, n, first));
        Store(to + 16, operand.Value(other, n, first + 16));
      } else {
        for (int64_t f = 0; f < left; ++f) to[f] = operand.Value((f < 16 ? one : other)[f % 16], n, first + f);
      }
    };
    DotKernel<T>::Multiply(blocks, count, width, {from, from + block}, {next, next + block},
                           [&](int64_t n, int64_t rows, const auto& sums) {
                             for (int64_t r = 0; r < rows; ++r) put(n + r, sums.one + r * 16, sums.other + r * 16);
                           });
  };
  InPhases(pool, clear, Phase{groups, fill}, Phase{count ? tasks : 0, multiply});
}

#endif

}  // namespace xla_engine
