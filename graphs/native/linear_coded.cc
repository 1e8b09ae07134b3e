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

}  // namespace xla_engine
