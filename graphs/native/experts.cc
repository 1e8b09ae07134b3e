// Routed experts of a bf16 decoder, for XLA:CPU: one call per layer.
//
// The rows of each expert in use are gathered, multiplied by its gates and ups, gated, and multiplied by its second matrix;
// experts that no row takes are not read. A row adds up its experts in ascending order and each product runs over its width
// in order: its bits depend on the row alone.

#include "common.h"
#ifdef XLA_ENGINE_AMX
#include "experts_tiles.h"
#else
#include "experts_dots.h"
#endif

namespace xla_engine {
namespace {

using Floats = ffi::Buffer<ffi::F32>;
using Halves = ffi::Buffer<ffi::BF16>;
using Integers = ffi::Buffer<ffi::S32>;

const BFloat16* Data(const Halves& buffer) { return reinterpret_cast<const BFloat16*>(buffer.untyped_data()); }

// x [N, D], expert [N, K] (E: none), weight [N, K], gate_up [E, 2 F, D] gates first, down [E, D, F], biases [E, 2 F] and
// [E, D] or empty, residual [N, D] -> residual plus each row's experts, weighted, [N, D].
ffi::Error Experts(ffi::ThreadPool pool, Halves x, Integers expert, Floats weight, Halves gate_up, Halves down,
                   Floats gate_up_bias, Floats down_bias, Floats residual, ffi::ResultBuffer<ffi::F32> out, float limit) {
  const int64_t width = x.dimensions()[1], inner = down.dimensions()[2];
  if (width % kFeatures || inner % kFeatures)
    return ffi::Error::InvalidArgument("features must come in multiples of 32");
  const bool biased = gate_up_bias.element_count() > 0;
  ExpertLayer layer;
  layer.x = Data(x);
  layer.gate_up = Data(gate_up);
  layer.down = Data(down);
  layer.gate_up_bias = biased ? gate_up_bias.typed_data() : nullptr;
  layer.down_bias = biased ? down_bias.typed_data() : nullptr;
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineExperts, Experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Halves>()
                                  .Arg<Integers>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("limit"));

}  // namespace xla_engine
