// Linear layers of weights as a quantised file has them, and rows of these.

#include "linear_coded.h"

namespace xla_engine {
namespace {

// Rows of coded weights, those of tokens [N]: [N, K].
ffi::Error RowsOf(ffi::ThreadPool pool, ffi::AnyBuffer weight, Integers tokens, ffi::ResultBuffer<ffi::F32> out) {
  const CodedWeights coded(weight.untyped_data(), weight.element_count());
  const int64_t width = out->dimensions()[1];
  if (!coded.Fit() || coded.IsFours() || coded.Width() != width) return ffi::Error::InvalidArgument("coded weights of another form");
  ParallelFor(pool, tokens.element_count(), [&](int64_t n) {
    thread_local Lines kept;
    char* block = kept.Bytes(width * 32);
    const int64_t row = std::clamp<int64_t>(tokens.typed_data()[n], 0, coded.Features() - 1);
    coded.Unpack(row / 16, block);
    for (int64_t k = 0; k < width; ++k) {
      BFloat16 value;
      std::memcpy(&value, block + k / 2 * 64 + row % 16 * 4 + k % 2 * 2, sizeof value);
      out->typed_data()[n * width + k] = Storage<BFloat16>::Widen(value);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_ENGINE_LINEAR(Coded, Coded)
XLA_ENGINE_HANDLER(XlaEngineRowsCoded, RowsOf)
XLA_ENGINE_WIDENING(LinearCoded, CodedWeights)

#ifdef XLA_ENGINE_WIDENS

// A plain C function; seconds as in `TimeRows`, of a task of Q4_K in the first cache: `PairedDots` stand for products while the next
// weights are unpacked, `WidenedDots` for products of what was unpacked before.
extern "C" void XlaEngineTimeLinearCoded(double* seconds) {
  constexpr int64_t kWidth = 256;
  constexpr int kKind = 12;  // ggml's number of Q4_K
  int index = 0;
  while (kCodedKinds[index].number != kKind) ++index;
  Lines rows, weights, strip;
  const int64_t bytes = 64 + 2 * kCodedKinds[index].Bytes(kWidth);
  const Word* words = reinterpret_cast<const Word*>(rows.Bytes(DotKernel<>::GroupBytes(kWidth)));
  const int32_t header[] = {kWidth, kFeatures, 1, 0, kKind, 2};
  char *array = weights.Bytes(bytes), *one = strip.Bytes(kWidth * 64);
  std::memcpy(array, header, sizeof header);
  const CodedWeights coded(array, bytes);
  const CodedTask task = coded.At(0, 16);
  Sums<float> sums;
  const auto multiply = [&](auto dots, int64_t count) {
    if constexpr (std::is_same_v<decltype(dots), PairedDots>) {
      SumGroup(count, words, kWidth, task, nullptr, sums);
    } else {
      coded.Unpack(task.one, one);
      coded.Unpack(task.other, one + kWidth * 32);
      MultiplyRows<WidenedDots>(count, words, {one, one + kWidth * 32}, nullptr, kWidth / 2, sums);
    }
    asm volatile("" : : "r"(&sums) : "memory");
  };
  TimeRows(multiply, seconds);
}

#endif

}  // namespace xla_engine
