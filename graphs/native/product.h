// What the kernels of all products share, on every instruction set: the layout of packed weights, tasks and sums.
//
// Packed weights are blocks of sixteen features, [F / 16][K words][16]. A word is 32 bits: two neighbours of K in bf16, four in int8.
//
//   block 0    word 0 of features 0 1 .. 15    word 1 of features 0 1 .. 15    ...
//   block 1    word 0 of features 16 .. 31     ...
//
// It is also the order of the right operand of matrix tiles (Intel SDM, TDPBF16PS and TDPBSSD). A task is two blocks by all rows, and reads
// each of them as one stream.
//
// Sums run over K in order, whatever the number of rows: a row's bits depend on the row alone. bf16 is summed in float32. int8 is summed
// in groups of K; the sum of a group is an exact integer, which the scales of row and feature turn into float32 (grouped_dots.h). The
// scales of packed weights are [F / 16][groups][16].

#pragma once

#include "common.h"

namespace xla_engine {

constexpr int64_t kFeatures = 32;  // the features of a task
constexpr int64_t kScaleGroup = 64;     // numbers of K in eight bits that share a scale (`graphs.ops.int8.GROUP`)

// The addresses of a task's weights (or of the next task's): two blocks of sixteen features.
struct Stream {
  const char *one, *other;
  const BFloat16 *one_scales = nullptr, *other_scales = nullptr;  // in eight bits
};

// Weights of type T [F, width], packed or as in a checkpoint, with the scales [F, width / kScaleGroup] of those in eight bits.
template <typename T>
struct PackedWeights {
  using Element = T;
  const T* values;
  const BFloat16* scales;
  int64_t width;

  // The blocks of sixteen features that begin at features `one` and `other`.
  Stream At(int64_t one, int64_t other) const {
    const auto* from = reinterpret_cast<const char*>(values);
    const int64_t pitch = width * static_cast<int64_t>(sizeof(T)), groups = width / kScaleGroup;
    Stream stream = {from + one * pitch, from + other * pitch};
    if (scales) stream.one_scales = scales + one * groups, stream.other_scales = scales + other * groups;
    return stream;
  }
};

// The sums of up to sixteen rows by two blocks of sixteen features.
template <typename Sum>
struct Sums {
  alignas(64) Sum one[16 * 16], other[16 * 16];
};

// A buffer that only grows, is never cleared and starts at a cache line.
class Lines {
 public:
  char* Bytes(int64_t count) {
    if (static_cast<int64_t>(kept_.size()) < count + 64) kept_ = std::vector<char>(count + 64);
    return kept_.data() + (64 - reinterpret_cast<uintptr_t>(kept_.data()) % 64) % 64;
  }

 private:
  std::vector<char> kept_;
};

}  // namespace xla_engine
