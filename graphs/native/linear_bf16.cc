// Linear layers of weights in bf16.

#include "by_head.h"
#include "linear.h"

namespace xla_engine {

using Halves16 = PackedKind<BFloat16, HalvesKernel>;
XLA_ENGINE_LINEAR(Bf16, Halves16)
XLA_ENGINE_HANDLER(XlaEngineByHeadBf16, ByHead)
XLA_ENGINE_WIDENING(LinearBf16, BFloat16)

#ifdef XLA_ENGINE_WIDENS

// A plain C function; seconds as in `TimeRows`, of tasks in the first cache.
extern "C" void XlaEngineTimeLinearBf16(double* seconds) {
  constexpr int64_t kWidth = 256;
  Lines rows, weights;
  const Word* words = reinterpret_cast<const Word*>(rows.Bytes(DotKernel<>::GroupBytes(kWidth)));
  const char* one = weights.Bytes(kWidth * 64);
  Sums<float> sums;
  const auto multiply = [&](auto dots, int64_t count) {
    MultiplyRows<decltype(dots)>(count, words, {one, one + kWidth * 32}, nullptr, kWidth / 2, sums);
    asm volatile("" : : "r"(&sums) : "memory");
  };
  TimeRows(multiply, seconds);
}

#endif

}  // namespace xla_engine
