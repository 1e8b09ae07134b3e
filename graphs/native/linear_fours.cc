// Linear layers of weights as a quantised file has them, with rows in eight bits; and rows of these weights.

#include "linear_fours.h"

namespace xla_engine {
namespace {

// Rows of weights, those of tokens [N]: [N, K].
ffi::Error RowsOf(ffi::ThreadPool pool, ffi::AnyBuffer weight, Integers tokens, ffi::ResultBuffer<ffi::F32> out) {
  const CodedWeights coded(weight.untyped_data(), weight.element_count());
  const int64_t width = out->dimensions()[1];
  if (!coded.Fit() || !coded.IsFours() || coded.Width() != width)
    return ffi::Error::InvalidArgument("coded weights of another form");
  ParallelFor(pool, tokens.element_count(), [&](int64_t n) {
    const int64_t row = std::clamp<int64_t>(tokens.typed_data()[n], 0, coded.Features() - 1);
    FoursKernel::Row(coded, row, out->typed_data() + n * width);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_ENGINE_LINEAR(Fours, Fours)
XLA_ENGINE_HANDLER(XlaEngineRowsFours, RowsOf)

}  // namespace xla_engine
