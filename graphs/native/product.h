// What the kernels of products have in common, whatever instruction set is in them.
//
// Packed weights stand sixteen features side by side, one 32-bit word of K after the other, [F / 16][K words][16], so that a
// task reads one stream; it is the order of a right operand of tiles as well (Intel SDM, TDPBF16PS and TDPBSSD). A task is two
// blocks of sixteen features by all rows. Sums run over K in order, whatever the number of rows: a row's bits depend on the
// row alone. Elements are bf16, summed in float32, or int8, summed in int32.

#pragma once

#include "common.h"

namespace xla_engine {

constexpr int64_t kFeatures = 32;  // of a task

// Where the weights of a task lie, or those of the next one: two blocks of sixteen features.
struct Stream {
  const char *one, *other;
};

// The sums of up to sixteen rows by two blocks of sixteen features.
template <typename Sum>
struct Sums {
  alignas(64) Sum one[16 * 16], other[16 * 16];
};

// Memory that grows, is never cleared and begins a cache line.
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
