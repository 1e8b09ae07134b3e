// What all kernels of products share, whatever their instruction set.
//
// Packed weights stand sixteen features side by side, one 32-bit word of K after the other, [F / 16][K words][16], so that a
// task reads one stream; it is the order of a right operand of tiles as well (Intel SDM, TDPBF16PS and TDPBSSD). A task is two
// blocks of sixteen features by all rows. Sums run over K in order, whatever the number of rows: a row's bits depend on the
// row alone. Elements are bf16, summed in float32, or int8 in groups of K: in each the sum is an exact integer, which the scales of
// row and feature turn to float32 (grouped_dots.h). Scales of packed weights stand as [F / 16][groups][16].

#pragma once

#include "common.h"

namespace xla_engine {

constexpr int64_t kFeatures = 32;  // of a task
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
