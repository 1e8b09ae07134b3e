// Routed experts of a bf16 decoder, for XLA:CPU: one call per layer.
//
// The rows of each expert in use are gathered, multiplied by its gates and ups, gated, and multiplied by its second matrix;
// experts that no row takes are not read. A row adds up its experts in ascending order and each product runs over its width
// in order: its bits depend on the row alone.

#include "buffers.h"
#include "common.h"
#ifdef XLA_ENGINE_AMX
#include "experts_tiles.h"
#else
#include "experts_dots.h"
#endif

namespace xla_engine {
namespace {

const BFloat16* Data(const Halves& buffer) { return reinterpret_cast<const BFloat16*>(buffer.untyped_data()); }

// x [N, D], expert [N, K] (E: none), weight [N, K], gate_up [E, 2 F, D] gates first, down [E, D, F], biases [E, 2 F] and
// [E, D] or empty, residual [N, D] -> residual plus each row's experts, weighted, [N, D].
ffi::Error Experts(ffi::ThreadPool pool, Halves x, Integers expert, Floats weight, Halves gate_up, Halves down,
                   Floats gate_up_bias, Floats down_bias, Floats residual, ffi::ResultBuffer<ffi::F32> out, float limit) {
  const int64_t width = x.dimensions()[1], inner = down.dimensions()[2];
  if (width % kFeatures || inner % kFeatures)
    return ffi::Error::InvalidArgument("features must come in multiples of 32");
  ExpertLayer layer = {};
  layer.x = Data(x);
  layer.gate_up = Data(gate_up);
  layer.down = Data(down);
  layer.gate_up_bias = OrNull(gate_up_bias);
  layer.down_bias = OrNull(down_bias);
  layer.weight = weight.typed_data();
  layer.residual = residual.typed_data();
  layer.out = out->typed_data();
  layer.count = x.dimensions()[0];
  layer.width = width;
  layer.per_row = expert.dimensions()[1];
  layer.experts = gate_up.dimensions()[0];
  layer.inner = inner;
  layer.limit = limit;
  RunExperts(pool, expert.typed_data(), layer);
  return ffi::Error::Success();
}

// The two halves, where several devices share the features of each product. The first: what stands between the products of
// every assignment, [N K, F], zero where there is no expert.
ffi::Error GatedExperts(ffi::ThreadPool pool, Halves x, Integers expert, Halves gate_up, Floats gate_up_bias,
                        ffi::ResultBuffer<ffi::BF16> out, float limit) {
  const int64_t width = x.dimensions()[1], inner = gate_up.dimensions()[1] / 2;
  if (width % kFeatures || inner % kFeatures)
    return ffi::Error::InvalidArgument("features must come in multiples of 32");
  std::memset(out->untyped_data(), 0, out->size_bytes());
  ExpertLayer layer = {};
  layer.x = Data(x);
  layer.gate_up = Data(gate_up);
  layer.gate_up_bias = OrNull(gate_up_bias);
  layer.count = x.dimensions()[0];
  layer.width = width;
  layer.per_row = expert.dimensions()[1];
  layer.experts = gate_up.dimensions()[0];
  layer.inner = inner;
  layer.limit = limit;
  layer.gated = static_cast<BFloat16*>(out->untyped_data());
  RunExperts(pool, expert.typed_data(), layer);
  return ffi::Error::Success();
}

// The second: hidden [N K, F], down [E, D, F] and residual [N, D], D being those of a device -> as of the whole, [N, D].
ffi::Error DownExperts(ffi::ThreadPool pool, Halves hidden, Integers expert, Floats weight, Halves down, Floats down_bias,
                       Floats residual, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t width = residual.dimensions()[1], inner = down.dimensions()[2];
  if (width % kFeatures || inner % kFeatures)
    return ffi::Error::InvalidArgument("features must come in multiples of 32");
  ExpertLayer layer = {};
  layer.down = Data(down);
  layer.down_bias = OrNull(down_bias);
  layer.weight = weight.typed_data();
  layer.residual = residual.typed_data();
  layer.out = out->typed_data();
  layer.count = residual.dimensions()[0];
  layer.width = width;
  layer.per_row = expert.dimensions()[1];
  layer.experts = down.dimensions()[0];
  layer.inner = inner;
  layer.given = Data(hidden);
  RunExperts(pool, expert.typed_data(), layer);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineExperts, Experts, Attributes({"limit"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineGatedExperts, GatedExperts, Attributes({"limit"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineDownExperts, DownExperts, Attributes());

}  // namespace xla_engine
