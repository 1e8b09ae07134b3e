// Products in bf16 on processors with vdpbf16ps: for each number of rows, whether they use it or widen.
//
// vdpbf16ps multiplies pairs, and `WidenedDots` do two fused multiply-adds in its place, with the same bits (dots.h). On AMD it has twice
// their rate; on Intel, where it takes two cycles and fused multiply-adds half a cycle, half of it. So it is timed: `TimeRows` takes
// milliseconds, and whoever loads the library decides by its figures (`runner/native_library/widening.py`).

#pragma once

#include <algorithm>
#include <chrono>

#include "dots.h"

#if defined(__AVX512BF16__) && !defined(XLA_ENGINE_AMX)
#define XLA_ENGINE_WIDENS 1
#endif

namespace xla_engine {

// Of products with weights of a kind: BFloat16, or CodedWeights, which are unpacked. It is set before the first product, because rows
// are laid out by it.
template <typename Weights>
struct Widening {
  static inline int32_t rows = 0;  // bit r: groups of r rows widen
};

// Calls run(dots) with what multiplies a group of rows by weights of a kind.
template <typename Weights, typename Run>
inline __attribute__((always_inline)) void WithDots([[maybe_unused]] int64_t rows, const Run& run) {
#ifdef XLA_ENGINE_WIDENS
  if (Widening<Weights>::rows >> rows & 1) return run(WidenedDots());
#endif
  run(HalvesDots());
}

#ifdef XLA_ENGINE_WIDENS

// The seconds of multiply(dots, rows) with PairedDots, then with WidenedDots, for 1 to kBlockRows rows: [kBlockRows][2]. Each is the
// least of several, taken in turns, so that others' load and the processor's frequency favour neither.
template <typename Multiply>
void TimeRows(const Multiply& multiply, double* seconds) {
  constexpr int kTurns = 12, kCalls = 4;
  std::fill_n(seconds, 2 * kBlockRows, 1.0);
  const auto time = [&](auto dots, int64_t rows, double* least) {
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < kCalls; ++call) multiply(dots, rows);
    *least = std::min(*least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kCalls);
  };
  for (int turn = 0; turn < kTurns; ++turn)
    for (int64_t rows = 1; rows <= kBlockRows; ++rows, seconds += 2) {
      time(PairedDots(), rows, seconds);
      time(WidenedDots(), rows, seconds + 1);
      if (rows == kBlockRows) seconds -= 2 * kBlockRows;
    }
}

// A plain C function by which the products of a library learn for which numbers of rows they widen.
#define XLA_ENGINE_WIDENING(Name, Weights) \
  extern "C" void XlaEngineWiden##Name(int32_t rows) { Widening<Weights>::rows = rows; }

#else
#define XLA_ENGINE_WIDENING(Name, Weights)
#endif

}  // namespace xla_engine
